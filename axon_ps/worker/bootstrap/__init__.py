"""Beginning a job that nobody has started services for: what torchrun, mpirun and srun start is workers only.

`job` decides which worker starts which service and announces it; `stores` finds the store by which the workers exchange
that; `local_store` and `torch_store` are such stores; `services` are the processes.
"""

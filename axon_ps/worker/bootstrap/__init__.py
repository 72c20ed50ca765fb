"""Forming a job without services: torchrun, mpirun and srun start workers only.

`job` decides which worker starts which service and announces it; `stores` finds the store by which the workers exchange
that; `local_store` and `torch_store` are such stores; `services` are the processes.
"""

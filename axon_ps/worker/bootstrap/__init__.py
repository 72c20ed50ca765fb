"""Beginning a job that nobody has started services for: what torchrun, mpirun and srun start is workers only.

`job` decides who starts what and tells everybody; `stores` finds where the workers can say that to each other;
`local_store` and `torch_store` are such places; `services` are the processes.
"""

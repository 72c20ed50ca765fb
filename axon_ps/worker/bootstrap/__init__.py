"""Forming a job without services: torchrun, mpirun and srun start workers only.

job                       assigns the services to workers, and announces them
stores                    finds the store by which the workers find each other
local_store, torch_store  such stores
private                   the secrets of the workers
services                  the processes
"""

"""The shard server: owns slices of parameters and optimizer state.

core        holds and decides: the engine, its slices, gradients being summed, the optimizer. No I/O
server      performs: protocol, waits, threads, checkpoints, reports
client      a worker's end: gather, push, upload
same_host shared memory between the workers and servers of one host
"""

"""The shard server: owns slices of parameters and optimizer state.

core        the state and its changes: the engine, its slices, gradients being summed, the optimizer. No I/O
server      I/O around it: protocol, waits, threads, checkpoints, reports
client      a worker's end: gather, push, upload
same_host   shared memory between the workers and servers of one host
"""

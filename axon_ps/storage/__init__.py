"""Where things outlive a process: the coordinator's state, files of checkpoints, their manifest and their export.

state_store   the coordinator's durable records (memory, sqlite)
files         directories of files behind one interface (local, fsspec)
checkpoint    the slices of a shard server as safetensors    manifest   what makes a directory a checkpoint
export        one safetensors file for other programs
"""

"""Durable data: the coordinator's state, the files of checkpoints, their manifest and their export.

state_store   the coordinator's durable records (memory, sqlite, etcd)
files         directories of files behind one interface (local, fsspec)
checkpoint    the slices of a shard server as safetensors    manifest   describes a complete checkpoint
export        safetensors files for other programs
"""

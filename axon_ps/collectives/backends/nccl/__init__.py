"""Collectives of GPUs through NCCL, on cupy arrays."""

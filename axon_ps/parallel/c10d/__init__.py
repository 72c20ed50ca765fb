"""torch.distributed over axon_ps: `init_process_group("axon")` for PyTorch's own DDP, FSDP2, DTensor and pipelining."""

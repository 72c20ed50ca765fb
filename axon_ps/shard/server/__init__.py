"""A shard server as a process: protocol, waits, threads, checkpoints and reports around the core."""

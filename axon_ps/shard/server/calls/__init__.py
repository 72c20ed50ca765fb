"""The calls under way at a shard server: which it takes, and what each waits for."""

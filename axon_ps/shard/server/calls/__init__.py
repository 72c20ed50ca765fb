"""The calls under way at a shard server: their checks, and the conditions for their answers."""

"""Placement of slices on shard servers: holders, capacity, failed memory, and the moves with their times."""

"""Placement of slices on shard servers: the moves, their times, and servers that join and leave."""

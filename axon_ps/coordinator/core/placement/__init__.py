"""Which shard servers hold which slices: what is to move, when it may, and servers that come and go."""

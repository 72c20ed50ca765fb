"""NO_SHARD: every worker has all parameters."""

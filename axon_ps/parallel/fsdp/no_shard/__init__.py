"""NO_SHARD: every worker keeps everything."""

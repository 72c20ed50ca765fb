"""HYBRID_SHARD: the workers of a node as one replica."""

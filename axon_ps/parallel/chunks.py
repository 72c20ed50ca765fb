"""Sharding of a dimension among ranks: as `torch.chunk` does it, and so DTensor."""

from __future__ import annotations


def counts_of(size: int, num_shards: int) -> tuple[int, ...]:
    """Elements in each shard: all but the last have ceil(size / num_shards), the last ones less or nothing."""
    each = -(-size // num_shards)
    return tuple(max(0, min(each, size - i * each)) for i in range(num_shards))

"""Sharding of a dimension among ranks, as in `torch.chunk` and DTensor."""

from __future__ import annotations


def counts_of(size: int, num_shards: int) -> tuple[int, ...]:
    """Return the elements in each shard: ceil(size / num_shards), but fewer or none in the last ones."""
    each = -(-size // num_shards)
    return tuple(max(0, min(each, size - i * each)) for i in range(num_shards))

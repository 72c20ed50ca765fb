"""How a dimension is split among ranks: as `torch.chunk` does it, and so DTensor."""

from __future__ import annotations


def counts_of(size: int, num_parts: int) -> tuple[int, ...]:
    """Elements in each part: all but the last have ceil(size / num_parts), the last ones less or nothing."""
    each = -(-size // num_parts)
    return tuple(max(0, min(each, size - i * each)) for i in range(num_parts))

"""A digest of an array's bits: the sum of its 32-bit words, modulo 2^64. It finds memory that failed, not an adversary.

One changed bit always changes the sum, and two leave it only if they undo each other. Sums of ranges add up to that of
the array, and a sum costs as much as reading: for what an optimizer has just read or is about to read, little.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from axon_ps.kernels.compiled import compiled
from axon_ps.types import Array


@compiled
def _sum(bits: Any, begin: Any, end: Any) -> Any:
    total = np.uint64(0)
    within = bits[begin:end]
    for i in range(within.size):
        total += np.uint64(within[i])
    return total


def digest(bits: Array, begin: int, end: int) -> int:
    """The digest of elements [begin, end).

    Args:
        bits: u32[n], contiguous: the array's bits (`array.view(np.uint32)`).
        begin: the first element.
        end: one past the last, at most n.
    """
    return int(_sum(bits, begin, end))


def warm_up() -> None:
    """Compile. Any thread."""
    digest(np.zeros(1, np.uint32), 0, 1)

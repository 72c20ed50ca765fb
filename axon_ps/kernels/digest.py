"""A digest of an array's bits, taken range by range in any order: two sums modulo 2^32, plain and weighted by position.

One changed bit always changes the plain sum; what was swapped or moved changes the weighted one (as in Fletcher's
checksum, 1982). It is to find memory that failed, not an adversary.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from axon_ps.kernels.compiled import compiled
from axon_ps.types import Array

_MASK = (1 << 32) - 1


@compiled
def _sums(bits: Any, first: Any) -> Any:
    plain = weighted = np.uint32(0)
    for i in range(bits.size):
        plain = np.uint32(plain + bits[i])
        weighted = np.uint32(weighted + np.uint32(bits[i] * np.uint32(np.uint32(first + np.uint32(i)) | np.uint32(1))))
    return plain, weighted


def digest(values: Array, first: int) -> int:
    """The digest of a range of an array.

    Args:
        values: f32[n], contiguous.
        first: where the range begins in the array.
    """
    plain, weighted = _sums(values.view(np.uint32), np.uint32(first & _MASK))
    return int(plain) << 32 | int(weighted)


def combined(digests: Iterable[int]) -> int:
    """The digest of an array, from those of ranges that together are all of it."""
    plain = weighted = 0
    for each in digests:
        plain += each >> 32
        weighted += each & _MASK
    return (plain & _MASK) << 32 | weighted & _MASK


def warm_up() -> None:
    """Compile. Any thread."""
    digest(np.zeros(1, np.float32), 0)

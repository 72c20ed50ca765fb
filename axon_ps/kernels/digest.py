"""A digest of an array's bits: the sum of its 32-bit words, modulo 2^64. It finds memory that failed, not an adversary.

One changed bit always changes the sum. Two changed bits leave it the same only if they cancel each other. The sums of
ranges add up to the sum of the array.

Note: [Sums in a loop]
    A loop that reads and writes anyway sums the values in its registers: `none_summed`, `with_value` for each element,
    and `add_digests` afterwards. Two u32 sums are enough: of the words modulo 2^32, and of their upper halves. Over at
    most SUMMED_NUMEL elements neither the second sum nor the sum of the lower halves overflows, and the latter follows
    from the two. This takes a third of the instructions of sums in u64, and half of the registers. Without digests all
    of this is None, and compiled away.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numba
import numpy as np
from numba.extending import overload

from axon_ps.kernels.compiled import compiled
from axon_ps.types import Array

SUMMED_NUMEL = 1 << 16
"""Most elements over which the sums of a loop are exact. See Note: [Sums in a loop]."""

READ, WRITTEN = 0, 1
"""Rows of digests: of the values that a loop has read, and of those that it has written."""

_HALF = np.uint32(16)


@compiled
def _sum(bits: Any, begin: Any, end: Any) -> Any:
    total = np.uint64(0)
    within = bits[begin:end]
    for i in range(within.size):
        total += np.uint64(within[i])
    return total


def none_summed(digests: Any) -> Any:
    """Return the sums of no element; None without digests. It works only inside compiled loops."""
    raise NotImplementedError


def with_value(sums: Any, value: Any) -> Any:
    """Return sums with one more element, an f32. It works only inside compiled loops."""
    raise NotImplementedError


def add_digests(digests: Any, column: Any, read: Any, written: Any) -> Any:
    """Add sums to a column of `digests`, u64[2, m]. It works only inside compiled loops."""
    raise NotImplementedError


@compiled
def digest_of(sums: Any) -> Any:
    """Return the digest of elements from their sums."""
    total, upper = sums
    lower = np.uint32(total - np.uint32(upper << _HALF))
    return np.uint64((np.uint64(upper) << np.uint64(16)) + np.uint64(lower))


def _none_summed_for(digests: Any) -> Any:
    def nothing(digests: Any) -> None:
        pass

    def zeros(digests: Any) -> Any:
        return np.uint32(0), np.uint32(0)

    return zeros if isinstance(digests, numba.types.Array) else nothing


def _with_value_for(sums: Any, value: Any) -> Any:
    def nothing(sums: Any, value: Any) -> None:
        pass

    def added(sums: Any, value: Any) -> Any:
        bits = np.float32(value).view(np.uint32)
        return np.uint32(sums[0] + bits), np.uint32(sums[1] + np.uint32(bits >> _HALF))

    return added if isinstance(sums, numba.types.BaseTuple) else nothing


def _add_digests_for(digests: Any, column: Any, read: Any, written: Any) -> Any:
    def nothing(digests: Any, column: Any, read: Any, written: Any) -> None:
        pass

    def added(digests: Any, column: Any, read: Any, written: Any) -> None:
        digests[READ, column] += digest_of(read)
        digests[WRITTEN, column] += digest_of(written)

    return added if isinstance(digests, numba.types.Array) else nothing


overload(none_summed)(_none_summed_for)
overload(with_value)(_with_value_for)
overload(add_digests)(_add_digests_for)


def digests_of(arrays: Iterable[Array]) -> Array:
    """Return the digests, u64[m], of m contiguous f32 arrays."""
    return np.array([digest(array.view(np.uint32), 0, array.size) for array in arrays], np.uint64)


def digest(bits: Array, begin: int, end: int) -> int:
    """Return the digest of elements [begin, end).

    Args:
        bits: u32[n], contiguous: the array's bits (`array.view(np.uint32)`).
        begin: the first element.
        end: one past the last, at most n.
    """
    return int(_sum(bits, begin, end))


def warm_up() -> None:
    """Compile the loop. Any thread may call it."""
    digest(np.zeros(1, np.uint32), 0, 1)

"""The elements of a chunk that changed between two versions of it: exact, and small if few changed.

    shape legend: n = numel of the chunk, k = changed elements

A payload is k distances u16[k], then the k new values. A distance is that to the previous changed element, minus 1. The
first distance is counted from -1. So that each distance fits, every `_STRIDE`-th element counts as changed. Elements
are compared as bits: a NaN equals itself, and 0.0 is not -0.0.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from axon_ps.errors import InvalidRequest
from axon_ps.types import Array

_STRIDE: Final = 1 << 16
_BITS: Final = {2: np.uint16, 4: np.uint32}


def encode_changes(old: Array, new: Array) -> bytes | None:
    """Encode the change from `old` to `new`; None unless it is surely smaller than `new` itself.

    Args:
        old: wire[n], contiguous.
        new: wire[n], contiguous.
    """
    size = new.itemsize
    differs = old.view(_BITS[size]) != new.view(_BITS[size])
    if (np.count_nonzero(differs) + new.size // _STRIDE) * (size + 2) >= new.nbytes:
        return None
    differs[_STRIDE - 1 :: _STRIDE] = True
    at = np.flatnonzero(differs)
    distances = (np.diff(at, prepend=-1) - 1).astype(np.uint16)
    return distances.tobytes() + new[at].tobytes()


def apply_changes(payload: memoryview, out: Array) -> None:
    """Update `out`, wire[n], from the old values to the new ones.

    Raises:
        InvalidRequest: the payload does not fit a chunk of this size.
    """
    count, rest = divmod(payload.nbytes, 2 + out.itemsize)
    if rest:
        raise InvalidRequest(f"{payload.nbytes} bytes are no whole number of changed elements of {out.dtype}")
    at = np.cumsum(np.frombuffer(payload[: 2 * count], np.uint16).astype(np.int64) + 1) - 1
    if count and at[-1] >= out.size:
        raise InvalidRequest(f"element {at[-1]} of a chunk is said to have changed; it has {out.size}")
    out[at] = np.frombuffer(payload[2 * count :], out.dtype)

"""Memory for units and sums that is passed to workers and servers of this host."""

from __future__ import annotations

import contextlib

import numpy as np

from axon_ps.errors import Busy
from axon_ps.host.shared_memory import Segment
from axon_ps.shard.core.slices import OwnedSlice
from axon_ps.shard.same_host.access import MIN_LEASED_BYTES
from axon_ps.shard.same_host.leases import allocate_sum
from axon_ps.shard.same_host.shared_copy import SharedCopy
from axon_ps.types import Array, DType

MAX_SEGMENTS = 400
"""Most segments of a server, since each takes a descriptor, and 1024 are often the limit. Other data is sent."""


def may_map(owned: OwnedSlice) -> bool:
    """Return True if a slice's wire copy may be in memory that workers map."""
    return Segment.open < MAX_SEGMENTS and not owned.wire.compressed


def filled_copy(owned: OwnedSlice, dtype: DType) -> SharedCopy | None:
    """Make memory for workers with a slice's wire copy, for `OwnedSlice.map`; None if there is not enough memory.

    It takes long, so it must not be called on an event loop. The slice is not changed meanwhile.

    Raises:
        SliceMoved: its values are corrupt.
    """
    try:
        memory = SharedCopy(owned.chunks.numel, dtype)
    except Busy:
        return None
    owned.fill(memory)
    return memory


def sum_memory(numel: int) -> Array:
    """Return f32[numel] zeros for sums forwarded to a server of this host, in shared memory if possible.

    It takes long, so it must not be called on an event loop.
    """
    if 4 * numel >= MIN_LEASED_BYTES and Segment.open < MAX_SEGMENTS:
        with contextlib.suppress(Busy):
            return allocate_sum(numel)
    return np.zeros(numel, np.float32)

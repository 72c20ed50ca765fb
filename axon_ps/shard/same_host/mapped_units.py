"""Gives units, and sums, memory that workers and servers of this host are passed."""

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
"""Most segments of a server: each takes a descriptor, of often 1024. What has none is sent."""


def may_map(owned: OwnedSlice) -> bool:
    """True if there may be memory for a slice's wire copy that workers map."""
    return Segment.open < MAX_SEGMENTS and not owned.wire.compressed


def filled_copy(owned: OwnedSlice, dtype: DType) -> SharedCopy | None:
    """Memory that is passed to workers, with the wire copy of a slice, for `OwnedSlice.map`; None if there is none.

    It takes long, so no event loop calls it. The slice is not changed meanwhile.
    """
    try:
        memory = SharedCopy(owned.chunks.numel, dtype)
    except Busy:
        return None
    owned.fill(memory)
    return memory


def sum_memory(numel: int) -> Array:
    """f32[numel] zeros for sums that are forwarded to a server of this host: shared, where that pays and can be.

    It takes long, so no event loop calls it.
    """
    if 4 * numel >= MIN_LEASED_BYTES and Segment.open < MAX_SEGMENTS:
        with contextlib.suppress(Busy):
            return allocate_sum(numel)
    return np.zeros(numel, np.float32)

"""Gives units, and sums, memory that workers and servers of this host are passed."""

from __future__ import annotations

import contextlib

import numpy as np

from axon_ps.errors import Busy
from axon_ps.host.shared_memory import Segment
from axon_ps.shard.core.engine import ShardEngine
from axon_ps.shard.core.slices import OwnedSlice
from axon_ps.shard.same_host.access import MIN_LEASED_BYTES
from axon_ps.shard.same_host.leases import allocate_sum
from axon_ps.shard.same_host.shared_copy import SharedCopy
from axon_ps.types import Array

MAX_SEGMENTS = 400
"""Most segments of a server: each takes a descriptor, of often 1024. What has none is sent."""


def map_unit(engine: ShardEngine, owned: OwnedSlice) -> SharedCopy | None:
    """A slice's wire copy in memory that is passed to workers; None where they must be sent it.

    Only while the slice is `available` and no step is applied to it.
    """
    assert not owned.applying, "values that are being changed cannot move to other memory"
    if owned.wire.mapped is None and Segment.open < MAX_SEGMENTS and not owned.wire.compressed:
        with contextlib.suppress(Busy):
            owned.map(SharedCopy(owned.chunks.numel, engine.precision.param))
    mapped = owned.wire.mapped
    assert mapped is None or isinstance(mapped, SharedCopy), "only this makes them"
    return mapped


def sum_memory(numel: int) -> Array:
    """f32[numel] zeros for sums that are forwarded to a server of this host: shared, where that pays and can be."""
    if 4 * numel >= MIN_LEASED_BYTES and Segment.open < MAX_SEGMENTS:
        with contextlib.suppress(Busy):
            return allocate_sum(numel)
    return np.zeros(numel, np.float32)

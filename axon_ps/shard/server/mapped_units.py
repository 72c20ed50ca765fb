"""Gives units memory that workers of this host map."""

from __future__ import annotations

import contextlib

from axon_ps.errors import Busy
from axon_ps.shard.core.engine import ShardEngine
from axon_ps.shard.core.slices import OwnedSlice
from axon_ps.shard.core.wire_copy import MappedMemory
from axon_ps.shard.same_host.shared_copy import SharedCopy

MAX_MAPPED_UNITS = 200
"""Most units that are mapped: each takes two file descriptors here and one in a worker, of often 1024."""


def map_unit(engine: ShardEngine, owned: OwnedSlice) -> MappedMemory | None:
    """A slice's wire copy in memory that workers map, if it is all of its unit; None where they must gather copies.

    Only while the slice is `available` and no step is applied to it.
    """
    assert not owned.applying, "values that are being changed cannot move to other memory"
    mapped = sum(s.wire.mapped is not None for s in engine.slices.values())
    if owned.wire.mapped is None and mapped < MAX_MAPPED_UNITS and engine.mappable(owned):
        with contextlib.suppress(Busy):
            owned.map(SharedCopy(owned.chunks.numel, engine.precision.param))
    return owned.wire.mapped

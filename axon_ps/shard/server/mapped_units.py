"""Gives units memory that workers of this host map."""

from __future__ import annotations

import contextlib

from axon_ps.errors import Busy
from axon_ps.shard.core.engine import ShardEngine
from axon_ps.shard.core.wire_copy import MappedMemory
from axon_ps.shard.same_host.shared_copy import SharedCopy

MAX_MAPPED_UNITS = 200
"""Most units that are mapped: each takes two file descriptors here and one in a worker, of often 1024."""


def map_unit(engine: ShardEngine, unit: int) -> MappedMemory | None:
    """A unit's wire copy in memory that workers map; None where they must gather copies.

    Only while the unit is `available` and no step is applied to it.
    """
    owned = engine.slices.of(unit)
    assert not owned.applying, "values that are being changed cannot move to other memory"
    mapped = sum(s.wire.mapped is not None for s in engine.slices.values())
    if owned.wire.mapped is None and mapped < MAX_MAPPED_UNITS and engine.mappable(unit):
        with contextlib.suppress(Busy):
            owned.map(SharedCopy(owned.chunks.numel, engine.precision.param))
    return owned.wire.mapped

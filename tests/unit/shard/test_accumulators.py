"""A slice has as many accumulators as replicas step by themselves."""

from __future__ import annotations

import numpy as np

from axon_ps.shard.core.accumulator import Accumulators
from axon_ps.shard.core.chunks import Chunks
from axon_ps.shard.core.queued import QueueLimit
from axon_ps.sharding.plan import Slice
from axon_ps.sharding.precision import WirePrecision
from axon_ps.types import Array

ONES = np.ones(4, np.float32)


def test_there_are_as_many_as_asked_for_empty_and_of_the_same_kind() -> None:
    allocated: list[int] = []

    def allocate(numel: int) -> Array:
        allocated.append(numel)
        return np.zeros(numel, np.float32)

    chunks = Chunks(Slice(unit=0, server=0, begin=0, end=8), 4)
    made = Accumulators(chunks, WirePrecision(), trainable=True, allocate=allocate)
    limit = QueueLimit(1 << 20)
    made.set_rounds(rounds=True)
    made.set_count(3)
    assert [each.rounds for each in made] == [True] * 3
    for each in made:
        each.add(0, ONES, 1)
        assert each.queue(1, 1, ONES, limit, borrowed=False)
    assert allocated == [8], "the others are in ordinary memory"
    assert limit.queued_bytes == 3 * ONES.nbytes
    first = made[0]
    made.set_count(1)
    assert list(made) == [first]
    assert (limit.queued_bytes, first.missing(1), first.nbytes) == (0, 2, 32)


def test_queued_chunks_are_dropped_of_all() -> None:
    chunks = Chunks(Slice(unit=0, server=0, begin=0, end=4), 4)
    made, limit = Accumulators(chunks, WirePrecision(), trainable=True), QueueLimit(1 << 20)
    made.set_count(2)
    for each in made:
        assert each.queue(0, 1, ONES, limit, borrowed=False)
    made.clear_queued()
    assert limit.queued_bytes == 0

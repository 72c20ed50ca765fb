"""Gradient chunks that came before their turn: kept, added when it comes, checked, and given up with their attempt."""

from __future__ import annotations

import numpy as np
import pytest

from axon_ps.compress import cast
from axon_ps.compress.int4 import Int4
from axon_ps.compress.int8 import Int8
from axon_ps.compress.top_k import TopK
from axon_ps.errors import InvalidRequest
from axon_ps.kernels import digest
from axon_ps.shard.core import queued
from axon_ps.shard.core.digests import GRADIENT, Corruption
from axon_ps.shard.core.gradients import Push
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.plan import PlanOptions
from axon_ps.sharding.precision import WirePrecision
from axon_ps.types import Array, DType, Outcome
from engine_driver import Servers, job_of, layout_of

NUMEL, CHUNK = 96, 32


def servers(queue_bytes: int = 1 << 20, *, replicas: int = 3) -> Servers:
    made = Servers(job_of(layout_of([NUMEL]), chunk_numel=CHUNK), replicas=replicas, queue_bytes=queue_bytes)
    made.upload([np.zeros(NUMEL, np.float32)])
    return made


def push(made: Servers, replica: int, offset: int = 0, grad: Array | None = None, *, borrowed: bool = False) -> Push:
    (engine,) = made.engines
    grad = np.full(CHUNK, replica + 1, np.float32) if grad is None else grad
    return engine.gradients.push(engine.step, 0, offset, replica, DType.F32, grad, borrowed=borrowed)


def summed(made: Servers) -> list[float]:
    """The first element of each chunk's sum."""
    return made.engines[0].slices[0].accumulators[0].array[::CHUNK].tolist()


def test_a_replica_that_is_ahead_need_not_wait_and_what_completes_a_step_is_the_last_to_come() -> None:
    made = servers()
    (engine,) = made.engines
    for offset in range(0, NUMEL, CHUNK):
        assert push(made, 2, offset) is Push.QUEUED
        assert push(made, 1, offset) is Push.QUEUED
    assert engine.statistics()["queued_bytes"] == made.queues[0].queued_bytes == 2 * NUMEL * 4
    for offset in range(0, NUMEL, CHUNK):
        assert engine.gradients.ready() is None
        assert push(made, 0, offset) is Push.SUMMED
        assert engine.gradients.next_in_order(0, offset, 0) == (engine.slices[0], 3, True)
    assert engine.gradients.ready() == (36.0 * NUMEL,)
    assert summed(made) == [6.0] * 3
    assert made.queues[0].queued_bytes == 0


def test_a_gap_stops_what_is_behind_it() -> None:
    made = servers(replicas=4)
    assert push(made, 3) is Push.QUEUED
    assert push(made, 1) is Push.QUEUED
    assert push(made, 0) is Push.SUMMED
    assert made.engines[0].gradients.next_in_order(0, 0, 0)[1:] == (2, False)
    assert push(made, 2) is Push.SUMMED
    assert summed(made)[0] == 10.0


def test_a_replica_without_a_gradient_is_queued_too() -> None:
    made = servers(replicas=2)
    (engine,) = made.engines
    assert engine.gradients.push(1, 0, 0, 1, DType.F32, None) is Push.QUEUED
    assert push(made, 0) is Push.SUMMED
    assert engine.gradients.next_in_order(0, 0, 0)[2]


def test_memory_that_is_borrowed_is_copied() -> None:
    made = servers(replicas=2)
    mine, theirs = np.ones(CHUNK, np.float32), np.ones(CHUNK, np.float32)
    assert push(made, 1, 0, theirs, borrowed=True) is Push.QUEUED
    theirs[:] = 100.0
    assert push(made, 0, 0, mine) is Push.SUMMED
    assert summed(made)[0] == 2.0


def test_what_there_is_no_memory_for_waits_and_the_sum_goes_on() -> None:
    made = servers(queue_bytes=CHUNK * 4)
    assert push(made, 1, 0) is Push.QUEUED
    assert push(made, 2, 0) is Push.WAIT
    assert push(made, 1, CHUNK) is Push.WAIT
    assert push(made, 0, 0) is Push.SUMMED
    assert push(made, 2, 0) is Push.SUMMED
    assert push(made, 1, CHUNK) is Push.QUEUED
    counters = made.engines[0].counters
    assert (counters["queued"], counters["waits"]) == (2, 2)


def end_attempt(made: Servers) -> None:
    made.end(Outcome.ABORT)


def begin_generation(made: Servers) -> None:
    made.engines[0].membership(2, made.step, made.version, 3)


def release(made: Servers) -> None:
    for owned in made.engines[0].release():
        owned.close()


@pytest.mark.parametrize("give_up", [end_attempt, begin_generation, release])
def test_what_is_queued_is_given_up_with_its_attempt(give_up: object) -> None:
    made = servers()
    assert push(made, 2) is Push.QUEUED
    assert callable(give_up)
    give_up(made)
    assert made.queues[0].queued_bytes == 0
    if give_up is not release:
        for replica in range(3):
            assert push(made, replica) is Push.SUMMED
        assert summed(made)[0] == 6.0


def test_a_bit_that_changes_while_it_is_queued_is_found_when_it_is_added() -> None:
    made = servers()
    (engine,) = made.engines
    grad = np.ones(CHUNK, np.float32)
    assert push(made, 1, CHUNK, grad) is Push.QUEUED
    grad.view(np.uint32)[5] ^= 1 << 9
    assert push(made, 0, CHUNK) is Push.SUMMED
    (owned,) = engine.slices.values()
    assert owned.take_corruptions() == [Corruption(GRADIENT, 0, CHUNK, 2 * CHUNK)]
    assert not owned.corrupt
    assert push(made, 1, CHUNK) is Push.WAIT  # for the generation in which all is summed again
    for replica in range(3):
        push(made, replica, 0)
        push(made, replica, 2 * CHUNK)
    assert engine.gradients.ready() is None


@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16, DType.U8])
def test_nothing_is_compiled_when_a_chunk_is_queued(dtype: DType) -> None:
    queued.warm_up(dtype)
    before = set(digest._sum.signatures)
    for chunk in cast.examples(dtype):
        for borrowed in (False, True):
            kept = queued.QueuedChunks()
            assert kept.put(0, 1, chunk, queued.QueueLimit(1), borrowed=borrowed)
            assert kept.take(0, 1)[1]
    assert set(digest._sum.signatures) == before


def compressed(compressor: Int4 | Int8 | TopK) -> Servers:
    spec = JobSpec(
        layout=layout_of([NUMEL]),
        precision=WirePrecision(grad_compression=compressor),
        options=PlanOptions(chunk_numel=CHUNK, min_slice_numel=8),
    )
    made = Servers(spec, replicas=2, queue_bytes=1 << 20)
    made.upload([np.zeros(NUMEL, np.float32)])
    return made


def test_what_no_compressor_writes_is_refused_to_who_sent_it() -> None:
    for compressor in (TopK(fraction=0.1), Int4(), Int8(block_numel=16)):
        made = compressed(compressor)
        (engine,) = made.engines
        data = np.empty(compressor.compressed_bytes(CHUNK), np.uint8)
        compressor.compress(np.arange(CHUNK, dtype=np.float32), data)
        bad = data[:-1] if isinstance(compressor, Int8) else np.full_like(data, 255)
        with pytest.raises(InvalidRequest):
            engine.gradients.push(1, 0, 0, 1, DType.U8, bad)
        assert engine.gradients.push(1, 0, 0, 1, DType.U8, data) is Push.QUEUED
        assert engine.gradients.push(1, 0, 0, 0, DType.U8, data) is Push.SUMMED
        assert engine.gradients.next_in_order(0, 0, 0)[2]

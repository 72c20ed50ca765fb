"""Several gradients of a replica in a step are added up, in order, and no sum of fewer counts as that of all."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axon_ps.errors import StepAborted
from axon_ps.shard.core.engine import ShardEngine
from axon_ps.shard.core.gradients import Push
from axon_ps.sharding.placement import Server, new_placement
from axon_ps.types import Array, Decision, DType, Outcome
from engine_driver import Servers, apply, cast_to, commit_of, job_of, layout_of, one_group

LAYOUT = layout_of([100], [40])
HYPER = ({"lr": 1.0},)


def grad_of(unit: int, replica: int, addend: int, scale: float = 1.0) -> Array:
    seed = 100 * unit + 10 * replica + addend
    return scale * np.random.default_rng(seed).standard_normal(LAYOUT.units[unit].numel, dtype=np.float32)


def made(*, replicas: int = 2, queue_bytes: int = 0, grad: DType = DType.F32) -> Servers:
    optimizer = one_group(LAYOUT, lr=1.0)
    servers = Servers(
        job_of(LAYOUT, chunk_numel=16, grad=grad), replicas=replicas, optimizer=optimizer, queue_bytes=queue_bytes
    )
    servers.upload([np.zeros(u.numel, np.float32) for u in LAYOUT.units])
    return servers


def push(engine: ShardEngine, unit: int, replica: int, addend: int, grad: Array | None) -> set[Push]:
    """Push the chunks of a gradient; return the fate of each."""
    dtype = engine.precision.grad
    wire = None if grad is None else cast_to(grad, dtype)
    owned = engine.slices.of(unit, 0)
    return {
        engine.gradients.push(
            engine.step, unit, begin, replica, dtype, None if wire is None else wire[begin:end], addend=addend
        )
        for begin, end in owned.chunks.bounds
    }


def summed(replicas: int, addends: int, unit: int) -> Array:
    total = np.zeros(LAYOUT.units[unit].numel, np.float32)
    for addend in range(addends):
        for replica in range(replicas):
            total += grad_of(unit, replica, addend)
    return total


@settings(max_examples=40)
@given(replicas=st.integers(1, 3), addends=st.integers(1, 3), queue=st.sampled_from([0, 200, 1 << 20]), data=st.data())
def test_every_order_of_arrival_gives_the_same_bits(
    replicas: int, addends: int, queue: int, data: st.DataObject
) -> None:
    servers = made(replicas=replicas, queue_bytes=queue)
    (engine,) = servers.engines
    draws: random.Random = data.draw(st.randoms(use_true_random=False), "order")
    streams: list[tuple[int, int, int, list[Any]]] = [
        (unit, replica, addend, list(engine.slices.of(unit, 0).chunks.bounds))
        for unit in (0, 1)
        for replica in range(replicas)
        for addend in range(addends)
    ]
    while streams:
        unit, replica, addend, chunks = stream = draws.choice(streams)
        begin, end = chunks[0]
        here = (1, unit, begin, replica, DType.F32, grad_of(unit, replica, addend)[begin:end])
        done = engine.gradients.push(*here, addend=addend)
        is_last = not streams[1:] and not chunks[1:]
        if engine.gradients.attempts[0].addend == addends - 1:
            assert (engine.gradients.ready() is not None) == is_last
        if done is Push.WAIT:
            continue
        assert engine.gradients.push(*here, addend=addend) is Push.DUPLICATE
        assert engine.gradients.resume_offset(1, unit, begin, replica, addend) == end
        chunks.pop(0)
        if not chunks:
            streams.remove(stream)
    assert servers.queues[0].queued_bytes == 0
    squares = engine.gradients.ready()
    for unit in (0, 1):
        total = summed(replicas, addends, unit)
        assert engine.slices.of(unit, 0).accumulators[0].array.tobytes() == total.tobytes()
        assert squares is not None
        assert np.isclose(squares[unit], np.sum(total.astype(np.float64) ** 2), rtol=1e-6)
    servers.commit()
    assert np.array_equal(servers.values(0), -summed(replicas, addends, 0))
    assert engine.gradients.attempts[0].addend == 0


def test_a_later_addend_makes_a_complete_sum_incomplete_again() -> None:
    servers = made()
    (engine,) = servers.engines
    begun: list[bool] = []
    engine.gradients.on_addend = lambda: begun.append(engine.gradients.ready() is not None)
    for unit in (0, 1):
        for replica in (0, 1):
            assert push(engine, unit, replica, 0, grad_of(unit, replica, 0)) == {Push.SUMMED}
    assert engine.gradients.ready() is not None
    assert list(engine.gradients.complete()) == [(0, 1)]
    assert push(engine, 1, 1, 1, grad_of(1, 1, 1)) == {Push.WAIT}, "the first replica's comes before it"
    assert begun == [True], "the sum is as it was when the addend begins"
    assert engine.gradients.ready() is None
    assert not list(engine.gradients.complete())
    assert engine.gradients.attempts[0].missing == 7 + 3
    assert not list(engine.gradients.sums_of(0, engine.slices[0]))
    assert push(engine, 1, 0, 1, None) == {Push.SUMMED}
    assert push(engine, 1, 1, 1, grad_of(1, 1, 1)) == {Push.SUMMED}
    assert push(engine, 0, 0, 1, None) == push(engine, 0, 1, 1, None) == {Push.SUMMED}
    assert begun == [True]
    servers.commit()
    assert np.array_equal(servers.values(0), -summed(2, 1, 0)), "nothing was added in the second"
    assert np.array_equal(servers.values(1), -(summed(2, 1, 1) + grad_of(1, 1, 1)))


def test_a_unit_has_a_gradient_if_it_has_one_in_any_addend() -> None:
    servers = made(replicas=1)
    (engine,) = servers.engines
    for addend, grads in enumerate(((None, None), (grad_of(0, 0, 1), None), (None, None))):
        for unit, grad in enumerate(grads):
            push(engine, unit, 0, addend, grad)
    servers.commit()
    assert np.array_equal(servers.values(0), -grad_of(0, 0, 1))
    assert [s.changed for s in engine.slices.values()] == [1, 0]


def test_an_aborted_step_begins_with_its_first_addend_again() -> None:
    servers = made(replicas=1)
    (engine,) = servers.engines
    for addend in (0, 1):
        push(engine, 0, 0, addend, grad_of(0, 0, addend))
    servers.end(Outcome.ABORT)
    with pytest.raises(StepAborted):
        engine.gradients.push(1, 1, 0, 0, DType.F32, grad_of(1, 0, 1)[:16], addend=1)
    for unit in (0, 1):
        assert push(engine, unit, 0, 0, grad_of(unit, 0, 5)) == {Push.SUMMED}
    assert engine.gradients.ready() is not None
    servers.commit()
    assert np.array_equal(servers.values(0), -grad_of(0, 0, 5))


def test_values_prepared_from_fewer_addends_are_discarded() -> None:
    servers = made(replicas=1)
    (engine,) = servers.engines
    expected, scratch, owned = engine.expected, engine.scratch(), engine.slices[0]
    for unit in (0, 1):
        push(engine, unit, 0, 0, grad_of(unit, 0, 0))
    assert expected.prepare_chunk(1, owned, 0, HYPER, scratch) is not None
    assert expected.prepare_chunk(1, owned, 0, HYPER, scratch, 1) is None, "that addend has not begun"
    push(engine, 1, 0, 1, grad_of(1, 0, 1))
    assert not owned.speculative.frames
    with pytest.raises(StepAborted, match="another backward"):
        expected.prepare_chunk(1, owned, 0, HYPER, scratch)
    assert expected.prepare_chunk(1, owned, 0, HYPER, scratch, 1) is None
    push(engine, 0, 0, 1, grad_of(0, 0, 1))
    prepared = [expected.prepare_chunk(1, owned, i, HYPER, scratch, 1) for i in range(len(owned.chunks.bounds))]
    servers.commit(HYPER)
    assert list(owned.wire.frames) == prepared
    assert np.array_equal(servers.values(0), -(grad_of(0, 0, 0) + grad_of(0, 0, 1)))


@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16])
def test_a_backup_takes_the_sum_of_a_later_addend_in_place_of_the_earlier(dtype: DType) -> None:
    spec = job_of(LAYOUT, chunk_numel=16, grad=dtype)
    placement = new_placement(spec.plan(1), [Server(0), Server(1)], 2)
    engines = [ShardEngine(), ShardEngine()]
    for rank, engine in enumerate(engines):
        engine.configure(spec, rank, 1, placement)
        engine.optimizer.set(one_group(LAYOUT, lr=1.0))
        engine.membership(1, 1, 0, 1)
        for unit in (0, 1):
            for begin, end in engine.slices.of(unit, 0).chunks.bounds:
                engine.parameters.upload(unit, begin, np.zeros(end - begin, np.float32), 0)
    primary_of = {s.chunks.unit: engine for engine in engines for s in engine.slices.primaries}
    backup_of = {unit: next(e for e in engines if e is not engine) for unit, engine in primary_of.items()}

    def forwarded(unit: int, index: int, addend: int) -> Push:
        owned = primary_of[unit].slices.of(unit, 0)
        sums, elements = owned.accumulators[0], owned.chunks.ranges[index]
        total = sums.array[elements].copy() if sums.present[index] else None
        if total is not None and sums.is_rounded(index, 1):
            assert total.tobytes() == (total.view(np.uint32) >> 16 << 16).view(np.float32).tobytes()
        digest = sums.digest(index) if total is not None else None
        begin = owned.chunks.bounds[index][0]
        return backup_of[unit].gradients.push_sum(1, unit, begin, 0, total, digest, addend=addend)

    chunks = {unit: range(len(primary_of[unit].slices.of(unit, 0).chunks.bounds)) for unit in (0, 1)}
    for addend in range(3):
        for unit in (0, 1):
            assert push(primary_of[unit], unit, 0, addend, grad_of(unit, 0, addend)) == {Push.SUMMED}
            assert primary_of[unit].slices.of(unit, 0).accumulators[0].is_rounded(0, 1) == (
                dtype is DType.BF16 and addend == 0
            )
        for unit in (0, 1):
            assert {forwarded(unit, index, addend) for index in chunks[unit]} == {Push.SUMMED}
            assert {forwarded(unit, index, addend) for index in chunks[unit]} == {Push.DUPLICATE}
        assert all(engine.gradients.ready() is not None for engine in engines)
    for engine in engines:
        apply(engine, commit_of(engine))
    for number in (0, 1):
        assert len({engine.slices[number].master.values.tobytes() for engine in engines}) == 1
        assert len({engine.slices[number].digest for engine in engines}) == 1
    values = engines[0].slices.of(0, 0).master.values
    assert np.allclose(
        values, -sum(grad_of(0, 0, a) for a in range(3)), rtol=0, atol=1e-6 if dtype is DType.F32 else 0.05
    )


def test_a_late_sum_of_fewer_addends_is_a_duplicate() -> None:
    spec = job_of(LAYOUT, chunk_numel=16)
    engine = ShardEngine()
    engine.configure(spec, 1, 1, new_placement(spec.plan(1), [Server(0), Server(1)], 2))
    engine.membership(1, 1, 0, 1)
    owned = next(s for s in engine.slices.values() if not s.primary)
    unit, ones = owned.chunks.unit, np.ones(16, np.float32)
    assert engine.gradients.push_sum(1, unit, 0, 0, 2 * ones, addend=1) is Push.SUMMED
    assert engine.gradients.push_sum(1, unit, 0, 0, ones, addend=0) is Push.DUPLICATE
    missing = engine.gradients.attempts[0].missing
    assert engine.gradients.push_sum(1, unit, 16, 0, ones, addend=0) is Push.SUMMED, "it is replaced later"
    assert engine.gradients.attempts[0].missing == missing
    assert engine.gradients.push_sum(1, unit, 16, 0, 2 * ones, addend=1) is Push.SUMMED
    assert engine.gradients.attempts[0].missing == missing - 1


def test_sums_of_several_addends_are_rounded_once() -> None:
    """A sum in bf16 would stop growing at 256 ones."""
    spec = job_of(LAYOUT, chunk_numel=16, grad=DType.BF16)
    engine = ShardEngine()
    engine.configure(spec, 0, 1, new_placement(spec.plan(1), [Server(0), Server(1)], 2))
    engine.membership(1, 1, 0, 1)
    owned = next(s for s in engine.slices.values() if s.primary)
    for addend in range(600):
        push(engine, owned.chunks.unit, 0, addend, np.ones(owned.chunks.numel, np.float32))
    assert set(owned.accumulators[0].array.tolist()) == {600.0}


def test_a_decision_needs_all_addends() -> None:
    servers = made(replicas=1)
    (engine,) = servers.engines
    for unit in (0, 1):
        push(engine, unit, 0, 0, grad_of(unit, 0, 0))
    push(engine, 0, 0, 1, grad_of(0, 0, 1))
    skip = Decision(step=1, generation=1, outcome=Outcome.SKIP, version=0)
    assert engine.gradients.attempts[0].missing == 3
    assert engine.decide(skip) == []
    assert (engine.gradients.attempts[0].addend, engine.gradients.attempts[0].missing) == (0, 10)

"""A unit's wire copy in shared memory: its version at every moment, and what becomes of frames."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest

from axon_ps.compress import Int8
from axon_ps.errors import Busy, InvalidRequest
from axon_ps.host import shared_memory
from axon_ps.host.leases import address_of
from axon_ps.host.shared_arrays import shared_arrays
from axon_ps.host.shared_memory import PAGE_BYTES, Access, Segment
from axon_ps.shard.core.engine import ShardEngine
from axon_ps.shard.same_host import mapped_units
from axon_ps.shard.same_host.mapped_units import sum_memory
from axon_ps.shard.same_host.shared_copy import MappedCopy, SharedCopy
from axon_ps.sharding.policy import BoundedStaleness
from axon_ps.sharding.precision import WirePrecision
from axon_ps.types import Array, DType, Outcome
from engine_driver import Servers, apply, commit_of, job_of, layout_of, map_unit, one_group

N, FROZEN = 300, 100
LAYOUT = layout_of([N - 20, 20], [FROZEN], frozen=[1])
WIRE = [DType.F32, DType.BF16, DType.F16]


def servers(param: DType = DType.F32, num_servers: int = 1) -> Servers:
    made = Servers(job_of(LAYOUT, param=param), num_servers, optimizer=one_group(LAYOUT, "adamw", lr=0.1))
    rng = np.random.default_rng(1)
    made.upload([rng.random(u.numel, np.float32) for u in LAYOUT.units])
    return made


def mapped(engine: ShardEngine, unit: int = 0) -> MappedCopy:
    shared = map_unit(engine, engine.slices[unit])
    assert shared is not None
    return mapping_of(shared, LAYOUT.units[unit].numel, engine.precision.param)


def mapping_of(shared: SharedCopy, numel: int, dtype: DType) -> MappedCopy:
    """As a worker maps what it was passed."""
    memory = shared_memory.receive(os.dup(shared.segment.fd), Access.PRIVATE)
    return MappedCopy(memory, numel, dtype)


def grad(seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal(N).astype(np.float32)


@pytest.mark.parametrize("param", WIRE)
def test_what_is_mapped_is_what_would_be_gathered_at_every_version(param: DType) -> None:
    made, plain = servers(param), servers(param)
    copy = mapped(made.engines[0])
    for step in range(3):
        np.testing.assert_array_equal(copy.values, plain.values(0))
        assert copy.is_at(step)
        assert not copy.is_at(step + 1)
        for one in (made, plain):
            one.train_step([[grad(step), None]])
    np.testing.assert_array_equal(made.values(0), plain.values(0))  # who cannot map it gathers the same
    assert mapped(made.engines[0]).values.tobytes() == copy.values.tobytes()


def test_while_a_step_is_applied_it_holds_no_version() -> None:
    made = servers()
    (engine,) = made.engines
    copy = mapped(engine)
    made.push(0, 0, grad(0))
    before = copy.values.copy()
    assert copy.is_at(0)
    decision = commit_of(engine)
    (owned,) = engine.decide(decision)
    assert not copy.is_at(0)
    assert not copy.is_at(1)
    np.testing.assert_array_equal(copy.values, before)
    assert owned.wire.mapped is not None
    with pytest.raises(AssertionError, match="being changed"):
        owned.map(owned.wire.mapped)
    owned.change.apply(0, len(owned.chunks.bounds), engine.scratch(8))
    owned.finish()
    assert copy.is_at(1)
    assert np.all(copy.values != before)


def test_a_step_that_is_not_committed_or_has_no_gradient_for_it_changes_nothing() -> None:
    made = servers()
    copy = mapped(made.engines[0])
    before = copy.values.copy()
    made.push(0, 0, grad(0))
    made.end(Outcome.ABORT)
    assert copy.is_at(0)
    made.push(0, 0, None)
    apply(made.engines[0], commit_of(made.engines[0]))
    assert copy.is_at(1)
    np.testing.assert_array_equal(copy.values, before)


def test_a_frozen_unit_is_that_of_the_last_copy_whatever_the_version() -> None:
    made = servers()
    copy = mapped(made.engines[0], 1)
    assert copy.is_at(0)
    made.train_step([[grad(0), None]])
    assert copy.is_at(0)
    assert not copy.is_at(1)


def test_frames_are_made_only_for_those_who_ask() -> None:
    made = servers()
    (engine,) = made.engines
    mapped(engine)
    assert engine.statistics()["frame_bytes"] < 4 * (N + FROZEN)  # the frozen unit's
    before = engine.statistics()["encodings"]
    made.train_step([[grad(0), None]])
    assert engine.statistics()["encodings"] == before
    made.values(0)
    made.values(0)
    assert engine.statistics()["encodings"] == before + len(engine.slices[0].chunks.bounds)
    assert 0 < engine.statistics()["shared_bytes"] < 2 * PAGE_BYTES  # the master's own memory is mapped


def test_prepared_frames_are_served_beside_it() -> None:
    made, plain = servers(), servers()
    (engine,) = made.engines
    copy = mapped(engine)
    for one in (made, plain):
        one.push(0, 0, grad(0))
    hyper = ({"lr": 0.1},)
    owned = engine.slices[0]
    chunks = range(len(owned.chunks.bounds))
    prepared = tuple(engine.expected.prepare_chunk(engine.step, owned, i, hyper, engine.scratch()) for i in chunks)
    assert copy.is_at(0)
    for one in (made, plain):
        one.commit(hyper)
    assert prepared == engine.parameters.frames(0, 0, N) == plain.engines[0].parameters.frames(0, 0, N)
    np.testing.assert_array_equal(copy.values, plain.values(0))


def test_a_commit_before_every_frame_was_prepared_serves_no_half_of_them() -> None:
    made, plain = servers(), servers()
    (engine,) = made.engines
    mapped(engine)
    for one in (made, plain):
        one.push(0, 0, grad(0))
    hyper = ({"lr": 0.1},)
    assert engine.expected.prepare_chunk(engine.step, engine.slices[0], 0, hyper, engine.scratch())
    for one in (made, plain):
        one.commit(hyper)
    assert engine.parameters.frames(0, 0, N) == plain.engines[0].parameters.frames(0, 0, N)


def test_values_that_replace_others_are_seen_when_all_are_there() -> None:
    made = servers()
    (engine,) = made.engines
    copy, owned = mapped(engine), engine.slices[0]
    owned.withdraw()
    assert not copy.is_at(0)
    other = np.arange(N, dtype=np.float32)
    for index, (begin, end) in enumerate(owned.chunks.bounds):
        owned.arriving.store(index, other[begin:end], owned.master.values)
    assert not copy.is_at(0)
    owned.publish(7)
    assert copy.is_at(7)
    np.testing.assert_array_equal(copy.values, other)


def test_only_all_of_a_unit_is_used_where_it_lies() -> None:
    for engine in servers(num_servers=2).engines:
        (owned,) = (owned for owned in engine.slices.values() if owned.chunks.unit == 0)
        assert not engine.mappable(owned)
        shared = map_unit(engine, owned)  # to be copied by others
        assert shared is not None
        np.testing.assert_array_equal(shared.values, owned.master.values)
    spec = replace(job_of(LAYOUT), policy=BoundedStaleness(max_staleness=2))
    other = Servers(spec)
    other.upload([np.ones(u.numel, np.float32) for u in LAYOUT.units])
    assert not other.engines[0].mappable(other.engines[0].slices[0])


def test_what_cannot_be_mapped_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = replace(job_of(LAYOUT), precision=WirePrecision(param_compression=Int8()))
    other = Servers(spec)
    other.upload([np.ones(u.numel, np.float32) for u in LAYOUT.units])
    assert map_unit(other.engines[0], other.engines[0].slices[0]) is None

    crowded = servers().engines[0]
    monkeypatch.setattr(mapped_units, "MAX_SEGMENTS", Segment.open + 1)
    assert map_unit(crowded, crowded.slices[0]) is not None
    assert map_unit(crowded, crowded.slices[1]) is None
    assert map_unit(crowded, crowded.slices[0]) is not None
    assert not shared_arrays.find(address_of(sum_memory(10_000)), 40_000)
    monkeypatch.undo()

    def out_of_memory(*_: object) -> SharedCopy:
        raise Busy("a shared-memory segment needs more than there is")

    monkeypatch.setattr(mapped_units, "SharedCopy", out_of_memory)
    monkeypatch.setattr(mapped_units, "allocate_sum", out_of_memory)
    full = servers()
    assert map_unit(full.engines[0], full.engines[0].slices[0]) is None
    assert len(full.engines[0].parameters.frames(0, 0, N)) == len(full.engines[0].slices[0].chunks.bounds)
    assert not sum_memory(10_000).any()


@pytest.mark.parametrize("param", WIRE)
def test_frames_for_those_who_share_no_memory_are_those_that_were_sent_before(param: DType) -> None:
    made, plain = servers(param), servers(param)
    (engine,) = made.engines
    mapped(engine)
    for step in range(2):
        assert engine.parameters.frames(0, 0, N) == plain.engines[0].parameters.frames(0, 0, N)
        for one in (made, plain):
            one.train_step([[grad(step), None]])
    assert engine.parameters.frames(0, 0, N) == plain.engines[0].parameters.frames(0, 0, N)


def test_a_lease_holds_until_the_values_change_even_to_the_same_version() -> None:
    shared = SharedCopy(5000, DType.BF16)
    shared.publish(7)
    before = shared.lease(10, 60)
    assert (before.segment, before.offset, before.size_bytes) == (shared.segment.number, PAGE_BYTES + 20, 100)
    copy = mapping_of(shared, 5000, DType.BF16)
    assert copy.is_at(7)
    shared.withdraw()
    assert not copy.is_at(7)
    shared.publish(7)  # after a restore
    assert copy.is_at(7)
    assert shared.lease(10, 60).tag != before.tag


def test_what_a_worker_writes_it_alone_sees_until_it_forgets() -> None:
    shared = SharedCopy(5000, DType.F32)
    shared.values[:] = 1.0
    shared.publish(0)
    ours, theirs = (mapping_of(shared, 5000, DType.F32) for _ in range(2))
    ours.values[3000] = 5.0
    assert (ours.values[3000], theirs.values[3000], shared.values[3000]) == (5.0, 1.0, 1.0)
    shared.values[:] = 2.0
    shared.publish(1)
    assert (ours.values[3000], ours.values[10], theirs.values[3000]) == (5.0, 2.0, 2.0)
    assert ours.is_at(1)
    ours.discard_writes()
    assert np.all(ours.values == 2.0)
    shared.close()
    assert np.all(theirs.values == 2.0)  # what is mapped stays


def test_what_is_too_small_is_not_mapped() -> None:
    shared = SharedCopy(10, DType.F32)
    with pytest.raises(InvalidRequest, match="2000 f32 are not in a segment"):
        mapping_of(shared, 2000, DType.F32)


def test_no_worker_can_change_what_the_server_serves() -> None:
    shared = SharedCopy(5000, DType.F32)
    with pytest.raises(Busy, match="not permitted"):
        shared_memory.receive(os.dup(shared.segment.fd), Access.WRITE)
    with pytest.raises(PermissionError):
        os.pwrite(shared.segment.fd, b"1234", PAGE_BYTES)
    with pytest.raises(PermissionError):
        os.ftruncate(shared.segment.fd, 0)

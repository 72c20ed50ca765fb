"""Slices that several servers hold: copies stay equal bit for bit, whatever happens to them."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from axon_ps.aggregation.client.probes import Wait, Waits
from axon_ps.compress import Compressor, Int4, Int8, TopK
from axon_ps.errors import Broken, InvalidRequest, SliceMoved, StepAborted
from axon_ps.optim import names
from axon_ps.shard.core.engine import ShardEngine
from axon_ps.shard.core.gradients import Push
from axon_ps.shard.core.slices import OwnedSlice
from axon_ps.shard.server.forwarding import BackupStreams
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.placement import Holders, Placement, Server, new_placement
from axon_ps.sharding.plan import PlanOptions
from axon_ps.sharding.policy import Asynchronous
from axon_ps.sharding.precision import WirePrecision
from axon_ps.types import Array, Decision, DType, Hyper, OptimizerSpec, Outcome, ReplicaClock
from axon_ps.wire.v1 import common_pb2
from deadlines import HANG_S
from engine_driver import apply, cast_to, commit_of, layout_of, one_group

LAYOUT = layout_of((100, 41), (60,), (50,), frozen=(2,))
TRAINABLE = (0, 1)


def job(precision: WirePrecision | None = None, *, asynchronous: bool = False) -> JobSpec:
    spec = JobSpec(
        layout=LAYOUT,
        precision=precision or WirePrecision(),
        options=PlanOptions(chunk_numel=16, min_slice_numel=8),
    )
    return dataclasses.replace(spec, policy=Asynchronous()) if asynchronous else spec


def normals(numel: int, seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal(numel, dtype=np.float32)


def encoded(spec: JobSpec, grad: Array) -> Array:
    """A gradient as it travels."""
    compressor: Compressor | None = spec.precision.grad_compression
    if compressor is None:
        return cast_to(grad, spec.precision.grad)
    out = np.empty(compressor.compressed_bytes(grad.size), np.uint8)
    compressor.compress(grad, out)
    return out


class Replicated:
    """Two servers that both hold every slice; each is the primary of about half. What forwarding does is done here."""

    def __init__(
        self,
        spec: JobSpec,
        *,
        replicas: int = 2,
        optimizer: OptimizerSpec | None = None,
        placement: Placement | None = None,
    ) -> None:
        self.spec, self.replicas = spec, replicas
        self.optimizer = optimizer or one_group(LAYOUT, lr=0.1)
        self.plan = spec.plan(2)
        self.placement = placement or new_placement(self.plan, [Server(0), Server(1)], 2)
        self.engines: dict[int, ShardEngine] = {}
        self.generation = 1
        for rank in (0, 1):
            self.add(rank)
        for unit, u in enumerate(LAYOUT.units):
            values = normals(u.numel, unit)
            for rank, owned in self.copies(unit):
                for begin, end in owned.chunks.bounds:
                    self.engines[rank].parameters.upload(unit, begin, values[begin:end], 0)
        assert all(e.parameters.initialized for e in self.engines.values())

    def add(self, rank: int, version: int = 0, step: int = 1) -> ShardEngine:
        """A server that has just come."""
        engine = self.engines[rank] = ShardEngine()
        engine.configure(self.spec, rank, 2, self.placement)
        engine.optimizer.set(self.optimizer)
        engine.membership(self.generation, step, version, self.replicas)
        return engine

    def copies(self, unit: int) -> list[tuple[int, OwnedSlice]]:
        """Every slice of a unit on every server, with the server's rank."""
        return [(rank, s) for rank, e in self.engines.items() for s in e.slices.values() if s.chunks.unit == unit]

    def set_placement(self, placement: Placement) -> None:
        self.placement = placement
        for rank, engine in self.engines.items():
            engine.set_placement(placement, rank)

    def begin_generation(self) -> None:
        engine = next(iter(self.engines.values()))
        self.generation, step, version = engine.generation + 1, engine.step, engine.version
        for engine in self.engines.values():
            engine.membership(self.generation, step, version, self.replicas)

    def push(self, unit: int, replica: int, grad: Array | None, step: int | None = None) -> None:
        """A gradient goes to the primaries of a unit, and what is complete from there to the backups."""
        dtype = DType.U8 if self.spec.precision.grad_compression else self.spec.precision.grad
        for rank, owned in self.copies(unit):
            if owned.primary:
                engine = self.engines[rank]
                for begin, end in owned.chunks.bounds:
                    wire = None if grad is None else encoded(self.spec, grad[begin:end])
                    at = engine.step if step is None else step
                    assert engine.gradients.push(at, unit, begin, replica, dtype, wire) is Push.SUMMED
        self.forward()

    def forward(self) -> set[Push]:
        """Forward all sums that are complete; returns what became of them."""
        became = set()
        for rank, engine in self.engines.items():
            for number, attempt in enumerate(engine.gradients.attempts):
                for owned in engine.slices.primaries:
                    accumulator = owned.accumulators[number]
                    for index in engine.gradients.sums_of(number, owned):
                        total = accumulator.array[owned.chunks.ranges[index]] if accumulator.present[index] else None
                        unit, begin = owned.chunks.unit, owned.chunks.bounds[index][0]
                        for other in self.placement.holders[owned.number].followers:
                            assert other != rank
                            sums = self.engines[other].gradients
                            became.add(sums.push_sum(attempt.step, unit, begin, number, total))
        return became

    def commit(self, hyper: Sequence[Hyper] = (), clip_factor: float = 1.0) -> None:
        for engine in self.engines.values():
            apply(engine, commit_of(engine, hyper, clip_factor))

    def drop(self, outcome: Outcome) -> None:
        for e in self.engines.values():
            decision = Decision(step=e.step, generation=e.generation, outcome=outcome, version=e.version)
            assert e.decide(decision) == []

    def step(self, seed: int, *, absent: Callable[[int, int], bool] = lambda unit, replica: False) -> None:
        """Push a gradient of every replica."""
        for unit in TRAINABLE:
            for replica in range(self.replicas):
                grad = normals(LAYOUT.units[unit].numel, 100 * seed + 10 * unit + replica)
                self.push(unit, replica, None if absent(unit, replica) else grad)

    def check_equal(self) -> None:
        """All servers hold the same bits of every slice."""
        assert len({(e.version, e.step) for e in self.engines.values()}) == 1
        for number, holders in enumerate(self.placement.holders):
            states = [state_of(self.engines[rank].slices[number]) for rank in holders.complete]
            assert all(state == states[0] for state in states[1:]), f"slice {number}"


def state_of(owned: OwnedSlice) -> dict[str, object]:
    """Everything of a slice that its next values and frames depend on."""
    return {
        "values": owned.master.values.tobytes(),
        "moments": {name: moment.tobytes() for name, moment in owned.master.state.items()},
        "updates": owned.master.parameter_updates(),
        "versions": (owned.reached, owned.changed, owned.copied),
        "feedback": {name: array.tobytes() for name, array in owned.wire.feedback.items()},
        "digest": owned.digest,
    }


def train(made: Replicated, hyper: Sequence[Hyper] = ()) -> None:
    """Steps with everything that can be in one."""
    made.step(1)
    made.commit(hyper)
    made.check_equal()
    made.step(2, absent=lambda unit, replica: replica == 1)  # one replica has nothing
    made.commit(hyper, clip_factor=0.37)
    made.check_equal()
    made.step(3, absent=lambda unit, replica: unit == 1)  # nobody has anything for a unit
    made.commit(hyper)
    made.check_equal()
    made.step(4)
    made.drop(Outcome.SKIP)
    made.push(0, 0, normals(141, 5))
    made.drop(Outcome.ABORT)
    made.push(1, 0, normals(60, 6))
    made.begin_generation()  # somebody was lost: what was summed is dropped
    made.step(7)
    made.commit(hyper)
    made.check_equal()


# ---------------------------------------------------------------------- equal bit for bit


@pytest.mark.parametrize("name", names())
def test_copies_are_equal_with_every_optimizer(name: str) -> None:
    made = Replicated(job(), optimizer=one_group(LAYOUT, name, lr=0.05, weight_decay=0.1))
    train(made)
    assert made.engines[0].version == 4
    assert any(s.digest for s in made.engines[0].slices.values())


@pytest.mark.parametrize("param", [DType.F32, DType.BF16, DType.F16])
@pytest.mark.parametrize("grad", [DType.F32, DType.BF16, DType.F16])
def test_copies_are_equal_with_every_dtype(param: DType, grad: DType) -> None:
    made = Replicated(job(WirePrecision(param=param, grad=grad)), optimizer=one_group(LAYOUT, "adamw", lr=0.1))
    train(made)


@pytest.mark.parametrize("param", [None, Int8(16), Int4()], ids=["plain", "int8", "int4"])
@pytest.mark.parametrize("grad", [None, Int8(16), Int4(), TopK(0.3)], ids=["plain", "int8", "int4", "top_k"])
def test_copies_are_equal_where_arrays_travel_compressed(param: Compressor | None, grad: Compressor | None) -> None:
    precision = WirePrecision(param_compression=param, grad_compression=grad)
    made = Replicated(job(precision), optimizer=one_group(LAYOUT, "adam", lr=0.1))
    train(made)
    for number, owned in made.engines[0].slices.items() if param else ():
        frames = [engine.slices[number].wire.frames for engine in made.engines.values()]
        assert frames[0] == frames[1]
        assert frames[0] or (owned.wire.differs and not owned.trainable), (
            "the residual moves with the frames, so backups make them, too"
        )


def test_copies_are_equal_when_hyperparameters_ask_for_a_moment_later() -> None:
    made = Replicated(job(), optimizer=one_group(LAYOUT, "sgd", lr=0.1))
    train(made)
    assert not made.engines[0].slices[0].master.state
    train(made, [{"lr": 0.1, "momentum": 0.9}])
    assert all(s.master.state for s in made.engines[1].slices.values() if s.trainable)


def test_copies_are_equal_where_replicas_step_asynchronously() -> None:
    made = Replicated(job(asynchronous=True), replicas=3, optimizer=one_group(LAYOUT, "adam", lr=0.1))
    order, clocks = random.Random(7), [0, 0, 0]
    for decided in range(1, 10):
        replica = order.randrange(3)
        for unit in TRAINABLE:
            grad = normals(LAYOUT.units[unit].numel, 10 * decided + unit)
            made.push(unit, replica, None if decided == 4 and unit == 0 else grad, clocks[replica])
        assert all((e.gradients.ready(replica) is not None) for e in made.engines.values())
        replica_clock = ReplicaClock(replica=replica, clock=clocks[replica], slowest_clock=0)
        for engine in made.engines.values():
            apply(engine, dataclasses.replace(commit_of(engine), replica_clock=replica_clock))
        clocks[replica] += 1
        made.check_equal()
    assert made.engines[0].version == 9


def test_reports_carry_each_sum_of_squares_once_and_equal_digests() -> None:
    made = Replicated(job())
    made.step(1)
    ready = {rank: engine.gradients.ready() for rank, engine in made.engines.items()}
    primaries = {rank: [s for s in e.slices.primaries if s.trainable] for rank, e in made.engines.items()}
    assert all(primaries.values()), "each is the primary of something"
    for rank, sums in ready.items():
        assert sums is not None
        arrays = [s.accumulators[0].array.astype(np.float64) for s in primaries[rank]]
        np.testing.assert_allclose(sums, [float((a**2).sum()) for a in arrays], rtol=1e-12)
    assert made.engines[0].digests() == {}, "nothing was updated yet"
    made.commit()
    trainable = {n for n, s in made.engines[0].slices.items() if s.trainable}
    assert made.engines[0].digests().keys() == trainable
    assert made.engines[0].digests() == made.engines[1].digests()


def test_replicas_that_step_asynchronously_report_no_digests() -> None:
    """A report on one replica's attempt may be made before or after another one's step is applied."""
    made = Replicated(job(asynchronous=True), replicas=1)
    for unit in TRAINABLE:
        made.push(unit, 0, normals(LAYOUT.units[unit].numel, unit), 0)
    for engine in made.engines.values():
        apply(
            engine,
            dataclasses.replace(commit_of(engine), replica_clock=ReplicaClock(replica=0, clock=0, slowest_clock=0)),
        )
        assert engine.digests() == {}


# ---------------------------------------------------------------------- what goes to whom


def test_workers_push_to_the_primary_and_the_primary_forwards_to_backups() -> None:
    made = Replicated(job(), replicas=1)
    number, holders = 0, made.placement.holders[0]
    primary, backup = (made.engines[rank] for rank in holders.complete)
    owned = primary.slices[number]
    begin, end = owned.chunks.bounds[0]
    unit, ones = owned.chunks.unit, np.ones(end - begin, np.float32)
    with pytest.raises(SliceMoved, match="a backup of unit 0 .*push to the primary"):
        backup.gradients.push(1, unit, begin, 0, DType.F32, ones)
    with pytest.raises(SliceMoved, match="forwarded to the primary of its slice"):
        primary.gradients.push_sum(1, unit, begin, 0, ones)
    with pytest.raises(InvalidRequest, match=f"has {ones.size + 1} elements; it must have {ones.size}"):
        backup.gradients.push_sum(1, unit, begin, 0, np.ones(ones.size + 1, np.float32))
    with pytest.raises(InvalidRequest, match="of attempt 3 was forwarded; there are 1"):
        backup.gradients.push_sum(1, unit, begin, 3, ones)
    with pytest.raises(InvalidRequest, match="which is frozen"):
        backup.gradients.push_sum(1, 2, 0, 0, ones)  # frozen
    missing = backup.gradients.attempts[0].missing
    assert backup.gradients.push_sum(1, unit, begin, 0, ones) is Push.SUMMED
    assert backup.gradients.push_sum(1, unit, begin, 0, ones) is Push.DUPLICATE
    assert backup.gradients.attempts[0].missing == missing - 1
    assert backup.gradients.push_sum(2, unit, begin, 0, ones) is Push.WAIT


def test_a_sum_that_comes_late_or_again_changes_nothing() -> None:
    made = Replicated(job(), replicas=1)
    made.step(1)
    assert made.forward() == {Push.DUPLICATE}
    made.commit()
    backup = made.engines[made.placement.holders[0].complete[1]]
    owned = backup.slices[0]
    begin, end = owned.chunks.bounds[0]
    before = state_of(owned)
    assert backup.gradients.push_sum(1, 0, begin, 0, np.ones(end - begin, np.float32)) is Push.DUPLICATE
    made.drop(Outcome.ABORT)
    with pytest.raises(StepAborted):
        backup.gradients.push_sum(2, 0, begin, 0, np.ones(end - begin, np.float32))
    assert state_of(owned) == before


def test_a_server_is_ready_once_it_has_the_sums_of_what_it_backs_up() -> None:
    made = Replicated(job(), replicas=1)
    forwarded, made.forward = made.forward, set  # type: ignore[method-assign,assignment]
    made.step(1)
    assert [e.gradients.ready() for e in made.engines.values()] == [None, None]
    forwarded()
    assert all(e.gradients.ready() for e in made.engines.values())


def test_a_backup_makes_no_frames_until_it_is_asked() -> None:
    made = Replicated(job(), replicas=1)
    made.step(1)
    made.commit()
    for number, holders in enumerate(made.placement.holders):
        primary, backup = (made.engines[rank] for rank in holders.complete)
        theirs, ours = primary.slices[number], backup.slices[number]
        if not ours.trainable:
            continue
        assert theirs.wire.frames
        assert not ours.wire.frames
        assert backup.parameters.available(ours.chunks.unit, ours.chunks.begin, 1)
        span = ours.chunks.unit, ours.chunks.begin, ours.chunks.end
        assert backup.parameters.frames(*span) == primary.parameters.frames(*span)


# ---------------------------------------------------------------------- placements that change


@pytest.mark.parametrize("param", [None, Int8(16), Int4()], ids=["plain", "int8", "int4"])
def test_a_promoted_backup_serves_the_same_frames_and_goes_on_alike(param: Compressor | None) -> None:
    spec = job(WirePrecision(param_compression=param))
    made, unfailed = (Replicated(spec, optimizer=one_group(LAYOUT, "adamw", lr=0.1)) for _ in range(2))
    for each in (made, unfailed):
        each.step(1)
        each.commit()
    made.push(0, 0, normals(141, 3))  # a step is under way
    lost = made.engines.pop(0)
    before = {n: s.wire.frames for n, s in lost.slices.items() if s.primary}
    assert before
    made.set_placement(made.placement.without(0))
    made.begin_generation()
    unfailed.drop(Outcome.ABORT)
    made.drop(Outcome.ABORT)
    (survivor,) = made.engines.values()
    assert [s.number for s in survivor.slices.primaries] == list(range(len(made.placement.holders)))
    for number, frames in before.items():
        c = survivor.slices[number].chunks
        assert survivor.parameters.frames(c.unit, c.begin, c.end) == frames
    for each in (made, unfailed):
        each.step(2)
        each.commit()
    for number, owned in survivor.slices.items():
        theirs = unfailed.engines[1].slices[number]
        assert {**state_of(owned), "digest": 0} == {**state_of(theirs), "digest": 0}


def copy_slices(made: Replicated, rank: int) -> None:
    """What `shard.server.copying` does."""
    engine = made.engines[rank]
    for owned in [s for s in engine.slices.values() if s.copying]:
        source = made.engines[made.placement.holders[owned.number].primary].slices[owned.number]
        owned.master.values[:] = source.master.values
        for name, array in source.wire.feedback.items():
            owned.wire.feedback[name][:] = array
        moments = {name: moment.copy() for name, moment in source.master.state.items()}
        frames = source.wire.frames if source.wire.compressed else ()
        updates = source.master.parameter_updates()
        engine.copied(owned, moments, updates, source.changed, source.copied, frames)
    made.set_placement(made.placement.copied(range(len(made.placement.holders)), rank, range(99)))


@pytest.mark.parametrize("param", [None, Int8(16), Int4()], ids=["plain", "int8", "int4"])
@pytest.mark.parametrize("name", ["sgd", "adagrad", "adamw"])
def test_a_copy_that_is_made_in_the_middle_of_a_step_goes_on_alike(name: str, param: Compressor | None) -> None:
    hyper: dict[str, float] = {"momentum": 0.9} if name == "sgd" else {}
    spec, optimizer = job(WirePrecision(param_compression=param)), one_group(LAYOUT, name, lr=0.1, **hyper)
    made = Replicated(spec, optimizer=optimizer)
    for seed in (1, 2):
        made.step(seed, absent=lambda unit, replica: unit == 1)
        made.commit()
    made.push(0, 0, normals(141, 30))
    made.push(0, 1, normals(141, 31))  # complete before the third server comes
    made.add(2, made.engines[0].version, made.engines[0].step)
    placement = made.placement
    for number in range(len(placement.holders)):
        placement = placement.changed({number: placement.holders[number].with_copying(2)})
    made.set_placement(placement)
    new = made.engines[2]
    assert new.version == 2
    assert all(s.copying for s in new.slices.values())
    assert made.forward() == {Push.SUMMED, Push.DUPLICATE}
    for replica in (0, 1):
        made.push(1, replica, normals(60, 32 + replica))
    assert not new.gradients.attempts[0].missing
    assert new.gradients.ready() is None, "it has the sums and not the values"
    assert not any(new.parameters.available(s.chunks.unit, s.chunks.begin, 0) for s in new.slices.values())
    assert made.engines[0].gradients.ready() is not None
    copy_slices(made, 2)
    assert made.placement.holders[0].complete[-1] == 2
    assert new.gradients.ready() == (), "it is the primary of nothing"
    made.commit()
    for seed in (4, 5):
        made.step(seed)
        made.commit()
        made.check_equal()
    made.engines.pop(0)
    made.engines.pop(1)
    made.set_placement(made.placement.without(0).without(1))
    made.begin_generation()
    made.step(6)
    made.commit()
    assert new.version == 6
    assert new.statistics()["slices_copied"] == len(new.slices)


def test_a_server_that_holds_nothing_follows_the_job_and_can_be_given_slices() -> None:
    made = Replicated(job(), replicas=1)
    idle = made.add(2)
    assert not idle.slices
    for seed in (1, 2):
        made.step(seed)
        assert idle.gradients.ready() is None
        made.commit()
    assert idle.version == 2
    made.set_placement(made.placement.changed({1: made.placement.holders[1].with_copying(2)}))
    assert [n for n, s in idle.slices.items() if s.copying] == [1]
    assert idle.slices[1].reached == 2
    copy_slices(made, 2)
    made.step(3)
    made.commit()
    made.check_equal()


def test_a_placement_adds_and_removes_slices_and_changes_roles() -> None:
    made = Replicated(job(), replicas=1)
    number, (primary, backup) = 0, made.placement.holders[0].complete
    ours = made.engines[primary].slices[number]
    before = dict(made.engines[primary].slices)
    made.set_placement(made.placement.changed({number: made.placement.holders[number].with_primary(backup)}))
    assert not ours.primary
    assert made.engines[backup].slices[number].primary
    assert dict(made.engines[primary].slices) == before, "nothing is made anew"
    made.step(1)
    made.commit()
    made.check_equal()
    placement = made.placement.changed({number: made.placement.holders[number].without(primary)})
    made.placement = placement
    assert made.engines[primary].set_placement(placement, primary) == [ours]
    assert made.engines[backup].set_placement(placement, backup) == []
    assert not made.engines[backup].slices[number].replicated
    with pytest.raises(SliceMoved, match="does not hold the slice of unit 0 with element 0"):
        made.engines[primary].parameters.available(0, 0, 0)
    with pytest.raises(SliceMoved, match="ask its primary"):
        made.engines[primary].gradients.push(2, 0, 0, 0, DType.F32, None)
    made.step(2)
    made.commit()
    assert number not in made.engines[backup].digests(), "there is nothing to compare it with"
    made.set_placement(placement.changed({number: placement.holders[number].with_copying(primary)}))
    assert list(made.engines[primary].slices) == sorted(made.engines[primary].slices)
    again = made.engines[primary].slices[number]
    assert again is not ours
    assert again.copying
    copy_slices(made, primary)
    made.step(3)
    made.commit()
    made.check_equal()


def test_only_slices_that_a_server_is_not_getting_lack_first_values() -> None:
    made = Replicated(job(), replicas=1)
    made.add(2)
    made.set_placement(made.placement.changed({0: made.placement.holders[0].with_copying(2)}))
    assert made.engines[2].parameters.lacking == 0
    alone = ShardEngine()
    alone.configure(job(), 0, 2, Placement((Holders((0,)),) * len(made.placement.holders), 2))
    assert alone.parameters.lacking == sum(len(s.chunks.bounds) for s in alone.slices.values())


# ---------------------------------------------------------------------- digests


def test_an_update_that_differs_shows_in_the_digests_of_the_next_step() -> None:
    made = Replicated(job(), replicas=1)
    made.step(1)
    other = made.engines[1].slices[0]
    accumulator = other.accumulators[0]
    assert accumulator.array is not None
    accumulator.array[3] += 1
    accumulator.digests.record(accumulator.array.view(np.uint32), range(1))  # as if it had been summed so
    made.commit()
    ours, theirs = made.engines[0].digests(), made.engines[1].digests()
    assert [n for n in ours if ours[n] != theirs[n]] == [0]


def test_update_counts_of_another_unit_are_refused_before_anything_is_applied() -> None:
    made = Replicated(job(), optimizer=one_group(LAYOUT, "adamw", lr=0.1))
    owned = made.engines[0].slices[0]
    before = owned.master.parameter_updates()
    for updates in ((), (1,), (1, 2, 3)):
        with pytest.raises(InvalidRequest, match=rf"has 2 parameters, and updates are counted of {len(updates)}"):
            owned.master.set_updates(updates)
    assert owned.master.parameter_updates() == before


def test_a_placement_of_other_slices_is_refused_before_anything_is_counted_by_it() -> None:
    """As a coordinator that lies would send it: `make lab NAME=fuzz` found an IndexError."""
    engine = ShardEngine()
    engine.configure(job(), 0, 2)
    placement = engine.placement
    assert placement is not None
    engine.slices.check(placement)
    with pytest.raises(InvalidRequest, match="slices are placed"):
        engine.slices.check(dataclasses.replace(placement, holders=placement.holders * 2))


def test_a_decision_on_an_attempt_that_there_is_not_is_refused() -> None:
    """As a coordinator that lies would send it: `make lab NAME=fuzz` found an IndexError."""
    engine = ShardEngine()
    engine.configure(job(asynchronous=True), 0, 2)
    replica_clock = ReplicaClock(replica=5, clock=0, slowest_clock=0)
    decision = Decision(step=0, generation=1, outcome=Outcome.ABORT, version=0, replica_clock=replica_clock)
    with pytest.raises(InvalidRequest, match="replica 5's attempt; there are 1 here"):
        engine.decide(decision)


class Written:
    """The stream to a backup; it holds what was written."""

    target = "server 1"

    def __init__(self) -> None:
        self.messages = 0

    async def __aenter__(self) -> Written:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    def is_current(self) -> bool:
        return True

    async def write(self, _: object) -> None:
        self.messages += 1

    async def read(self) -> None:
        await asyncio.Event().wait()

    async def open_bulk(self, method: str) -> Written:
        """The stub of the backup, too."""
        assert method == "Replicate"
        return self


@pytest.mark.parametrize("leave", [True, False])
def test_a_server_whose_slices_have_left_forwards_none_of_them_after_a_broken_stream(
    leave: bool, caplog: pytest.LogCaptureFixture
) -> None:
    made = Replicated(job(), replicas=1)
    engine, stream = made.engines[0], Written()
    made.step(1)  # all sums are complete

    class Links:
        """The slices leave while the first stream breaks."""

        def __init__(self) -> None:
            self.tried = 0

        def forget(self, rank: int) -> None:
            assert rank == 1

        def waiting(self) -> Wait:
            return Waits().begin()

        def context(self, _model: int, *, generation: int, placement: int) -> common_pb2.CallContext:
            assert generation == engine.generation, "sums of one generation are none of another"
            return common_pb2.CallContext(generation=generation, placement=placement)

        async def peer(self, *_: object) -> None:
            return None

        async def stub(self, _: int) -> Written:
            self.tried += 1
            if self.tried == 1:
                if leave:
                    engine.set_placement(new_placement(made.plan, [Server(1)], 1), 0)
                    assert not engine.slices
                raise Broken("the stream to server 1 is broken")
            return stream

    async def forwarded() -> None:
        links: Any = Links()
        forwarding = BackupStreams(0, engine, links, lambda owned: None)
        forwarding.on_placement()
        (follower,) = forwarding._followers.values()
        assert follower.queue
        while links.tried < 2 or follower.filled.is_set():  # until the second stream has no more to send
            await asyncio.sleep(0.001)
        forwarding.close()

    asyncio.run(asyncio.wait_for(forwarded(), HANG_S))
    assert (stream.messages > 0) == (not leave)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []

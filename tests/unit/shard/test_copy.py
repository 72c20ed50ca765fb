"""A step that takes another model's values: the arithmetic on a slice, and its place among the other steps."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from axon_ps.compress import Int8
from axon_ps.errors import InternalError, Misuse
from axon_ps.shard.core.gradients import Push
from axon_ps.shard.same_host.shared_copy import SharedCopy
from axon_ps.shard.server.shell import ShardShell
from axon_ps.sharding.layout import Layout
from axon_ps.sharding.placement import Server, new_placement
from axon_ps.sharding.precision import WirePrecision
from axon_ps.types import (
    Array,
    CopyFrom,
    Decision,
    DType,
    Grouping,
    Member,
    Membership,
    ModelProgress,
    Outcome,
    Role,
    numbered,
)
from axon_ps.wire.events import JobState, Ready, SnapshotOrder
from axon_ps.wire.v1.common_pb2 import CallContext
from engine_driver import Servers, job_of, layout_of, map_unit, one_group

LAYOUT = layout_of([700, 41], [90])
FROZEN = Layout(units=tuple(dataclasses.replace(u, trainable=False) for u in LAYOUT.units))
VERSIONS = 1 << 48
"""Of a tag of shared memory, what is not the version is above this."""
VALUES = [np.linspace(-1, 1, 741, dtype=np.float32), np.linspace(0, 3, 90, dtype=np.float32)]
OTHERS = [np.cos(v) for v in VALUES]


def copy_decision(servers: Servers, weight: float, source: int = 1) -> Decision:
    engine = servers.engines[0]
    return Decision(
        step=engine.step,
        generation=engine.generation,
        outcome=Outcome.COMMIT,
        version=engine.version + 1,
        copy=CopyFrom(source=source, weight=weight, version=0),
    )


def copied(target: Servers, source: Servers, weight: float) -> None:
    decision = copy_decision(target, weight)
    for engine, other in zip(target.engines, source.engines, strict=True):
        for owned in engine.decide(decision):
            for index in range(len(owned.chunks.bounds)):
                owned.change.copy(index, index + 1, other.slices[owned.number], weight, engine.scratch())
            owned.finish()


@pytest.mark.parametrize("layout", [LAYOUT, FROZEN])
@pytest.mark.parametrize("param", [DType.F32, DType.BF16])
@pytest.mark.parametrize("weight", [1.0, 0.005])
def test_values_are_mixed_on_every_server_and_served_at_the_next_version(
    layout: Layout, param: DType, weight: float
) -> None:
    target = Servers(job_of(layout, param=param), 3)
    source = Servers(job_of(LAYOUT, param=param), 3)
    target.upload(VALUES)
    source.upload(OTHERS)
    copied(target, source, weight)
    assert target.version == 1
    for unit, (mine, other) in enumerate(zip(VALUES, OTHERS, strict=True)):
        wanted = mine * np.float32(1 - weight) + other * np.float32(weight)
        for engine in target.engines:
            for owned in (s for s in engine.slices.values() if s.chunks.unit == unit):
                np.testing.assert_array_equal(owned.master.values, wanted[owned.chunks.begin : owned.chunks.end])
                assert (owned.reached, owned.changed, owned.copied) == (1, 1, 1)
                assert engine.parameters.available(unit, owned.chunks.begin, 1)
                assert not engine.parameters.available(unit, owned.chunks.begin, 2)
        if param is DType.F32:
            np.testing.assert_array_equal(target.values(unit), wanted)


def test_moments_and_update_counts_stay_and_what_was_summed_is_dropped() -> None:
    adam = one_group(LAYOUT, "adam", lr=0.1)
    target, plain = (Servers(job_of(LAYOUT), replicas=2, optimizer=adam) for _ in range(2))
    source = Servers(job_of(LAYOUT))
    grads = [[np.ones_like(v) for v in VALUES] for _ in range(2)]
    for servers in (target, plain):
        servers.upload(VALUES)
        servers.train_step(grads)
    source.upload(OTHERS)
    target.push(0, 0, grads[0][0])
    copied(target, source, 1.0)
    (a,), (b,) = target.engines, plain.engines
    for number, owned in a.slices.items():
        assert owned.master.parameter_updates() == b.slices[number].master.parameter_updates()
        for name, state in b.slices[number].master.state.items():
            np.testing.assert_array_equal(owned.master.state[name], state)
    assert a.gradients.push(a.step, 0, 0, 0, DType.F32, grads[0][0][: a.slices[0].chunks.bounds[0][1]]) is Push.SUMMED
    assert a.statistics()["copies"] == 1


def test_compressed_parameters_keep_their_error_feedback() -> None:
    precision = WirePrecision(param_compression=Int8(64))
    spec = dataclasses.replace(job_of(LAYOUT), precision=precision)
    target, source = Servers(spec), Servers(job_of(LAYOUT))
    target.upload(VALUES)
    source.upload(OTHERS)
    copied(target, source, 0.5)
    (engine,) = target.engines
    owned = engine.slices[0]
    assert owned.wire.residual is not None
    assert np.abs(owned.wire.residual).max() > 0
    assert len(owned.wire.frames) == len(owned.chunks.bounds)


def test_a_mapped_unit_is_withdrawn_while_it_is_copied_and_says_its_version_then() -> None:
    for layout, holds in ((LAYOUT, 1), (FROZEN, 1)):
        target, source = Servers(job_of(layout)), Servers(job_of(LAYOUT))
        target.upload(VALUES)
        source.upload(OTHERS)
        (engine,), (other,) = target.engines, source.engines
        shared = map_unit(engine, engine.slices[1])
        assert isinstance(shared, SharedCopy)
        engine.decide(copy_decision(target, 1.0))
        assert not shared.lease(0, 1).tag % VERSIONS
        for number, owned in engine.slices.items():
            chunks = len(owned.chunks.bounds)
            owned.change.copy(0, chunks, other.slices[number], 1.0, engine.scratch(chunks))
            owned.finish()
        np.testing.assert_array_equal(shared.values, OTHERS[1])
        assert shared.lease(0, 1).tag % VERSIONS == holds + 1


def test_a_copy_of_another_version_than_the_next_is_a_missed_decision() -> None:
    target = Servers(job_of(LAYOUT))
    target.upload(VALUES)
    decision = dataclasses.replace(copy_decision(target, 1.0), version=7)
    with pytest.raises(InternalError, match="restore a checkpoint"):
        target.engines[0].decide(decision)


# ---------------------------------------------------------------------- the shell


class Reports:
    rank = 0

    def __init__(self) -> None:
        self.readied: list[tuple[int, int]] = []
        self.snapshots: asyncio.Queue[Any] = asyncio.Queue()

    def ready(self, ready: Ready, replica: int | None = None) -> None:
        self.readied.append((ready.model, ready.step))

    def initialized(self, **_: Any) -> None:
        pass

    def snapshot_report(self, id: int, files: Any = (), error: Any = None) -> None:
        self.snapshots.put_nowait((files, error))

    def restore_report(self, *_: Any, **__: Any) -> None:
        pass


class Job:
    """One server with models 0 and 1, trained by one worker; the test is the coordinator."""

    def __init__(self) -> None:
        self.shell, self.reports = ShardShell("j", threads=2), Reports()
        self.shell.reports = self.reports
        worker = Member(role=Role.WORKER, rank=0, incarnation="w", node="n", replica=0)
        self.membership = Membership(
            generation=1, step=1, version=0, workers=(worker,), shards=(), num_replicas=1, complete=True
        )
        self.shell.on_event(self.membership)
        self.steps = {0: 1, 1: 1}

    async def begin(self) -> None:
        for number, (layout, values) in enumerate(((LAYOUT, OTHERS), (FROZEN, VALUES))):
            optimizer = one_group(layout, lr=1.0) if number == 0 else None
            spec = job_of(layout)
            placement = new_placement(spec.plan(1), [Server(0)], 1)
            state = JobState(model=number, name=f"m{number}", spec=spec, optimizer=optimizer, placement=placement)
            self.shell.on_event(state)
            await self.shell.model(number).order.idle.wait()
            for unit, whole in enumerate(values):
                for begin, end in self.slices(number)[unit].chunks.bounds:
                    await self.shell.model(number).values.upload(0, unit, begin, whole[begin:end])

    def slices(self, number: int) -> Any:
        return self.shell.model(number).engine.slices

    def decide(self, model: int, copy: CopyFrom | None = None) -> None:
        step = self.steps[model]
        self.steps[model] += 1
        self.shell.on_event(
            Decision(step=step, generation=1, outcome=Outcome.COMMIT, version=step, model=model, copy=copy)
        )

    async def train(self, grad: float) -> None:
        """A step of model 0, as soon as the one before it is applied."""
        for unit, owned in self.slices(0).items():
            for begin, end in owned.chunks.bounds:
                whole = np.full(end - begin, grad, np.float32)
                await self.shell.model(0).gradients.push((self.steps[0], unit, begin, 0), DType.F32, whole)
        while (0, self.steps[0]) not in self.reports.readied:
            await asyncio.sleep(0)
        self.decide(0)

    async def settled(self) -> None:
        for number in (0, 1):
            await self.shell.model(number).order.idle.wait()

    def values(self, number: int, unit: int = 0) -> Array:
        return np.asarray(self.slices(number)[unit].master.values)


def run(body: Any) -> None:
    async def main() -> None:
        job = Job()
        try:
            await job.begin()
            await asyncio.wait_for(body(job), 60.0)
            assert not job.shell.failure.done()
        finally:
            await job.shell.close()

    asyncio.run(main())


def test_copies_take_the_version_decided_before_them_whatever_is_being_applied() -> None:
    """Steps of the source and copies from it are announced at once; the result is an average after each of them."""

    async def body(job: Job) -> None:
        source, target = OTHERS[0].copy(), VALUES[0].copy()
        for version in range(1, 5):
            await job.train(0.25)
            source -= np.float32(0.25)
            for _ in range(3):  # announced while the one before is being copied
                job.decide(1, CopyFrom(source=0, weight=0.5, version=version))
                target = target * np.float32(0.5) + source * np.float32(0.5)
        await job.settled()
        np.testing.assert_array_equal(job.values(0), source)
        np.testing.assert_array_equal(job.values(1), target)
        assert job.shell.model(1).engine.version == 12
        assert job.shell.statistics()["model/m1/version"] == 12

    run(body)


def test_a_copy_that_is_read_holds_the_next_step_of_its_source_back() -> None:
    async def body(job: Job) -> None:
        # a snapshot of the target: nothing is copied to it before that has passed
        pin = job.shell.model(1).pins.pin(0)
        job.decide(1, CopyFrom(source=0, weight=1.0, version=0))
        await job.train(1.0)
        np.testing.assert_array_equal(job.values(0), OTHERS[0])
        assert not job.shell.model(0).order.idle.is_set()
        job.shell.model(1).pins.release(pin)
        await job.settled()
        np.testing.assert_array_equal(job.values(1), OTHERS[0])
        np.testing.assert_array_equal(job.values(0), OTHERS[0] - np.float32(1.0))

    run(body)


def test_a_checkpoint_is_of_the_moment_between_two_copies(tmp_path: Path) -> None:
    async def body(job: Job) -> None:
        pin = job.shell.model(1).pins.pin(0)
        job.decide(1, CopyFrom(source=0, weight=1.0, version=0))
        job.decide(1, CopyFrom(source=0, weight=0.5, version=0))
        order = SnapshotOrder(id=1, uri=str(tmp_path), version=0, models=(ModelProgress(model=1, step=0, version=2),))
        job.shell.on_event(order)
        job.decide(1, CopyFrom(source=0, weight=0.25, version=0))
        job.shell.model(1).pins.release(pin)
        files, error = await job.reports.snapshots.get()
        assert error is None
        assert [f.model for f in files] == [0, 1]
        await job.settled()
        assert job.shell.model(1).engine.version == 3

    run(body)


def test_what_is_released_is_freed_once_nobody_copies_from_it_and_is_refused_then() -> None:
    async def body(job: Job) -> None:
        pin = job.shell.model(1).pins.pin(0)
        job.decide(1, CopyFrom(source=0, weight=1.0, version=0))
        source = job.shell.model(0)
        job.shell.on_event(JobState(model=0, name="m0", released=True))
        await asyncio.sleep(0)
        assert source.engine.slices, "the copy still reads it"
        job.shell.model(1).pins.release(pin)
        await job.shell.model(1).order.idle.wait()
        np.testing.assert_array_equal(job.values(1), OTHERS[0])
        context = CallContext(job="j", generation=1, incarnation="w")
        with pytest.raises(Misuse, match="model 'm0' was released"):
            await job.shell.fence.worker(context)
        while source.engine.slices:
            await asyncio.sleep(0)
        assert job.shell.statistics()["master_bytes"] == 4 * sum(v.size for v in VALUES)

    run(body)


def test_replicas_are_numbered_as_each_model_has_them() -> None:
    members = [SimpleNamespace(node=node, rank=rank) for rank, node in enumerate(("a", "b", "a"))]
    workers, _ = numbered(
        [Member(role=Role.WORKER, rank=m.rank, incarnation=f"w{m.rank}", node=m.node) for m in members], Grouping()
    )
    membership = Membership(generation=1, step=1, version=0, workers=workers, shards=(), num_replicas=3, complete=True)
    by_node = membership.numbered(Grouping(by_node=True))
    assert [m.replica for m in by_node.workers] == [0, 1, 0]
    assert by_node.num_replicas == 2
    assert by_node.numbered(Grouping()) == membership
    assert membership.numbered(Grouping()) is membership

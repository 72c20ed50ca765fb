"""A simulated job: the coordinator, the shard servers and the workers, each a process that may die and come back.

Coordinator and shard servers are the real services. A worker uses the product's `StepClient` on the simulation's
loop, for tickets, gathers, pushes and decisions.

The model is an integer that is known for every version: in version v each replica pushes `1 + rank + v % 5`
for every element, in one to three addends, and SGD with a rate of 1 subtracts their sum. So a chunk, an addend or a
step that is lost or counted twice shows in the values of every later version. With rows each worker of a row pushes one
of the two units, and `rank` is the number of the row. When the coordinator has lost its disk there is another job:
processes of the former job end, and are started anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import itertools
import os
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from axon_ps.aggregation.client.client import CollectiveClient
from axon_ps.coordinator.checkpoint_schedule import CheckpointPolicy
from axon_ps.coordinator.client.session import CoordinatorClient, SessionLost
from axon_ps.coordinator.config import CoordinatorConfig
from axon_ps.coordinator.core import records
from axon_ps.coordinator.core.restart.knowledge import behind
from axon_ps.coordinator.server import retention
from axon_ps.coordinator.server import server as coordinator_server
from axon_ps.errors import GenerationChanged, MemberLost, StepAborted, again
from axon_ps.rpc.carriers.in_process import PORT, SUFFIX
from axon_ps.rpc.security import Security
from axon_ps.shard.client.client import ShardGroup
from axon_ps.shard.core.slices import OwnedSlice
from axon_ps.shard.server import server as shard_server
from axon_ps.shard.server.server import ShardConfig
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.layout import Layout, build_unit
from axon_ps.sharding.plan import PlanOptions
from axon_ps.storage.state_store import MemoryStateStore
from axon_ps.storage.state_store.base import Record
from axon_ps.types import EACH_WORKER, Array, Decision, DType, Grouping, Membership, OptimizerSpec, Outcome, Role
from axon_ps.wire.events import FIRST_VALUES, Arrived, ModelPosition, Position, Vote
from axon_ps.wire.v1 import state_pb2
from axon_ps.worker.job_view import JobView
from axon_ps.worker.steps.client import StepClient
from axon_ps_lab.faults.bit_flips import is_changed
from axon_ps_lab.interleavings.collectives import SimulatedCollectives, group_of
from axon_ps_lab.interleavings.network import Network
from axon_ps_lab.interleavings.virtual_loop import VirtualLoop

JOB: Final = "simulated"
LAYOUT: Final = Layout(
    units=(
        build_unit("first", [("first.weight", (40,), DType.F32)]),
        build_unit("second", [("second.weight", (24,), DType.F32)]),
    )
)
SPEC: Final = JobSpec(layout=LAYOUT, options=PlanOptions(chunk_numel=8, min_slice_numel=8))
OPTIMIZER: Final = OptimizerSpec(name="sgd", groups=({"lr": 1.0},), group_of=(0, 0))
ROWS: Final = Grouping(rows=((0, 1), (2, 3)))
"""The replicas of a job whose workers push different units."""

COMPUTE_S: Final = 1.0
"""The most seconds that a worker computes for a step."""

SETTLED_S: Final = 45.0
"""Seconds after which a fault has no effect any more: silent links are found, members expire."""

TIMEOUT_S: Final = 300.0
"""Time-out of everything that a worker waits for, in seconds; longer than any fault lasts."""


class Violation(AssertionError):
    """An invariant does not hold."""


class Disk(MemoryStateStore):
    """The coordinator's disk.

    Attributes:
        batches: the batches that were written to it.
        fails: whether the next batch is lost with an error.
    """

    def __init__(self, batches: Sequence[Sequence[Record]] = ()) -> None:
        super().__init__()
        self.batches: list[Sequence[Record]] = []
        self.fails = False
        for batch in batches:
            self.apply(batch)

    def apply(self, records: Sequence[Record]) -> None:
        """See `StateStore`."""
        if self.fails:
            self.fails = False
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().apply(records)
        self.batches.append(records)


class DiskStore(MemoryStateStore):
    """A coordinator's store on its disk. Writes of a dead coordinator do not reach the disk."""

    def __init__(self, disk: Disk, alive: Callable[[], bool], written: Callable[[Any], None]) -> None:
        super().__init__()
        self._disk, self._alive, self._written = disk, alive, written

    def load(self) -> Any:
        """See `StateStore`."""
        return self._disk.load()

    def apply(self, records: Any) -> None:
        """See `StateStore`."""
        if self._alive():
            self._disk.apply(records)
            self._written(records)


class Truth:
    """The reports of all members, compared.

    Args:
        job: id of the coordinator's state; another job has another id.
        saved: returns the values that any job has had at a version.
        grouping: the workers that make a replica together.

    Attributes:
        values: the value of every element, by epoch and version.
    """

    def __init__(self, job: str, saved: Callable[[int], Collection[float]], grouping: Grouping) -> None:
        self.generations: dict[int, tuple[str, ...]] = {}
        self.decisions: dict[int, tuple[Any, ...]] = {}
        self.values: dict[tuple[int, int], float] = {(0, 0): 0.0}
        self._job, self._saved, self._grouping = job, saved, grouping
        self._epoch = 0
        self._epochs: dict[int, int] = {}  # by generation
        self._restored: set[int] = set()  # epochs of which the first values are known

    def written(self, values: Mapping[str, bytes]) -> None:
        """Note the parameters' epoch at the begin of each generation, from records that the coordinator has stored."""
        if value := values.get("parameters"):
            self._epoch = state_pb2.ParametersRecord.FromString(value).epoch
        if value := values.get("members"):
            self._epochs.setdefault(state_pb2.MembersRecord.FromString(value).membership.generation, self._epoch)

    def membership(self, m: Membership) -> None:
        """Check a generation that a member was told of."""
        who = tuple(f"{w.rank} {w.incarnation}" for w in m.workers)
        if self.generations.setdefault(m.generation, who) != who:
            raise Violation(f"generation {m.generation} is {who} and was {self.generations[m.generation]}")

    def decision(self, d: Decision) -> None:
        """Check a decision that a member was told of."""
        if d.reason.endswith("ended before the step was decided"):
            return  # a member's own conclusion
        decided = d.outcome, d.version, d.generation
        if self.decisions.setdefault(d.step, decided) != decided:
            raise Violation(f"step {d.step} was decided as {self.decisions[d.step]} and as {decided}")
        if d.outcome is Outcome.COMMIT:
            epoch = self._epochs.get(d.generation, 0)
            ranks = {int(w.split()[0]) for w in self.generations[d.generation]}
            if rows := self._grouping.rows:
                ranks = {number for number, row in enumerate(rows) if ranks.issuperset(row)}
            value = self.values[epoch, d.version - 1] - sum(gradient(r, d.version - 1) for r in ranks)
            if self.values.setdefault((epoch, d.version), value) != value:
                raise Violation(f"version {d.version} was committed twice, with other gradients")

    def gathered(self, epoch: int, version: int, out: Array, who: str, disk: Callable[[], Any]) -> None:
        """Check a version that a worker has gathered; a decision that no member was told of is read from `disk`."""
        if (epoch, version) not in self.values and epoch not in self._restored and epoch > 0:
            self._restored.add(epoch)
            if (value := float(out[0])) in self._saved(version):
                self.values[epoch, version] = value
        if (epoch, version) not in self.values and (durable := records.load(disk())) and durable.state_id == self._job:
            for decision in durable.models[0].decisions:
                self.decision(decision)
        if (epoch, version) not in self.values:
            raise Violation(f"{who} gathered version {version} of epoch {epoch}, of which nobody has heard")
        if not (out == self.values[epoch, version]).all():
            wanted = self.values[epoch, version]
            raise Violation(f"{who} gathered {sorted(set(out.tolist()))} as version {version}: {wanted}")


def gradient(rank: int, version: int) -> int:
    """Return the gradient of one replica, the same for every element."""
    return 1 + rank + version % 5


def addends(rank: int, version: int) -> list[int]:
    """Return the addends of a replica's gradient: as many on every worker, and two of a replica differ."""
    others = list(range(7, 7 + version % 3))
    return [*others, gradient(rank, version) - sum(others)]


class SimulatedWorker:
    """A worker's life.

    Args:
        job: its job.
        name: name of the process.
    """

    def __init__(self, job: Job, name: str) -> None:
        self._job = job
        self._name = name
        self._changed = asyncio.Event()
        self._shards = ShardGroup(Security())
        self.client = CoordinatorClient(
            job.coordinator,
            job=JOB,
            role=Role.WORKER,
            node=name,
            security=Security(),
            incarnation=uuid.uuid4().hex,
            on_event=self._on_event,
            reconnect_timeout_s=TIMEOUT_S,
        )
        self._collective_client = CollectiveClient(Security(), self.client.context)
        self._shards.probe(self.client.connectivity, self.client.context)
        self._collective_client.probe(self.client.connectivity)
        self._collectives = SimulatedCollectives(self._collective_client, lambda: job.may_fail)
        self.view = JobView(lambda: self.client.incarnation, TIMEOUT_S)
        none: Any = None  # the loop of the threads that call the worker
        self.steps = StepClient(none, self.client, self._shards, self.view)

    def _on_event(self, event: Any) -> None:
        truth = self._job.truth(self.client.state_id)
        with self.view.changed:
            if isinstance(event, Membership):
                truth.membership(event)
                self._collective_client.set_members(event)
                self.view.update(event)
                me = self.view.member_in(event)
                self._shards.set_members(event, "" if me is None else me.id)
            elif isinstance(event, SessionLost) and event.final:
                self.view.failure = event.error
            elif isinstance(event, Decision):
                truth.decision(event)
                self._job.network.note(f"{self._name}: step {event.step} {event.outcome.value} {event.version}")
        self.steps.on_event(event)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    @property
    def is_finished(self) -> bool:
        """True if it has made all steps."""
        return self.steps.view.latest_version >= self._job.steps

    async def run(self) -> None:
        """Join, and train until the job's steps are over."""
        try:
            await self.client.start(TIMEOUT_S)
            await self._register()
            while not self.is_finished:
                await self._step()
        finally:
            await self.client.close(finished=self.is_finished)
            await self._shards.close()
            await self._collective_client.close()

    async def until(self, ready: Callable[[], Any], what: str) -> Any:
        """Return the value of `ready`, once it is not None."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                while (found := ready()) is None:
                    if self.view.failure is not None:
                        raise again(self.view.failure)
                    await self._changed.wait()
        except TimeoutError:
            raise Violation(f"{self._name} waited {TIMEOUT_S:g} s: {what}") from None
        return found

    async def _register(self) -> None:
        view = self.steps.view
        while True:
            reply = await self.client.register(self._job.spec, timeout_s=TIMEOUT_S)
            self.steps.registered(self._job.spec, reply, "")
            await self.client.register(optimizer=OPTIMIZER, timeout_s=TIMEOUT_S)
            if reply.initialized:
                return
            if reply.upload:
                for unit in self._units(self.client.rank):
                    zeros = np.zeros(LAYOUT.units[unit].numel, np.float32)
                    with contextlib.suppress(GenerationChanged):
                        await self.steps.parameters._upload(unit, zeros, view.epoch)

            def known(reply: Any = reply) -> bool | None:
                if view._state is not None and view._state.initialized:
                    return True
                return False if view.membership.generation > reply.generation else None

            if await self.until(known, "first values"):
                return

    def _units(self, rank: int) -> Sequence[int]:
        """Return the units of a worker: all, or with rows that of its place in its row."""
        row = self._job.spec.grouping.row_of(rank)
        return range(len(LAYOUT.units)) if not row else [row.index(rank)]

    def _in_replica(self) -> bool | None:
        """Return True if this worker makes the next step, or all are made, or it is not a member."""
        me = self.view.member_in(self.steps.view.membership)
        return True if self.is_finished or me is None or me.replica >= 0 else None

    async def _step(self) -> None:
        """Make an attempt at a step."""
        steps, view = self.steps, self.steps.view
        await asyncio.sleep(self._job.loop.rng.uniform(0.0, COMPUTE_S))
        await self.until(self._in_replica, "to be in a replica")  # as `ticket` does, which would block the loop
        if self.is_finished:
            return
        try:
            began = view.latest
            for unit, u in enumerate(LAYOUT.units):
                await self._gather(unit, np.full(u.numel, np.nan, np.float32))
            if self.is_finished or not self._in_replica():
                return
            ticket = steps.ticket(began)
        except (MemberLost, StepAborted):  # cut off: until it has joined again there are no steps
            if self.view.failure is not None:
                raise
            await self.until(lambda: self.view.member_in(view.membership), "to be a member again")
            return
        rows = self._job.spec.grouping.rows
        replica = next((n for n, row in enumerate(rows) if view.me.rank in row), view.me.rank)
        units, pushes = self._units(view.me.rank), []
        for number, addend in enumerate(addends(replica, began[1])):
            if number:
                ticket = ticket.next_addend()
                await asyncio.sleep(self._job.loop.rng.uniform(0.0, COMPUTE_S / 10))
            for unit in units:
                grad = np.full(LAYOUT.units[unit].numel, addend, np.float32)
                pushes.append(asyncio.create_task(self._push(unit, grad, ticket)))
        collective = asyncio.create_task(self._collective(view.membership, ticket.step))
        try:
            why = await self._pushed(ticket, pushes, collective)
        finally:
            for task in (*pushes, collective):
                task.cancel()
        generation = 0
        if view.valid(ticket) and view.membership.complete:
            if why is None:
                others = tuple(unit for unit in range(len(LAYOUT.units)) if unit not in units)
                self.client.vote(
                    Vote(
                        generation=ticket.generation,
                        step=ticket.step,
                        version=view.version,
                        untouched=others,
                        last_addend=ticket.addend,
                    )
                )
            over = lambda: view.stepping.decision_on(ticket) or (None if view.valid(ticket) else True)  # noqa: E731
            found = await self.until(over, f"the decision on step {ticket.step}")
            generation = found.next_generation if isinstance(found, Decision) else 0
        if view.latest_version >= self._job.steps:
            return  # the others may have left already
        await self.until(
            lambda: True if view.membership.generation >= generation and view.membership.complete else None,
            "members that can make a step",
        )

    async def _pushed(
        self, ticket: Any, pushes: Sequence[asyncio.Task[None]], collective: asyncio.Task[None]
    ) -> str | None:
        """Wait for the pushes, and for the step's collective unless the step is over; return a push's error."""
        left = {*pushes, collective}
        while left:
            _, left = await asyncio.wait(left, timeout=1.0)
            if self.view.failure is None and self.steps.view.valid(ticket):
                if left:
                    at = Arrived(generation=ticket.generation, step=ticket.step, addend=ticket.addend)
                    self.client.arrived(at)
            elif collective.cancel():
                left.discard(collective)
        if collective.done() and not collective.cancelled():
            collective.result()
        for push in pushes:
            try:
                push.result()
            except (GenerationChanged, StepAborted) as error:
                return str(error)
        return None

    async def _collective(self, membership: Membership, step: int) -> None:
        me = self.view.member_in(membership)
        if not self._job.collectives or me is None or len(membership.workers) == 1:
            return
        if wrong := await self._collectives.perform(group_of(membership, me.id), step):
            raise Violation(f"{self._name}, step {step}: {wrong}")

    async def _gathered(self, unit: int, out: Array, version: int, epoch: int, span: Any) -> Any:
        context = self.steps._calls.context
        return await self._shards.gather(
            unit, out, min_version=version, epoch=epoch, context=context, timeout_s=TIMEOUT_S, span=span
        )

    async def _gather(self, unit: int, out: Array) -> None:
        steps, view = self.steps, self.steps.view
        while True:
            epoch, version = view.latest
            running = asyncio.create_task(
                steps._calls.run(
                    partial(self._gathered, unit, out, version, epoch),
                    steps.trace.call("gather", unit),
                    epoch=epoch,
                    retried=True,
                )
            )
            try:
                got = await running
            except asyncio.CancelledError:
                running.cancel()
                if asyncio.current_task().cancelling():  # type: ignore[union-attr]
                    raise
                continue  # the parameters are of another epoch
            self._job.truth(self.client.state_id).gathered(epoch, got, out, self._name, self._job.disk.load)
            return

    async def _push(self, unit: int, grad: Array, ticket: Any) -> None:
        """Push as `Gradients.push` does."""
        await self.steps.gradients._push(
            unit, grad, ticket, lambda: None, 0, None, self.steps.trace.call("push", unit, absent=False)
        )


class Job:
    """The processes of a job, which are started again when they die.

    Args:
        loop: the simulation's loop.
        network: its network.
        workers: number of workers.
        shards: number of shard servers.
        steps: versions to be committed.
        queue_bytes: bytes that a shard server has for queued gradients.
        collectives: whether workers perform collectives.
        directory: directory for checkpoints; empty = none are written.
        min_workers: the fewest workers to continue with; None = all.
        grouping: the workers that make a replica together.

    Attributes:
        spec: layout of the model.
        disk: the coordinator's disk.
        names: names of the present processes, by role ("worker-0").
        tasks: their tasks, by role.
    """

    def __init__(
        self,
        loop: VirtualLoop,
        network: Network,
        *,
        workers: int,
        shards: int,
        steps: int,
        queue_bytes: int,
        collectives: bool,
        directory: str = "",
        min_workers: int | None = None,
        grouping: Grouping = EACH_WORKER,
    ) -> None:
        self.spec = dataclasses.replace(SPEC, grouping=grouping)
        self.loop, self.network, self.steps, self.collectives = loop, network, steps, collectives
        self.coordinator = f"coordinator{SUFFIX}:{PORT}"
        self.names: dict[str, str] = {}
        self.tasks: dict[str, asyncio.Task[Any]] = {}
        self.workers: dict[str, SimulatedWorker] = {}
        self.directory = directory
        self._queue_bytes = queue_bytes
        self._config = CoordinatorConfig(
            job=JOB,
            world_size=workers,
            num_shards=shards,
            min_workers=min_workers,
            in_worker=True,
            checkpoints=CheckpointPolicy(directory=directory, every_steps=bool(directory), limit=2),
        )
        self.disk = Disk()
        self._truths: dict[str, Truth] = {}
        self._stored = ""  # id of the state that is on the disk
        self._lives = itertools.count(1)
        self._lost_disk = 0  # earlier lives are of the former job
        self._roles = ["coordinator", *(f"shard-{i}" for i in range(shards)), *(f"worker-{i}" for i in range(workers))]

    @property
    def ends(self) -> bool:
        """True if a worker has ended: it has made all steps, or has failed and is not started again yet."""
        return any(self.tasks[r].done() for r in self.names if r.startswith("worker"))

    @property
    def is_trained(self) -> bool:
        """True if a worker has made all steps: it ends, and takes no part in a job that begins anew."""
        return any(worker.is_finished for worker in self.workers.values())

    @property
    def roles(self) -> list[str]:
        """The roles of all processes."""
        return list(self._roles)

    @property
    def may_fail(self) -> bool:
        """True if a collective may fail: something has happened lately, or the job ends."""
        return self.ends or self.loop.time() < self.network.struck_s + SETTLED_S

    def truth(self, job: str) -> Truth:
        """Return the truth of the job whose state has this id."""
        if job not in self._truths:
            self._truths[job] = Truth(job, self._values, self.spec.grouping)
        return self._truths[job]

    def _values(self, version: int) -> set[float]:
        found = {value for truth in self._truths.values() for (_, v), value in truth.values.items() if v == version}
        return found | ({0.0} if version == 0 else set())

    def _written(self, written: Sequence[Record]) -> None:
        values = {record.key: record.value for record in written if record.value}
        if value := values.get("job"):
            self._stored = state_pb2.JobRecord.FromString(value).state_id
        self.truth(self._stored).written(values)

    @property
    def committed(self) -> int:
        """The latest version that a member was told of."""
        return max((version for truth in self._truths.values() for _, version in truth.values), default=0)

    @property
    def is_stuck(self) -> bool:
        """True if some parameters were lost before there was a checkpoint: the job has to be started anew."""
        if not self.directory or (durable := records.load(self.disk.load())) is None:
            return False
        return "restore a checkpoint" in durable.membership.waiting_for and retention.newest(self.directory) is None

    @property
    def begins_again(self) -> bool:
        """True if it has lost everything, and waits for first values: a worker has to be started again."""
        if not self.directory or (durable := records.load(self.disk.load())) is None:
            return False
        parameters = durable.models[0].parameters
        uploads = parameters.uploader and any(
            w.client.incarnation == parameters.uploader for w in self.workers.values()
        )
        return parameters.restore is not None and parameters.restore.uri == FIRST_VALUES and not uploads

    def lose_disk(self) -> None:
        """Lose all that the coordinator has written; it must not run."""
        self.disk = Disk()
        self._lost_disk = next(self._lives)

    def older_disk(self, lost: int) -> bool:
        """Lose the last `lost` batches that the coordinator has written; it must not run.

        Nothing is lost, and the result is False, if no present shard server knows all of them, or if no member would
        be left.
        """
        known = self._known()
        older = Disk(self.disk.batches[: max(0, len(self.disk.batches) - lost)])
        durable = records.load(older.load())
        if durable is None or not (durable.membership.workers or durable.membership.shards):
            return False
        if not any(behind(position, self._stored_position) == "" for position in known):
            return False
        self.disk = older
        return True

    @property
    def is_older(self) -> bool:
        """True if a shard server knows something that is not on the disk."""
        return any(behind(self._stored_position, position) for position in self._known())

    @property
    def _stored_position(self) -> Position:
        durable = records.load(self.disk.load())
        if durable is None:
            return Position()
        model = durable.models[0]
        placement = model.parameters.placement
        return Position(
            generation=durable.membership.generation,
            models=(
                ModelPosition(
                    model=0,
                    epoch=model.parameters.epoch,
                    initialized=model.parameters.initialized,
                    optimized=model.optimizer is not None,
                    step=model.step,
                    version=model.version,
                    placement=0 if placement is None else placement.number,
                ),
            ),
            snapshot_id=durable.snapshot_id,
        )

    def _known(self) -> list[Position]:
        """Return the newest position that each present shard server knows, if it is of the job on the disk."""
        shells = [self.network.shells.get(name) for role, name in self.names.items() if role.startswith("shard")]
        clients: list[Any] = [shell.reports for shell in shells if shell is not None and shell.reports is not None]
        return [client._delivery.position for client in clients if client.state_id == self._stored]

    def may_end(self, name: str, error: BaseException) -> bool:
        """Return True if a process may end with this error; it is started again."""
        if name.startswith("coordinator"):
            return os.strerror(errno.EIO) in str(error)
        if not isinstance(error, MemberLost):
            return False
        return "without the state it had" not in str(error) or int(name.partition("#")[2]) < self._lost_disk

    def start(self, role: str) -> None:
        """Begin a life of a process."""
        name = f"{role}#{next(self._lives)}"
        self.names[role] = name
        self.network.note(f"{name} starts")
        self.tasks[role] = self.loop.start(name, self._life(role, name))

    def kill(self, role: str) -> None:
        """End a process at once."""
        name = self.names.pop(role)
        self.network.note(f"{name} is killed")
        self.loop.kill(name)
        self.network.died(name)
        self.workers.pop(role, None)

    @property
    def is_safe(self) -> bool:
        """True if a shard server may be lost: all are present, and hold two full copies of everything.

        Before the job has first values there is nothing to lose: a worker uploads them again.
        """
        shards = [r for r in self._roles if r.startswith("shard")]
        if any(r not in self.names or self.tasks[r].done() for r in (*shards, "coordinator")):
            return False
        if (durable := records.load(self.disk.load())) is None:
            return True
        present = {id for role in shards for id in self.network.ids.get(self.names[role], ())}
        members = durable.membership.shards
        if len(members) != len(shards) or not all(m.incarnation in present for m in members):
            return False
        if self.is_changed:
            return False
        if not (durable.models[0].version or durable.models[0].parameters.initialized):
            return True
        placement = durable.models[0].parameters.placement
        return placement is not None and all(len(h.complete) > 1 and not h.copying for h in placement.holders)

    @property
    def is_changed(self) -> bool:
        """True if memory of a shard server holds something else than was written to it."""
        held = (owned for role in self._roles if role.startswith("shard") for owned in self.slices_of(role))
        return any(is_changed(owned) for owned in held if not owned.copying)

    def slices_of(self, role: str) -> list[OwnedSlice]:
        """Return the slices that a shard server holds."""
        shell = self.network.shells.get(self.names.get(role, ""))
        return [] if shell is None or 0 not in shell._models else list(shell._models[0].engine.slices.values())

    async def _life(self, role: str, name: str) -> None:
        if role == "coordinator":
            store = DiskStore(self.disk, lambda: self.loop.lives(name), self._written)
            host, config = f"coordinator{SUFFIX}", self._config
            if self.directory and not self.disk.load() and (newest := retention.newest(self.directory)) is not None:
                config = dataclasses.replace(config, resume=newest.uri)
            await coordinator_server.serve(config, host, PORT, Security(), store, lambda port: None, asyncio.Event())
        elif role.startswith("shard"):
            host = f"{role}{SUFFIX}"
            shard_config = ShardConfig(
                coordinator=self.coordinator,
                job=JOB,
                host=host,
                port=PORT,
                node=host,
                threads=1,
                queue_bytes=self._queue_bytes,
                join_timeout_s=TIMEOUT_S,
            )
            await shard_server.serve(shard_config, lambda port: None, asyncio.Event())
        else:
            worker = self.workers[role] = SimulatedWorker(self, name)
            await worker.run()

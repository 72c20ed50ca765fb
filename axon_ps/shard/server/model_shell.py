"""Around the engine of one model: its waits and threads, and what it reports. Decides nothing.

Everything here runs on one event loop, apart from what the apply pool and the files' thread do. Events of the
coordinator's session that are about the model come in through `on_event`, streams through the coroutines that the
servicer calls. What all models of a server share is `shard.server.shell`'s.

Note: [In order]
    A decision that needs no report of this server first (replicas step asynchronously, or another model's values are
    copied) may come while an earlier one is applied. It waits for its turn, and everything about the model that comes
    after it waits behind it. What must find the model as it is between two events, a snapshot of it or a copy from it,
    is queued in the same order (`in_order`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from axon_ps.compress import cast
from axon_ps.coordinator.core.events import Event, JobState, RestoreOrder, SnapshotFile
from axon_ps.errors import AxonError, GenerationChanged, Misuse, StepAborted
from axon_ps.shard.core.engine import ShardEngine
from axon_ps.shard.core.gradients import Push
from axon_ps.shard.server import snapshot
from axon_ps.shard.server.apply import ApplyPool, Pin, VersionPins
from axon_ps.shard.server.model_values import ModelValues
from axon_ps.shard.server.reports import ServerShell
from axon_ps.shard.server.waiters import Waiters
from axon_ps.sharding.job import JobSpec
from axon_ps.types import Array, Decision, DType, Hyper, Member, Membership


def warm_up(spec: JobSpec) -> None:
    """Compile what a server needs for a layout. Any thread but the loop's: it may take seconds."""
    precision = spec.precision
    for dtype in (precision.param, precision.grad):
        cast.warm_up(dtype)
    for compression in (precision.param_compression, precision.grad_compression):
        if compression is not None:
            compression.warm_up()


@dataclass(frozen=True)
class Copying:
    """A decision to copy the values of `source`; `pinned` gives the pin that keeps them unchanged until it is done."""

    decision: Decision
    source: ModelShell
    pinned: asyncio.Future[Pin]


class ModelShell:
    """One model's engine with what it needs to run.

    Args:
        number: of the model.
        server: whose it is.
        threads: for applying; None = one per core this process may use.

    Attributes:
        engine: the state.
        values: where its values come from.
        pins: versions that snapshots and copies still read.
        members: the workers by incarnation, each with the replica that it contributes to here.
        name: its name in the job; empty until that is known.
    """

    def __init__(self, number: int, server: ServerShell, threads: int | None = None) -> None:
        self.number = number
        self.name = ""
        self.engine = ShardEngine()
        self._server = server
        self._membership: Membership | None = None
        self.members: dict[str, Member] = {}
        self._waiters = Waiters()
        self.pins = VersionPins()
        self._pool = ApplyPool(self.engine, self.pins, threads, self._finished, server.fail)
        self._applying = 0
        self._readers = 0  # copies from here that are under way
        self._copy: tuple[ModelShell, Pin] | None = None  # what is copied to here
        self._idle = asyncio.Event()
        self._idle.set()
        self.values = ModelValues(number, self.engine, server, self._waiters, self._idle)
        self._pushing: set[asyncio.Task[Any]] = set()
        self._reported: dict[int, tuple[int, int]] = {}  # per attempt, the newest (generation, step)
        self._events: deque[Event | Copying | Callable[[], None]] = deque()
        self._released = False

    def stop(self) -> None:
        """End all waits for a unit; an unfinished snapshot or copy fails."""
        self.pins.close()

    async def close(self) -> None:
        """End the threads, after `stop`."""
        await asyncio.to_thread(self._pool.close)

    async def release(self) -> None:
        """The job has the model no more: end what is under way, and give its memory back."""
        self._released = True
        for task in self._pushing:
            task.cancel()
        self._waiters.wake_all()
        await self._idle.wait()
        self.stop()
        await self.close()
        self.engine.release()

    # ------------------------------------------------------------------ events from the coordinator

    def on_event(self, event: Event | Copying) -> None:
        """Take one event of the session, in order, on the loop's thread. See Note: [In order].

        Where replicas step asynchronously at most as many decisions wait as there are replicas, since each needs our
        report on its next attempt; a copy needs every worker's vote.
        """
        if self._applying and (self.engine.gradients.asynchronous or self._events or isinstance(event, Copying)):
            self._events.append(event)
        else:
            self._take(event)

    def in_order(self, call: Callable[[], None]) -> None:
        """Call something when everything that came before it has been taken."""
        if self._events:
            self._events.append(call)
        else:
            call()

    def pin_for_copy(self, version: int) -> Pin:
        """Keep each unit at `version`, once it is there, until a copy is done and calls `unpin_copy`."""
        self._readers += 1
        self._idle.clear()
        return self.pins.pin(version, expires=False)

    def unpin_copy(self, pin: Pin) -> None:
        """A copy is done."""
        self.pins.release(pin)
        self._readers -= 1
        self._update_idle()

    def _update_idle(self) -> None:
        if not self._applying and not self._readers:
            self._idle.set()

    def _take(self, event: Event | Copying) -> None:
        try:
            if isinstance(event, Membership):
                self._on_membership(event)
            elif isinstance(event, JobState):
                self._on_job(event)
            elif isinstance(event, Decision):
                self._on_decision(event)
            elif isinstance(event, Copying):
                self._on_copying(event)
            elif isinstance(event, RestoreOrder):
                self.values.begin(event)
        except AxonError as error:
            self._server.fail(error)

    def _on_membership(self, membership: Membership) -> None:
        spec = self.engine.spec
        numbered = membership if spec is None else membership.numbered(spec.replica_is_node)
        self._membership = membership
        self.members = {m.incarnation: m for m in numbered.workers}
        if membership.generation > self.engine.generation:
            step, version = membership.progress(self.number)
            self.engine.membership(membership.generation, step, version, numbered.num_replicas)
            for task in self._pushing:
                task.cancel()
        self._wake_all()
        self._report_ready()

    def _on_job(self, job: JobState) -> None:
        reports = self._server.reports
        assert reports is not None
        self.name = job.name or self.name
        self.values.epoch = max(self.values.epoch, job.epoch)
        if job.spec is not None and not self.engine.configured:
            self.engine.configure(job.spec, reports.rank, reports.num_shards)
            self._renumber(job.spec.replica_is_node)
            self._server.start(self._warm_up(partial(warm_up, job.spec)))
            # nothing is owned here, and no restore is on its way
            if self.engine.parameters.initialized and self.values.epoch == 0:
                reports.initialized(version=job.version, epoch=0, model=self.number)
        if job.optimizer is not None and self.engine.updater is None:
            updater = self.engine.set_optimizer(job.optimizer)
            self._server.start(self._warm_up(partial(updater.warm_up, self.engine.precision.param)))
        self._wake_all()

    def _renumber(self, by_node: bool) -> None:
        """The layout defines what a replica is, which may differ from what the membership took it to be."""
        if self._membership is not None and self._membership.by_node != by_node:
            numbered = self._membership.numbered(by_node)
            self.members = {m.incarnation: m for m in numbered.workers}
            self.engine.set_replicas(numbered.num_replicas)

    def _on_decision(self, decision: Decision) -> None:
        if units := self.engine.decide(decision):
            self._begin(units)
            self._pool.start(units)
        self._waiters.wake_all()

    def _on_copying(self, copying: Copying) -> None:
        units = self.engine.decide(copying.decision)
        self._begin(units)
        self._server.start(self._copy_from(copying, units))
        self._waiters.wake_all()

    def _begin(self, units: tuple[int, ...]) -> None:
        self._applying = len(units)
        if units:
            self._idle.clear()

    async def _copy_from(self, copying: Copying, units: tuple[int, ...]) -> None:
        """Copy all chunks, each unit once the other model is at the version wanted."""
        source, how = copying.source, copying.decision.copy
        assert how is not None
        weight, version, slices = how.weight, how.version, source.engine.slices
        pin = await copying.pinned
        if not units:
            source.unpin_copy(pin)
            return

        def copy(unit: int, first: int, last: int, scratch: Array) -> None:
            if source.pins.wait_until(lambda: slices[unit].reached >= version):
                self.engine.slices[unit].copy(first, last, slices[unit], weight, scratch)

        self._copy = source, pin
        self._pool.start(units, copy)

    def _finished(self, unit: int) -> None:
        self.engine.slices[unit].finish()
        self.pins.notify()
        self._waiters.wake_unit(unit)
        self._applying -= 1
        if self._applying == 0:
            if self._copy is not None:
                (source, pin), self._copy = self._copy, None
                source.unpin_copy(pin)
            self._report_ready()
            while self._events and not self._applying:
                event = self._events.popleft()
                if callable(event):
                    event()
                else:
                    self._take(event)
            self._update_idle()

    def _report_ready(self) -> None:
        engine = self.engine
        for replica, step in engine.gradients.complete():
            name = (engine.generation, step)
            if self._reported.get(replica) == name or (total := engine.gradients.ready(replica)) is None:
                continue
            reports = self._server.reports
            assert reports is not None
            self._reported[replica] = name
            reports.ready(
                generation=engine.generation,
                step=step,
                sum_of_squares=total,
                replica=replica if engine.gradients.asynchronous else None,
                model=self.number,
            )

    async def _warm_up(self, *compiles: Callable[[], None]) -> None:
        """Compile kernels before the first gradient needs them."""
        for compile_it in compiles:
            await self._server.in_files_thread(compile_it)

    def _wake_all(self) -> None:
        self._waiters.wake_all()
        self._server.wake()

    # ------------------------------------------------------------------ checkpoints

    def write(self, uri: str, version: int, pin: Pin) -> SnapshotFile:
        """Write our slices of a checkpoint, in the files' thread; see `snapshot.write`."""
        reports = self._server.reports
        assert reports is not None
        try:
            entry = snapshot.write(self.engine, uri, version, reports.rank, reports.num_shards, self.pins, pin)
        finally:
            self.pins.release(pin)
        return SnapshotFile(name=entry.name, sha256=entry.sha256, bytes=entry.bytes, model=self.number)

    async def wait_withdrawn(self, epoch: int, generation: int) -> None:
        """Before first values are stored: wait until those that they replace, if any, are withdrawn.

        The worker that brings them may have received the order before this server.

        Args:
            epoch: how often the model had been restored when they were sent.
            generation: the worker's.

        Raises:
            GenerationChanged: while it waited.
        """
        while self.values.waits_for(epoch):
            await self._waiters.wait()
            self.check_generation(generation)

    # ------------------------------------------------------------------ streams

    def check_generation(self, generation: int) -> None:
        """Refuse a generation that is over, and calls for a model that was released.

        Raises:
            GenerationChanged: it is.
            Misuse: the model was released.
        """
        if self._released:
            raise Misuse(f"model {self.name!r} was released: its parameters are on the shard servers no more")
        if generation != self.engine.generation:
            raise GenerationChanged(
                f"generation {generation} is over; the current one is {self.engine.generation}", self.engine.generation
            )

    @asynccontextmanager
    async def pushing(self, generation: int) -> AsyncIterator[None]:
        """A stream of gradients is under way in the calling task: it ends when the generation does.

        Raises:
            GenerationChanged: it did.
            Misuse: the model was released.
        """
        task = asyncio.current_task()
        assert task is not None
        self._pushing.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if self.engine.generation == generation and not self._released:
                raise
            task.uncancel()
            self.check_generation(generation)
        finally:
            self._pushing.discard(task)

    async def push(self, step: int, unit: int, offset: int, replica: int, dtype: DType, grad: Array | None) -> bool:
        """Add a gradient chunk when its turn comes; False for a duplicate. See `Gradients.push`."""
        gradients = self.engine.gradients
        while (done := gradients.push(step, unit, offset, replica, dtype, grad)) is Push.WAIT:
            await self._waiters.wait(unit, offset, replica)
        if done is Push.DUPLICATE:
            return False
        self._waiters.wake_turn(unit, offset, replica + 1)
        if gradients.is_last(replica):
            self._report_ready()
        return True

    async def push_absent(self, step: int, unit: int, offset: int, numel: int, replica: int) -> int:
        """Record that a replica has no gradient for elements [offset, offset + numel); returns how many were new."""
        chunks = self.engine.slices.of(unit).chunks
        first, last = chunks.range_of(offset, offset + numel)
        dtype = self.engine.gradients.dtype
        return sum([await self.push(step, unit, begin, replica, dtype, None) for begin, _ in chunks.bounds[first:last]])

    async def available(self, unit: int, epoch: int, min_version: int, generation: int) -> None:
        """Wait until the unit can be served at `min_version` of `epoch` or later.

        Versions grow within an epoch only. The caller may know of a restore before this server does, or after it.

        Raises:
            GenerationChanged: while it waited.
            StepAborted: the parameters are of a later epoch.
        """
        while True:
            if epoch < self.values.served:
                raise StepAborted(
                    f"the model was restored: the parameters are of epoch {self.values.served}, no longer {epoch}"
                )
            if epoch == self.values.served and self.engine.parameters.available(unit, min_version):
                return
            await self._waiters.wait(unit)
            self.check_generation(generation)

    async def prepared(self, step: int, unit: int, index: int, hypers: tuple[Hyper, ...], generation: int) -> bytes:
        """The speculative frame of one chunk, once it can be made. See `ShardEngine.prepare_chunk`.

        Raises:
            GenerationChanged: while it waited.
        """
        engine = self.engine
        scratch = engine.scratch()
        while (frame := engine.prepare_chunk(step, unit, index, hypers, scratch)) is None:
            await self._waiters.wait(
                unit, engine.slices.of(unit).chunks.bounds[index][0], engine.gradients.num_replicas
            )
            self.check_generation(generation)
        return frame

    async def unchanging(self, unit: int, generation: int) -> None:
        """Wait until the unit has values and no step is being applied to it; frames may be served before.

        Raises:
            GenerationChanged: while it waited.
        """
        while self.engine.slices[unit].applying or not self.engine.parameters.available(unit, 0):
            await self._waiters.wait(unit)
            self.check_generation(generation)

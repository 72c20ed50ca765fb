"""The shell around the engine of one model: its waits, threads and reports. All decisions are the engine's.

Everything here runs on one event loop, except for work in threads. Events of the coordinator's session about the model
come in through `on_event`, streams through the coroutines that the servicer calls. State that all models of a server
share is in `shard.server.shell`.

Note: [In order]
    A decision may arrive while an earlier one is applied if it needs no report of this server first: replicas step
    asynchronously, or another model's values are copied. It is queued, and all later events about the model are queued
    behind it. Calls that need the model in its state between two events, a snapshot of it or a copy from it, are queued
    in the same order (`EventOrder.call`).

Note: [Long work]
    Work that takes long, because a slice may have GiBs, runs in a thread (`ServerShell.off_loop`), so that the event
    loop can send heartbeats and serve other calls. It is: allocating slices, hashing and encoding values, filling
    memory that workers map. Meanwhile events about the model are queued behind that work, in order
    (`EventOrder.begin_work`): no step begins, no restore begins, and no slice is added or removed. Streams go on. They
    change only sums, and values that are not served yet.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial

from axon_ps.compress import cast
from axon_ps.errors import AxonError, GenerationChanged, Misuse
from axon_ps.host.priority import Throttle
from axon_ps.kernels import digest
from axon_ps.observe.work import LongWork
from axon_ps.shard.core import queued
from axon_ps.shard.core.engine import ShardEngine
from axon_ps.shard.core.slices import OwnedSlice
from axon_ps.shard.server import snapshot
from axon_ps.shard.server.apply import ApplyPool, ApplyTrace, Pin, VersionPins
from axon_ps.shard.server.calls.gradients import GradientCalls
from axon_ps.shard.server.calls.reads import Reads
from axon_ps.shard.server.copying import Copying
from axon_ps.shard.server.corruption import Corruptions
from axon_ps.shard.server.forwarding import BackupStreams
from axon_ps.shard.server.model_capacity import ModelCapacity, OutOfMemory, free_slices
from axon_ps.shard.server.model_values import ModelValues
from axon_ps.shard.server.reports import Reports, ServerShell
from axon_ps.shard.server.subscriptions import SubscriberLimits, Subscriptions
from axon_ps.shard.server.waiters import EventOrder, Waiters
from axon_ps.sharding.job import JobSpec
from axon_ps.types import Array, Decision, DType, Grouping, Member, Membership
from axon_ps.wire.events import Event, JobState, Ready, RestoreOrder, SnapshotFile

_logger = logging.getLogger(__name__)


def warm_up(spec: JobSpec) -> None:
    """Compile a server's loops for a layout, outside of the event loop's thread: it may take seconds."""
    precision = spec.precision
    for dtype in (precision.param, precision.grad):
        cast.warm_up(dtype)
    digest.warm_up()
    queued.warm_up(precision.grad if precision.grad_compression is None else DType.U8)
    for compression in (precision.param_compression, precision.grad_compression):
        if compression is not None:
            compression.warm_up()


@dataclass(frozen=True)
class Averaging:
    """A decision to copy the values of `source`. `pinned` gives the pin that keeps them unchanged meanwhile."""

    decision: Decision
    source: ModelShell
    pinned: asyncio.Future[Pin]


class ModelShell:
    """One model's engine, with its waits, threads and streams.

    Args:
        number: number of the model.
        server: the server that it belongs to.
        threads: threads for applying; None = one per core this process may use.
        limits: limits of subscribers; None = the default.

    Attributes:
        engine: the state of the model.
        subscriptions: to this model.
        values: the sources of its values.
        corruptions: the handling of corrupt memory.
        gradients: the calls that bring gradients.
        reads: the calls that read values.
        pins: versions that snapshots and copies still read.
        members: the workers by incarnation, each with the replica that it contributes to here.
        name: its name in the job; empty until it is known.
        capacity: its memory on this server.
        order: the queue of events about it.
    """

    def __init__(
        self,
        number: int,
        server: ServerShell,
        threads: int | None = None,
        limits: SubscriberLimits | None = None,
    ) -> None:
        self.number = number
        self.name = ""
        self.engine = ShardEngine(server.queue)
        self._server = server
        self.capacity = ModelCapacity(server, self.engine, number)
        self._membership: Membership | None = None
        self.members: dict[str, Member] = {}
        self._waiters = Waiters()
        self.pins = VersionPins()
        self._pool = ApplyPool(self.engine, self.pins, threads, self._finished, server.fail)
        self._applying = 0
        self._apply_trace = ApplyTrace(server.tracer, self.engine)
        self._copy: tuple[ModelShell, Pin] | None = None  # the copy under way to this model
        self.order: EventOrder[Event | Averaging] = EventOrder(self._take, self._must_wait)
        self.subscriptions = Subscriptions(self, limits or SubscriberLimits())
        self.values = ModelValues(number, self.engine, server, self._waiters, self.order, self.subscriptions.wake)
        self.corruptions = Corruptions(number, self.engine, server, lambda: self.values.served, self._wake_all)
        self._forwarding: BackupStreams | None = None
        self._copying: Copying | None = None
        self.gradients = GradientCalls(
            self.engine, self._waiters, self.corruptions.report, self.check_generation, self._summed, self._report_ready
        )
        self.reads = Reads(self, server, self._waiters)
        self._reported: dict[int, tuple[int, int, int]] = {}  # per attempt, the newest (generation, step, addend)
        self._released = False

    def stop(self) -> None:
        """End all waits for a slice, and the streams to other servers. An unfinished snapshot or copy fails."""
        self.pins.close()
        if self._forwarding is not None and self._copying is not None:
            self._forwarding.close()
            self._copying.close()

    async def close(self) -> None:
        """End the threads, after `stop`."""
        self.subscriptions.close()
        await asyncio.to_thread(self._pool.close)

    async def release(self) -> None:
        """End everything under way and free the memory, after the job has released the model."""
        self._released = True
        self.gradients.end()
        self._waiters.wake_all()
        self.subscriptions.wake()
        await self.order.idle.wait()
        self.stop()
        await self.close()
        await self._server.off_loop(partial(free_slices, self.engine.release()))

    # ------------------------------------------------------------------ events from the coordinator

    def on_event(self, event: Event | Averaging) -> None:
        """Take one event of the session, in order, on the loop's thread. See Note: [In order].

        If replicas step asynchronously, at most as many decisions are queued as there are replicas, since each
        replica's next one needs this server's report. A copy is decided only with every worker's vote.
        """
        self.order.on_event(event)

    def _must_wait(self, event: Event | Averaging) -> bool:
        """Return True if an event must be queued behind the step that is being applied."""
        return bool(self._applying) and (self.engine.gradients.asynchronous or isinstance(event, Averaging))

    @property
    def published(self) -> tuple[int, int] | None:
        """Epoch and version of the values here, while no step changes them and nothing replaces them; else None."""
        if self._applying or self._released or not self.engine.parameters.serving:
            return None
        return self.values.served, self.engine.version

    def pin_for_copy(self, version: int) -> Pin:
        """Keep each unit at `version`, once it has reached it, until `unpin_copy` is called."""
        self.order.begin()
        return self.pins.pin(version, expires=False)

    def unpin_copy(self, pin: Pin) -> None:
        """Release the pin of a copy that is done."""
        self.pins.release(pin)
        self.order.end()

    def _take(self, event: Event | Averaging) -> None:
        try:
            if isinstance(event, Membership):
                self._on_membership(event)
            elif isinstance(event, JobState):
                self._on_job(event)
            elif isinstance(event, Decision):
                self._on_decision(event)
            elif isinstance(event, Averaging):
                self._on_averaging(event)
            elif isinstance(event, RestoreOrder):
                self.values.begin(event)
        except AxonError as error:
            self._server.fail(error)

    def _on_membership(self, membership: Membership) -> None:
        spec = self.engine.spec
        numbered = membership if spec is None else membership.numbered(spec.grouping)
        self._membership = membership
        self.members = {m.incarnation: m for m in numbered.workers}
        if membership.generation > self.engine.generation:
            step, version = membership.progress(self.number)
            self.engine.membership(membership.generation, step, version, numbered.num_replicas)
            self.gradients.end()
            if self._forwarding is not None and self._copying is not None:
                self._forwarding.restart()
                self._copying.restart()
        self._wake_all()
        self._report_ready()

    def _on_job(self, job: JobState) -> None:
        self.name = job.name or self.name
        self.values.epoch = max(self.values.epoch, job.epoch)
        engine = self.engine
        new_optimizer = job.optimizer is not None and engine.optimizer.updater is None
        if (job.spec is not None and not engine.configured) or (
            engine.configured and (new_optimizer or job.placement not in (None, engine.placement))
        ):
            self._server.start(self._make(job, self.order.begin_work()))
        self._wake_all()

    async def _make(self, job: JobState, exclusive: AbstractAsyncContextManager[None]) -> None:
        """Make the slices and optimizer state that the job requires, which may take long."""
        try:
            async with exclusive:
                await self._make_slices(job)
        except OutOfMemory:
            pass
        except AxonError as error:
            self._server.fail(error)
        self._wake_all()

    async def _make_slices(self, job: JobState) -> None:
        reports = self._reports
        if job.spec is not None and not self.engine.configured:
            assert job.placement is not None
            await self._server.off_loop(partial(warm_up, job.spec))
            await self.capacity.configure(self.name, job.spec, job.optimizer, job.placement)
            self.values.served = job.epoch  # copies are of this epoch; the order of a restore follows
            if (links := self._server.links) is not None:
                self._forwarding = BackupStreams(self.number, self.engine, links, self.corruptions.report)
                self.engine.gradients.on_addend = self._forwarding.revoke
                work, epoch = self._server.off_loop, lambda: self.values.served
                self._copying = Copying(self.number, self.engine, links, epoch, self._on_copied, reports, work)
            self._placed()
            self._renumber(job.spec.grouping)
            # no slice is owned here, and no restore will follow
            if self.engine.parameters.initialized and self.values.epoch == 0:
                reports.initialized(version=job.version, epoch=0, model=self.number)
        if job.optimizer is not None and self.engine.optimizer.updater is None and self.engine.configured:
            await self.capacity.set_optimizer(job.optimizer)
        if job.placement is not None and self.engine.configured and job.placement != self.engine.placement:
            removed = [owned for owned in await self.capacity.set_placement(job.placement) if not owned.applying]
            self._placed()
            await self._server.off_loop(partial(free_slices, removed))

    def _placed(self) -> None:
        """Apply a new placement: repeat reports, and begin and end streams to other servers."""
        self._reported.clear()
        if self._forwarding is not None and self._copying is not None:
            self._forwarding.on_placement()
            self._copying.on_placement()
        self._report_ready()

    def _on_copied(self, owned: OwnedSlice) -> None:
        """Use a slice that was copied from its primary."""
        self._waiters.wake_unit(owned.chunks.unit)
        self._report_ready()

    def _renumber(self, grouping: Grouping) -> None:
        """Number the replicas as the layout defines them, if the membership numbered them in another way."""
        if self._membership is not None and self._membership.grouping != grouping:
            numbered = self._membership.numbered(grouping)
            self.members = {m.incarnation: m for m in numbered.workers}
            self.engine.set_replicas(numbered.num_replicas)

    def _on_decision(self, decision: Decision) -> None:
        if self._forwarding is not None:
            self._forwarding.settled()
        if slices := self.engine.decide(decision):
            self._begin(slices, decision)
            self._pool.start(slices)
        else:
            self.subscriptions.wake()
        self._waiters.wake_all()

    def _on_averaging(self, copying: Averaging) -> None:
        owned = self.engine.decide(copying.decision)
        self._begin(owned, copying.decision)
        self._server.start(self._copy_from(copying, owned))
        self._waiters.wake_all()

    def _begin(self, slices: list[OwnedSlice], decision: Decision) -> None:
        self._applying = len(slices)
        if slices:
            self.order.begin()
            self._apply_trace.begin(decision, len(slices))

    async def _copy_from(self, copying: Averaging, targets: list[OwnedSlice]) -> None:
        """Copy all chunks, each slice once the other model has reached the version wanted."""
        source, how = copying.source, copying.decision.copy
        assert how is not None
        weight, version, slices = how.weight, how.version, source.engine.slices
        pin = await copying.pinned
        if not targets:
            source.unpin_copy(pin)
            return

        def copy(owned: OwnedSlice, first: int, last: int, scratch: Array) -> None:
            theirs = slices[owned.number]
            assert owned.change is not None
            if source.pins.wait_until(lambda: theirs.reached >= version):
                owned.change.copy(first, last, theirs, weight, scratch)

        self._copy = source, pin
        self._pool.start(targets, copy)

    def _finished(self, owned: OwnedSlice) -> None:
        owned.finish()
        self.corruptions.report(owned)
        if self.engine.slices.get(owned.number) is not owned:  # it was removed meanwhile
            self._server.start(self._server.off_loop(partial(free_slices, [owned])))
        self.pins.notify()
        self._waiters.wake_unit(owned.chunks.unit)
        self._applying -= 1
        self._apply_trace.applied(owned, is_last=self._applying == 0)
        if self._applying == 0:
            self.corruptions.look_at_unchanged()
            self.subscriptions.wake()
            if self._copy is not None:
                (source, pin), self._copy = self._copy, None
                source.unpin_copy(pin)
            self._report_ready()
            self.order.end()

    def _summed(self, owned: OwnedSlice, index: int, accumulator: int) -> None:
        if self._forwarding is not None:
            self._forwarding.completed(owned, index, accumulator)
        self._report_ready()

    def _report_ready(self) -> None:
        engine = self.engine
        for replica, step in engine.gradients.complete():
            name = (engine.generation, step, engine.gradients.attempts[replica].addend)
            if self._reported.get(replica) == name or (sums := engine.gradients.ready(replica)) is None:
                continue
            self._reported[replica] = name
            of = replica if engine.gradients.asynchronous else None
            self._reports.ready(_ready(self, step, sums, of or 0), of)

    @property
    def _reports(self) -> Reports:
        assert self._server.reports is not None
        return self._server.reports

    def _wake_all(self) -> None:
        self._waiters.wake_all()
        self.subscriptions.wake()
        self._server.wake()

    # ------------------------------------------------------------------ checkpoints

    def write(self, uri: str, version: int, pin: Pin, throttle: Throttle, work: LongWork) -> SnapshotFile:
        """Write this server's slices of a checkpoint, in the files' thread; see `snapshot.write`."""
        try:
            num_cuts = 1 if self.engine.placement is None else self.engine.placement.num_cuts
            entry = snapshot.write(
                self.engine, uri, version, self._reports.rank, num_cuts, self.pins, pin, throttle, work
            )
        finally:
            self.pins.release(pin)
        return SnapshotFile(name=entry.name, sha256=entry.sha256, bytes=entry.bytes, model=self.number)

    def works(self) -> Iterator[LongWork]:
        """Yield the work of missing first values and missing copies of slices."""
        yield from self.values.works()
        if self._copying is not None:
            yield from self._copying.works()

    async def wait_withdrawn(self, epoch: int, generation: int) -> None:
        """Wait, before first values are stored, until the values that they replace, if any, are withdrawn.

        The worker that uploads them may have received the order before this server.

        Args:
            epoch: number of restores of the model when they were sent.
            generation: the worker's generation.

        Raises:
            GenerationChanged: the generation ended meanwhile.
            Misuse: the model was released.
        """
        while self.values.waits_for(epoch):
            await self._waiters.wait()
            self.check_generation(generation)

    # ------------------------------------------------------------------ streams

    def check_generation(self, generation: int) -> None:
        """Check that a generation is the current one, and that the model was not released.

        Raises:
            GenerationChanged: it is not.
            Misuse: the model was released.
        """
        self.check_released()
        if generation != self.engine.generation:
            raise GenerationChanged(
                f"generation {generation} is over; the current one is {self.engine.generation}", self.engine.generation
            )

    def check_released(self) -> None:
        """Check that the model was not released.

        Raises:
            Misuse: it was released.
        """
        if self._released:
            raise Misuse(f"model {self.name!r} was released: its parameters are on the shard servers no more")


def _ready(model: ModelShell, step: int, sums_of_squares: tuple[float, ...], replica: int) -> Ready:
    """Return the report that every gradient of a step is here."""
    engine = model.engine
    assert engine.placement is not None
    return Ready(
        generation=engine.generation,
        step=step,
        sums_of_squares=sums_of_squares,
        replica=replica,
        model=model.number,
        placement=engine.placement.number,
        digests=engine.digests(),
        last_addend=engine.gradients.attempts[replica].addend,
    )

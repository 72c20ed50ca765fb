"""Around the engine: waits, threads, and the way to the coordinator. Decides nothing.

Everything here runs on one event loop, apart from what the apply pool and the snapshot thread do. Events of the
coordinator's session come in through `on_event`, streams through the coroutines that the servicer calls, and reports go
out through `reports`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Protocol

from axon_ps.compress import cast
from axon_ps.compress.compressor import compressor_of
from axon_ps.coordinator.events import UPLOADED, Event, JobState, RestoreOrder, SessionLost, SnapshotFile, SnapshotOrder
from axon_ps.errors import AxonError, GenerationChanged, InternalError, PermissionDenied, StepAborted
from axon_ps.shard import snapshot
from axon_ps.shard.apply import ApplyPool, Hold, SnapshotGate
from axon_ps.shard.collective_shell import CollectiveShell
from axon_ps.shard.engine import Push, ShardEngine
from axon_ps.shard.reach import Callers
from axon_ps.shard.waiters import Waiters
from axon_ps.sharding.job import JobSpec
from axon_ps.types import Array, Decision, DType, Hyper, Member, Membership
from axon_ps.wire.v1.common_pb2 import CallContext

_logger = logging.getLogger(__name__)


class Reports(Protocol):
    """What a shard server tells the coordinator; `coordinator.client.CoordinatorClient` is one.

    Attributes:
        rank: our number among the shard servers.
        num_shards: shard servers of the job.
    """

    rank: int
    num_shards: int

    def ready(self, *, generation: int, step: int, sum_of_squares: float, replica: int | None = None) -> None:
        """Every slice has every replica's gradients, or those of `replica` where replicas step alone."""

    def initialized(self, *, version: int, epoch: int) -> None:
        """Every slice has its values."""

    def snapshot_report(self, id: int, files: tuple[SnapshotFile, ...] = (), error: AxonError | None = None) -> None:
        """Our files of a checkpoint are written, or why not."""

    def restore_report(self, epoch: int, error: AxonError) -> None:
        """We could not restore."""


def warm_up(spec: JobSpec) -> None:
    """Compile what a server needs for a layout. Any thread but the loop's: it may take seconds."""
    precision = spec.precision
    for dtype in (precision.param, precision.grad):
        cast.warm_up(dtype)
    for compression in (precision.param_compression, precision.grad_compression):
        if compression is not None:
            compressor_of(compression).warm_up()


class ShardShell:
    """One shard server's engine with what it needs to run.

    Args:
        job: name of the job; calls for another one are refused.
        threads: for applying; None = one per core this process may use.

    Attributes:
        engine: the state.
        collectives: what workers do together here; nothing of it concerns the parameters.
        callers: the workers whose memory this server can read.
        reports: the way to the coordinator; set before the first event.
        failure: set when this server cannot go on; the server ends with it.
    """

    def __init__(self, job: str, threads: int | None = None) -> None:
        self.job = job
        self.engine = ShardEngine()
        self.collectives = CollectiveShell(job)
        self.reports: Reports | None = None
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.callers = Callers()
        self._membership: Membership | None = None
        self._workers: dict[str, Member] = {}
        self._waiters = Waiters()
        self._gate = SnapshotGate()
        self._pool = ApplyPool(self.engine, self._gate, threads, self._finished, self._fail)
        self._files = ThreadPoolExecutor(1, "axon-ps-files")
        self._applying = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._pushing: set[asyncio.Task[Any]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._epoch = 0
        self._ordered = 0  # epoch of the newest restore order, and of the newest that has room for its values
        self._withdrawn = 0
        self._served = 0  # epoch of the values that there are
        self._reported: dict[int, tuple[int, int]] = {}  # per attempt, the newest (generation, step)
        self._events: deque[Event] = deque()

    async def close(self) -> None:
        """End the threads; unfinished snapshots fail."""
        self.collectives.close()
        self._gate.close()
        if self.failure.done():
            self.failure.exception()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._pool.close)
        await asyncio.to_thread(self._files.shutdown)

    # ------------------------------------------------------------------ events from the coordinator

    def on_event(self, event: Event) -> None:
        """Take one event of the session, in order, on the loop's thread.

        Where replicas step alone, steps are decided while others are applied: what comes meanwhile waits for its turn.
        There are at most as many decisions waiting as replicas, since each needs our word on its next attempt.
        """
        if self._applying and self.engine.alone and not isinstance(event, SessionLost):
            self._events.append(event)
        else:
            self._take(event)

    def _take(self, event: Event) -> None:
        try:
            if isinstance(event, Membership):
                self._on_membership(event)
            elif isinstance(event, JobState):
                self._on_job(event)
            elif isinstance(event, Decision):
                self._on_decision(event)
            elif isinstance(event, SnapshotOrder):
                self._start(self._snapshot(event, self._gate.hold(event.version)))
            elif isinstance(event, RestoreOrder):
                self.engine.begin_restore(uploaded=event.uri == UPLOADED)
                self._ordered = event.epoch
                self._start(self._replace(event) if event.uri == UPLOADED else self._restore(event))
            elif isinstance(event, SessionLost) and event.final:
                self._fail(event.error)
        except AxonError as error:
            self._fail(error)

    def _on_membership(self, membership: Membership) -> None:
        self._membership = membership
        self._workers = {m.incarnation: m for m in membership.workers}
        self.collectives.on_membership(membership)
        self.callers.set_members(membership)
        if membership.generation > self.engine.generation:
            self.engine.membership(membership.generation, membership.step, membership.version, membership.num_replicas)
            for task in self._pushing:
                task.cancel()
        self._waiters.wake_all()
        self._report_ready()

    def _on_job(self, job: JobState) -> None:
        assert self.reports is not None
        self._epoch = max(self._epoch, job.epoch)
        if job.spec is not None and not self.engine.configured:
            self.engine.configure(job.spec, self.reports.rank, self.reports.num_shards)
            self._start(self._warm_up(partial(warm_up, job.spec)))
            if self.engine.initialized and self._epoch == 0:  # nothing is owned here, and no restore is on its way
                self.reports.initialized(version=job.version, epoch=self._epoch)
        if job.optimizer is not None and self.engine.updater is None:
            updater = self.engine.set_optimizer(job.optimizer)
            self._start(self._warm_up(partial(updater.warm_up, self.engine.param_dtype)))
        self._waiters.wake_all()

    def _on_decision(self, decision: Decision) -> None:
        units = self.engine.decide(decision)
        if units:
            self._applying = len(units)
            self._idle.clear()
            self._pool.start(units)
        self._waiters.wake_all()

    def _finished(self, unit: int) -> None:
        self.engine.finish(unit)
        self._gate.notify()
        self._waiters.wake_unit(unit)
        self._applying -= 1
        if self._applying == 0:
            self._idle.set()
            self._report_ready()
            while self._events and not self._applying:
                self._take(self._events.popleft())

    def _report_ready(self) -> None:
        engine = self.engine
        for replica, step in engine.complete():
            name = (engine.generation, step)
            if self._reported.get(replica) == name or (total := engine.ready(replica)) is None:
                continue
            assert self.reports is not None
            self._reported[replica] = name
            whose = replica if engine.alone else None
            self.reports.ready(generation=engine.generation, step=step, sum_of_squares=total, replica=whose)

    async def _warm_up(self, *compiles: Callable[[], None]) -> None:
        """Compile kernels before the first gradient needs them."""
        for compile_it in compiles:
            await asyncio.get_running_loop().run_in_executor(self._files, compile_it)

    # ------------------------------------------------------------------ checkpoints

    async def _snapshot(self, order: SnapshotOrder, hold: Hold) -> None:
        reports = self.reports
        assert reports is not None
        try:
            entry = await self._in_files_thread(
                lambda: snapshot.write(
                    self.engine, order.uri, order.version, reports.rank, reports.num_shards, self._gate, hold
                )
            )
        except AxonError as error:
            _logger.error("checkpoint at version %d failed: %s", order.version, error)
            reports.snapshot_report(order.id, error=error)
        else:
            reports.snapshot_report(order.id, (SnapshotFile(name=entry.name, sha256=entry.sha256, bytes=entry.bytes),))
        finally:
            self._gate.release(hold)

    async def _restore(self, order: RestoreOrder) -> None:
        assert self.reports is not None
        engine = self.engine
        await self._idle.wait()
        try:
            restore = await self._in_files_thread(lambda: snapshot.prepare(engine, order.uri, order.version))
            engine.withdraw()
            await self._in_files_thread(lambda: snapshot.load(engine, restore))
        except AxonError as error:
            _logger.error("restoring version %d from %s failed: %s", order.version, order.uri, error)
            engine.cancel_restore()
            self._served = order.epoch  # what is left, if anything is, is all that this epoch has
            self.reports.restore_report(order.epoch, error)
        else:
            engine.restored(order.version, restore.optimizer)
            self._epoch, self._served = max(self._epoch, order.epoch), order.epoch
            self.reports.initialized(version=order.version, epoch=order.epoch)
        self._waiters.wake_all()

    async def _replace(self, order: RestoreOrder) -> None:
        """Make room for the values that a worker is about to upload."""
        await self._idle.wait()
        self.engine.withdraw()
        self._withdrawn = order.epoch
        self._waiters.wake_all()
        if self.engine.initialized:  # nothing is owned here
            self._values_replaced()

    def _values_replaced(self) -> None:
        assert self.reports is not None
        self.engine.replaced()
        self._served = self._withdrawn
        self.reports.initialized(version=self.engine.version, epoch=self._epoch)
        self._waiters.wake_all()

    async def wait_withdrawn(self, epoch: int, generation: int) -> None:
        """Before first values are stored: wait until those that they replace, if any, are withdrawn.

        The worker that brings them may have heard of the order before this server has.

        Args:
            epoch: how often the job had been restored when they were sent.
            generation: the worker's.

        Raises:
            GenerationChanged: while it waited.
        """
        while self._withdrawn < epoch and self._ordered <= epoch:
            await self._waiters.wait()
            self.check_generation(generation)

    async def _in_files_thread(self, work: Callable[[], Any]) -> Any:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._files, work)
        except AxonError:
            raise
        except Exception as error:
            _logger.exception("a checkpoint operation failed")
            raise InternalError(f"{type(error).__name__}: {error}") from error

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if not self.failure.done():
            _logger.critical("this shard server cannot go on: %s", error)
            self.failure.set_exception(error)

    # ------------------------------------------------------------------ streams

    async def fence(self, context: CallContext) -> Member:
        """The worker that calls, once our generation is the caller's and the layout is known.

        Raises:
            PermissionDenied: another job, or not a worker of the generation it names.
            GenerationChanged: the caller's generation is over.
        """
        if context.job != self.job:
            raise PermissionDenied(f"this server serves job {self.job!r}, not {context.job!r}")
        engine = self.engine
        while engine.generation < context.generation or engine.spec is None:
            if engine.generation > context.generation:
                break
            await self._waiters.wait()
        self.check_generation(context.generation)
        member = self._workers.get(context.incarnation)
        if member is None:
            raise PermissionDenied(
                f"incarnation {context.incarnation[:32]!r} is not a worker of generation {engine.generation}"
            )
        return member

    def check_generation(self, generation: int) -> None:
        """Refuse a generation that is over.

        Raises:
            GenerationChanged: it is.
        """
        if generation != self.engine.generation:
            raise GenerationChanged(
                f"generation {generation} is over; the current one is {self.engine.generation}", self.engine.generation
            )

    @asynccontextmanager
    async def pushing(self, generation: int) -> AsyncIterator[None]:
        """A stream of gradients is under way in the calling task: it ends when the generation does.

        Raises:
            GenerationChanged: it did.
        """
        task = asyncio.current_task()
        assert task is not None
        self._pushing.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if self.engine.generation == generation:
                raise
            task.uncancel()
            self.check_generation(generation)
        finally:
            self._pushing.discard(task)

    async def push(self, step: int, unit: int, offset: int, replica: int, dtype: DType, grad: Array | None) -> bool:
        """Add a gradient chunk when its turn comes; False for a duplicate. See `ShardEngine.push`."""
        engine = self.engine
        while (done := engine.push(step, unit, offset, replica, dtype, grad)) is Push.WAIT:
            await self._waiters.wait(unit, offset, replica)
        if done is Push.DUPLICATE:
            return False
        self._waiters.wake_turn(unit, offset, replica + 1)
        if engine.is_last(replica):
            self._report_ready()
        return True

    async def push_absent(self, step: int, unit: int, offset: int, numel: int, replica: int) -> int:
        """Say that a replica has no gradient for elements [offset, offset + numel); how many chunks that passed."""
        owned = self.engine.slice_of(unit)
        first, last = owned.range_of(offset, offset + numel)
        dtype = self.engine.grad_dtype
        return sum([await self.push(step, unit, begin, replica, dtype, None) for begin, _ in owned.bounds[first:last]])

    async def available(self, unit: int, epoch: int, min_version: int, generation: int) -> None:
        """Wait until the unit can be served at `min_version` of `epoch` or later.

        Versions grow within an epoch only. Who asks may have heard of a restore before this server has, or after it.

        Raises:
            GenerationChanged: while it waited.
            StepAborted: the parameters are of a later epoch.
        """
        while True:
            if epoch < self._served:
                raise StepAborted(
                    f"the job was restored: the parameters are of epoch {self._served}, no longer {epoch}"
                )
            if epoch == self._served and self.engine.available(unit, min_version):
                return
            await self._waiters.wait(unit)
            self.check_generation(generation)

    async def foreseen(self, step: int, unit: int, index: int, hypers: tuple[Hyper, ...], generation: int) -> bytes:
        """One chunk as an undecided step will make it, once that is known. See `ShardEngine.foresee`.

        Raises:
            GenerationChanged: while it waited.
        """
        engine = self.engine
        scratch = engine.scratch()
        while (frame := engine.foresee(step, unit, index, hypers, scratch)) is None:
            await self._waiters.wait(unit, engine.slice_of(unit).bounds[index][0], engine.num_replicas)
            self.check_generation(generation)
        return frame

    async def encoded(self, unit: int, index: int, dtype: DType, generation: int) -> bytes:
        """One chunk in a dtype that is encoded on demand, when nothing is changing it.

        Raises:
            GenerationChanged: while it waited.
        """
        await self.unchanging(unit, generation)
        return self.engine.encode(unit, index, dtype)

    async def unchanging(self, unit: int, generation: int) -> None:
        """Wait until the unit has values and no step is being applied to it; frames may be served before.

        Raises:
            GenerationChanged: while it waited.
        """
        while self.engine.slices[unit].applying or not self.engine.available(unit, 0):
            await self._waiters.wait(unit)
            self.check_generation(generation)

    def upload(self, epoch: int, unit: int, offset: int, values: Array) -> bool:
        """Store first values of a chunk, unless a restore was ordered since; True once this server has all of them."""
        if epoch < self._ordered:
            return self.engine.initialized
        before, replacing = self.engine.initialized, self.engine.replacing
        complete = self.engine.upload(unit, offset, values)
        if complete and replacing:
            self._values_replaced()
        elif complete and not before:
            assert self.reports is not None
            self.reports.initialized(version=self.engine.version, epoch=self._epoch)
        if complete or self.engine.available(unit, 0):
            self._waiters.wake_unit(unit)
        return complete

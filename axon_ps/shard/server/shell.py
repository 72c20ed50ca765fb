"""The shell around the engines of a shard server: one `ModelShell` per model, and their shared state.

All decisions are the engines'. Everything here runs on one event loop, except for work in threads. Events of the
coordinator's session come in through `on_event` and go to the model that they are about, or to all.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import numpy as np

from axon_ps.aggregation.server.shell import CollectiveShell
from axon_ps.errors import AxonError, Drained, InternalError
from axon_ps.host.priority import BACKGROUND, UNTHROTTLED
from axon_ps.observe.tracing.tracer import Tracer
from axon_ps.observe.work import LongWork, process_measures, to_measures
from axon_ps.shard.core.engine import ShardEngine
from axon_ps.shard.core.queued import QueueLimit
from axon_ps.shard.same_host.access import SameHostCallers
from axon_ps.shard.same_host.mapped_units import sum_memory
from axon_ps.shard.server.apply import Pin
from axon_ps.shard.server.calls.fence import Fence
from axon_ps.shard.server.capacity import Capacity
from axon_ps.shard.server.links import Links
from axon_ps.shard.server.model_shell import Averaging, ModelShell
from axon_ps.shard.server.reports import Reports
from axon_ps.shard.server.subscriptions import Pacer, SubscriberLimits
from axon_ps.storage.manifest import discard
from axon_ps.types import Array, Decision, Membership, Outcome
from axon_ps.wire.events import Event, JobState, RestoreOrder, SessionLost, SnapshotFile, SnapshotOrder

T = TypeVar("T")
_logger = logging.getLogger(__name__)

_MEASURED = ("version", "step", "missing_chunks")
_MEMORY = ("master_bytes", "accumulator_bytes", "state_bytes", "residual_bytes", "frame_bytes", "shared_bytes")
"""Statistics in heartbeats: those in `_MEASURED` are sent as they are, and these are summed."""

_NOT_SUMMED = frozenset(("generation", "step", "version"))
"""Statistics that are not added up over models. The first model's are reported."""


class ShardShell:
    """One shard server's models, with their connections, threads and timers.

    Args:
        job: name of the job.
        threads: threads for applying, per model; None = one per core this process may use.
        limits: limits of subscribers; None = the default.
        capacity: the memory that the server may allocate; None = the limit of the machine.
        queue: the part of it for gradients that arrive out of order; None = none, and they wait.

    Attributes:
        fence: the check of calls.
        pacer: the schedule of chunks for subscribers.
        collectives: the collectives of workers; independent of the parameters.
        same_host: the workers and servers that this one shares memory with.
        reports: the way to the coordinator; set before the first event.
        links: the connections to the other shard servers; set before the first event, if there can be any.
        failure: set when this server cannot go on. The server ends with it.
        tracer: the spans of this process.
        capacity: the memory that the server may allocate.
    """

    def __init__(
        self,
        job: str,
        threads: int | None = None,
        limits: SubscriberLimits | None = None,
        capacity: Capacity | None = None,
        queue: QueueLimit | None = None,
    ) -> None:
        self.job = job
        self.pacer = Pacer(limits or SubscriberLimits())
        self._limits = limits
        self.collectives = CollectiveShell(job)
        self.reports: Reports | None = None
        self.links: Links | None = None
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.same_host = SameHostCallers()
        self.tracer = Tracer()
        self.capacity = capacity or Capacity()
        self.queue = queue or QueueLimit()
        self._threads = threads
        self._models: dict[int, ModelShell] = {}
        self.fence = Fence(job, self._models)
        self._files = ThreadPoolExecutor(1, "axon-ps-files")
        self._memory = ThreadPoolExecutor(1, "axon-ps-memory")
        self._tasks: set[asyncio.Task[None]] = set()
        self._works: list[LongWork] = []
        self.model(0)

    async def close(self) -> None:
        """End the threads. Unfinished snapshots fail."""
        self.collectives.close()
        if self.failure.done():
            self.failure.exception()
        for model in self._models.values():
            model.order.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for model in self._models.values():
            model.stop()
        for model in self._models.values():
            await model.close()
        if self.links is not None:
            await self.links.close()
        self.same_host.close()
        await asyncio.to_thread(self._files.shutdown)
        await asyncio.to_thread(self._memory.shutdown)

    # ------------------------------------------------------------------ the models

    def model(self, number: int = 0) -> ModelShell:
        """Return the model with a number; made when it is first named."""
        if number not in self._models:
            model = self._models[number] = ModelShell(number, self, self._threads, self._limits)
            model.engine.slices.allocate = self._sum_memory
            if self.fence.membership is not None:
                model.on_event(self.fence.membership)
        return self._models[number]

    def _sum_memory(self, numel: int) -> Array:
        """Return zeros, f32[numel], for sums that are forwarded."""
        near = self.links is not None and self.links.has_neighbours
        return sum_memory(numel) if near else np.zeros(numel, np.float32)

    @property
    def engine(self) -> ShardEngine:
        """The engine of the first model."""
        return self.model().engine

    def statistics(self) -> dict[str, float]:
        """Return the sum of `ShardEngine.statistics` over all models.

        With several models, it has the memory, step and version of each, too.
        """
        total: Counter[str] = Counter()
        models = sorted(self._models.items())
        for number, model in models:
            for name, value in model.engine.statistics().items():
                if name not in _NOT_SUMMED or number == models[0][0]:
                    total[name] += value  # type: ignore[assignment]
                if len(models) > 1 and (name.endswith("_bytes") or name in ("step", "version")):
                    total[f"model/{model.name}/{name}"] = value  # type: ignore[assignment]
        return {name: float(value) for name, value in sorted(total.items())}

    @contextlib.contextmanager
    def working(self, kind: str) -> Iterator[LongWork]:
        """Show long work in this server's metrics while the context lasts."""
        work = LongWork(kind)
        self._works.append(work)
        try:
            yield work
        finally:
            self._works.remove(work)

    def measures(self) -> dict[str, float]:
        """Return the measures in heartbeats: bytes, memory, the progress of this server, and its long work."""
        statistics = self.statistics()
        measures = {name: statistics[name] for name in _MEASURED if name in statistics}
        measures["slice_bytes"] = sum(v for name, v in statistics.items() if name in _MEMORY)
        measures |= process_measures(statistics)
        measures["available_bytes"] = float(self.capacity.free_bytes())
        works = [*self._works, *(w for model in self._models.values() for w in model.works())]
        uploads_too = not any(work.kind == "restore" for work in self._works)
        return measures | to_measures(w for w in works if w.kind != "upload" or uploads_too)

    # ------------------------------------------------------------------ events from the coordinator

    def on_event(self, event: Event) -> None:
        """Take one event of the session, in order, on the loop's thread."""
        if isinstance(event, Membership):
            self.fence.set_members(event)
            self.collectives.on_membership(event)
            self.same_host.set_members(event)
            if self.links is not None:
                self.links.set_members(event)
            for model in self._models.values():
                model.on_event(event)
            self.wake()
        elif isinstance(event, JobState) and event.released:
            self._release(event)
        elif isinstance(event, Decision) and event.copy is not None and event.outcome is Outcome.COMMIT:
            self._copy(event)
        elif isinstance(event, (JobState, Decision, RestoreOrder)):
            if event.model not in self.fence.released:
                self.model(event.model).on_event(event)
        elif isinstance(event, SnapshotOrder):
            self._order_snapshot(event)
        elif isinstance(event, SessionLost) and event.final:
            self.fail(event.error)

    def _copy(self, decision: Decision) -> None:
        """Have a model copy another's values, which are pinned until the copy is done."""
        assert decision.copy is not None
        source, version = self.model(decision.copy.source), decision.copy.version
        pinned: asyncio.Future[Pin] = asyncio.get_running_loop().create_future()
        source.order.call(lambda: pinned.set_result(source.pin_for_copy(version)))
        self.model(decision.model).on_event(Averaging(decision, source, pinned))

    def _release(self, event: JobState) -> None:
        model = self._models.pop(event.model, None)
        self.fence.released[event.model] = event.name
        if model is not None:
            self.start(model.release())
        self.wake()

    def _order_snapshot(self, order: SnapshotOrder) -> None:
        """Pin every model's version in the order of events, then write the models one after the other."""
        versions = {p.model: p.version for p in order.models}
        if 0 in self._models and (self._models[0].engine.configured or not versions):
            versions[0] = order.version
        pins: dict[int, asyncio.Future[Pin]] = {}
        for number, version in sorted(versions.items()):
            pinned = pins[number] = asyncio.get_running_loop().create_future()
            model = self.model(number)
            model.order.call(lambda m=model, v=version, p=pinned: p.set_result(m.pins.pin(v)))  # type: ignore[misc]
        self.start(self._snapshot(order, versions, pins))

    async def _snapshot(
        self, order: SnapshotOrder, versions: dict[int, int], pins: dict[int, asyncio.Future[Pin]]
    ) -> None:
        reports = self.reports
        assert reports is not None
        files: list[SnapshotFile] = []
        throttle = BACKGROUND if order.background else UNTHROTTLED
        try:
            with self.working("snapshot") as work:
                for number in pins:
                    model, pin = self.model(number), await pins[number]
                    write = partial(model.write, order.uri, versions[number], pin, throttle, work)
                    files.append(await self.in_files_thread(write))
        except AxonError as error:
            _logger.error("the checkpoint at %s failed: %s", order.uri, error)
            for number in pins:
                self.model(number).pins.release(await pins[number])
            if files:
                await self._discard(order.uri, files)
            reports.snapshot_report(order.id, error=error)
        else:
            reports.snapshot_report(order.id, tuple(files))

    async def _discard(self, uri: str, files: list[SnapshotFile]) -> None:
        """Remove files that are useless without the other models' files. If that fails, they stay."""
        try:
            await self.in_files_thread(lambda: discard(uri, [f.name for f in files]))
        except AxonError as error:
            _logger.warning("files of the checkpoint that failed are left at %s: %s", uri, error)

    async def in_files_thread(self, work: Callable[[], Any]) -> Any:
        """Run slow work in the files' thread, after earlier work there.

        Raises:
            MemoryError: there is not enough memory.
            InternalError: it raised another error than an `AxonError`.
        """
        return await self._perform(asyncio.get_running_loop().run_in_executor(self._files, work))

    async def off_loop(self, work: Callable[[], T]) -> T:
        """Run work on much memory in its thread, after earlier work there.

        A slice may have GiBs. Allocating, hashing or encoding them takes seconds, in which the event loop could not
        send heartbeats. The work is over when this returns, also if the task is cancelled meanwhile.

        Raises:
            MemoryError: there is not enough memory.
            InternalError: it raised another error than an `AxonError`.
        """
        future, cancelled = asyncio.get_running_loop().run_in_executor(self._memory, work), False
        while not future.done():
            try:
                await asyncio.wait([future])
            except asyncio.CancelledError:
                cancelled = True
        if cancelled:
            future.exception()
            raise asyncio.CancelledError
        return await self._perform(future)

    async def _perform(self, work: asyncio.Future[T]) -> T:
        try:
            return await work
        except (AxonError, MemoryError):
            raise
        except Exception as error:
            _logger.exception("what a thread of this shard server was given failed")
            raise InternalError(f"{type(error).__name__}: {error}") from error

    def start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine to its end, even if its caller is cancelled. If it raises, the server ends."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """End this server, which cannot go on."""
        if not self.failure.done():
            if not isinstance(error, Drained):
                _logger.critical("this shard server cannot go on: %s", error)
            self.failure.set_exception(error)

    def wake(self) -> None:
        """Wake callers that wait in `fence`, after a change of a model."""
        self.fence.wake()

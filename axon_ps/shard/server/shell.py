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
from typing import Any, Final, TypeVar

import numpy as np

from axon_ps.aggregation.server.shell import CollectiveShell, check_job
from axon_ps.errors import (
    AxonError,
    Broken,
    Busy,
    Drained,
    GenerationChanged,
    InternalError,
    InvalidRequest,
    Misuse,
    PermissionDenied,
)
from axon_ps.host.priority import BACKGROUND, UNTHROTTLED
from axon_ps.observe.tracing.tracer import Tracer
from axon_ps.observe.work import LongWork, process_measures, to_measures
from axon_ps.rpc.limits import FENCE_S, MAX_NEWER
from axon_ps.shard.core.engine import ShardEngine
from axon_ps.shard.core.queued import QueueLimit
from axon_ps.shard.same_host.access import SameHostCallers
from axon_ps.shard.same_host.mapped_units import sum_memory
from axon_ps.shard.server.apply import Pin
from axon_ps.shard.server.capacity import Capacity
from axon_ps.shard.server.links import Links
from axon_ps.shard.server.model_shell import Averaging, ModelShell
from axon_ps.shard.server.reports import Reports
from axon_ps.shard.server.subscriptions import Pacer, SubscriberLimits, Subscriptions
from axon_ps.shard.server.waiters import Waiters
from axon_ps.storage.manifest import discard
from axon_ps.types import Array, Decision, Member, Membership, Outcome
from axon_ps.wire.events import Event, JobState, RestoreOrder, SessionLost, SnapshotFile, SnapshotOrder
from axon_ps.wire.v1.common_pb2 import CallContext

T = TypeVar("T")
_logger = logging.getLogger(__name__)

MAX_MEMBER_CALLS: Final = 1024
"""Gathers, pushes and uploads of one worker that may be under way at a time."""

_MEASURED = ("version", "step", "missing_chunks")
_MEMORY = ("master_bytes", "accumulator_bytes", "state_bytes", "residual_bytes", "frame_bytes", "shared_bytes")
"""Statistics in heartbeats: the first are sent as they are, these are summed."""

_NOT_SUMMED = frozenset(("generation", "step", "version"))
"""Statistics that are not added up over models; the first model's are reported."""


class ShardShell:
    """One shard server's models, with their connections, threads and timers.

    Args:
        job: name of the job; calls for another one are refused.
        threads: threads for applying, per model; None = one per core this process may use.
        limits: limits of subscribers; None = the default.
        capacity: the memory that the server may allocate; None = the limit of the machine.
        queue: the part of it for gradients that arrive out of order; None = none, and they wait.

    Attributes:
        pacer: the schedule of chunks for subscribers.
        collectives: the collectives of workers; independent of the parameters.
        same_host: the workers and servers that this one shares memory with.
        reports: the way to the coordinator; set before the first event.
        links: the connections to the other shard servers; set before the first event, if there can be any.
        failure: set when this server cannot go on; the server ends with it.
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
        self._generation = 0
        self._membership: Membership | None = None
        self._servers: dict[str, Member] = {}
        self._models: dict[int, ModelShell] = {}
        self._released: dict[int, str] = {}
        self._waiters = Waiters()
        self._files = ThreadPoolExecutor(1, "axon-ps-files")
        self._memory = ThreadPoolExecutor(1, "axon-ps-memory")
        self._tasks: set[asyncio.Task[None]] = set()
        self._works: list[LongWork] = []
        self._calls: Counter[str] = Counter()  # under way, by member
        self.model(0)

    async def close(self) -> None:
        """End the threads; unfinished snapshots fail."""
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
            if self._membership is not None:
                model.on_event(self._membership)
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
        """Return the sum of `ShardEngine.statistics` over all models; with several models, also the memory of each."""
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
            self._membership = event
            self._generation = event.generation
            self.collectives.on_membership(event)
            self.same_host.set_members(event)
            self._servers = {m.incarnation: m for m in event.shards}
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
            if event.model not in self._released:
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
        source.in_order(lambda: pinned.set_result(source.pin_for_copy(version)))
        self.model(decision.model).on_event(Averaging(decision, source, pinned))

    def _release(self, event: JobState) -> None:
        model = self._models.pop(event.model, None)
        self._released[event.model] = event.name
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
            model.in_order(lambda m=model, v=version, p=pinned: p.set_result(m.pins.pin(v)))  # type: ignore[misc]
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
        """Remove files that are useless without the other models' files; if that fails, they stay."""
        try:
            await self.in_files_thread(lambda: discard(uri, [f.name for f in files]))
        except AxonError as error:
            _logger.warning("files of the checkpoint that failed are left at %s: %s", uri, error)

    async def in_files_thread(self, work: Callable[[], Any]) -> Any:
        """Run slow work in the files' thread, after earlier work there.

        Raises:
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
        """Run a coroutine to its end, even if its caller is cancelled; if it raises, the server ends."""
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
        self._waiters.wake_all()

    # ------------------------------------------------------------------ streams

    async def fence(self, context: CallContext) -> tuple[ModelShell, Member]:
        """Return the model and the calling worker, once this server knows the caller's generation and placement.

        Raises:
            PermissionDenied: another job, or not a worker of the generation it names.
            GenerationChanged: the caller's generation is over.
            Misuse: the model was released.
        """
        model = await self._fence(context)
        member = model.members.get(context.incarnation)
        if member is None:
            raise PermissionDenied(
                f"incarnation {context.incarnation[:32]!r} is not a worker of generation {self._generation}"
            )
        return model, member

    async def fence_server(self, context: CallContext) -> tuple[ModelShell, Member]:
        """Fence a call of another shard server; see `fence`.

        Raises:
            PermissionDenied: another job, or not a shard server of the generation it names.
            GenerationChanged: the caller's generation is over.
            Misuse: the model was released.
        """
        model = await self._fence(context)
        member = self._servers.get(context.incarnation)
        if member is None:
            raise PermissionDenied(
                f"incarnation {context.incarnation[:32]!r} is not a shard server of generation {self._generation}"
            )
        return model, member

    async def fence_member(self, context: CallContext) -> Member:
        """Fence a call of a worker or a shard server, as `fence` does; return the caller."""
        await self._fence(context)
        server = self._servers.get(context.incarnation)
        return server if server is not None else (await self.fence(context))[1]

    def observed(self, context: CallContext) -> tuple[Subscriptions, ShardEngine]:
        """Return the subscriptions to a model, and its engine, for a caller that need not be a member.

        Raises:
            PermissionDenied: another job.
            Misuse: the model was released.
            Busy: this server does not know the model yet.
        """
        check_job(context, self.job)
        self._check_not_released(context.model)
        model = self._models.get(context.model)
        if model is None or not model.engine.configured:
            raise Busy(f"this shard server does not know model {context.model} yet; try again")
        return model.subscriptions, model.engine

    def _check_not_released(self, number: int) -> None:
        if number in self._released:
            name = self._released[number]
            raise Misuse(f"model {name!r} was released: its parameters are on the shard servers no more")

    async def _fence(self, context: CallContext) -> ModelShell:
        check_job(context, self.job, "" if self._membership is None else self._membership.state_id)
        if not self._can_answer(context):
            await self._catch_up(context)
        self._check_not_released(context.model)
        if context.model in self._models and (missing := self._models[context.model].capacity.missing):
            raise Busy(missing)
        if context.generation < self._generation:
            raise GenerationChanged(
                f"generation {context.generation} is over; the current one is {self._generation}", self._generation
            )
        model = self._models[context.model]
        model.check_generation(context.generation)
        return model

    async def _catch_up(self, context: CallContext) -> None:
        """Wait until this server knows enough to serve or to refuse a call; see `rpc.limits.FENCE_S`.

        Raises:
            InvalidRequest: its generation or placement is too far ahead of the job's.
            Broken: this server has not learned of them in time.
        """
        model = self._models.get(context.model)
        placement = None if model is None else model.engine.placement
        for what, given, known in (
            ("generation", context.generation, self._generation),
            ("placement", context.placement, 0 if placement is None else placement.number),
        ):
            if given > known + MAX_NEWER:
                raise InvalidRequest(f"{what} {given} is none of this job's; this server knows {known}")
        while not self._can_answer(context):
            try:
                async with asyncio.timeout(FENCE_S):
                    while not self._can_answer(context):
                        await self._waiters.wait()
            except TimeoutError:
                if context.model in self._models and self._models[context.model].order.is_busy:
                    continue  # it knows them, and allocates memory
                raise Broken(
                    f"this server has not heard of generation {context.generation} and placement {context.placement} "
                    f"of model {context.model} within {FENCE_S:g} s; it knows generation {self._generation}"
                ) from None

    def calling(self, caller: str) -> MemberCall:
        """Count a call of an incarnation while the context lasts."""
        return MemberCall(self._calls, caller)

    def _can_answer(self, context: CallContext) -> bool:
        """Return True if this server knows enough to serve or to refuse a call."""
        if context.model in self._released or context.generation < self._generation:
            return True
        model = self._models.get(context.model)
        if model is not None and model.capacity.missing:
            return True
        if model is None or (placement := model.engine.placement) is None:
            return False
        return model.engine.generation >= context.generation and placement.number >= context.placement


class MemberCall:
    """The context of a call of a member.

    Args:
        calls: number of calls under way, by incarnation.
        caller: incarnation of the caller.

    Raises:
        Busy: the caller has too many calls under way.
    """

    __slots__ = ("_caller", "_calls")

    def __init__(self, calls: Counter[str], caller: str) -> None:
        self._calls, self._caller = calls, caller

    def __enter__(self) -> None:
        if self._calls[self._caller] >= MAX_MEMBER_CALLS:
            raise Busy(
                f"{self._caller[:32]!r} has {MAX_MEMBER_CALLS} gathers and pushes under way at this server, which is "
                "the most of a member; wait for some of them"
            )
        self._calls[self._caller] += 1

    def __exit__(self, *_: object) -> None:
        self._calls[self._caller] -= 1
        if not self._calls[self._caller]:
            del self._calls[self._caller]

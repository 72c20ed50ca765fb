"""The shell around the state machine: sessions, calls, time and the store. All decisions are in the state machine.

Note: [Written before published]
    Actions are performed in the order in which the state machine gave them. If there are records to write, one task
    takes the batch of all actions so far, writes all their records in one transaction (in a thread if that may take a
    while), and only then pushes and replies. Moving records before pushes of the same batch is harmless: they are
    written earlier than they had to be. A full disk delays everything until there is space again, since a decision can
    neither be revoked nor announced. Any other failure of the store ends the shell, and nothing is announced any more.
    If several coordinators share the store, the loss of the lead also ends it. In both cases the members retain their
    state, and join the next coordinator.

Bounds: a session's queue holds `QUEUE_EVENTS`, and a member that lets it fill up loses its session. At most `MAX_CALLS`
calls are pending at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from axon_ps.coordinator.core.actions import Action, CloseSession, Happened, Persist, Reply, SendEvent
from axon_ps.coordinator.core.history.logs import COORDINATOR
from axon_ps.coordinator.core.restart.knowledge import Knowledge, check_known, learned
from axon_ps.coordinator.core.state import CoordinatorState
from axon_ps.coordinator.messages import event_to_proto, logged_to_proto
from axon_ps.coordinator.server.audit import NO_AUDIT, OF_MEMBERS, AuditLog
from axon_ps.coordinator.server.checkpoint_log import CheckpointLog
from axon_ps.coordinator.server.event_log import EventLog
from axon_ps.coordinator.server.step_spans import StepSpans
from axon_ps.errors import AxonError, Broken, Busy, InternalError, NotLeader, StorageFull, again
from axon_ps.observe.log_buffer import LogBuffer
from axon_ps.observe.moments import Moment, reached
from axon_ps.observe.tracing.tracer import Tracer
from axon_ps.storage.state_store.base import Record, StateStore
from axon_ps.types import Decision, Membership
from axon_ps.wire.events import ServerEvent, Status

QUEUE_EVENTS: Final = 1024
MAX_CALLS: Final = 1 << 15
MAX_SLEEP_S: Final = 1.0
"""Most seconds between two readings of the clock, so that a pause of the whole process is noticed."""

LOOKS_IN_A_LEASE: Final = 8
"""Least readings of the clock in a lease: the unseen part of a pause is too short to end one."""

PAUSE_S: Final = 0.05
"""A delay in waking that counts as a pause: the process was suspended or busy, or its machine overloaded.

Heartbeats that came meanwhile are not read yet. So leases are extended by the pause: a lease depends on the time at
which a heartbeat came, and not on the time at which the coordinator read it.
"""

LOG_PAUSE_S: Final = 0.2

LEAD_LOOK_S: Final = 0.1
"""Seconds between two checks that we still lead."""

ASKED_LEASES: Final = 2
"""Leases without any member, after which a standby may lead if members have asked it."""

_logger = logging.getLogger(__name__)


_NO_TASK: asyncio.Task[None] | None = None


class StateLearned(Broken):
    """A newer state than that of this leadership was learned: the next leadership begins with it."""


class MemberSession:
    """One member's stream in the shell: a bounded queue of the events to send, and the error that ended it.

    Args:
        number: its number.
        differences: whether its member takes memberships as differences.
        send_soon: sends an encoded event at once; returns False when it cannot. None = events are queued.

    Attributes:
        number: its number.
        error: the error with which it ended.
        known: the newest membership that was sent on it.
        differences: whether its member takes memberships as differences.
    """

    def __init__(
        self, number: int, *, differences: bool = False, send_soon: Callable[[bytes], bool] | None = None
    ) -> None:
        self.number = number
        self._send_soon = send_soon
        self.differences = differences
        self.error: AxonError | None = None
        self.known: Membership | None = None
        self._events: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._open = True

    def send(self, event: bytes) -> bool:
        """Send or queue an encoded `SessionEvent`; return False if neither is possible."""
        if self._send_soon is not None:
            return not self._open or self._send_soon(event)
        if self._open and self._events.qsize() >= QUEUE_EVENTS:
            return False
        if self._open:
            self._events.put_nowait(event)
        return True

    def close(self, error: AxonError | None) -> None:
        """Send the queued events and end; with an error, end at once. The first call counts."""
        if self._open:
            self._open = False
            self.error = None if error is None else again(error)
            if error is not None:
                while not self._events.empty():
                    self._events.get_nowait()
            self._events.put_nowait(None)

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the encoded events to send, until the session is closed.

        Raises:
            AxonError: the error with which it was closed.
        """
        while (event := await self._events.get()) is not None:
            yield event
        if self.error is not None:
            raise again(self.error)


class _News:
    """The encoded events of a batch: each is encoded once for all members with the same known membership.

    Args:
        announce: called with each event once; returns its span.
    """

    def __init__(self, announce: Callable[[ServerEvent], str]) -> None:
        self._announce = announce
        self._spans: dict[int, str] = {}
        self._encoded: dict[tuple[int, int], bytes] = {}

    def messages(self, event: ServerEvent, sessions: Sequence[MemberSession]) -> Iterator[tuple[MemberSession, bytes]]:
        """Yield the encoded event for each session."""
        if id(event) not in self._spans:
            self._spans[id(event)] = self._announce(event)
        if not isinstance(event, Membership):
            message = self._message(event, None)
            yield from ((session, message) for session in sessions)
            return
        for session in sessions:
            before, session.known = session.known if session.differences else None, event
            yield session, self._message(event, before)

    def _message(self, event: ServerEvent, before: Membership | None) -> bytes:
        key = id(event), -1 if before is None else before.generation
        if key not in self._encoded:
            message = event_to_proto(event, before)
            if isinstance(event, Decision):
                message.decision.traceparent = self._spans[id(event)]
            self._encoded[key] = message.SerializeToString()
        return self._encoded[key]


class RecordWriter:
    """Writes records to one store, in a thread if that may take a while. Calls of its coroutines do not overlap.

    Args:
        store: gets the records; not closed here.
        retry_s: seconds before a full disk is tried again.

    Attributes:
        trouble: the reason why records are not written yet; empty while there is none.
    """

    def __init__(self, store: StateStore, retry_s: float) -> None:
        self._store = store
        self._retry_s = retry_s
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="axon_ps-state")
        self.trouble = ""

    async def apply(self, records: list[Record]) -> None:
        """Return when the records are written."""
        while records:
            try:
                if self._store.blocks:
                    await asyncio.get_running_loop().run_in_executor(self._executor, self._store.apply, records)
                else:
                    self._store.apply(records)
                if self.trouble:
                    _logger.warning("the coordinator's state can be written again")
                self.trouble = ""
                return
            except StorageFull as error:
                self.trouble = f"nothing can be decided before there is space on the disk: {error}"
                _logger.error("%s", self.trouble)
                await asyncio.sleep(self._retry_s)

    async def learn(self, known: Knowledge) -> None:
        """Add a shard server's newer knowledge to the records."""
        await asyncio.get_running_loop().run_in_executor(self._executor, self._learn, known)

    def _learn(self, known: Knowledge) -> None:
        self._store.apply(learned(self._store.load(), known))

    def close(self) -> None:
        """End the thread, after the write under way."""
        self._executor.shutdown()


class Shell:
    """Runs one `CoordinatorState`. Everything happens on one event loop, the one it is made on.

    Args:
        state: the state machine.
        store: gets its records. The shell owns neither.
        store_retry_s: seconds before a full disk is tried again.
        log: the log of this process, for the job's log.
        tracer: the coordinator's; None = a new one.
        audit: gets the changes of the job, with the callers; not closed here.

    Attributes:
        audit: the same.
        checkpoints: the status of the job's checkpoints.
        started_s: the time of its start, by `now`.
        tracer: as given.
        spans: those of the steps.
    """

    def __init__(
        self,
        state: CoordinatorState,
        store: StateStore,
        *,
        store_retry_s: float = 1.0,
        log: LogBuffer | None = None,
        tracer: Tracer | None = None,
        audit: AuditLog = NO_AUDIT,
    ) -> None:
        self.state = state
        self._log_buffer = log
        self.audit = audit
        self.tracer = tracer or Tracer()
        self.spans = StepSpans(self.tracer, state.id)
        self._store = store
        self._records = RecordWriter(store, store_retry_s)
        self._loop = asyncio.get_running_loop()
        self.started_s = self.now()
        self.checkpoints = CheckpointLog(self.now, self._happened)
        self._sessions: dict[int, MemberSession] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._hosts: set[Callable[[AxonError], None]] = set()
        self._lost: list[int] = []
        self._number = 0
        self._events = EventLog()
        self._actions: list[Action] = []
        self._writer = self._learning = _NO_TASK
        self._timer: asyncio.TimerHandle | None = None
        self._timing = False
        self._failed: asyncio.Future[None] = self._loop.create_future()
        self._announced = asyncio.Event()
        self._closed = False
        self._failing = False
        self._look_s = min(MAX_SLEEP_S, state.config.lease_s / LOOKS_IN_A_LEASE)
        self._set_timer()

    def now(self) -> float:
        """Return the time, as passed to the state machine."""
        return self._loop.time()

    def status(self, *, measures: bool = True) -> Status:
        """Return the status of the job; see `CoordinatorState.status`."""
        status, trouble = self.state.status(self.now(), measures=measures), self._records.trouble
        pending = (*status.pending, trouble) if trouble else status.pending
        return dataclasses.replace(
            status, uptime_s=self.now() - self.started_s, pending=pending, checkpoints=self.checkpoints.status()
        )

    def statistics(self) -> dict[str, float]:
        """Return the numbers of the job's status, by name."""
        return self.state.statistics(self.status(), self.now()) | {"audit_lost": float(self.audit.lost)}

    def take_logs(self) -> None:
        """Add the lines that this process has logged to the job's log.

        Raises:
            Broken: the coordinator is stopping.
        """
        self._check()
        if self._log_buffer is not None:
            records, dropped = self._log_buffer.take()
            self.state.history.logs.add(COORDINATOR, socket.gethostname(), logged_to_proto(records), dropped)

    async def changed(self, timeout_s: float) -> None:
        """Wait until an event has been announced since the last call of this method, or the time is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s if math.isfinite(timeout_s) else None):
                await self._announced.wait()
        self._announced.clear()

    async def failed(self) -> None:
        """Wait until this leadership is over.

        Raises:
            NotLeader: we lead no more.
            StateLearned: a newer state was learned.
            AxonError: the error of the store.
        """
        while not self._failed.done():
            if not self._store.leads():
                self._fail(NotLeader("this coordinator leads no more: its lease was not renewed in time"))
            await asyncio.wait([self._failed], timeout=LEAD_LOOK_S if self._store.is_shared else None)
        self._failed.result()

    async def learn(self, known: Knowledge, why: str) -> None:
        """Write a shard server's knowledge, which is newer than the state. Then this leadership is over.

        Args:
            known, why: the knowledge, and the part of it that is newer, as text.

        Raises:
            Broken: the coordinator is stopping.
            InvalidRequest: it cannot be knowledge of this job.
        """
        self._check()
        check_known(known, self.state.id, self.state.membership.generation)
        self._failing = True  # nothing is decided any more
        self._learning = self._loop.create_task(self._learn(known, why))
        await asyncio.shield(self._learning)  # which goes on if the server's stream ends

    async def _learn(self, known: Knowledge, why: str) -> None:
        if self._writer is not None:
            await asyncio.wait([self._writer])
        try:
            await self._records.learn(known)
        except Exception as error:
            self._end(error)
        else:
            self._end(StateLearned(f"the coordinator's state was older than what a shard server knows: {why}"))

    async def close(self) -> None:
        """Stop: sessions end as broken and calls fail. Members join again when a coordinator is back."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._close_everything(Broken("the coordinator is stopping; its state is kept; join again when it is back"))
        if self._writer is not None and self._records.trouble:
            self._writer.cancel()
        if tasks := [task for task in (self._writer, self._learning) if task is not None]:
            await asyncio.wait(tasks)
        self._records.close()
        if not self._failed.cancel() and not self._failed.cancelled():
            self._failed.exception()  # retrieved, since perhaps no task has waited for it

    # ------------------------------------------------------------------ events in

    def open_session(
        self, *, differences: bool = False, send_soon: Callable[[bytes], bool] | None = None
    ) -> MemberSession:
        """Open a new stream, which belongs to no member yet; see `MemberSession`.

        Raises:
            Broken: the coordinator is stopping.
        """
        self._check()
        self._number += 1
        session = self._sessions[self._number] = MemberSession(
            self._number, differences=differences, send_soon=send_soon
        )
        return session

    def close_session(self, session: MemberSession) -> None:
        """Close a stream. Members whose streams end together, as those of a host, are lost in one generation."""
        if self._sessions.pop(session.number, None) is not None:
            self._lost.append(session.number)
            if len(self._lost) == 1:
                self._loop.call_soon(self._lose)

    def _lose(self) -> None:
        lost, self._lost = self._lost, []
        if not self._closed:
            self.perform(self.state.streams_lost(lost, self.now()))

    @contextlib.contextmanager
    def host(self, end: Callable[[AxonError], None]) -> Iterator[None]:
        """Have a host's session for this context. `end` gets the error if all sessions are ended.

        Raises:
            Broken: the coordinator is stopping.
        """
        self._check()
        self._hosts.add(end)
        try:
            yield
        finally:
            self._hosts.discard(end)

    async def call(self, event: Callable[[int], list[Action]]) -> Any:
        """Give the state machine a call and wait for its answer.

        Args:
            event: an event of the state machine: takes the call's number, returns actions.

        Raises:
            Busy: too many calls are pending.
            AxonError: it was refused, or answered with an error.
        """
        self._check()
        if len(self._calls) >= MAX_CALLS:
            raise Busy(f"{MAX_CALLS} calls wait for the coordinator already; try again later")
        self._number += 1
        number = self._number
        actions = event(number)
        answer = self._calls[number] = self._loop.create_future()
        try:
            self.perform(actions)
            return await answer
        finally:
            if self._calls.pop(number, None) is not None and not self._closed:
                self.perform(self.state.cancel(number))

    # ------------------------------------------------------------------ actions out

    def perform(self, actions: list[Action]) -> None:
        """Perform actions after all earlier ones. See Note: [Written before published]."""
        if self._closed or self._failing:
            return
        self._actions.extend(actions)
        if self._writer is None and self._actions:
            if any(isinstance(a, Persist) for a in self._actions):
                self._writer = self._loop.create_task(self._write_and_publish())
            else:
                batch, self._actions = self._actions, []
                self._publish(batch)
        if not self._timing:
            self._timing = True
            self._loop.call_soon(self._set_timer)

    async def _write_and_publish(self) -> None:
        try:
            while self._actions:
                batch, self._actions = self._actions, []
                await self._records.apply([r for a in batch if isinstance(a, Persist) for r in a.records])
                self._publish(batch)
            self._writer = None
        except Exception as error:
            self._fail(error)

    def _publish(self, batch: list[Action]) -> None:
        if not self._store.leads():
            self._fail(NotLeader("this coordinator leads no more: its lease was over before it announced anything"))
            return
        news = _News(self._announce)
        for action in batch:
            if isinstance(action, SendEvent):
                there = [session for n in action.sessions if (session := self._sessions.get(n)) is not None]
                for session, message in news.messages(action.event, there):
                    if not session.send(message):
                        session.close(Broken(f"this member has not read {QUEUE_EVENTS} events; its stream is closed"))
                        self._loop.call_soon(self.close_session, session)  # its handler may be stuck in a write
            elif isinstance(action, Reply):
                self._answer(action.call, action.result)
            elif isinstance(action, Happened):
                self._happened(action.kind, action.text)
            elif isinstance(action, CloseSession) and (closed := self._sessions.get(action.session)) is not None:
                closed.close(action.error)

    def _announce(self, event: ServerEvent) -> str:
        """Log an event that is about to be sent, and record it in the history; return its span, if it is traced."""
        self._announced.set()
        self._events.published(event)
        self._loop.call_soon(self.state.history.published, event, self.now())  # after it is sent
        if not isinstance(event, Decision):
            return ""
        reached(Moment.DECISION, event.version)
        return self.spans.published(event)

    def _happened(self, kind: str, text: str) -> None:
        self.state.history.happened(kind, text, self.now())
        if kind in OF_MEMBERS:
            self.audit.record(self.state.config.job, kind, text=text)

    def _answer(self, call: int, result: object) -> None:
        answer = self._calls.pop(call, None)
        if answer is None or answer.done():
            return
        if isinstance(result, BaseException):
            answer.set_exception(result)
        else:
            answer.set_result(result)

    def _fail(self, error: Exception) -> None:
        """Announce nothing any more; see `_end`."""
        if not self._failing:
            self._failing = True
            self._end(error)

    def _end(self, error: Exception) -> None:
        """End all sessions and calls as broken, and have `failed` raise the error.

        Such a call may have been performed: the next leader begins with its effects.
        """
        if not isinstance(error, (Broken, StorageFull)):
            _logger.error("the state store failed; the coordinator cannot go on", exc_info=error)
        if not isinstance(error, AxonError):
            error = InternalError(f"the state store failed: {error!r}")
        failed = "" if isinstance(error, Broken) else "this coordinator's state store failed: "
        self._close_everything(Broken(f"{failed}{error}; the next coordinator knows what was done"))
        self._failed.set_exception(error)

    def _check(self) -> None:
        if self._closed or self._failing:
            raise Broken("the coordinator is stopping")

    def _close_everything(self, error: AxonError) -> None:
        for session in list(self._sessions.values()):
            session.close(error)
        for call in list(self._calls):
            self._answer(call, error)
        for end in list(self._hosts):
            end(error)

    # ------------------------------------------------------------------ time

    def _set_timer(self) -> None:
        """Set the timer for the next deadline, or for the next reading of the clock."""
        self._timing = False
        if self._closed or self._failing:
            return
        at = min(self.state.next_deadline(), self.now() + self._look_s)
        if self._timer is None or at < self._timer.when() or self._timer.cancelled():
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_at(at, self._wake, at)

    def _wake(self, planned: float) -> None:
        self._timer = None
        late_s = self.now() - planned
        if late_s > min(PAUSE_S, self._look_s):
            loud = late_s > LOG_PAUSE_S and not self.state.config.in_worker
            level = logging.WARNING if loud else logging.DEBUG
            _logger.log(level, "the coordinator was paused for %.1f s; leases are extended by that", late_s)
            self.state.paused(late_s)
        if self._is_cut_off():
            self._fail(NotLeader("no member was there any more, and another coordinator stands by for them"))
        self.perform(self.state.tick(self.now()))
        self._set_timer()  # at once: without a timer, a pause is not noticed
        self._events.waited(*self.state.stragglers.longest_wait(self.now()))
        if not self._failing:
            self.take_logs()

    def _is_cut_off(self) -> bool:
        """Return True if the members may reach another coordinator that would lead, and not this one."""
        now, isolation, store = self.now(), self.state.isolation, self._store
        if not store.is_shared:
            return False
        if isolation.suspected(now):
            return store.has_standby()
        return isolation.silent_s(now) > ASKED_LEASES * self.state.config.lease_s and store.has_standby(asked=True)

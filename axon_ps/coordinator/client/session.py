"""A member's end of its session with the coordinator.

`CoordinatorClient` joins, sends heartbeats, delivers events (in order, on the loop's thread), and sends votes and
reports. When the stream breaks, it reconnects to the coordinator that leads then. All of it runs on one event loop, the
loop of `start`. `vote`, `ready`, `initialized` and the reports only queue a message and may be called from any thread.

Invariants (ensured by `delivery`): events arrive in the coordinator's order, a decision and an order at most once, and
the generation never falls; every vote is followed by exactly one `Decision` of its step.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Final

from axon_ps.coordinator.client.addresses import Addresses, Endpoint
from axon_ps.coordinator.client.calls import Calls
from axon_ps.coordinator.client.connectivity_report import ConnectivityReport
from axon_ps.coordinator.client.delivery import Delivery
from axon_ps.coordinator.client.heartbeat import Punctuality, heartbeat, interval_s
from axon_ps.coordinator.client.operator import SERVICE, OperatorClient
from axon_ps.coordinator.client.succession import successor
from axon_ps.coordinator.messages import (
    copied_to_proto,
    corrupted_to_proto,
    event_from_proto,
    initialized_to_proto,
    join_to_proto,
    knowledge_to_proto,
    snapshot_report_to_proto,
    step_message_to_proto,
)
from axon_ps.coordinator.span_messages import report_to_proto
from axon_ps.errors import (
    AxonError,
    Broken,
    Busy,
    Closed,
    GenerationChanged,
    InternalError,
    InvalidRequest,
    MemberLost,
    Misuse,
    Timeout,
    Unreachable,
    again,
)
from axon_ps.observe.log_buffer import LogBuffer, collect
from axon_ps.observe.reminders import reminder_pauses
from axon_ps.observe.tracing.span import TraceOrder
from axon_ps.observe.tracing.tracer import Collection, Tracer
from axon_ps.rpc.auth import credentials as auth
from axon_ps.rpc.auth.identity import Principal
from axon_ps.rpc.deadlines import Deadline
from axon_ps.rpc.security import Security
from axon_ps.rpc.service import Stub
from axon_ps.rpc.status import error_to_detail
from axon_ps.rpc.stream import Stream
from axon_ps.types import Decision, Membership, Role
from axon_ps.wire import build
from axon_ps.wire.events import (
    CheckpointReply,
    Copied,
    Corrupted,
    Event,
    JobState,
    JoinRequest,
    KnowledgeRequest,
    KnownNames,
    Ready,
    Registered,
    RestoreOrder,
    RevokedNames,
    ServerEvent,
    ServerMemory,
    SessionLost,
    SessionRestored,
    SnapshotFile,
    SnapshotOrder,
    SnapshotReport,
    Status,
    Vote,
    Welcome,
)
from axon_ps.wire.v1 import (
    checkpoint_pb2,
    common_pb2,
    coordinator_pb2,
    membership_pb2,
    memory_pb2,
    policy_pb2,
    session_pb2,
)

__all__ = [
    "CheckpointReply",
    "CoordinatorClient",
    "Event",
    "JobState",
    "OperatorClient",
    "Registered",
    "RestoreOrder",
    "SessionLost",
    "SessionRestored",
    "SnapshotFile",
    "SnapshotOrder",
    "Status",
]

LEAVE_S: Final = 2.0
"""Most seconds that `close` waits until the coordinator has received the Leave."""

RETIRE_S: Final = 1.0
"""Seconds that calls may stay on a channel that was replaced."""

FAILOVER_S: Final = 0.25
"""Most seconds between two rounds, if there are several coordinators: one of them leads soon."""

STANDBY_S: Final = 0.2
"""Most seconds between two requests of a standby to join."""

RENEW_S: Final = 1.0
"""Seconds between two checks for newer credentials."""

_logger = logging.getLogger(__name__)
_PRINCIPALS: Final = {Role.WORKER: Principal.WORKER, Role.SHARD: Principal.SHARD}
_TEMPORARY: Final = (Broken, Busy, GenerationChanged)
"""Errors of a session after which joining again may succeed; every other one is final."""


class CoordinatorClient(Calls):
    """One member's session. Make it anywhere; `start` and every other coroutine run on one event loop.

    Args:
        address: "host:port" of the coordinator, or several, of which one leads, with commas between them.
        job: name of the job.
        role: worker or shard server.
        node: host or container.
        security: TLS and token.
        incarnation: 32 hex digits; None = a random one.
        listen_address: shard server: "host:port" where workers reach it.
        requested_rank: wanted rank; -1 = any.
        world_size: worker: how many workers the job starts with; 0 = as the coordinator is configured.
        standby: worker: wait until the job has lost a worker, and replace it.
        known: shard server: the optimizers and compressors it can make; None = they are not listed.
        on_event: gets every event, on the loop's thread; must not block. If it raises, the session fails.
        reconnect_timeout_s: seconds for which a broken session may be reconnected before it fails.

    Attributes:
        rank: ours, from the first Welcome on; -1 before.
        lease_s: seconds for which the coordinator tolerates our silence.
        world_size: workers the job starts with.
        num_shards: shard servers of the job.
        measure: returns the measurements of heartbeats by name, for `axon-ps status` and `top`. Called on the loop's
            thread.
        log: the log of this process, also sent in heartbeats; None = another member of this process sends it.
        memory: shard server: returns the memory that it has for parameters; None = not reported.
        state_id: id of the job's durable state, the same for all members; empty before the first Welcome.
        connectivity: the findings of probes, for the coordinator.
        tracer: this member's spans; those that the coordinator orders are sent to it.
        revocations: the names that the servers of this process refuse; gets the job's revoked names.
    """

    def __init__(
        self,
        address: str,
        *,
        job: str,
        role: Role,
        node: str,
        security: Security,
        incarnation: str | None = None,
        listen_address: str = "",
        requested_rank: int = -1,
        world_size: int = 0,
        standby: bool = False,
        known: KnownNames | None = None,
        on_event: Callable[[Event], None],
        reconnect_timeout_s: float = 60.0,
    ) -> None:
        self.address = address
        self._addresses = Addresses(address)
        self.job = job
        self.role = role
        self.node = node
        self.incarnation = incarnation or uuid.uuid4().hex
        self.rank = -1
        self.lease_s = 5.0
        self.world_size = world_size
        self.num_shards = 0
        self.measure: Callable[[], Mapping[str, float]] = dict
        self.log: LogBuffer | None = None
        self.memory: Callable[[], ServerMemory | None] = lambda: None
        self.connectivity = ConnectivityReport(lambda: self.lease_s)
        self.connectivity.changed = lambda: self._send(heartbeat(self.measure, self.log, self.connectivity.take()))
        self.tracer = Tracer()
        self.state_id, self.revocations = "", auth.Revocations()
        self._listen_address = listen_address
        self._requested_rank = requested_rank
        self._standby = standby
        self._known = known
        self._security = security.acting(_PRINCIPALS[role], job)
        self._on_event = on_event
        self._reconnect_timeout_s = reconnect_timeout_s
        self._random = random.Random(self.incarnation)
        self._delivery = Delivery()
        self._outbox: asyncio.Queue[session_pb2.SessionRequest] = asyncio.Queue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._channel: Any = None  # of `rpc.channels.connect`
        self._stub: Stub | None = None
        self._retiring: set[asyncio.Task[None]] = set()
        self._task: asyncio.Task[None] | None = None
        self._attached = asyncio.Event()
        self._reminder: asyncio.Task[None] | None = None
        self._renewed = asyncio.Event()  # set, and replaced, when the membership changes or the session fails
        self._error: AxonError | None = None
        self._last_error: AxonError | None = None
        self._closing = False
        self._successor: Endpoint | None = None  # the address of another leader, if that ended our session

    @property
    def membership(self) -> Membership | None:
        """The newest membership; None before the first."""
        return self._delivery.membership

    @property
    def job_state(self) -> JobState | None:
        """The newest state of the job; None before the first."""
        return self._delivery.job_state

    # ------------------------------------------------------------------ start and close

    async def start(self, timeout_s: float | None = None) -> None:
        """Join; return when rank, membership and job state are known.

        Raises:
            Unreachable: there was no answer in time.
            Busy: no rank became free in time.
            PermissionDenied: wrong job name or token.
            InvalidRequest: the rank is taken, or the join request is invalid.
            Misuse: it was started before.

        After an error: we are not a member; `close` and make another client to try again.
        """
        if self._task is not None or self._closing:
            raise Misuse("this CoordinatorClient was started before; make a new one")
        self._loop = asyncio.get_running_loop()
        await self._addresses.look_up()
        self._connect()
        self.log = collect(self._security.secrets())
        self._remind()
        self._task = asyncio.create_task(self._run(Deadline(timeout_s)), name=f"session {self.incarnation[:8]}")
        try:
            async with asyncio.timeout(timeout_s) as limit:
                await self._wait_attached()
        except TimeoutError:
            await self.close()
            if not limit.expired():  # the session failed with this error
                raise
            error = self._last_error or Unreachable(f"nobody answers at {self.address}")
            error.add_note(f"tried for {timeout_s:g} s")
            raise error from None
        except BaseException:
            await self.close()
            raise

    async def close(self, reason: str = "", *, finished: bool = False) -> None:
        """Leave the job; the others are told at once. Harmless when repeated, or before `start`.

        Args:
            reason: for the others' logs.
            finished: worker: it has done all its work and needs no replacement.
        """
        self._closing = True
        try:
            if self._task is not None and not self._task.done():
                await _leave(self, self._task, reason, finished)
        finally:
            if self.log is not None:
                self.log.close()
        self._fail(Closed("the session with the coordinator was closed by its owner"))
        if self._channel is not None:
            await asyncio.gather(self._channel.close(), *self._retiring)

    def context(self) -> common_pb2.CallContext:
        """Return the context of a call to a coordinator or a shard server, in the newest generation that we know."""
        membership = self.membership
        return common_pb2.CallContext(
            job=self.job,
            generation=membership.generation if membership is not None else 0,
            incarnation=self.incarnation,
            state_id=self.state_id,
        )

    # ------------------------------------------------------------------ votes and reports

    def vote(self, vote: Vote, replica: int | None = None) -> None:
        """Worker: report that nothing else of a step is pushed. It is sent again after a reconnect while it is current.

        With asynchronous replicas, the vote's step is the clock of our `replica`.
        """
        self._call_soon(self._send_step_message, vote, replica)

    def arrived(self, *, generation: int, step: int, model: int = 0, blocked: bool = False) -> None:
        """Worker: report that it waits in a step until the servers take its gradients."""
        arrived = policy_pb2.Arrived(generation=generation, step=step, model=model, blocked=blocked)
        self._call_soon(self._send, session_pb2.SessionRequest(arrived=arrived))

    def ready(self, ready: Ready, replica: int | None = None) -> None:
        """Shard server: report that every slice has the gradients of every replica.

        It is sent again after a reconnect while it is current. With asynchronous replicas, `replica` is the replica of
        these gradients, and the step its clock.
        """
        self._call_soon(self._send_step_message, ready, replica)

    def copied(self, copied: Copied) -> None:
        """Shard server: report that slices were received from their primaries.

        If the report is lost, they are copied again.
        """
        self._call_soon(self._send_recorded, self._delivery.record_copied, copied_to_proto(copied))

    def corrupted(self, report: Corrupted) -> None:
        """Shard server: report that memory of a slice failed.

        It is sent again after a reconnect, until the slice has been received again.
        """
        self._call_soon(self._send_recorded, self._delivery.record_corrupted, corrupted_to_proto(report))

    def initialized(self, *, version: int, epoch: int, model: int = 0) -> None:
        """Shard server: report that every slice of a model has its values. It is sent again after a reconnect."""
        message = initialized_to_proto(version, epoch, model)
        self._call_soon(self._send_recorded, self._delivery.record_initialized, message)

    def snapshot_report(self, id: int, files: tuple[SnapshotFile, ...] = (), error: AxonError | None = None) -> None:
        """Shard server: answer a `SnapshotOrder` with the files written, or with an error."""
        self._call_soon(self._send, snapshot_report_to_proto(SnapshotReport(id=id, files=files, error=error)))

    def restore_report(self, epoch: int, error: AxonError, *, model: int = 0) -> None:
        """Shard server: report the error of a `RestoreOrder` (success is reported by `initialized`)."""
        report = checkpoint_pb2.RestoreReport(epoch=epoch, error=error_to_detail(error), model=model)
        message = session_pb2.SessionRequest(restore=report)
        self._call_soon(self._send_recorded, self._delivery.record_restore_failure, message)

    def out_of_memory(self, model: int, placement: int, error: AxonError) -> None:
        """Shard server: report that it has no memory for its slices of a model. It is sent again after a reconnect."""
        report = memory_pb2.NoRoom(model=model, placement=placement, error=error_to_detail(error))
        message = session_pb2.SessionRequest(no_room=report)
        self._call_soon(self._send_recorded, self._delivery.record_out_of_memory, message)

    def spans(self, collection: Collection) -> None:
        """Answer a `TraceOrder`."""
        self._call_soon(self._send, session_pb2.SessionRequest(spans=report_to_proto(collection, time.time_ns())))

    def _call_soon(self, fn: Callable[..., None], *args: Any) -> None:
        if self._loop is None:
            raise Misuse("the session has not been started; await start() first")
        try:
            inside = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            inside = False
        if inside:
            fn(*args)
        else:
            self._loop.call_soon_threadsafe(fn, *args)

    def _send_step_message(self, message: Vote | Ready, replica: int | None) -> None:
        if events := self._delivery.record(message, replica):
            self._emit(events)
        else:
            self._send(step_message_to_proto(message))

    def _send_recorded(self, record: Callable[[Any], None], message: session_pb2.SessionRequest) -> None:
        """Send a message that is sent again after a reconnect."""
        record(message)
        self._send(message)

    def _send(self, message: session_pb2.SessionRequest) -> None:
        """Queue a message for the present stream; `_delivery` sends those again that must not be lost with it."""
        if self._attached.is_set():
            self._outbox.put_nowait(message)

    # ------------------------------------------------------------------ the session

    async def _run(self, first: Deadline) -> None:
        """Maintain a session until it is closed or refused, or reconnecting has timed out."""
        deadline, wait_s = first, 0.05
        try:
            while not self._closing:
                try:
                    await self._session()
                    return
                except _TEMPORARY as error:
                    self._last_error = again(error)
                    if was_attached := self._attached.is_set():
                        self._detach(error)
                        deadline, wait_s = Deadline(self._reconnect_timeout_s), 0.05
                    if deadline.expired:
                        raise
                    before = self._addresses.present
                    more = isinstance(error, Broken) and await self._addresses.next(self._successor)
                    self._successor = None
                    if self._addresses.present != before or not (was_attached or isinstance(error, Busy)):
                        self._reconnect()
                    if more:
                        continue
                await asyncio.sleep(min(self._random.uniform(wait_s / 2, wait_s), deadline.remaining()))
                longest_s = FAILOVER_S if len(self._addresses) > 1 else STANDBY_S if self._standby else 2.0
                wait_s = min(wait_s * 2, longest_s, self.lease_s / 4)
        except InvalidRequest as error:  # of a member: its rank was given to another, or the job is another one
            was_member = self.state_id != ""
            reason = (
                f"the coordinator gave up this {self.role.value}, rank {self.rank}, and does not take it back: {error}"
            )
            self._fail(MemberLost(reason) if was_member else error)
        except AxonError as error:
            self._fail(error)
        except Exception as error:
            _logger.exception("the session with the coordinator failed")
            self._fail(InternalError(f"the session failed: {type(error).__name__}: {error}"))

    async def _session(self) -> None:
        """Run one stream from Join to its end; return only after a Leave of ours."""
        assert self._stub is not None
        await self._addresses.until_connected(self._channel)
        stream = self._stub.open("Session")
        self._outbox = asyncio.Queue()
        tasks: list[asyncio.Task[None]] = []
        try:
            await stream.write(join_to_proto(_join_request(self), self.role))
            async for event in _events(stream):
                if isinstance(event, KnowledgeRequest):
                    await stream.write(knowledge_to_proto(self._delivery.knowledge(self.revocations.reasons)))
                    continue
                await self._receive(event)
                if not tasks:  # not before the Welcome, which has the lease
                    tasks.append(asyncio.create_task(self._write(stream, self._outbox)))
                    tasks.append(asyncio.create_task(_renew(self, self._stub)))
                    if len(self._addresses) > 1:
                        tasks.append(asyncio.create_task(self._follow(stream)))
            if not self._closing:
                raise Broken(f"the coordinator at {self.address} ended the session")
        except Closed:
            if self._successor is None:
                raise
            raise Broken(f"another coordinator leads, at {self._successor.address}") from None
        finally:
            stream.cancel()
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)

    async def _follow(self, stream: Stream) -> None:
        """End the session when another coordinator leads."""
        self._successor = await successor(self._addresses, self._security, self.job)
        stream.cancel()

    async def _write(self, stream: Stream, outbox: asyncio.Queue[session_pb2.SessionRequest]) -> None:
        """Send the queued messages, and regular heartbeats."""
        sent_s, punctuality = -math.inf, Punctuality()
        with contextlib.suppress(AxonError):  # the reader gets the error that ended the stream
            while True:
                pause_s = interval_s(self.lease_s)
                try:
                    with punctuality.expected(pause_s):
                        async with asyncio.timeout(pause_s):
                            message = await outbox.get()
                    await stream.write(message)
                    if message.HasField("leave"):
                        await stream.done_writing()
                        return
                except TimeoutError:
                    sent_s = -math.inf
                if time.monotonic() - sent_s >= pause_s:
                    sent_s = time.monotonic()
                    await stream.write(heartbeat(self.measure, self.log, self.connectivity.take()))
                    punctuality.sent()

    async def _receive(self, event: ServerEvent) -> None:
        if isinstance(event, RevokedNames):
            return self.revocations.set(event.reasons)
        if isinstance(event, TraceOrder):
            return self.tracer.order(event, self.spans)
        if isinstance(event, Welcome):
            build.check(event.build, f"the coordinator at {self.address}", f"this {self.role.value}")
            self.rank, self.lease_s, self.state_id = event.rank, event.lease_s, event.state_id
            self.world_size, self.num_shards = event.world_size or self.world_size, event.num_shards
        was_member = self.membership is not None
        for new in self._delivery.receive(event):
            self._on_event(new)
            if self.tracer.active and isinstance(new, Decision):
                self.tracer.decided(new.model, new.step)
        if not isinstance(event, Membership):
            return
        if not self._attached.is_set():
            self._attached.set()
            self._addresses.found()
            if self._reminder is not None:
                self._reminder.cancel()
            for message in self._delivery.to_resend():
                self._outbox.put_nowait(message)
            if was_member:
                self._emit([SessionRestored()])
        self._wake()

    def _wake(self) -> None:
        """Wake all tasks that wait for a membership."""
        self._renewed.set()
        self._renewed = asyncio.Event()

    def _emit(self, events: Sequence[Event]) -> None:
        for event in events:
            self._on_event(event)

    # ------------------------------------------------------------------ when it breaks

    def _connect(self) -> None:
        self._channel = self._addresses.connect(self._security)
        self._stub = Stub(self._channel, SERVICE, self._security)

    def _reconnect(self) -> None:
        """Open a fresh channel, so that the next attempt connects at once instead of after gRPC's own back-off."""
        old = self._channel
        self._connect()
        retiring = asyncio.create_task(old.close(RETIRE_S))  # calls in progress on it fail by themselves
        self._retiring.add(retiring)
        retiring.add_done_callback(self._retiring.discard)

    def _detach(self, error: AxonError) -> None:
        self._attached.clear()
        _logger.warning("%s %d lost its session with the coordinator: %s", self.role.value, self.rank, error)
        self._remind()
        self._emit([SessionLost(error=error)])

    def _remind(self) -> None:
        """Log at growing intervals that this member has no session, until it has one."""
        self._reminder = asyncio.create_task(_log_waiting(self))

    def _fail(self, error: AxonError) -> None:
        """Fail the session; all calls that wait for it get `error`."""
        if self._reminder is not None:
            self._reminder.cancel()
        if self._error is not None:
            return
        self._error = again(error)
        self._attached.set()
        self._wake()
        if self.membership is not None and not self._closing:
            try:
                self._emit([SessionLost(error=error, final=True)])
            except Exception:
                _logger.exception("on_event failed on the event that the session is lost")

    # ------------------------------------------------------------------ unary calls

    @property
    def _is_over(self) -> bool:
        return self._closing or self._error is not None

    async def _wait_attached(self) -> None:
        await self._attached.wait()
        if self._error is not None:
            raise again(self._error)

    async def _connected(self, deadline: Deadline) -> Stub:
        if self._task is None:
            raise Misuse("the session has not been started; await start() first")
        try:
            async with _until(deadline) as limit:
                await self._wait_attached()
        except TimeoutError:
            if not limit.expired():  # the session ended with this error
                raise
            raise Timeout(f"the session with the coordinator at {self.address} was not restored in time") from None
        assert self._stub is not None
        return self._stub

    async def _reached(self, generation: int, deadline: Deadline) -> None:
        def there() -> bool:
            known = self.membership is not None and self.membership.generation >= generation
            return known or self._error is not None

        try:
            async with _until(deadline):
                while not there():
                    await self._renewed.wait()
        except TimeoutError:
            raise Timeout(f"the session did not announce generation {generation} in time") from None
        if self._error is not None:
            raise again(self._error)


async def _events(stream: Stream) -> AsyncIterator[ServerEvent]:
    """Yield the events of a stream, except for those of a newer protocol."""
    known: Membership | None = None
    async for message in stream:
        event = event_from_proto(message, known)
        if isinstance(event, Membership):
            known = event
        if event is not None:
            yield event


def _join_request(client: CoordinatorClient) -> JoinRequest:
    """Return the request with which a client joins."""
    return JoinRequest(
        job=client.job,
        incarnation=client.incarnation,
        node=client.node,
        address=client._listen_address,
        requested_rank=client._requested_rank if client.membership is None else client.rank,
        world_size=client.world_size if client.role is Role.WORKER else 0,
        standby=client._standby and client.membership is None,
        known=client._known,
        memory=client.memory(),
        state_id=client.state_id,
        position=client._delivery.position,
        connectivity=client.connectivity.begin(),
    )


def _until(deadline: Deadline) -> asyncio.Timeout:
    """Return a context that is ended at a deadline."""
    left_s = deadline.remaining()
    return asyncio.timeout(None if math.isinf(left_s) else left_s)


async def _leave(client: CoordinatorClient, running: asyncio.Task[None], reason: str, finished: bool) -> None:
    """Send a Leave to the coordinator, and end the session."""
    client.tracer.finish()
    if client._attached.is_set():
        client._outbox.put_nowait(heartbeat(client.measure, client.log))  # with the last log records
        leave = membership_pb2.Leave(reason=reason[:200], finished=finished)
        client._outbox.put_nowait(session_pb2.SessionRequest(leave=leave))
        await asyncio.wait([running], timeout=LEAVE_S)
    running.cancel()
    await asyncio.wait([running])


async def _renew(client: CoordinatorClient, stub: Stub) -> None:
    """Send the coordinator newer credentials when there are any: it ends a session whose credentials have expired."""
    known = stub.credentials()
    while True:
        await asyncio.sleep(RENEW_S)
        with contextlib.suppress(AxonError):  # it is tried again
            if (newest := stub.credentials()) != known:
                any_key = coordinator_pb2.KVRequest(context=client.context(), op=coordinator_pb2.KV_OP_GET, key="any")
                await stub.call("KV", any_key, timeout_s=client.lease_s)
                known = newest


async def _log_waiting(client: CoordinatorClient) -> None:
    """Log at growing intervals that a member has no session, until it has one."""
    began_s = time.monotonic()
    for pause_s in reminder_pauses():
        await asyncio.sleep(pause_s)
        if client._attached.is_set():
            return
        waited_s, why = time.monotonic() - began_s, client._last_error or "no answer"
        state = "" if client.rank < 0 else "; what this process holds is kept"
        _logger.warning(
            "no session with coordinator %s for %.0f s, trying again: %s%s", client.address, waited_s, why, state
        )

"""A member's end of its session with the coordinator.

`CoordinatorClient` joins, sends heartbeats, delivers events (in order, on the loop's thread), and sends votes and
reports. When the stream breaks, it reconnects to the coordinator that leads then. All of it runs on one event loop, the
loop of `start`. `vote`, `ready`, `initialized` and the reports do not block and may be called from any thread.

Invariants (ensured by `delivery`): events arrive in the coordinator's order, a decision and an order at most once, and
the generation never falls. Every vote is followed by exactly one `Decision` of its step.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any, Final

from axon_ps.coordinator.client.availability import Availability, in_time
from axon_ps.coordinator.client.calls import Calls
from axon_ps.coordinator.client.connectivity_report import ConnectivityReport
from axon_ps.coordinator.client.delivery import Delivery
from axon_ps.coordinator.client.heartbeat import heartbeat
from axon_ps.coordinator.client.operator import OperatorClient
from axon_ps.coordinator.client.session_stream import Handlers, SessionStream
from axon_ps.coordinator.messages import (
    ARRIVED,
    copied_to_proto,
    corrupted_to_proto,
    initialized_to_proto,
    join_to_proto,
    knowledge_to_proto,
    snapshot_report_to_proto,
    step_message_to_proto,
)
from axon_ps.coordinator.span_messages import report_to_proto
from axon_ps.errors import (
    AxonError,
    Closed,
    InternalError,
    InvalidRequest,
    MemberLost,
    Misuse,
    Unreachable,
)
from axon_ps.observe.log_buffer import LogBuffer, collect
from axon_ps.observe.tracing.span import TraceOrder
from axon_ps.observe.tracing.tracer import Collection, Tracer
from axon_ps.rpc.auth import credentials as auth
from axon_ps.rpc.auth.identity import Principal
from axon_ps.rpc.deadlines import Deadline
from axon_ps.rpc.security import Security
from axon_ps.rpc.service import Stub
from axon_ps.rpc.status import error_to_detail
from axon_ps.types import Decision, Membership, Role
from axon_ps.wire import build
from axon_ps.wire.events import (
    Arrived,
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
    membership_pb2,
    memory_pb2,
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

_logger = logging.getLogger(__name__)
_PRINCIPALS: Final = {Role.WORKER: Principal.WORKER, Role.SHARD: Principal.SHARD}


class CoordinatorClient(Calls):
    """One member's session. Make it anywhere. `start` and every other coroutine run on one event loop.

    Args:
        address: "host:port" of the coordinator, or several, of which one leads, with commas between them. A malformed
            one is refused with a `ConfigurationError`.
        job: name of the job.
        role: worker or shard server.
        node: host or container.
        security: TLS and token.
        incarnation: 32 hex digits; None = a random one.
        listen_address: shard server: "host:port" where workers reach it.
        requested_rank: wanted rank; -1 = any.
        world_size: worker: number of workers that the job starts with; 0 = as the coordinator is configured.
        standby: worker: wait until the job has lost a worker, and replace it.
        known: shard server: the optimizers and compressors it can make; None = they are not listed.
        on_event: gets every event, on the loop's thread; must not block. If it raises, the session fails.
        reconnect_timeout_s: seconds for which a broken session may be reconnected before it fails.

    Attributes:
        rank: ours, from the first Welcome on; -1 before.
        lease_s: seconds for which the coordinator tolerates our silence.
        sums_addends: whether the coordinator decides steps of several addends.
        world_size: workers the job starts with.
        num_shards: shard servers of the job.
        measure: returns the measurements of heartbeats by name; called on the loop's thread.
        log: the log of this process, also sent in heartbeats; None = another member of this process sends it.
        memory: shard server: returns the memory that it has for parameters; None = not reported.
        state_id: id of the job's durable state, the same for all members; empty before the first Welcome.
        connectivity: the findings of probes, for the coordinator.
        tracer: this member's spans. Those that the coordinator orders are sent to it.
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
        self.job = job
        self.role = role
        self.node = node
        self.incarnation = incarnation or uuid.uuid4().hex
        self.rank, self.lease_s = -1, 5.0
        self.sums_addends = True
        self.world_size, self.num_shards = world_size, 0
        self.measure: Callable[[], Mapping[str, float]] = dict
        self.log: LogBuffer | None = None
        self.memory: Callable[[], ServerMemory | None] = lambda: None
        self.connectivity = ConnectivityReport(lambda: self.lease_s)
        self.connectivity.changed = lambda: self._stream.send(self._heartbeat())
        self.tracer = Tracer()
        self.state_id, self.revocations = "", auth.Revocations()
        self._listen_address = listen_address
        self._requested_rank = requested_rank
        self._standby = standby
        self._known = known
        self._security = security.acting(_PRINCIPALS[role], job)
        self._on_event = on_event
        self._delivery = Delivery()
        self._availability = Availability()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._closing = False
        self._stream = SessionStream(
            self,
            Handlers(
                request=self._request,
                heartbeat=self._heartbeat,
                receive=self._receive,
                broke=lambda error: on_event(SessionLost(error=error)),
            ),
            self._security,
            self._availability,
            reconnect_timeout_s=reconnect_timeout_s,
            standby=standby,
        )

    @property
    def membership(self) -> Membership | None:
        """The newest membership; None before the first."""
        return self._delivery.membership

    @property
    def job_state(self) -> JobState | None:
        """The newest state of the first model; None before the first."""
        return self._delivery.job_state

    # ------------------------------------------------------------------ start and close

    async def start(self, timeout_s: float | None = None) -> None:
        """Join; return when rank, membership and job state are known.

        Raises:
            Broken: no leader answered in time (`Unreachable`, `NotLeader`).
            Busy: no rank became free in time.
            PermissionDenied: wrong job name or token.
            InvalidRequest: the coordinator refuses the request: the rank is taken, for example.
            Misuse: it was started before.

        After an error: we are not a member. `close` and make another client to try again.
        """
        if self._task is not None or self._closing:
            raise Misuse("this CoordinatorClient was started before; make a new one")
        self._loop = asyncio.get_running_loop()
        await self._stream.open()
        self.log = collect(self._security.secrets())
        self._task = asyncio.create_task(self._run(Deadline(timeout_s)), name=f"session {self.incarnation[:8]}")
        try:
            async with asyncio.timeout(timeout_s) as limit:
                await self._availability.until_up()
        except TimeoutError:
            await self.close()
            if not limit.expired():  # the session failed with this error
                raise
            error = self._stream.last_error or Unreachable(f"nobody answers at {self.address}")
            error.add_note(f"tried for {timeout_s:g} s")
            raise error from None
        except BaseException:
            await self.close()
            raise

    async def close(self, reason: str = "", *, finished: bool = False) -> None:
        """Leave the job. The others are told at once. This is harmless when repeated, or before `start`.

        Args:
            reason: for the others' logs.
            finished: worker: it has done all its work and needs no replacement.
        """
        self._closing = True
        try:
            if self._task is not None and not self._task.done():
                self.tracer.finish()
                leave = membership_pb2.Leave(reason=reason[:200], finished=finished)
                last = heartbeat(self.measure, self.log)  # with the last log records
                await self._stream.leave(self._task, last, session_pb2.SessionRequest(leave=leave))
        finally:
            if self.log is not None:
                self.log.close()
        self._fail(Closed("the session with the coordinator was closed by its owner"))
        await self._stream.close()

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

    def arrived(self, arrived: Arrived) -> None:
        """Worker: report that it waits in a step until the servers take its gradients."""
        self._call_soon(self._stream.send, session_pb2.SessionRequest(arrived=ARRIVED.to_proto(arrived)))

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
        self._call_soon(self._stream.send, snapshot_report_to_proto(SnapshotReport(id=id, files=files, error=error)))

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
        report = report_to_proto(collection, time.time_ns())
        self._call_soon(self._stream.send, session_pb2.SessionRequest(spans=report))

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
        aborts = self._delivery.record(message, replica)
        for abort in aborts:
            self._on_event(abort)
        if not aborts:
            self._stream.send(step_message_to_proto(message))

    def _send_recorded(self, record: Callable[[Any], None], message: session_pb2.SessionRequest) -> None:
        """Send a message that is sent again after a reconnect."""
        record(message)
        self._stream.send(message)

    # ------------------------------------------------------------------ the session

    async def _run(self, first: Deadline) -> None:
        """Maintain a session until it is closed or refused, or reconnecting has timed out."""
        try:
            await self._stream.run(first)
        except InvalidRequest as error:  # of a member: its rank was given to another, or the job is another one
            was_member, me = self.state_id != "", f"this {self.role.value}, rank {self.rank}"
            reason = f"the coordinator gave up {me}, and does not take it back: {error}"
            self._fail(MemberLost(reason) if was_member else error)
        except AxonError as error:
            self._fail(error)
        except Exception as error:
            _logger.exception("the session with the coordinator failed")
            self._fail(InternalError(f"the session failed: {type(error).__name__}: {error}"))

    def _request(self) -> session_pb2.SessionRequest:
        request = JoinRequest(
            job=self.job,
            incarnation=self.incarnation,
            node=self.node,
            address=self._listen_address,
            requested_rank=self._requested_rank if self.membership is None else self.rank,
            world_size=self.world_size if self.role is Role.WORKER else 0,
            standby=self._standby and self.membership is None,
            known=self._known,
            memory=self.memory(),
            state_id=self.state_id,
            position=self._delivery.position,
            connectivity=self.connectivity.begin(),
        )
        return join_to_proto(request, self.role)

    def _heartbeat(self) -> session_pb2.SessionRequest:
        return heartbeat(self.measure, self.log, self.connectivity.take())

    def _receive(self, event: ServerEvent) -> session_pb2.SessionRequest | None:
        """Take an event; return the answer, if it has one."""
        if isinstance(event, KnowledgeRequest):
            return knowledge_to_proto(self._delivery.knowledge(self.revocations.reasons))
        if isinstance(event, RevokedNames):
            self.revocations.set(event.reasons)
            return None
        if isinstance(event, TraceOrder):
            self.tracer.order(event, self.spans)
            return None
        if isinstance(event, Welcome):
            self._welcomed(event)
        was_member = self.membership is not None
        for new in self._delivery.receive(event):
            self._on_event(new)
            if self.tracer.active and isinstance(new, Decision):
                self.tracer.decided(new.model, new.step)
        if isinstance(event, Membership):
            self._attach(was_member)
        return None

    def _welcomed(self, event: Welcome) -> None:
        build.check(event.build, f"the coordinator at {self.address}", f"this {self.role.value}")
        self.rank, self.lease_s, self.state_id = event.rank, event.lease_s, event.state_id
        self.sums_addends = event.addends
        self.world_size, self.num_shards = event.world_size or self.world_size, event.num_shards

    def _attach(self, was_member: bool) -> None:
        """Let messages be sent again, now that the membership is known."""
        if not self._availability.is_up:
            self._stream.attached(self._delivery.to_resend())
            if was_member:
                self._on_event(SessionRestored())
        self._availability.changed()

    def _fail(self, error: AxonError) -> None:
        """Fail the session. All callers that wait for it get `error`."""
        if not self._availability.fail(error):
            return
        if self.membership is not None and not self._closing:
            try:
                self._on_event(SessionLost(error=error, final=True))
            except Exception:
                _logger.exception("on_event failed on the event that the session is lost")

    # ------------------------------------------------------------------ unary calls

    @property
    def _is_over(self) -> bool:
        return self._closing or self._availability.error is not None

    async def _connected(self, deadline: Deadline) -> Stub:
        if self._task is None:
            raise Misuse("the session has not been started; await start() first")
        late = f"the session with the coordinator at {self.address} was not restored in time"
        await in_time(self._availability.until_up(), deadline, late)
        return self._stream.stub

    async def _reached(self, generation: int, deadline: Deadline) -> None:
        def reached() -> bool:
            return self.membership is not None and self.membership.generation >= generation

        late = f"the session did not announce generation {generation} in time"
        await in_time(self._availability.until(reached), deadline, late)

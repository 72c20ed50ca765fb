"""The coordinator's protocol: messages in, messages out. The state machine decides on their effects.

See "An end of input may be a broken connection" in `rpc.service`: a stream that ends without a Leave is a lost member.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Final

from axon_ps.coordinator.core.access.callers import Caller
from axon_ps.coordinator.core.actions import Action
from axon_ps.coordinator.core.kv import KVResult
from axon_ps.coordinator.core.models import MAX_MODELS, MAX_SLICES
from axon_ps.coordinator.core.roster import name_of
from axon_ps.coordinator.core.state import CoordinatorState
from axon_ps.coordinator.messages import (
    checkpoint_to_proto,
    connectivity_from_proto,
    copied_from_proto,
    corrupted_from_proto,
    event_to_proto,
    files_from_proto,
    incarnation_from_proto,
    job_to_proto,
    join_from_proto,
    knowledge_from_proto,
    ready_from_proto,
    snapshot_report_from_proto,
    status_to_proto,
    vote_from_proto,
)
from axon_ps.coordinator.server import manifests
from axon_ps.coordinator.server.audit import AuditLog, audited, recording, refused
from axon_ps.coordinator.server.feed import MAX_READERS, TICK_S, Feed
from axon_ps.coordinator.server.registering import Registering
from axon_ps.coordinator.server.shared_calls import SharedCalls
from axon_ps.coordinator.server.shell import Session, Shell
from axon_ps.coordinator.server.trace_calls import TraceCalls
from axon_ps.errors import AxonError, Broken, Busy, InternalError, InvalidRequest, Misuse, PermissionDenied
from axon_ps.observe.log_buffer import TAKEN
from axon_ps.observe.metrics.histogram import Histogram
from axon_ps.rpc.access import CHANGES_A_JOB, may_call, refusal, short
from axon_ps.rpc.auth import credentials as auth
from axon_ps.rpc.auth.identity import Principal
from axon_ps.rpc.calls.method import method_of
from axon_ps.rpc.calls.protocol import ServerCall
from axon_ps.rpc.multiplex.server import MultiplexedServer
from axon_ps.rpc.service import service_handler
from axon_ps.rpc.status import error_from_detail
from axon_ps.rpc.stream import EOF
from axon_ps.sharding.job import JobSpec
from axon_ps.storage.roots import check_allowed
from axon_ps.texts import printable
from axon_ps.types import OptimizerSpec, Role
from axon_ps.wire import codec
from axon_ps.wire.events import (
    FIRST_NAME,
    UPLOADED,
    CheckpointReply,
    JoinRequest,
    KnowledgeRequest,
    RevokeReply,
    SnapshotFile,
)
from axon_ps.wire.v1 import (
    checkpoint_pb2,
    common_pb2,
    coordinator_pb2,
    logs_pb2,
    membership_pb2,
    placement_pb2,
    revocation_pb2,
    session_pb2,
    status_pb2,
    trace_pb2,
)

JOIN_S: Final = 10.0
"""Seconds for which a stream may stay silent before its Join."""

MAX_METRICS: Final = 64
MAX_LOGS_WAIT_S: Final = 10.0
MAX_LOGS: Final = 2 * TAKEN
"""Most log records of a heartbeat; further ones count as dropped."""

MAX_RANKS: Final = 1 << 16

HOST_SESSION: Final = "HostSession"
_SERVICE: Final = coordinator_pb2.DESCRIPTOR.services_by_name["Coordinator"]

_logger = logging.getLogger(__name__)


class CoordinatorServicer:
    """The service `axon_ps.wire.v1.Coordinator`.

    Args:
        shell: performs the calls.
        feed: the history of the job, for `watch`.
        revocations: the names that the servers of this process refuse; gets the job's revoked names. None = no caller
            is refused.

    Attributes:
        feed: the same.
        has_registered: whether a model was registered under this leader.
    """

    def __init__(self, shell: Shell, feed: Feed, revocations: auth.Revocations | None = None) -> None:
        self._shell = shell
        self._revocations = revocations or auth.Revocations()
        self._revocations.set(shell.state.revocations.reasons)
        self.feed = feed
        self.has_registered = False
        self._registering = Registering(shell)
        self._saves = SharedCalls[CheckpointReply]()
        self._log_readers = 0
        self._traces = TraceCalls(shell)
        self._ends: dict[str, auth.StreamEnd] = {}  # of sessions, by incarnation
        self._handlers = (service_handler(_SERVICE, self),)
        self._vote: session_pb2.SessionRequest | None = None  # not passed on yet
        self._voters: list[Session] = []

    @property
    def audit(self) -> AuditLog:
        """The log of changes of the job, with the callers."""
        return self._shell.audit

    def refused(self, path: str, credentials: auth.Credentials, peer: str, error: AxonError) -> None:
        """Record a call that the caller's role does not allow."""
        if path in CHANGES_A_JOB:
            refused(self, short(path), credentials, peer, error)

    def job_and_name(self, incarnation: str) -> tuple[str, str]:
        """Return the job, and the caller's name in the audit log."""
        state = self._shell.state
        known = {m.incarnation: m for m in state.members_by_session().values()}.get(incarnation)
        stranger = f"no member: {incarnation[:32]!r}" if incarnation else "an operator"
        return state.config.job, stranger if known is None else name_of(known)

    async def session(self, context: ServerCall) -> None:
        """Serve a member's session."""
        first = await _first(context, "a Join")
        if first is EOF:
            return
        if not first.HasField("join"):
            raise InvalidRequest(f"a session begins with {first.WhichOneof('message')}; its first message is a Join")
        role, request = join_from_proto(first.join)
        try:
            request = _with_credentials(role, request, self._shell.state)
        except PermissionDenied as error:
            refused(self, "join", auth.calling(), context.peer(), error)
            raise
        if why := self._shell.state.behind(role, request):
            await _learn(self._shell, context, role, why)
        session = self._shell.open_session(differences=first.join.differences, send_soon=context.send_soon)
        reader: asyncio.Task[None] | None = None
        end = auth.stream_end()
        try:
            if end is not None:
                self._ends[request.incarnation] = end
            self._shell.perform(self._shell.state.join(session.number, role, request, self._shell.now()))
            if not context.receive(partial(self._take, session)):
                reader = asyncio.create_task(self._read(context, session))
            async for event in session.events():
                await context.write(event)
        finally:
            if reader is not None:
                reader.cancel()
            self._shell.close_session(session)
            if self._ends.get(request.incarnation) is end:
                self._ends.pop(request.incarnation, None)

    async def host_session(self, context: ServerCall) -> None:
        """Serve the calls of a host's members: its proxy, which holds the job's secret, names the caller of each."""
        if not auth.calling().has_secret:
            raise PermissionDenied(
                f"{auth.calling().text} may not call for others; a host's session needs the job's secret"
            )

        def handler(method: str, caller: auth.Credentials) -> Any:
            path = f"/{_SERVICE.full_name}/{method}"
            found = None if method == HOST_SESSION else method_of(self._handlers, path)
            if found is None:
                raise InvalidRequest(f"{_SERVICE.full_name} has no method {method!r} for the members of a host")
            if not may_call(caller.roles, path):
                raise PermissionDenied(refusal(caller.roles, path))
            return found

        end, ids = auth.stream_end(), []

        def named(id: str) -> None:
            if end is not None:
                ids.append(id)
                self._ends[id] = end

        calls = MultiplexedServer(context, handler, auth.calling(), self._revocations, named)
        try:
            with self._shell.host(calls.end):
                await calls.run()
        finally:
            for id in ids:
                self._ends.pop(id, None)

    async def _read(self, context: ServerCall, session: Session) -> None:
        """Pass a member's messages on until its stream ends."""
        try:
            while (message := await context.read()) is not EOF:
                self._take(session, message)
        except Exception as error:
            _logger.debug("a session's stream broke: %s", error)
        session.close(None)

    def _take(self, session: Session, message: Any) -> None:
        """Pass a member's message on; a malformed one ends the session with an error.

        Votes are passed on in the next iteration of the event loop. So one vote message of several members is one
        event.
        """
        if self._vote is not None and message is self._vote:
            self._voters.append(session)
            return
        self._pass_votes_on()
        if message is EOF:
            session.close(None)
        elif message.HasField("vote"):
            self._vote, self._voters = message, [session]
            asyncio.get_running_loop().call_soon(self._pass_votes_on)
        elif message.HasField("ready"):
            state, ready, number = self._shell.state, message.ready, session.number
            with _refusing([session]):
                asynchronous = state.is_asynchronous(ready.model)
                self._shell.spans.ready(state.rank_of(number), ready, asynchronous=asynchronous)
                self._shell.perform(state.ready(number, ready_from_proto(ready), self._shell.now()))
        else:
            with _refusing([session]):
                self._shell.perform(self._dispatch(session.number, message))

    def _pass_votes_on(self) -> None:
        message, sessions = self._vote, self._voters
        self._vote, self._voters = None, []
        if message is None:
            return
        state, numbers = self._shell.state, [session.number for session in sessions]
        if len(sessions) > 1 and not all(map(state.is_worker, numbers)):  # so that an error ends only one session
            for session in sessions:
                self._vote, self._voters = message, [session]
                self._pass_votes_on()
            return
        with _refusing(sessions):
            if self._shell.tracer.active:
                for number in numbers:
                    self._shell.spans.voted(state.rank_of(number), message.vote)
            self._shell.perform(state.vote(numbers, vote_from_proto(message.vote), self._shell.now()))

    def _dispatch(self, session: int, message: session_pb2.SessionRequest) -> list[Action]:
        state, now = self._shell.state, self._shell.now()
        kind = message.WhichOneof("message")
        if kind == "heartbeat":
            beat = message.heartbeat
            logged = state.logged(session, beat.logs[:MAX_LOGS], beat.logs_dropped + len(beat.logs[MAX_LOGS:]), now)
            return [*logged, *state.heartbeat(session, _metrics(beat), now, connectivity=connectivity_from_proto(beat))]
        if kind == "arrived":
            arrived = message.arrived
            return state.arrived(
                session, arrived.generation, arrived.step, now, model=arrived.model, blocked=arrived.blocked
            )
        if kind == "copied":
            return state.copied(session, copied_from_proto(message.copied), now)
        if kind == "corrupted":
            return state.corrupted(session, corrupted_from_proto(message.corrupted), now)
        if kind == "initialized":
            report = message.initialized
            return state.initialized(session, report.version, report.epoch, now, model=report.model)
        if kind == "spans":
            self._traces.report(session, message.spans)
            return []
        if kind == "snapshot":
            return state.snapshot_report(session, snapshot_report_from_proto(message.snapshot), now)
        if kind == "restore":
            error = error_from_detail(message.restore.error)
            return state.restore_report(session, message.restore.epoch, error, now, model=message.restore.model)
        if kind == "no_room":
            error = error_from_detail(message.no_room.error)
            return state.out_of_memory(session, message.no_room.model, message.no_room.placement, error, now)
        if kind == "leave":
            return state.leave(session, printable(message.leave.reason, 200), now, finished=message.leave.finished)
        raise InvalidRequest(f"a session's message is {kind or 'empty, or of a newer version'}; it is not understood")

    def _caller(self, context: common_pb2.CallContext) -> Caller:
        """Return the caller, if its credentials may be that member's.

        Raises:
            PermissionDenied: they name another rank.
        """
        caller, credentials = _caller(context), auth.calling()
        if caller.incarnation and credentials.rank is not None:
            rank = self._shell.state.rank_held_by(caller.incarnation)
            if rank not in (None, credentials.rank):
                raise PermissionDenied(f"{credentials.text} may not call as the member of rank {rank}")
        if (end := self._ends.get(caller.incarnation)) is not None:
            end.extend(credentials)
        return caller

    async def barrier(self, request: coordinator_pb2.BarrierRequest, context: Any) -> coordinator_pb2.BarrierReply:
        """Wait for other workers."""
        if len(request.ranks) > MAX_RANKS:
            raise InvalidRequest(f"a barrier for {len(request.ranks)} ranks; at most {MAX_RANKS} are allowed")
        caller, timeout_s = self._caller(request.context), _timeout(request.timeout_s)
        state, now = self._shell.state, self._shell.now()
        generation = await self._shell.call(
            lambda call: state.barrier(call, caller, request.name, tuple(request.ranks), now, timeout_s)
        )
        return coordinator_pb2.BarrierReply(generation=generation)

    async def kv(self, request: coordinator_pb2.KVRequest, context: Any) -> coordinator_pb2.KVReply:
        """Perform an operation on the key-value store."""
        caller, timeout_s = self._caller(request.context), _timeout(request.timeout_s)
        result: KVResult = await self._shell.call(lambda call: self._operate(call, caller, request, timeout_s))
        return coordinator_pb2.KVReply(found=result.found, value=result.value, sum=result.sum)

    def _operate(self, call: int, caller: Caller, request: coordinator_pb2.KVRequest, timeout_s: float) -> list[Action]:
        kv = self._shell.state.kv(caller)
        if request.op == coordinator_pb2.KV_OP_PUT:
            kv.put(call, request.key, request.value)
            self._shell.state.history.stored(request.key, request.value, self._shell.now())
        elif request.op == coordinator_pb2.KV_OP_GET:
            kv.get(call, request.key)
        elif request.op == coordinator_pb2.KV_OP_WAIT:
            kv.wait(call, request.key, self._shell.now(), timeout_s, caller.incarnation)
        elif request.op == coordinator_pb2.KV_OP_ADD:
            kv.add(call, request.key, request.amount)
        elif request.op == coordinator_pb2.KV_OP_COMPARE_AND_SET:
            kv.compare_and_set(call, request.key, request.expected, request.value)
        elif request.op == coordinator_pb2.KV_OP_DELETE:
            kv.delete(call, request.key)
        else:
            raise InvalidRequest(f"key-value operation {request.op} is unset or unknown")
        return self._shell.state.flush()

    @audited
    async def register(self, request: coordinator_pb2.RegisterRequest, context: Any) -> coordinator_pb2.RegisterReply:
        """Take a model's layout or optimizer, or compare with the one it has."""
        caller = self._caller(request.context)
        name = codec.name_from_proto(request.name or FIRST_NAME, "the model's name")
        spec, optimizer = await asyncio.to_thread(_registered, request, name)  # a large layout takes a while
        timeout_s = _timeout(request.timeout_s) if request.HasField("timeout_s") else math.inf
        reply = await self._registering.register(
            caller, spec, optimizer, name=name, later=request.later, timeout_s=timeout_s
        )
        self.has_registered = True
        return coordinator_pb2.RegisterReply(
            first=reply.first,
            initialized=reply.initialized,
            version=reply.version,
            upload=reply.upload,
            generation=reply.generation,
            model=reply.model,
        )

    @audited
    async def release(self, request: coordinator_pb2.ReleaseRequest, context: Any) -> coordinator_pb2.ReleaseReply:
        """Release a model."""
        caller, state = self._caller(request.context), self._shell.state
        if not (request.HasField("model") and request.name):
            raise InvalidRequest(
                f"a release names its model by number and name; this is {request.name!r}, number "
                f"{request.model if request.HasField('model') else 'not given'}"
            )
        released = await self._shell.call(lambda call: state.release(call, caller, request.model, request.name))
        return coordinator_pb2.ReleaseReply(released=released)

    @audited
    async def save_checkpoint(
        self, request: coordinator_pb2.SaveCheckpointRequest, context: Any
    ) -> checkpoint_pb2.CheckpointReply:
        """Have the servers write their slices, then the manifest; equal requests at the same version are one."""
        uri = codec.name_from_proto(request.uri, "the checkpoint's URI")
        self._shell.state.callers.check_member_or_operator(self._caller(request.context))
        check_allowed(uri)  # before the servers write there
        states = manifests.check_states(files_from_proto(request.states))
        return checkpoint_to_proto(await self.save(uri, request.extra_json, states, background=request.background))

    async def save(
        self, uri: str, extra_json: str, states: Sequence[SnapshotFile] = (), *, background: bool = False
    ) -> CheckpointReply:
        """Write a checkpoint, with a JSON object and files that are there already; see `CoordinatorState.save`."""
        state, extra = self._shell.state, manifests.check_extra(extra_json)

        async def save() -> CheckpointReply:
            log, began_s = self._shell.checkpoints, self._shell.now()
            try:
                attached = state.attached()
                snapshot = await self._shell.call(lambda call: state.save(call, uri, background=background))
                with log.doing(f"writing {uri}"):
                    info = await asyncio.to_thread(
                        manifests.complete, state.config.job, snapshot, extra, attached, states
                    )
            except AxonError as error:
                if not isinstance(error, (Busy, Misuse)):  # these are the caller's errors
                    log.failed(str(error))
                raise
            log.written(info, self._shell.now() - began_s)
            return info

        return await self._saves.run((uri, extra_json, tuple(states), state.position), save)

    @audited
    async def restore_checkpoint(
        self, request: coordinator_pb2.RestoreCheckpointRequest, context: Any
    ) -> checkpoint_pb2.CheckpointReply:
        """Read the manifest, check its files, then have the servers load their slices; or have values uploaded.

        If the job has values, which a damaged checkpoint would destroy, all files are read here first.
        """
        state = self._shell.state
        state.callers.check_takes_away(self._caller(request.context))
        uri = codec.name_from_proto(request.uri, "the checkpoint's URI")
        if len(request.models) > MAX_MODELS:
            raise InvalidRequest(f"{len(request.models)} models are to be restored; a job has at most {MAX_MODELS}")
        if uri == UPLOADED:
            if len(request.models) != 1:
                raise InvalidRequest(f"one model is replaced at a time, by its name; {len(request.models)} are named")
            name = request.models[0]
            return checkpoint_to_proto(
                await self._shell.call(lambda call: state.replace(call, self._shell.now(), name))
            )
        with self._shell.checkpoints.doing(f"checking {uri}"):
            found = await asyncio.to_thread(
                manifests.find_complete, uri, state.specs, tuple(request.models), read=state.has_values
            )
        await self._shell.call(lambda call: state.restore(call, found.resumes, self._shell.now()))
        return checkpoint_to_proto(found.info)

    @audited
    async def drain(self, request: placement_pb2.DrainRequest, context: Any) -> placement_pb2.DrainReply:
        """Have a shard server give up its slices."""
        if not request.HasField("rank"):
            raise InvalidRequest("a drain names its shard server by rank; none is given")
        caller = self._caller(request.context)
        by_itself = self._shell.state.rank_held_by(caller.incarnation) == request.rank
        if Principal.OPERATOR not in auth.calling().roles and not by_itself:
            raise PermissionDenied(f"{auth.calling().text} may drain only itself, not shard server {request.rank}")
        return placement_pb2.DrainReply(slices=await self.drain_server(caller, request.rank))

    async def drain_by_http(self, rank: int, peer: str) -> int:
        """Drain a shard server for an operator's browser."""
        with recording(self, "drain", "", peer, {"rank": str(rank)}):
            return await self.drain_server(Caller(job=self._shell.state.config.job), rank)

    async def drain_server(self, caller: Caller, rank: int) -> int:
        """Drain a shard server; return the number of slices that it still has. See `CoordinatorState.drain`."""
        state = self._shell.state
        slices: int = await self._shell.call(lambda call: state.drain(call, caller, rank, self._shell.now()))
        return slices

    @audited
    async def revoke(self, request: revocation_pb2.RevokeRequest, context: Any) -> revocation_pb2.RevokeReply:
        """Revoke credentials."""
        caller, state = self._caller(request.context), self._shell.state
        done: RevokeReply = await self._shell.call(
            lambda call: state.revoke(call, caller, request.target, request.reason, self._shell.now())
        )
        self._revocations.set(state.revocations.reasons)
        return revocation_pb2.RevokeReply(names=done.names, members=done.members, has_secret=done.has_secret)

    async def describe(self, request: coordinator_pb2.DescribeRequest, context: Any) -> coordinator_pb2.DescribeReply:
        """Return a model with its placement, and the members."""
        name = codec.name_from_proto(request.name, "the model's name", empty=True)
        job, membership = self._shell.state.describe(self._caller(request.context), name)
        return coordinator_pb2.DescribeReply(job=job_to_proto(job), membership=codec.membership_to_proto(membership))

    def statistics(self) -> dict[str, float]:
        """Return the numbers of the job's status, by name."""
        return self._shell.statistics()

    def histograms(self) -> dict[str, Histogram]:
        """Return the times of the job's steps."""
        return {"step": self._shell.state.history.step_seconds}

    async def trace(self, request: trace_pb2.TraceRequest, context: Any) -> trace_pb2.TraceReply:
        """Have the next steps recorded, and return their spans."""
        self._shell.state.callers.check(self._caller(request.context))
        codec.name_from_proto(request.model, "the model's name", empty=True)
        return await self._traces.run(request)

    async def status(self, request: status_pb2.StatusRequest, context: Any) -> status_pb2.StatusReply:
        """Return the status of the job."""
        self._shell.state.callers.check(self._caller(request.context))
        return status_to_proto(self._shell.status())

    async def watch(self, context: ServerCall) -> None:
        """Send the job's events as they happen."""
        request = await _first(context, "a WatchRequest")
        if request is EOF:
            return
        self._shell.state.callers.check(self._caller(request.context))
        async with contextlib.aclosing(self.feed.read()) as messages:
            async for message in messages:
                await context.write(message.encoded)

    async def logs(self, request: logs_pb2.LogsRequest, context: Any) -> logs_pb2.LogsReply:
        """Return a page of the lines that the job's processes have logged."""
        self._shell.state.callers.check(self._caller(request.context))
        deadline_s = self._shell.now() + min(_timeout(request.wait_s), MAX_LOGS_WAIT_S)
        if self._log_readers >= MAX_READERS:
            raise Busy(f"{MAX_READERS} readers wait for the log already; try again later")
        self._log_readers += 1
        try:
            reply = self.logs_after(request.history, request.after)
            while not (reply.records or reply.finished) and self._shell.now() < deadline_s:
                await asyncio.sleep(TICK_S)
                reply = self.logs_after(request.history, request.after)
            return reply
        finally:
            self._log_readers -= 1

    def logs_after(self, history: str, after: float) -> logs_pb2.LogsReply:
        """Return the records after a number; from the first on, if it belongs to another history.

        Raises:
            Broken: the coordinator stops, or leads no more.
        """
        self._shell.take_logs()
        logs, members = self._shell.state.history.logs, self._shell.state.membership
        records, more = logs.after(after if history == self.feed.history else 0.0)
        return logs_pb2.LogsReply(
            history=self.feed.history, records=records, more=more, dropped=logs.dropped, finished=members.is_over
        )


def _with_credentials(role: Role, request: JoinRequest, state: CoordinatorState) -> JoinRequest:
    """Return the request to join, with the caller's credentials and with the rank that they name, if any.

    Raises:
        PermissionDenied: they do not allow it to join in this role or with this rank.
    """
    caller = auth.calling()
    held = state.rank_held_by(request.incarnation)
    rank = caller.check_join(Principal(role.value), request.requested_rank if held is None else held)
    return dataclasses.replace(
        request,
        requested_rank=rank if held is None else request.requested_rank,
        credentials=caller.names,
        makes_itself=caller.has_secret and bool(caller.names),
    )


@contextlib.contextmanager
def _refusing(sessions: Sequence[Session]) -> Iterator[None]:
    """End the sessions of some members after an error in their message."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, AxonError):
            _logger.exception("a message of a session failed")
            error = InternalError(f"a message of a session failed: {type(error).__name__}: {error}")
        for session in sessions:
            session.close(error)


async def _learn(shell: Shell, context: ServerCall, role: Role, why: str) -> None:
    """Bring an older state up to the knowledge of a joining process, if it is a shard server.

    Raises:
        Broken: the process is to join again.
    """
    _logger.warning("this coordinator's state is older than what a %s knows: %s", role.value, why)
    if role is Role.SHARD:
        await context.write(event_to_proto(KnowledgeRequest()).SerializeToString())
        answer = await _first(context, "what it knows")
        if answer is not EOF and answer.HasField("knowledge"):
            await shell.learn(knowledge_from_proto(answer.knowledge), why)
    raise Broken(
        f"the coordinator's state is older than what this process knows ({why}); it waits for a shard server that "
        "knows as much. If there is none any more: restore a newer state or a checkpoint, and start again"
    )


async def _first(context: ServerCall, what: str) -> Any:
    """Return the first message of a stream, or `EOF`."""
    try:
        async with asyncio.timeout(JOIN_S):
            return await context.read()
    except TimeoutError:
        raise Broken(f"a stream stayed silent for {JOIN_S:g} s; its first message is {what}") from None


def _caller(context: common_pb2.CallContext) -> Caller:
    incarnation = incarnation_from_proto(context.incarnation) if context.incarnation else ""
    return Caller(job=context.job, incarnation=incarnation)


def _timeout(timeout_s: float) -> float:
    """Check the time-out of a call: 0 means not to wait, and a negative value or NaN is an error."""
    if not timeout_s >= 0 or math.isnan(timeout_s):
        raise InvalidRequest(f"timeout_s is {timeout_s}; it must be 0 or more, or inf")
    return timeout_s


def _registered(request: coordinator_pb2.RegisterRequest, name: str) -> tuple[JobSpec | None, OptimizerSpec | None]:
    """Return the layout and the optimizer of a registration. It may be called in any thread."""
    if (units := len(request.spec.layout.units)) > MAX_SLICES:
        raise InvalidRequest(
            f"model {name!r} has {units} units, and a job has at most {MAX_SLICES} slices: put more parameters into "
            "each unit (unit_types, or fully_shard on larger modules)"
        )
    spec = codec.job_spec_from_proto(request.spec) if request.HasField("spec") else None
    return spec, codec.optimizer_from_proto(request.optimizer) if request.HasField("optimizer") else None


def _metrics(heartbeat: membership_pb2.Heartbeat) -> dict[str, float]:
    if len(heartbeat.metrics) > MAX_METRICS:
        raise InvalidRequest(f"a heartbeat has {len(heartbeat.metrics)} metrics; at most {MAX_METRICS} are allowed")
    return {codec.name_from_proto(name, "a metric's name"): value for name, value in heartbeat.metrics.items()}

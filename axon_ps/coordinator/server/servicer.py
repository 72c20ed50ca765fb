"""The coordinator's protocol: messages in, messages out. Their effects are those of the state machine."""

from __future__ import annotations

import asyncio
import contextlib
import math
from typing import Any, Final

from axon_ps.coordinator.core.access.callers import Caller
from axon_ps.coordinator.core.actions import Action
from axon_ps.coordinator.core.kv import KVResult
from axon_ps.coordinator.core.models import MAX_MODELS, MAX_SLICES
from axon_ps.coordinator.core.roster import name_of
from axon_ps.coordinator.messages import (
    checkpoint_to_proto,
    files_from_proto,
    job_to_proto,
    join_from_proto,
    status_to_proto,
)
from axon_ps.coordinator.server import manifests
from axon_ps.coordinator.server.audit import AuditLog, audited, recording, refused
from axon_ps.coordinator.server.checkpoint_calls import CheckpointCalls
from axon_ps.coordinator.server.feed import MAX_READERS, TICK_S, Feed
from axon_ps.coordinator.server.member_sessions import MemberSessions, admitted, first_message
from axon_ps.coordinator.server.registering import Registering
from axon_ps.coordinator.server.shell import Shell
from axon_ps.coordinator.server.trace_calls import TraceCalls
from axon_ps.errors import AxonError, Busy, InvalidRequest, PermissionDenied
from axon_ps.observe.metrics.histogram import Histogram
from axon_ps.rpc.access import CHANGES_A_JOB, may_call, refusal, short
from axon_ps.rpc.auth import credentials as auth
from axon_ps.rpc.auth.identity import Principal
from axon_ps.rpc.calls.method import method_of
from axon_ps.rpc.calls.protocol import ServerCall
from axon_ps.rpc.service import service_handler
from axon_ps.rpc.stream import EOF
from axon_ps.sharding.job import JobSpec
from axon_ps.storage.roots import check_allowed
from axon_ps.types import OptimizerSpec
from axon_ps.wire import codec
from axon_ps.wire.events import FIRST_NAME, UPLOADED, RevokeReply
from axon_ps.wire.v1 import (
    checkpoint_pb2,
    coordinator_pb2,
    logs_pb2,
    placement_pb2,
    revocation_pb2,
    status_pb2,
    trace_pb2,
)

MAX_LOGS_WAIT_S: Final = 10.0
MAX_RANKS: Final = 1 << 16

HOST_SESSION: Final = "HostSession"
_SERVICE: Final = coordinator_pb2.DESCRIPTOR.services_by_name["Coordinator"]


class CoordinatorServicer:
    """The service `axon_ps.wire.v1.Coordinator`.

    Args:
        shell: performs the calls.
        feed: the history of the job, for `watch`.
        revocations: the names that the servers of this process refuse; gets the job's revoked names. None = no caller
            is refused.

    Attributes:
        feed: the same.
        checkpoints: the calls that write and load checkpoints.
        has_registered: whether a registration has succeeded under this leader.
    """

    def __init__(self, shell: Shell, feed: Feed, revocations: auth.Revocations | None = None) -> None:
        self._shell = shell
        self._revocations = revocations or auth.Revocations()
        self._revocations.set(shell.state.revocations.reasons)
        self.feed = feed
        self.has_registered = False
        self._registering = Registering(shell)
        self.checkpoints = CheckpointCalls(shell)
        self._log_readers = 0
        self._traces = TraceCalls(shell)
        self._sessions = MemberSessions(shell, self._traces, self._revocations)
        self._handlers = (service_handler(_SERVICE, self),)

    def close(self) -> None:
        """End calls that wait for members, since the leadership is over."""
        self._traces.close()

    @property
    def audit(self) -> AuditLog:
        """The log of changes of the job, with the callers."""
        return self._shell.audit

    def refused(self, path: str, credentials: auth.Credentials, peer: str, error: AxonError) -> None:
        """Record a call that the caller's role does not allow, if its method changes a job."""
        if path in CHANGES_A_JOB:
            refused(self, short(path), credentials, peer, error)

    def job_and_name(self, incarnation: str) -> tuple[str, str]:
        """Return the job, and the caller's name in the audit log."""
        state = self._shell.state
        known = {m.incarnation: m for m in state.roster.by_session().values()}.get(incarnation)
        stranger = f"no member: {incarnation[:32]!r}" if incarnation else "an operator"
        return state.config.job, stranger if known is None else name_of(known)

    async def session(self, context: ServerCall) -> None:
        """Serve a member's session."""
        first = await first_message(context, "a Join")
        if first is EOF:
            return
        if not first.HasField("join"):
            raise InvalidRequest(f"a session begins with {first.WhichOneof('message')}; its first message is a Join")
        role, request = join_from_proto(first.join)
        try:
            request = admitted(role, request, self._shell.state)
        except PermissionDenied as error:
            refused(self, "join", auth.calling(), context.peer(), error)
            raise
        await self._sessions.serve(context, role, request, differences=first.join.differences)

    async def host_session(self, context: ServerCall) -> None:
        """Serve the calls of a host's members: its proxy, which holds the job's secret, names the caller of each."""
        if not auth.calling().has_secret:
            raise PermissionDenied(
                f"{auth.calling().text} may not call for others; a host's session needs the job's secret"
            )
        await self._sessions.serve_host(context, self._handler_for)

    def _handler_for(self, method: str, caller: auth.Credentials) -> Any:
        """Return the handler of a method for a member of a host.

        Raises:
            InvalidRequest: there is none.
            PermissionDenied: the caller may not call it.
        """
        path = f"/{_SERVICE.full_name}/{method}"
        found = None if method == HOST_SESSION else method_of(self._handlers, path)
        if found is None:
            raise InvalidRequest(f"{_SERVICE.full_name} has no method {method!r} for the members of a host")
        if not may_call(caller.roles, path):
            raise PermissionDenied(refusal(caller.roles, path))
        return found

    async def barrier(self, request: coordinator_pb2.BarrierRequest, context: Any) -> coordinator_pb2.BarrierReply:
        """Wait for other workers."""
        if len(request.ranks) > MAX_RANKS:
            raise InvalidRequest(f"a barrier for {len(request.ranks)} ranks; at most {MAX_RANKS} are allowed")
        caller, timeout_s = self._sessions.caller(request.context), _timeout(request.timeout_s)
        state, now = self._shell.state, self._shell.now()
        generation = await self._shell.call(
            lambda call: state.barrier(call, caller, request.name, tuple(request.ranks), now, timeout_s)
        )
        return coordinator_pb2.BarrierReply(generation=generation)

    async def kv(self, request: coordinator_pb2.KVRequest, context: Any) -> coordinator_pb2.KVReply:
        """Perform an operation on the key-value store."""
        caller, timeout_s = self._sessions.caller(request.context), _timeout(request.timeout_s)
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
        caller = self._sessions.caller(request.context)
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
        caller, state = self._sessions.caller(request.context), self._shell.state
        if not (request.HasField("model") and request.name):
            raise InvalidRequest(
                f"a release names its model by number and name; this is {request.name!r}, number "
                f"{request.model if request.HasField('model') else 'not given'}"
            )
        released = await self._shell.call(
            lambda call: state.registrations.release(call, caller, request.model, request.name)
        )
        return coordinator_pb2.ReleaseReply(released=released)

    @audited
    async def save_checkpoint(
        self, request: coordinator_pb2.SaveCheckpointRequest, context: Any
    ) -> checkpoint_pb2.CheckpointReply:
        """Have a checkpoint written; see `CheckpointCalls.save`."""
        uri = codec.name_from_proto(request.uri, "the checkpoint's URI")
        self._shell.state.callers.check_member_or_operator(self._sessions.caller(request.context))
        check_allowed(uri)  # before the servers write there
        states = manifests.check_states(files_from_proto(request.states))
        saved = await self.checkpoints.save(uri, request.extra_json, states, background=request.background)
        return checkpoint_to_proto(saved)

    @audited
    async def restore_checkpoint(
        self, request: coordinator_pb2.RestoreCheckpointRequest, context: Any
    ) -> checkpoint_pb2.CheckpointReply:
        """Have a checkpoint loaded, or values uploaded; see `CheckpointCalls`."""
        self._shell.state.callers.check_takes_away(self._sessions.caller(request.context))
        uri = codec.name_from_proto(request.uri, "the checkpoint's URI")
        if len(request.models) > MAX_MODELS:
            raise InvalidRequest(f"{len(request.models)} models are to be restored; a job has at most {MAX_MODELS}")
        models = tuple(request.models)
        if uri == UPLOADED:
            return checkpoint_to_proto(await self.checkpoints.replace(models))
        return checkpoint_to_proto(await self.checkpoints.restore(uri, models))

    @audited
    async def drain(self, request: placement_pb2.DrainRequest, context: Any) -> placement_pb2.DrainReply:
        """Have a shard server give up its slices."""
        if not request.HasField("rank"):
            raise InvalidRequest("a drain names its shard server by rank; none is given")
        caller = self._sessions.caller(request.context)
        by_itself = self._shell.state.roster.rank_held_by(caller.incarnation) == request.rank
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
        caller, state = self._sessions.caller(request.context), self._shell.state
        done: RevokeReply = await self._shell.call(
            lambda call: state.revocations.revoke(call, caller, request.target, request.reason, self._shell.now())
        )
        self._revocations.set(state.revocations.reasons)
        return revocation_pb2.RevokeReply(names=done.names, members=done.members, has_secret=done.has_secret)

    async def describe(self, request: coordinator_pb2.DescribeRequest, context: Any) -> coordinator_pb2.DescribeReply:
        """Return a model with its placement, and the members."""
        name = codec.name_from_proto(request.name, "the model's name", empty=True)
        job, membership = self._shell.state.describe(self._sessions.caller(request.context), name)
        return coordinator_pb2.DescribeReply(job=job_to_proto(job), membership=codec.membership_to_proto(membership))

    def statistics(self) -> dict[str, float]:
        """Return the numbers of the job's status, by name."""
        return self._shell.statistics()

    def histograms(self) -> dict[str, Histogram]:
        """Return the times of the job's steps."""
        return {"step": self._shell.state.history.step_seconds}

    async def trace(self, request: trace_pb2.TraceRequest, context: Any) -> trace_pb2.TraceReply:
        """Have the next steps recorded, and return their spans."""
        self._shell.state.callers.check(self._sessions.caller(request.context))
        codec.name_from_proto(request.model, "the model's name", empty=True)
        return await self._traces.run(request)

    async def status(self, request: status_pb2.StatusRequest, context: Any) -> status_pb2.StatusReply:
        """Return the status of the job."""
        self._shell.state.callers.check(self._sessions.caller(request.context))
        return status_to_proto(self._shell.status())

    async def watch(self, context: ServerCall) -> None:
        """Send the job's events as they happen."""
        request = await first_message(context, "a WatchRequest")
        if request is EOF:
            return
        self._shell.state.callers.check(self._sessions.caller(request.context))
        async with contextlib.aclosing(self.feed.read()) as messages:
            async for message in messages:
                await context.write(message.encoded)

    async def logs(self, request: logs_pb2.LogsRequest, context: Any) -> logs_pb2.LogsReply:
        """Return a page of the lines that the job's processes have logged."""
        self._shell.state.callers.check(self._sessions.caller(request.context))
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

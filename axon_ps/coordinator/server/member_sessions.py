"""The sessions of members: events out, messages in, and the credentials with which each may go on.

See "An end of input may be a broken connection" in `rpc.service`: a stream that ends without a Leave is a lost member.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final

from axon_ps.coordinator.core.access.callers import Caller
from axon_ps.coordinator.core.actions import Action
from axon_ps.coordinator.core.state import CoordinatorState
from axon_ps.coordinator.messages import (
    arrived_from_proto,
    connectivity_from_proto,
    copied_from_proto,
    corrupted_from_proto,
    event_to_proto,
    incarnation_from_proto,
    knowledge_from_proto,
    ready_from_proto,
    snapshot_report_from_proto,
    vote_from_proto,
)
from axon_ps.coordinator.server.shell import MemberSession, Shell
from axon_ps.coordinator.server.trace_calls import TraceCalls
from axon_ps.errors import AxonError, Broken, InternalError, InvalidRequest, PermissionDenied
from axon_ps.observe.log_buffer import TAKEN
from axon_ps.rpc.auth import credentials as auth
from axon_ps.rpc.auth.identity import Principal
from axon_ps.rpc.calls.protocol import ServerCall
from axon_ps.rpc.multiplex.server import MultiplexedServer
from axon_ps.rpc.status import error_from_detail
from axon_ps.rpc.stream import EOF
from axon_ps.texts import printable
from axon_ps.types import Role
from axon_ps.wire import codec
from axon_ps.wire.events import JoinRequest, KnowledgeRequest
from axon_ps.wire.v1 import common_pb2, membership_pb2, session_pb2

JOIN_S: Final = 10.0
"""Seconds for which a stream may stay silent before its Join."""

MAX_METRICS: Final = 64
MAX_LOGS: Final = 2 * TAKEN
"""Most log records of a heartbeat; further ones count as dropped."""

_logger = logging.getLogger(__name__)


class MemberMessages:
    """Passes the messages of members on to the state machine.

    Votes are passed on in the next iteration of the event loop. So one vote message of several members is one event.

    Args:
        shell: performs the actions that the state machine returns.
        traces: get the spans of members.
    """

    def __init__(self, shell: Shell, traces: TraceCalls) -> None:
        self._shell = shell
        self._traces = traces
        self._vote: session_pb2.SessionRequest | None = None  # not passed on yet
        self._voters: list[MemberSession] = []

    def take(self, session: MemberSession, message: Any) -> None:
        """Pass a member's message on. A malformed one ends the session with an error."""
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
                asynchronous = state.models.is_asynchronous(ready.model)
                self._shell.spans.ready(state.roster.rank_of(number), ready, asynchronous=asynchronous)
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
        if len(sessions) > 1 and not all(
            map(state.roster.is_worker, numbers)
        ):  # so that an error ends only one session
            for session in sessions:
                self._vote, self._voters = message, [session]
                self._pass_votes_on()
            return
        with _refusing(sessions):
            if self._shell.tracer.active:
                for number in numbers:
                    self._shell.spans.voted(state.roster.rank_of(number), message.vote)
            self._shell.perform(state.vote(numbers, vote_from_proto(message.vote), self._shell.now()))

    def _dispatch(self, session: int, message: session_pb2.SessionRequest) -> list[Action]:
        state, now = self._shell.state, self._shell.now()
        kind = message.WhichOneof("message")
        if kind == "heartbeat":
            beat = message.heartbeat
            logged = state.logged(session, beat.logs[:MAX_LOGS], beat.logs_dropped + len(beat.logs[MAX_LOGS:]), now)
            return [*logged, *state.heartbeat(session, _metrics(beat), now, connectivity=connectivity_from_proto(beat))]
        if kind == "arrived":
            return state.arrived(session, arrived_from_proto(message.arrived), now)
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


class MemberSessions:
    """The sessions with one leadership, and the ends of their credentials.

    Args:
        shell: opens and closes them.
        traces: get the spans of members.
        revocations: the names that the servers of this process refuse.
    """

    def __init__(self, shell: Shell, traces: TraceCalls, revocations: auth.Revocations) -> None:
        self._shell = shell
        self._messages = MemberMessages(shell, traces)
        self._revocations = revocations
        self._ends: dict[str, auth.StreamEnd] = {}  # by incarnation

    def caller(self, context: common_pb2.CallContext) -> Caller:
        """Return the caller, if its credentials may be that member's.

        Raises:
            PermissionDenied: they name another rank.
        """
        caller, credentials = _caller(context), auth.calling()
        if caller.incarnation and credentials.rank is not None:
            rank = self._shell.state.roster.rank_held_by(caller.incarnation)
            if rank not in (None, credentials.rank):
                raise PermissionDenied(f"{credentials.text} may not call as the member of rank {rank}")
        if (end := self._ends.get(caller.incarnation)) is not None:
            end.extend(credentials)
        return caller

    async def serve(self, context: ServerCall, role: Role, request: JoinRequest, *, differences: bool) -> None:
        """Serve a member's session from its request to join on.

        Args:
            context: the stream.
            role, request: of the Join, with the caller's credentials; see `admitted`.
            differences: whether the member takes memberships as differences.

        Raises:
            Broken: the process knows more of the job than this coordinator. It is to join again.
        """
        state = self._shell.state
        if why := state.comeback.behind(role, request):
            await _learn(self._shell, context, role, why)
        session = self._shell.open_session(differences=differences, send_soon=context.send_soon)
        reader: asyncio.Task[None] | None = None
        end = auth.stream_end()
        try:
            if end is not None:
                self._ends[request.incarnation] = end
            self._shell.perform(state.join(session.number, role, request, self._shell.now()))
            if not context.receive(partial(self._messages.take, session)):
                reader = asyncio.create_task(self._read(context, session))
            async for event in session.events():
                await context.write(event)
        finally:
            if reader is not None:
                reader.cancel()
            self._shell.close_session(session)
            if self._ends.get(request.incarnation) is end:
                self._ends.pop(request.incarnation, None)

    async def serve_host(self, context: ServerCall, handler: Callable[[str, auth.Credentials], Any]) -> None:
        """Serve the calls of a host's members. `handler` is as of `MultiplexedServer`."""
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

    async def _read(self, context: ServerCall, session: MemberSession) -> None:
        """Pass a member's messages on until its stream ends."""
        try:
            while (message := await context.read()) is not EOF:
                self._messages.take(session, message)
        except Exception as error:
            _logger.debug("a session's stream broke: %s", error)
        session.close(None)


def admitted(role: Role, request: JoinRequest, state: CoordinatorState) -> JoinRequest:
    """Return the request to join, with the caller's credentials and with the rank that they name, if any.

    Raises:
        PermissionDenied: they do not allow it to join in this role or with this rank.
    """
    caller = auth.calling()
    held = state.roster.rank_held_by(request.incarnation)
    rank = caller.check_join(Principal(role.value), request.requested_rank if held is None else held)
    return dataclasses.replace(
        request,
        requested_rank=rank if held is None else request.requested_rank,
        credentials=caller.names,
        makes_itself=caller.has_secret and bool(caller.names),
    )


@contextlib.contextmanager
def _refusing(sessions: Sequence[MemberSession]) -> Iterator[None]:
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
        answer = await first_message(context, "what it knows")
        if answer is not EOF and answer.HasField("knowledge"):
            await shell.learn(knowledge_from_proto(answer.knowledge), why)
    raise Broken(
        f"the coordinator's state is older than what this process knows ({why}); it waits for a shard server that "
        "knows as much. If there is none any more: restore a newer state or a checkpoint, and start again"
    )


async def first_message(context: ServerCall, what: str) -> Any:
    """Return the first message of a stream, or `EOF`.

    Raises:
        Broken: the stream stayed silent for `JOIN_S` seconds.
    """
    try:
        async with asyncio.timeout(JOIN_S):
            return await context.read()
    except TimeoutError:
        raise Broken(f"a stream stayed silent for {JOIN_S:g} s; its first message is {what}") from None


def _caller(context: common_pb2.CallContext) -> Caller:
    incarnation = incarnation_from_proto(context.incarnation) if context.incarnation else ""
    return Caller(job=context.job, incarnation=incarnation)


def _metrics(heartbeat: membership_pb2.Heartbeat) -> dict[str, float]:
    if len(heartbeat.metrics) > MAX_METRICS:
        raise InvalidRequest(f"a heartbeat has {len(heartbeat.metrics)} metrics; at most {MAX_METRICS} are allowed")
    return {codec.name_from_proto(name, "a metric's name"): value for name, value in heartbeat.metrics.items()}

"""Messages of members: votes that came as one message are one event, and a malformed message ends its session only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from axon_ps.coordinator.config import CoordinatorConfig
from axon_ps.coordinator.core.actions import Action
from axon_ps.coordinator.core.state import CoordinatorState
from axon_ps.coordinator.server.member_sessions import MemberMessages
from axon_ps.coordinator.server.shell import MemberSession, Shell
from axon_ps.coordinator.server.trace_calls import TraceCalls
from axon_ps.errors import InvalidRequest
from axon_ps.storage.state_store import MemoryStateStore
from axon_ps.types import Role
from axon_ps.wire.events import JoinRequest, Vote
from axon_ps.wire.v1 import session_pb2


class RecordingState(CoordinatorState):
    """A state machine that records for which sessions votes come."""

    votes: list[tuple[int, ...]]

    def vote(self, sessions: Sequence[int], vote: Vote, now: float) -> list[Action]:
        self.votes.append(tuple(sessions))
        return []


def votes(test: Callable[[MemberMessages, list[MemberSession]], None]) -> list[list[int]]:
    """Run a test with the sessions of two workers and a server; return the members (by index) of each vote event."""

    async def main() -> list[list[int]]:
        state = RecordingState(CoordinatorConfig(job="job", world_size=2, num_shards=1), 0.0)
        state.votes = []
        shell = Shell(state, MemoryStateStore())
        sessions = [shell.open_session() for _ in range(3)]
        for session, role in zip(sessions, (Role.WORKER, Role.WORKER, Role.SHARD), strict=True):
            request = JoinRequest(job="job", incarnation=f"{session.number}" * 32, node="n", address="n:1")
            shell.perform(state.join(session.number, role, request, shell.now()))
        test(MemberMessages(shell, TraceCalls(shell)), sessions)
        await asyncio.sleep(0)
        await shell.close()
        numbers = [session.number for session in sessions]
        return [[numbers.index(number) for number in vote] for vote in state.votes]

    return asyncio.run(main())


def vote(step: int) -> session_pb2.SessionRequest:
    return session_pb2.SessionRequest(vote=session_pb2.Vote(generation=1, step=step))


def test_one_vote_message_of_several_members_is_one_event() -> None:
    def take(messages: MemberMessages, sessions: list[MemberSession]) -> None:
        shared = vote(1)
        for session in sessions[:2]:
            messages.take(session, shared)

    assert votes(take) == [[0, 1]]


def test_equal_votes_in_two_messages_are_two_events() -> None:
    def take(messages: MemberMessages, sessions: list[MemberSession]) -> None:
        for session in sessions[:2]:
            messages.take(session, vote(1))

    assert votes(take) == [[0], [1]]


def test_a_vote_is_passed_on_before_a_later_message_of_another_member() -> None:
    def take(messages: MemberMessages, sessions: list[MemberSession]) -> None:
        messages.take(sessions[0], vote(1))
        messages.take(sessions[1], session_pb2.SessionRequest())
        assert isinstance(sessions[1].error, InvalidRequest)
        messages.take(sessions[0], vote(2))

    assert votes(take) == [[0], [0]]


def test_a_server_among_the_voters_does_not_spoil_the_votes_of_workers() -> None:
    def take(messages: MemberMessages, sessions: list[MemberSession]) -> None:
        shared = vote(1)
        for session in sessions:
            messages.take(session, shared)

    assert votes(take) == [[0], [1], [2]]


def test_a_malformed_message_ends_its_session_only() -> None:
    def take(messages: MemberMessages, sessions: list[MemberSession]) -> None:
        messages.take(sessions[0], session_pb2.SessionRequest())
        assert isinstance(sessions[0].error, InvalidRequest)
        assert sessions[1].error is None

    assert votes(take) == []

"""The stream of a session: messages wait for no stream, and a member leaves with its last messages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from axon_ps.coordinator.client.availability import Availability
from axon_ps.coordinator.client.session_stream import Handlers, SessionStream
from axon_ps.errors import AxonError, Broken, PermissionDenied
from axon_ps.rpc.deadlines import Deadline
from axon_ps.rpc.security import Security
from axon_ps.types import Role
from axon_ps.wire.v1 import common_pb2, membership_pb2, session_pb2

LEAVE = session_pb2.SessionRequest(leave=membership_pb2.Leave(reason="done"))


class Owner:
    """A worker that has joined."""

    address = "127.0.0.1:1"
    job = "job"
    role = Role.WORKER
    incarnation = "a" * 32
    rank = 0
    lease_s = 1.0

    def context(self) -> common_pb2.CallContext:
        return common_pb2.CallContext()


class ScriptedStream(SessionStream):
    """A stream that breaks with these errors, one after the other; then it ends when a Leave was queued.

    Attributes:
        broken: the errors of streams that were up.
        received: the messages that were queued for the last stream.
    """

    def __init__(self, *errors: AxonError, reconnect_timeout_s: float = 60.0) -> None:
        self.errors = list(errors)
        self.broken: list[str] = []
        self.received: list[session_pb2.SessionRequest] = []
        handlers = Handlers(
            request=session_pb2.SessionRequest,
            heartbeat=session_pb2.SessionRequest,
            receive=lambda event: None,
            broke=lambda error: self.broken.append(str(error)),
        )
        availability = self.availability = Availability()
        super().__init__(
            Owner(), handlers, Security(), availability, reconnect_timeout_s=reconnect_timeout_s, standby=False
        )

    async def _session(self) -> None:
        self.attached([])
        if self.errors:
            raise self.errors.pop(0)
        while not self.received or not self.received[-1].HasField("leave"):
            self.received.append(await self._outbox.get())


def run(stream: ScriptedStream, test: Callable[[asyncio.Task[None]], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        await stream.open()
        try:
            await asyncio.wait_for(test(asyncio.create_task(stream.run(Deadline(60.0)))), 10.0)
        finally:
            await stream.close()

    asyncio.run(main())


def test_a_broken_stream_is_opened_again_and_reported_each_time() -> None:
    stream = ScriptedStream(Broken("first"), Broken("second"))

    async def test(running: asyncio.Task[None]) -> None:
        while stream.errors or not stream.availability.is_up:
            await asyncio.sleep(0.01)
        await stream.leave(running, LEAVE)
        await running

    run(stream, test)
    assert stream.broken == ["first", "second"]
    assert str(stream.last_error) == "second"


def test_messages_are_for_the_present_stream_and_the_last_ones_are_sent_before_the_end() -> None:
    stream, said = ScriptedStream(), session_pb2.SessionRequest(arrived={"step": 7})
    stream.send(session_pb2.SessionRequest())  # before there is a stream: it is dropped

    async def test(running: asyncio.Task[None]) -> None:
        await stream.availability.until_up()
        stream.send(said)
        await stream.leave(running, LEAVE)

    run(stream, test)
    assert stream.received == [said, LEAVE]


def test_a_refusal_and_the_end_of_the_time_are_the_errors_of_the_run() -> None:
    async def test(running: asyncio.Task[None]) -> None:
        await running

    with pytest.raises(PermissionDenied):
        run(ScriptedStream(PermissionDenied("wrong token")), test)
    with pytest.raises(Broken, match="once"):
        run(ScriptedStream(Broken("once"), reconnect_timeout_s=0.0), test)

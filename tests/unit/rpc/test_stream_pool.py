"""A pool of streams: which one is used next, what ends one, and what a server that stops does with them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from axon_ps.errors import Closed, Timeout
from axon_ps.rpc.calls.protocol import EOF
from axon_ps.rpc.calls.queue import MessageQueue
from axon_ps.rpc.deadlines import Deadline
from axon_ps.rpc.stream_pool import IdleStreams, StreamPool

MAX_IDLE = 3


class OneStub:
    """Only its identity counts."""


class FakeStream:
    """A stream that is over once it was cancelled."""

    target = "Method at server"

    def __init__(self) -> None:
        self.cancelled = False
        self.is_current = True
        self.ended = asyncio.Event()

    async def read(self) -> None:
        await self.ended.wait()
        raise Closed("cancelled by this side")

    async def is_free(self) -> bool:
        return not self.cancelled and self.is_current

    def cancel(self) -> None:
        self.cancelled = True
        self.ended.set()


def make() -> tuple[StreamPool[FakeStream], list[FakeStream]]:
    opened: list[FakeStream] = []

    async def open(stub: Any) -> FakeStream:
        opened.append(FakeStream())
        return opened[-1]

    return StreamPool(open, MAX_IDLE), opened


def test_the_next_use_gets_the_same_stream() -> None:
    async def test() -> None:
        streams, opened = make()
        stub: Any = OneStub()
        for _ in range(3):
            async with streams.acquire(stub) as stream:
                assert stream is opened[0]
        assert len(opened) == 1

    asyncio.run(test())


def test_one_that_is_older_than_the_credentials_is_ended_and_not_used_again() -> None:
    async def test() -> None:
        streams, opened = make()
        stub: Any = OneStub()
        async with streams.acquire(stub):
            pass
        opened[0].is_current = False
        async with streams.acquire(stub) as stream:
            assert stream is opened[1]
        assert opened[0].cancelled

    asyncio.run(test())


def test_each_server_has_its_own() -> None:
    async def test() -> None:
        streams, opened = make()
        here: Any = OneStub()
        there: Any = OneStub()
        async with streams.acquire(here):
            pass
        async with streams.acquire(there) as stream:
            assert stream is not opened[0]

    asyncio.run(test())


def test_uses_at_the_same_time_have_streams_of_their_own_and_few_are_pooled() -> None:
    async def test() -> None:
        streams, opened = make()
        stub: Any = OneStub()
        managers = [streams.acquire(stub) for _ in range(MAX_IDLE + 2)]
        for manager in managers:
            await manager.__aenter__()
        assert len(opened) == MAX_IDLE + 2
        for manager in managers:
            await manager.__aexit__(None, None, None)
        assert sum(stream.cancelled for stream in opened) == 2

    asyncio.run(test())


@pytest.mark.parametrize("error", [ZeroDivisionError, asyncio.CancelledError])
def test_an_error_ends_the_stream(error: type[BaseException]) -> None:
    async def test() -> None:
        streams, opened = make()
        stub: Any = OneStub()
        with pytest.raises(error):
            async with streams.acquire(stub):
                raise error
        assert opened[0].cancelled
        async with streams.acquire(stub):
            assert len(opened) == 2

    asyncio.run(test())


def test_streams_that_broke_while_idle_are_replaced() -> None:
    async def test() -> None:
        streams, opened = make()
        stub: Any = OneStub()
        async with streams.acquire(stub), streams.acquire(stub):
            pass
        for stream in opened:
            stream.cancel()
        async with streams.acquire(stub):
            assert len(opened) == 3

    asyncio.run(test())


def test_a_use_that_is_not_over_in_time() -> None:
    async def test() -> None:
        streams, opened = make()
        stub: Any = OneStub()
        with pytest.raises(Timeout, match=r"Method at server did not answer within 0.01 s"):
            async with streams.acquire(stub, Deadline(0.01)) as stream:
                await stream.read()
        assert opened[0].cancelled

    asyncio.run(test())


def test_whoever_cancels_a_use_before_its_time_closes_it() -> None:
    async def test() -> None:
        streams, opened = make()
        stub: Any = OneStub()
        asyncio.get_running_loop().call_soon(lambda: opened[0].cancel())
        with pytest.raises(Closed):
            async with streams.acquire(stub, Deadline(100.0)) as stream:
                await stream.read()

    asyncio.run(test())


def test_a_deadline_is_over_with_its_use() -> None:
    async def test() -> None:
        streams, opened = make()
        stub: Any = OneStub()
        now_s = 0.0
        async with streams.acquire(stub, Deadline(1e-3, lambda: now_s)):
            pass
        await asyncio.sleep(0.01)
        assert not opened[0].cancelled

    asyncio.run(test())


class FakeServerCall:
    """A servicer's end of a stream that gets `messages`, and then waits."""

    received = False
    send_soon = None

    def __init__(self, *messages: bytes) -> None:
        self._messages: MessageQueue[bytes] = MessageQueue()
        for message in messages:
            self._messages.put(message)

    async def read(self) -> Any:
        message = await self._messages.get()
        return EOF if message is None else message

    def end_input(self) -> None:
        self._messages.end_input()

    def receive(self, take: Callable[[Any], None]) -> bool:
        return False

    async def write(self, message: Any) -> None:
        raise AssertionError("nothing is written")

    def done(self) -> bool:
        return False

    def peer(self) -> str:
        return ""


def test_a_server_that_stops_ends_idle_streams_now_and_later() -> None:
    async def test() -> None:
        idle = IdleStreams()
        assert await idle.next(FakeServerCall(b"first")) == b"first"
        waiting = asyncio.ensure_future(idle.next(FakeServerCall()))
        await asyncio.sleep(0)
        idle.drain()
        assert await waiting is EOF
        assert waiting.cancelling() == 0
        assert await idle.next(FakeServerCall(b"first")) is EOF

    asyncio.run(test())


@pytest.mark.parametrize("first", ["the client", "the server"])
def test_a_client_that_goes_cancels_an_idle_stream_also_while_the_server_stops(first: str) -> None:
    async def test() -> None:
        idle = IdleStreams()
        waiting = asyncio.ensure_future(idle.next(FakeServerCall()))
        await asyncio.sleep(0)
        if first == "the client":
            waiting.cancel()
            idle.drain()
        else:
            idle.drain()
            waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(test())

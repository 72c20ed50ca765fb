"""Streams of collectives are kept: which one the next operation gets, and what ends them."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import pytest

from axon_ps.errors import Broken
from axon_ps.shard.collective_shell import CollectiveShell
from axon_ps.shard.operation_streams import MOST_IDLE, OperationStreams
from axon_ps.transport.backoff import Deadline
from axon_ps.transport.stream import EOF
from axon_ps.wire.v1.collective_pb2 import CollectiveChunk

ENDED = CollectiveChunk(ended=True)
DATA = CollectiveChunk(source=1, offset=7)


class ScriptedStream:
    """A `transport.stream.Stream` whose peer has sent `messages`."""

    def __init__(self) -> None:
        self.messages: deque[Any] = deque()
        self.cancelled = False

    async def read(self) -> Any:
        message = self.messages.popleft()
        return message if message is EOF else message.SerializeToString()

    def cancel(self) -> None:
        self.cancelled = True

    def done(self) -> bool:
        return self.cancelled


class Servers:
    """`Peers` and the stub of its one server, which notes what is opened."""

    def __init__(self) -> None:
        self.opened: list[ScriptedStream] = []

    async def stub(self, server: int, lane: int, deadline: Deadline) -> Servers:
        return self

    def open(self, method: str) -> ScriptedStream:
        assert method == "Collective"
        self.opened.append(ScriptedStream())
        return self.opened[-1]


def make() -> tuple[Servers, OperationStreams]:
    servers = Servers()
    return servers, OperationStreams(servers)  # type: ignore[arg-type]


def test_the_next_operation_gets_the_same_stream() -> None:
    async def test() -> None:
        servers, streams = make()
        for _ in range(3):
            async with streams.take(0, Deadline(1.0)) as stream:
                servers.opened[0].messages.extend([DATA, ENDED])
                header, _ = await stream.data()
                assert header == DATA
                await stream.ended()
        assert len(servers.opened) == 1

    asyncio.run(test())


def test_operations_at_the_same_time_have_streams_of_their_own_and_few_are_kept() -> None:
    async def test() -> None:
        servers, streams = make()
        managers = [streams.take(0, Deadline(1.0)) for _ in range(MOST_IDLE + 2)]
        for manager in managers:
            await manager.__aenter__()
        assert len(servers.opened) == MOST_IDLE + 2
        for manager in managers:
            await manager.__aexit__(None, None, None)
        assert sum(stream.cancelled for stream in servers.opened) == 2

    asyncio.run(test())


def test_an_end_that_was_not_waited_for_is_seen_to_before_the_next_operation() -> None:
    async def test() -> None:
        servers, streams = make()
        async with streams.take(0, Deadline(1.0)) as stream:
            stream.will_end()
        servers.opened[0].messages.extend([ENDED, DATA])
        async with streams.take(0, Deadline(1.0)) as stream:
            assert (await stream.data())[0] == DATA
        assert len(servers.opened) == 1

    asyncio.run(test())


@pytest.mark.parametrize("late", [EOF, DATA])
def test_a_stream_that_did_not_end_well_after_all_is_not_used_again(late: Any) -> None:
    async def test() -> None:
        servers, streams = make()
        async with streams.take(0, Deadline(1.0)) as stream:
            stream.will_end()
        servers.opened[0].messages.append(late)
        async with streams.take(0, Deadline(1.0)):
            assert len(servers.opened) == 2
        assert servers.opened[0].cancelled

    asyncio.run(test())


def test_an_error_ends_the_stream() -> None:
    async def test() -> None:
        servers, streams = make()
        with pytest.raises(ZeroDivisionError):
            async with streams.take(0, Deadline(1.0)):
                raise ZeroDivisionError
        assert servers.opened[0].cancelled
        async with streams.take(0, Deadline(1.0)):
            assert len(servers.opened) == 2

    asyncio.run(test())


def test_a_stream_that_broke_while_idle_is_replaced() -> None:
    async def test() -> None:
        servers, streams = make()
        async with streams.take(0, Deadline(1.0)):
            pass
        servers.opened[0].cancel()
        async with streams.take(0, Deadline(1.0)):
            assert len(servers.opened) == 2

    asyncio.run(test())


def test_messages_out_of_turn() -> None:
    async def test() -> None:
        servers, streams = make()
        for messages, method, words in (
            ([ENDED], "data", "before everything had come"),
            ([DATA], "ended", "more than was asked for"),
            ([EOF], "data", "before its end"),
            ([EOF], "ended", "before its end"),
        ):
            with pytest.raises(Broken, match=words):
                async with streams.take(0, Deadline(1.0)) as stream:
                    servers.opened[-1].messages.extend(messages)
                    await getattr(stream, method)()

    asyncio.run(test())


def test_a_server_that_stops_ends_idle_streams_now_and_later() -> None:
    async def test() -> None:
        shell = CollectiveShell("job")
        never: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        async def read() -> bytes:
            return await never

        async def message() -> bytes:
            return b"begin"

        assert await shell.idle(message()) == b"begin"
        idle = asyncio.ensure_future(shell.idle(read()))
        await asyncio.sleep(0)
        shell.drain()
        assert await idle is EOF
        assert await shell.idle(read()) is EOF
        shell.close()

    asyncio.run(test())

"""A stream of collectives between operations: what has to come, and what must not."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import pytest

from axon_ps.aggregation.client.operation_stream import OperationStream
from axon_ps.errors import Broken
from axon_ps.rpc.stream import EOF
from axon_ps.wire.v1.collective_pb2 import CollectiveChunk

ENDED = CollectiveChunk(ended=True)
DATA = CollectiveChunk(source=1, offset=7)


class ScriptedStream:
    """A `rpc.stream.Stream` whose peer has sent `messages`."""

    def __init__(self, *messages: Any) -> None:
        self.messages = deque(messages)
        self.cancelled = False

    async def read(self) -> Any:
        message = self.messages.popleft()
        return message if message is EOF else message.SerializeToString()

    def cancel(self) -> None:
        self.cancelled = True

    def done(self) -> bool:
        return self.cancelled


def make(*messages: Any) -> tuple[ScriptedStream, OperationStream]:
    script = ScriptedStream(*messages)
    return script, OperationStream(script)  # type: ignore[arg-type]


def test_several_operations() -> None:
    async def test() -> None:
        script, stream = make(*[DATA, ENDED] * 3)
        for _ in range(3):
            assert await stream.is_free()
            header, _ = await stream.data()
            assert header == DATA
            await stream.ended()
        script.cancel()
        assert not await stream.is_free()

    asyncio.run(test())


def test_an_end_that_was_not_waited_for_is_seen_to_before_the_next_operation() -> None:
    async def test() -> None:
        script, stream = make(ENDED, DATA)
        stream.will_end()
        await asyncio.sleep(0)  # the caller does something else
        assert list(script.messages) == [DATA]
        assert await stream.is_free()
        assert (await stream.data())[0] == DATA

    asyncio.run(test())


@pytest.mark.parametrize("late", [EOF, DATA])
def test_a_stream_that_did_not_end_well_after_all_is_not_used_again(late: Any) -> None:
    async def test() -> None:
        script, stream = make(late)
        stream.will_end()
        assert not await stream.is_free()
        assert script.cancelled

    asyncio.run(test())


@pytest.mark.parametrize(
    ("message", "method", "words"),
    [
        (ENDED, "data", "before everything had come"),
        (DATA, "ended", "more than was asked for"),
        (EOF, "data", "before its end"),
        (EOF, "ended", "before its end"),
    ],
)
def test_messages_out_of_turn(message: Any, method: str, words: str) -> None:
    async def test() -> None:
        _, stream = make(message)
        with pytest.raises(Broken, match=words):
            await getattr(stream, method)()

    asyncio.run(test())

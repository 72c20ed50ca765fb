"""A stream of collectives between operations: what has to come, and what must not."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from typing import Any

import numpy as np
import pytest

from axon_ps.aggregation.client.client import CollectiveClient, GroupHandle
from axon_ps.aggregation.client.operation_stream import OperationStream
from axon_ps.errors import Broken
from axon_ps.rpc.security import Security
from axon_ps.rpc.stream import EOF
from axon_ps.types import DType
from axon_ps.wire.v1.collective_pb2 import CollectiveChunk
from axon_ps.wire.v1.common_pb2 import CallContext

ENDED = CollectiveChunk(ended=True)
DATA = CollectiveChunk(source=1, offset=7)


class ScriptedStream:
    """A `rpc.stream.Stream` whose peer has sent `messages`."""

    def __init__(self, *messages: Any) -> None:
        self.messages = deque(messages)
        self.cancelled = False
        self.written: list[bytes] = []

    async def read(self, destination: Any = None) -> Any:
        message = self.messages.popleft()
        return message if message is EOF else message.SerializeToString()

    async def write(self, message: bytes) -> None:
        self.written.append(message)

    def cancel(self) -> None:
        self.cancelled = True

    async def is_free(self) -> bool:
        return not self.cancelled


def make(*messages: Any) -> tuple[ScriptedStream, OperationStream]:
    script = ScriptedStream(*messages)
    return script, OperationStream(script, Counter())  # type: ignore[arg-type]


def test_several_operations() -> None:
    async def test() -> None:
        script, stream = make(*[DATA, ENDED] * 3)
        for _ in range(3):
            assert await stream.is_free()
            header, _, _ = await stream.data()
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


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (CollectiveChunk(source=2, payload=bytes(8)), "rank 2; it may come from 2 ranks"),
        (CollectiveChunk(source=1 << 31, payload=bytes(8)), "may come from 2 ranks"),
        (CollectiveChunk(source=1, payload=bytes(24)), "6 elements for 0 of an array of 4"),
        (CollectiveChunk(source=1, offset=1 << 60, payload=bytes(4)), "1 elements for"),
    ],
)
def test_data_that_no_server_may_send(sent: CollectiveChunk, words: str) -> None:
    async def test() -> None:
        client = CollectiveClient(Security(), CallContext)
        with pytest.raises(Broken, match=words):
            await client._download(make(sent)[1], 4, DType.F32, np.zeros(4, np.float32), [0, 0])
        await client.close()

    asyncio.run(test())


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (CollectiveChunk(source=7, payload=bytes(16)), "rank 7; it may come from 2 ranks"),
        (CollectiveChunk(source=1, payload=bytes(24)), "6 elements of a message of 4"),
    ],
)
def test_a_message_that_nobody_may_have_sent(
    sent: CollectiveChunk, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        client = CollectiveClient(Security(), CallContext)

        async def stream(*_: object) -> Any:
            return contextlib.nullcontext(make(sent)[1])

        monkeypatch.setattr(client, "_mailbox_stream", stream)
        group = GroupHandle(name="g", rank=0, ranks=(0, 1), members=("a", "b"))
        with pytest.raises(Broken, match=words):
            await client.recv(group, np.zeros(4, np.float32), DType.F32, -1, 0, 5.0)
        await client.close()

    asyncio.run(test())


def test_what_is_sent_is_counted() -> None:
    async def test() -> None:
        script, counters = ScriptedStream(), Counter[str]()
        stream = OperationStream(script, counters)  # type: ignore[arg-type]
        await stream.send(DATA)
        await stream.send(DATA, np.zeros(3, np.float32))
        assert counters == {"messages_out": 2, "bytes_out": 12}
        assert len(script.written) == 2

    asyncio.run(test())

"""Frames arrive as they were sent, however the network cuts them, and where `Destination` says."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from axon_ps.rpc.carriers.bulk.connection import BUFFER_BYTES, FIRST_BYTES, HEAD, LARGE_BYTES, Connection, FrameKind

MOST = 2 * LARGE_BYTES
SIZES = st.sampled_from(
    (
        0,
        1,
        4,
        5,
        6,
        FIRST_BYTES,
        BUFFER_BYTES - HEAD.size,
        BUFFER_BYTES,
        LARGE_BYTES - 1,
        LARGE_BYTES,
        LARGE_BYTES + 1,
        MOST,
    )
)


def frames(sizes: Sequence[int]) -> list[bytes]:
    return [bytes((number + i) % 251 for i in range(size)) for number, size in enumerate(sizes)]


async def received(bodies: Sequence[bytes], cuts: Sequence[int], start: int) -> None:
    """Send the frames in segments of these sizes, one when the one before was read, and compare what comes."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    connection, loop = Connection(ours, MOST), asyncio.get_running_loop()
    data = b"".join(HEAD.pack(FrameKind.MESSAGE, len(body)) + body for body in bodies)

    async def send() -> None:
        at = 0
        for cut in cuts:
            await loop.sock_sendall(theirs, data[at : at + cut])
            at += cut
            await asyncio.sleep(0)
        await loop.sock_sendall(theirs, data[at:])

    targets: list[memoryview] = []

    def destination(_: memoryview, size: int) -> tuple[int, memoryview]:
        targets.append(memoryview(bytearray(size - start)))
        return start, targets[-1]

    sending = asyncio.create_task(send())
    for number, body in enumerate(bodies):
        kind, came = await connection.receive(destination if number % 2 else None)
        assert kind is FrameKind.MESSAGE
        assert bytes(came) + bytes(targets.pop() if targets else b"") == body
    await sending
    theirs.close()
    with pytest.raises(ConnectionResetError):
        await connection.receive()
    connection.close()


@settings(max_examples=40)
@given(
    sizes=st.lists(SIZES, min_size=1, max_size=6),
    cuts=st.lists(st.sampled_from((1, 3, 5, 6, FIRST_BYTES, BUFFER_BYTES, 70_000)), max_size=12),
    start=st.integers(0, FIRST_BYTES),
)
@example(sizes=[6] * 6, cuts=[], start=0)
@example(sizes=[6, MOST, 6], cuts=[HEAD.size + 6 + HEAD.size + FIRST_BYTES + 1], start=FIRST_BYTES)
def test_frames_come_whole_and_in_order(sizes: list[int], cuts: list[int], start: int) -> None:
    asyncio.run(received(frames(sizes), cuts, start))


def test_a_connection_that_is_asked_and_answers_is_watched_once() -> None:
    """Each time would be two system calls."""

    async def scenario() -> None:
        ours, theirs = socket.socketpair()
        connection, loop = Connection(ours, MOST), asyncio.get_running_loop()
        with mock.patch.object(loop, "add_reader", side_effect=loop.add_reader) as watched:
            for _ in range(5):
                loop.call_soon(theirs.send, HEAD.pack(FrameKind.MESSAGE, 3) + b"abc")
                assert bytes((await connection.receive())[1]) == b"abc"
        assert watched.call_count == 1
        connection.close()
        theirs.close()

    asyncio.run(scenario())


def test_closing_ends_a_read_and_a_read_after_it() -> None:
    async def scenario() -> None:
        ours, theirs = socket.socketpair()
        connection = Connection(ours, MOST)
        reading = asyncio.create_task(connection.receive())
        await asyncio.sleep(0)
        connection.close()
        for read in (reading, connection.receive()):
            with pytest.raises(ConnectionResetError):
                await read
        theirs.close()

    asyncio.run(scenario())

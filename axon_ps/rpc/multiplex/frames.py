"""The queue of frames to be written to a stream of many calls."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Final

from axon_ps.errors import InvalidRequest
from axon_ps.rpc.calls.protocol import ServerCall
from axon_ps.rpc.channels import MAX_CALL_BYTES, MAX_MESSAGE_BYTES
from axon_ps.rpc.stream import Stream
from axon_ps.wire.v1 import multiplex_pb2

LAZY_S: Final = 0.1
"""Seconds for which lazy messages are batched before they are written."""

MAX_WAITING: Final = 1 << 14
"""Most frames that wait to be written. At more, a server ends the stream, and a client refuses to send."""

MAX_WAITING_BYTES: Final = 1 << 27
"""Most bytes of their messages."""

MAX_FRAME_BYTES: Final = MAX_MESSAGE_BYTES - (1 << 16)
"""Most bytes of a message to a member: it is sent in a message of the stream, with the other fields of a frame."""

MAX_CALL_FRAME_BYTES: Final = MAX_CALL_BYTES - (1 << 16)
"""Most bytes of a message of a member's call."""

MAX_BYTES: Final = 1 << 20
"""Most bytes of frames that are written together; a larger frame is written by itself."""


class FrameQueue:
    """Frames in the order in which they were added; a message that equals a waiting one is added to its frame.

    This happens only if no other frame of the same call was added in between: each call's messages stay in order.
    """

    def __init__(self) -> None:
        self._frames: list[multiplex_pb2.Frame] = []
        self._indexes: dict[bytes, int] = {}  # of frames, by the message that waits
        self._last: dict[int, int] = {}  # by call, the index of its newest frame
        self._waiting_bytes = 0
        self._flush = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_full(self) -> bool:
        """True if too much waits to be written, because the peer does not read."""
        return len(self._frames) >= MAX_WAITING or self._waiting_bytes >= MAX_WAITING_BYTES

    def add(self, call: int, message: bytes, *, lazy: bool = False) -> None:
        """Have a message of a call written: soon, or, if it is `lazy`, within `LAZY_S`."""
        index = self._indexes.get(message, -1)
        if index > self._last.get(call, -1):
            self._frames[index].calls.append(call)
            self._last[call] = index
        else:
            self._indexes[message] = len(self._frames)
            self._add(multiplex_pb2.Frame(calls=(call,), message=message))
        self._wake(lazy)

    def add_frame(self, frame: multiplex_pb2.Frame) -> None:
        """Have a frame written that begins a call or ends it."""
        self._add(frame)
        self._wake(lazy=False)

    async def take(self) -> Iterator[multiplex_pb2.Frames]:
        """Return the frames to be written now, as soon as there are some."""
        await self._flush.wait()
        self._flush.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        frames, self._frames, self._waiting_bytes = self._frames, [], 0
        self._indexes.clear()
        self._last.clear()
        return _batches(frames)

    async def write_to(self, stream: Stream | ServerCall) -> None:
        """Write all frames, also those added later, until it is cancelled or the stream ends."""
        while True:
            for frames in await self.take():
                await stream.write(frames)

    def _add(self, frame: multiplex_pb2.Frame) -> None:
        for call in frame.calls:
            self._last[call] = len(self._frames)
        self._frames.append(frame)
        self._waiting_bytes += len(frame.message)

    def _wake(self, lazy: bool) -> None:
        if not lazy:
            self._flush.set()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LAZY_S, self._flush.set)


def _batches(frames: list[multiplex_pb2.Frame]) -> Iterator[multiplex_pb2.Frames]:
    batch: list[multiplex_pb2.Frame] = []
    size_bytes = 0
    for frame in frames:
        frame_bytes = frame.ByteSize()
        if batch and size_bytes + frame_bytes > MAX_BYTES:
            yield multiplex_pb2.Frames(frames=batch)
            batch, size_bytes = [], 0
        batch.append(frame)
        size_bytes += frame_bytes
    if batch:
        yield multiplex_pb2.Frames(frames=batch)


def check_size(message: bytes, method: str, *, is_call: bool) -> None:
    """Refuse a message that is too large; `is_call` = a member sends it, else it is sent to a member.

    Raises:
        InvalidRequest: it is too large.
    """
    max_bytes = MAX_CALL_FRAME_BYTES if is_call else MAX_FRAME_BYTES
    if len(message) > max_bytes:
        raise InvalidRequest(f"a message of {method} has {len(message)} bytes; at most {max_bytes} are allowed")

"""A worker's stream to a shard server's collectives: one operation after the other.

See Note: [How an operation ends] at `aggregation.server.servicer`. Everything here runs on one event loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter

from axon_ps.errors import AxonError, Broken
from axon_ps.rpc.stream import EOF, Stream
from axon_ps.types import Array
from axon_ps.wire.frames import Target, decode_bulk, encode_buffers
from axon_ps.wire.v1.collective_pb2 import CollectiveChunk


class OperationStream:
    """A stream while operations are performed on it.

    Args:
        stream: the call.
        counters: gets the messages and bytes that are sent.
    """

    def __init__(self, stream: Stream, counters: Counter[str]) -> None:
        self._stream = stream
        self._counters = counters
        self._ending: asyncio.Task[None] | None = None

    async def send(self, header: CollectiveChunk, data: Array | None = None) -> None:
        """Send a message."""
        await self._stream.write(encode_buffers(header, data))
        self._counters["messages_out"] += 1
        self._counters["bytes_out"] += 0 if data is None else data.nbytes

    async def data(self, target: Target[CollectiveChunk] | None = None) -> tuple[CollectiveChunk, memoryview, bool]:
        """Return the operation's next message: header, payload, and whether the payload is in `target`'s memory.

        Raises:
            AxonError: the operation ended with it.
            Broken: the server ended it before all data had arrived.
        """
        header, payload, copied = await self._read(target)
        if header.ended:
            raise Broken("a shard server ended an operation before everything had come")
        return header, payload, copied

    async def ended(self) -> None:
        """Wait for the server's end of the operation. It must be the next message.

        Raises:
            AxonError: the operation ended with it.
            Broken: the server sent more.
        """
        header, _, _ = await self._read()
        if not header.ended:
            raise Broken("a shard server sent more than was asked for")

    def will_end(self) -> None:
        """Read the operation's `ended` message in the background, before the next operation begins."""
        self._ending = asyncio.ensure_future(self._await_end())

    async def is_free(self) -> bool:
        """Return True if another operation may begin."""
        if self._ending is not None:
            await self._ending
            self._ending = None
        return await self._stream.is_free()

    def cancel(self) -> None:
        """End the stream, and the operation under way on it."""
        self._stream.cancel()

    @property
    def target(self) -> str:
        """The RPC and the address, for errors."""
        return self._stream.target

    async def _await_end(self) -> None:
        try:
            await self.ended()
        except AxonError:
            self.cancel()

    async def _read(self, target: Target[CollectiveChunk] | None = None) -> tuple[CollectiveChunk, memoryview, bool]:
        message = await self._stream.read(target)
        if message is EOF:
            raise Broken("a shard server ended the stream of an operation before its end")
        if target is None:
            return (*decode_bulk(CollectiveChunk, message), False)
        return target.decode(message)

"""The caller's end of a stream of many calls."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any, Final

from axon_ps.errors import AxonError, Broken, Closed, again
from axon_ps.rpc.auth.credentials import Credentials
from axon_ps.rpc.calls.ending import Ending
from axon_ps.rpc.calls.protocol import EOF, CallOver, Destination, Message, joined
from axon_ps.rpc.calls.queue import MessageQueue
from axon_ps.rpc.calls.status import CANCELLED, OK, CallStatus
from axon_ps.rpc.multiplex.callers import caller_to_proto
from axon_ps.rpc.multiplex.frames import FrameQueue, check_size
from axon_ps.rpc.status import error_of_status, status_of
from axon_ps.rpc.stream import Stream
from axon_ps.wire.v1 import multiplex_pb2

MAX_UNREAD: Final = 1024
"""Most unread messages of a call; more of them end it."""


class MultiplexedClient:
    """Makes calls on one stream. `run` it once; calls can be made from then on, until it ends.

    Args:
        stream: the stream.
        peer: the name of the other end in errors.
        id: the stream's id; see `Frames.id`.
    """

    def __init__(self, stream: Stream, peer: str, id: str = "") -> None:
        self.outbox = FrameQueue()
        self._id = id
        self.peer = peer
        self._stream = stream
        self._calls: dict[int, MultiplexedCall] = {}
        self._numbers = itertools.count(1)
        self._error: AxonError | None = None
        self._began = asyncio.Event()

    async def began(self) -> None:
        """Return once the peer performs calls.

        Raises:
            AxonError: it does not.
        """
        await self._began.wait()
        if self._error is not None:
            raise again(self._error)

    async def run(self) -> None:
        """Carry messages until the stream ends; all calls end with it.

        Raises:
            AxonError: the error that ended it.
        """
        writer = asyncio.ensure_future(self.outbox.write_to(self._stream))
        try:
            await self._stream.write(multiplex_pb2.Frames(id=self._id))
            while (frames := await self._stream.read()) is not EOF:
                self._began.set()
                for frame in frames.frames:
                    self._take(frame)
            raise Broken(f"{self._stream.target} ended")
        except AxonError as error:
            if not isinstance(error, Closed):
                # The error of the stream does not answer a call: for a call, its connection broke.
                self._fail(error if isinstance(error, Broken) else Broken(f"{self._stream.target} has ended: {error}"))
            raise
        finally:
            self._fail(Broken(f"{self._stream.target} was closed"))
            self._stream.cancel()
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)

    async def call(self, method: str, request: bytes, caller: Credentials | None = None) -> bytes:
        """Make a unary call, and return the encoded reply. Cancelling the task cancels the call.

        Args:
            method: name of the RPC.
            request: its request, encoded.
            caller: the process that makes it; None = the process that opened the stream.

        Raises:
            InvalidRequest: the request is too large.
            AxonError: the error of the servicer, or the error that ended the stream.
        """
        check_size(request, method, is_call=True)
        call = self._begin(method, caller, request)
        try:
            async for reply in call.messages():
                return reply
        finally:
            call.cancel()
        raise Broken(f"{method} at {self.peer} ended without a reply")

    def open(self, method: str, caller: Credentials | None = None) -> MultiplexedCall:
        """Begin a streaming call; see `call`.

        Raises:
            AxonError: the error that ended the stream.
        """
        return self._begin(method, caller, None)

    def forget(self, number: int) -> None:
        """Forget a call that is over."""
        self._calls.pop(number, None)

    def check_capacity(self) -> None:
        """Refuse to send more to a peer that does not read.

        Raises:
            Broken: too much waits to be sent.
        """
        if self.outbox.is_full:
            raise Broken(f"{self.peer} does not take what is sent to it")

    def _begin(self, method: str, caller: Credentials | None, request: bytes | None) -> MultiplexedCall:
        if self._error is not None:
            raise again(self._error)
        self.check_capacity()
        call = MultiplexedCall(self, next(self._numbers), method)
        self._calls[call.number] = call
        who = None if caller is None else caller_to_proto(caller)
        self.outbox.add_frame(multiplex_pb2.Frame(calls=(call.number,), method=method, message=request, caller=who))
        return call

    def _take(self, frame: multiplex_pb2.Frame) -> None:
        for number in frame.calls:
            if (call := self._calls.get(number)) is None:  # it was cancelled
                continue
            if frame.HasField("message"):
                call.take(frame.message)
            if frame.HasField("status"):
                call.end(CallStatus.numbered(frame.status.code, frame.status.details, frame.status.error))
            elif frame.end:
                call.end(OK)

    def _fail(self, error: AxonError) -> None:
        if self._error is None:
            self._error = again(error)
            self._began.set()
        status = status_of(error)
        for call in list(self._calls.values()):
            call.end(status)


class MultiplexedCall:
    """One streaming call. See `calls.protocol.ClientCall`; a write never waits, since the stream is for all calls."""

    def __init__(self, client: MultiplexedClient, number: int, method: str) -> None:
        self.number = number
        self.method = method
        self._client = client
        self._messages: MessageQueue[bytes] = MessageQueue()
        self._ending: Ending[MultiplexedCall] = Ending(self)

    async def read(self, destination: Destination | None = None) -> Any:
        """Return the peer's next message, or `EOF`."""
        try:
            message = await self._messages.get()
        except asyncio.CancelledError:
            self.cancel()
            raise
        return EOF if message is None else message

    async def messages(self) -> AsyncIterator[bytes]:
        """Yield the peer's messages, until the call has ended without an error.

        Raises:
            AxonError: the error that ended it.
        """
        while (message := await self._messages.get()) is not None:
            yield message
        status = await self.status()
        if not (status.is_ok or status.local):
            raise error_of_status(status, self._client.peer, self.method)

    async def write(self, message: Message) -> None:
        """Send a message; also raises as `send` does."""
        if self.done():
            raise CallOver("the call has ended")
        self.send(joined(message))

    def send(self, message: bytes, *, lazy: bool = False) -> None:
        """Send a message, if the call has not ended; see `FrameQueue.add`.

        Raises:
            Broken: too much waits to be sent.
            InvalidRequest: it is too large.
        """
        check_size(message, self.method, is_call=True)
        self._client.check_capacity()
        if not self.done():
            self._client.outbox.add(self.number, message, lazy=lazy)

    async def done_writing(self) -> None:
        """Half-close."""
        if not self.done():
            self._client.outbox.add_frame(multiplex_pb2.Frame(calls=(self.number,), end=True))

    def cancel(self, error: AxonError | None = None) -> None:
        """End the call from this side; its reader gets `error`, if there is one. Does nothing when it is over."""
        if not self.done():
            self._client.outbox.add_frame(multiplex_pb2.Frame(calls=(self.number,), cancel=True))
            self.end(CANCELLED if error is None else status_of(error))

    def done(self) -> bool:
        """Return True if the call has ended."""
        return self._ending.status is not None

    async def status(self) -> CallStatus:
        """Return the status with which the call has ended, as soon as it is known."""
        return await self._ending.wait()

    def take(self, message: bytes) -> None:
        """Queue a message that has come."""
        if len(self._messages) >= MAX_UNREAD:
            self.cancel(Broken(f"{MAX_UNREAD} messages of {self.method} were not read; the call is ended"))
        else:
            self._messages.put(message)

    def end(self, status: CallStatus) -> None:
        """Record that the call has ended."""
        if self._ending.set(status):
            self._client.forget(self.number)
            self._messages.close(drop=status.local)

"""The server's end of a stream of many calls, which a service's handlers perform."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final

from google.protobuf.message import DecodeError

from axon_ps.errors import AxonError, Broken, Busy, InvalidRequest, again
from axon_ps.rpc.auth.credentials import Credentials, Ended, Revocations, Revoked
from axon_ps.rpc.calls.method import Method
from axon_ps.rpc.calls.protocol import EOF, CallOver, ServerCall
from axon_ps.rpc.calls.queue import MessageQueue
from axon_ps.rpc.calls.status import CallStatus
from axon_ps.rpc.multiplex.callers import caller_from_proto
from axon_ps.rpc.multiplex.frames import FrameQueue, check_size
from axon_ps.rpc.status import status_of
from axon_ps.wire.v1 import multiplex_pb2

MAX_CALLS: Final = 1 << 14
"""Calls at a time on one stream: a member has a few."""

MAX_UNREAD: Final = 1024
"""Messages of a call that its servicer has not read; more of them end it."""

_logger = logging.getLogger(__name__)


class MultiplexedServer:
    """Performs the calls of one stream. `run` it once, in the task that serves the stream.

    Args:
        stream: the stream.
        handler: returns a method, by its name, for a caller; raises an `AxonError` when it may not be called.
        caller: the process that has opened the stream; calls without another caller are its own.
        revocations: the names that are revoked: calls of such callers are ended, and are not begun.
        on_id: called with the stream's id, if it has one; see `Frames.id`.
    """

    def __init__(
        self,
        stream: ServerCall,
        handler: Callable[[str, Credentials], Method],
        caller: Credentials,
        revocations: Revocations,
        on_id: Callable[[str], None] = lambda _id: None,
    ) -> None:
        self._stream = stream
        self._handler = handler
        self._caller = caller
        self._revocations = revocations
        self._on_id = on_id
        self._calls: dict[int, MultiplexedServerCall] = {}
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.outbox = FrameQueue()

    async def run(self) -> None:
        """Perform calls until the caller ends the stream; those under way are cancelled then, all at once.

        Raises:
            AxonError: the error with which it was ended; or the caller has sent an invalid frame.
        """
        tasks = [asyncio.ensure_future(self._read()), asyncio.ensure_future(self._write())]
        try:
            await asyncio.wait([*tasks, self._ended], return_when=asyncio.FIRST_COMPLETED)
            for done in (self._ended, *tasks):
                if done.done():
                    done.result()
        finally:
            self._ended.cancel()
            calls = [call.task for call in self._calls.values() if call.task is not None]
            for task in (*tasks, *calls):
                task.cancel()
            await asyncio.gather(*tasks, *calls, return_exceptions=True)

    def end(self, error: AxonError) -> None:
        """End the stream with an error, and all its calls."""
        if not self._ended.done():
            self._ended.set_exception(again(error))

    async def _read(self) -> None:
        while (frames := await self._stream.read()) is not EOF:
            if frames.id:
                self._on_id(frames.id)
            for frame in frames.frames:
                self._take(frame)

    async def _write(self) -> None:
        await self._stream.write(multiplex_pb2.Frames())  # tells the caller that its calls are performed
        await self.outbox.write_to(self._stream)

    def _take(self, frame: multiplex_pb2.Frame) -> None:
        if frame.method:
            for number in frame.calls:
                self._begin(number, frame)
            return
        calls = [call for number in frame.calls if (call := self._calls.get(number)) is not None]  # others have ended
        if frame.cancel:
            for call in calls:
                call.cancel()
            return
        if frame.HasField("message"):
            parsed: dict[int, Any] = {}  # shared by all calls of a method
            for call in calls:
                call.take_encoded(frame.message, parsed)
        if frame.end:
            for call in calls:
                call.take(EOF)

    def _begin(self, number: int, frame: multiplex_pb2.Frame) -> None:
        if number in self._calls:
            raise InvalidRequest(f"call {number} of {frame.method} begins while it is under way")
        try:
            if len(self._calls) >= MAX_CALLS:
                raise Busy(f"{MAX_CALLS} calls are under way on this stream already; try again later")
            caller = caller_from_proto(frame.caller) if frame.HasField("caller") else self._caller
            self._revocations.check(caller.names)
            method = self._handler(frame.method, caller)
        except AxonError as error:
            self.fail(number, status_of(error))
            return
        call = self._calls[number] = MultiplexedServerCall(self, number, method)
        request = None
        if not method.is_stream:
            request = frame.message
        elif frame.HasField("message"):
            call.take_encoded(frame.message, {})
        if not call.over:
            call.task = asyncio.ensure_future(self._perform(call, request, caller))

    async def _perform(self, call: MultiplexedServerCall, request: bytes | None, caller: Credentials) -> None:
        try:
            with self._revocations.watching(caller, is_stream=request is None):
                status = await call.method.perform(call, request)
        except (Revoked, Ended) as error:
            status = status_of(error)
        finally:
            over = call.done()
            self.forget(call)
        if over:
            return
        if status.is_ok:
            self._send(multiplex_pb2.Frame(calls=(call.number,), message=call.reply, end=True))
        else:
            self.fail(call.number, status)

    def forget(self, call: MultiplexedServerCall) -> None:
        """Forget a call that has ended."""
        call.over = True
        if self._calls.get(call.number) is call:
            del self._calls[call.number]

    def fail(self, number: int, status: CallStatus) -> None:
        """Send a call's status."""
        sent = multiplex_pb2.CallStatus(code=status.number, details=status.details, error=status.error)
        self._send(multiplex_pb2.Frame(calls=(number,), status=sent))

    def peer(self) -> str:
        """Return the address of the stream's client."""
        return self._stream.peer()

    def is_deaf(self) -> bool:
        """Return True if the caller does not read; then the stream is ended."""
        if self.outbox.is_full:
            self.end(Broken("this host does not read what is sent to it; its stream is ended"))
        return self.outbox.is_full

    def _send(self, frame: multiplex_pb2.Frame) -> None:
        if not self.is_deaf():
            self.outbox.add_frame(frame)


class MultiplexedServerCall:
    """A servicer's end of a call. See `calls.protocol.ServerCall`.

    Attributes:
        reply: the reply to a unary call, which is sent with the end of the call.
    """

    def __init__(self, server: MultiplexedServer, number: int, method: Method) -> None:
        self.number = number
        self.method = method
        self.task: asyncio.Task[None] | None = None
        self.over = False
        self.received = False
        self.reply: bytes | None = None
        self._server = server
        self._messages: MessageQueue[Any] = MessageQueue()
        self._receive: Callable[[Any], None] | None = None

    def take_encoded(self, data: bytes, parsed: dict[int, Any]) -> None:
        """Queue an encoded message that has come; `parsed` caches it for calls of the same method."""
        message = parsed.get(id(self.method))
        if message is None:
            parse = self.method.parse
            try:
                message = parsed[id(self.method)] = parse(data) if parse else data
            except DecodeError as error:
                return self._end(InvalidRequest(f"a message of {self.method.name} cannot be parsed: {error}"))
        self.take(message)

    def take(self, message: Any) -> None:
        """Queue a message that has come, or `EOF`."""
        if self._receive is not None:
            self._receive(message)
        elif message is EOF:
            self._messages.close()
        elif len(self._messages) >= MAX_UNREAD:
            self._end(Broken(f"{self.method.name} has not read {MAX_UNREAD} messages; the call is ended"))
        else:
            self._messages.put(message)

    def cancel(self) -> None:
        """End the call, because it is over for its caller."""
        self._server.forget(self)
        if self.task is not None:
            self.task.cancel()

    def _end(self, error: AxonError) -> None:
        self._server.fail(self.number, status_of(error))
        self.cancel()

    # ------------------------------------------------------------------ for the servicer

    async def read(self) -> Any:
        """Return the caller's next message; `EOF` when there are no more."""
        message = await self._messages.get()
        self.received = True
        return EOF if message is None else message

    def end_input(self) -> None:
        """Have the read under way, and later ones, return `EOF`."""
        self._messages.end_input()

    def receive(self, take: Callable[[Any], None]) -> bool:
        """Have each further message, and `EOF`, passed to `take` at once, which must not raise."""
        self._receive = take
        for message in self._messages.pop_all():
            take(message)
        if self._messages.closed:
            take(EOF)
        return True

    async def write(self, message: Any) -> None:
        """Send the caller a message."""
        data = self.method.serialize(message) if self.method.serialize else message
        check_size(data, self.method.name, is_call=False)
        if not self.method.is_stream:
            self.reply = data
        elif not self.send_soon(data):
            raise CallOver("the call has ended")

    def send_soon(self, message: bytes) -> bool:
        """Send an encoded message, without waiting; False when too much waits, or the call is over."""
        if self.over or self._server.is_deaf():
            return False
        self._server.outbox.add(self.number, message)
        return True

    def done(self) -> bool:
        """Return True if the call has ended."""
        return self.over

    def peer(self) -> str:
        """Return the address of the stream's client."""
        return self._server.peer()

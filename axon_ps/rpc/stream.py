"""A client's end of a streaming call: messages of its method, and our errors.

Note: [Whose cancellation]
    A task that was not cancelled itself must not get `asyncio.CancelledError` when another task cancels the call. It
    gets `Closed`. A task that is cancelled while it waits on a call cancels the call.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any
from weakref import WeakSet

from google.protobuf.message import DecodeError

from axon_ps.errors import AxonError, Broken, Closed
from axon_ps.host import fork
from axon_ps.rpc.calls.protocol import EOF, CallOver, ClientCall, Destination, task_is_cancelled
from axon_ps.rpc.calls.status import CallStatus
from axon_ps.rpc.status import error_of_status

__all__ = ["EOF", "Destination", "Stream", "task_is_cancelled"]

_streams: WeakSet[Stream] = WeakSet()

fork.in_child(lambda: list(_streams))


class Stream:
    """One streaming call. Use `read` or iteration to receive, `write` and `done_writing` to send.

    One task may read while others write; writes of several tasks go out one after the other.

    After an error the call is over. `Unreachable` means that nothing was sent. After `Broken`, `Timeout` or `Closed`
    the peer may have received some, all or none of the messages written. An error may overtake unread messages that the
    peer sent before it.

    A stream that is left before its end (`break`, an exception) is cancelled when `async with` is left, or when the
    last reference to it is gone.
    """

    def __init__(
        self,
        call: ClientCall,
        peer: str,
        method: str,
        timeout_s: float | None,
        parse: Callable[[bytes], Any],
        is_current: Callable[[], bool] = lambda: True,
    ) -> None:
        self._call = call
        self._parse = parse
        self._is_current = is_current
        self._peer = peer
        self._method = method
        self._timeout_s = timeout_s
        self._answered = False
        self._half_closed = False
        self._loop = asyncio.get_running_loop()
        _streams.add(self)

    def __del__(self) -> None:
        if not self._call.done():  # otherwise gRPC's call and the peer's end would stay open
            with contextlib.suppress(RuntimeError):  # the event loop is closed, and so is the call
                self._loop.call_soon_threadsafe(self._call.cancel)

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()

    async def read(self, destination: Destination | None = None) -> Any:
        """Return the next message, or `EOF` once the peer has ended the call without an error.

        Args:
            destination: returns the destination of a large message, or of its end; then only the bytes before that are
                returned. For a small message it is not called.

        Raises:
            AxonError: the error that ended the call, as the peer raised it; see `status.error_of` for gRPC's own.
            Broken: the peer sent a message that cannot be parsed; the call is cancelled.
        """
        data = await self._call.read(destination)
        if data is EOF:
            status = await self._call.status()
            if status.is_ok:
                return EOF
            raise self._error_of(status)
        self._answered = True
        try:
            return self._parse(data)
        except DecodeError as error:
            self.cancel()
            raise Broken(f"{self.target} sent a message that cannot be parsed: {error}") from None

    async def write(self, message: Any) -> None:
        """Send one message; returns when the transport has accepted it.

        Args:
            message: a message of the method's type; if messages are raw, bytes or a tuple of buffers that follow each
                other.

        Raises:
            AxonError: the error that ended the call, as the peer raised it.
            Closed: `done_writing` or `cancel` was called, or the peer ended the call without an error.
        """
        if self._half_closed:
            raise Closed(f"{self.target} was half-closed; nothing more can be written to it")
        try:
            await self._call.write(message if isinstance(message, (bytes, tuple)) else message.SerializeToString())
        except CallOver:
            raise self._error_of(await self._call.status()) from None

    async def done_writing(self) -> None:
        """Half-close: no further message is written. Does nothing when the call is over; `read` raises its error."""
        if not self._half_closed and not self._call.done():
            self._half_closed = True
            await self._call.done_writing()

    def __aiter__(self) -> AsyncIterator[Any]:
        """Iterate over messages until the peer ends the call without an error; raises as `read` does."""
        return self._messages()

    def cancel(self) -> None:
        """End the call now; every task that waits on it gets `Closed`. Does nothing when it is over."""
        self._call.cancel()

    def done(self) -> bool:
        """Return True if the call is over."""
        return self._call.done()

    async def is_free(self) -> bool:
        """Return True if it can still be used. See `rpc.stream_pool`."""
        return not self.done() and self.is_current()

    def is_current(self) -> bool:
        """Return True if it was opened with our newest credentials. A server ends it soon after older ones expire."""
        return self._is_current()

    @property
    def target(self) -> str:
        """The method and the address, for errors."""
        return f"{self._method} at {self._peer}"

    async def _messages(self) -> AsyncIterator[Any]:
        while (message := await self.read()) is not EOF:
            yield message

    def _error_of(self, status: CallStatus) -> AxonError:
        """Return the error of a call that has ended, for an operation that needs more of it."""
        if status.local:
            return Closed(f"{self.target} was cancelled by this side")
        if status.is_ok:
            return Closed(f"{self.target} was ended by the peer; nothing more can be written to it")
        return error_of_status(status, self._peer, self._method, answered=self._answered, timeout_s=self._timeout_s)

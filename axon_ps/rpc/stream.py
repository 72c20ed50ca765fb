"""A client's end of a streaming call: a wrapper of gRPC's call that raises our errors.

Note: [Whose cancellation]
    If a call was cancelled locally, gRPC raises `asyncio.CancelledError` in every task that awaits it, also when
    another task called `cancel()`. A task that was not cancelled itself must not get it, so it becomes `Closed` here. A
    task that is cancelled while it waits on a call cancels the call.

Note: [Why a write failed]
    When the peer ends a call under a write, gRPC's `write` overwrites the status that the peer sent with its own
    INTERNAL, "Internal error from Core", and the peer's message is lost. So we pass messages to the call below that
    layer, and wait for the status when that fails. It comes once all messages before it were read: while one task
    writes to a peer that may send, another task must read.

Only gRPC's calls need `Shielded` and the lock here; a bulk call needs neither.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, Final
from weakref import WeakSet

import grpc
from google.protobuf.message import DecodeError

from axon_ps.errors import AxonError, Broken, Closed
from axon_ps.host import fork
from axon_ps.rpc.shielded import Shielded
from axon_ps.rpc.status import error_of, error_of_status

Destination = Callable[[memoryview, int], tuple[int, memoryview] | None]
"""Gets a message's first bytes and its size; returns the offset at which its end begins, and the memory for that.

None = any memory.
"""

EOF: Final = grpc.aio.EOF
"""The result of `Stream.read` and of a servicer's `context.read` when there are no more messages."""

_streams: WeakSet[Stream] = WeakSet()

fork.in_child(lambda: list(_streams))


class Stream:
    """One streaming call. Use `read` or iteration to receive, `write` and `done_writing` to send.

    One task may read while others write; writes of several tasks go out one after the other.

    After an error the call is over. `Unreachable` means that nothing was sent. After `Broken`, `Timeout` or `Closed`
    the peer may have received some, all or none of the messages written. An error may overtake messages that the peer
    sent before it and that were not read yet.

    A stream that is left before its end (`break`, an exception) is cancelled when `async with` is left, or when the
    last reference to it is gone.
    """

    def __init__(
        self, call: Any, peer: str, method: str, timeout_s: float | None, is_current: Callable[[], bool] = lambda: True
    ) -> None:
        self._call = call
        self._is_current = is_current
        self._is_bulk = getattr(call, "is_bulk", False)
        self._peer = peer
        self._method = method
        self._timeout_s = timeout_s
        self._answered = False
        self._connected = False
        self._half_closed = False
        self._writing = asyncio.Lock()
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
                returned. It may not be called at all.

        Raises:
            AxonError: the error that ended the call, as the peer raised it; see `status.error_of` for gRPC's own.
            Broken: the peer sent a message that cannot be parsed; the call is cancelled.
        """
        try:
            if self._is_bulk:
                message = await self._call.read(destination)
            else:
                message = await Shielded(self._call.read(), self._call.cancel)
        except grpc.aio.AioRpcError as error:
            raise self._error_of(error) from None
        except asyncio.CancelledError:
            raise self._cancelled() from None
        self._answered = True
        if isinstance(message, DecodeError):
            self.cancel()
            raise Broken(f"{self.target} sent a message that cannot be parsed: {message}")
        return message

    async def write(self, message: Any) -> None:
        """Send one message; returns when the transport has accepted it.

        Args:
            message: of the method's type; if messages are raw, bytes or a tuple of buffers that follow each other.

        Raises:
            AxonError: the error that ended the call, as the peer raised it.
            Closed: `done_writing` or `cancel` was called, or the peer ended the call without an error.
        """
        data: bytes | tuple[bytes | memoryview, ...]
        if not isinstance(message, tuple):
            data = message if isinstance(message, bytes) else message.SerializeToString()
        else:
            data = message if self._is_bulk else b"".join(message)
        try:
            if self._is_bulk:  # the messages of a bulk call do not mix
                await self._check_writable()
                await self._call.send_serialized_message(data)
                return
            async with self._writing:
                await self._check_writable()
                await self._connect()
                # See Note: [Why a write failed]
                await Shielded(self._call._cython_call.send_serialized_message(data), self._call.cancel)
        except grpc.aio.InternalError:
            raise await self._ended() from None
        except asyncio.CancelledError:
            self._call.cancel()
            raise self._cancelled() from None

    async def done_writing(self) -> None:
        """Half-close: no further message is written. Does nothing when the call is over; `read` raises its error."""
        try:
            async with self._writing:
                if self._half_closed or self._call.done():
                    return
                self._half_closed = True
                await self._connect()
                await self._call.done_writing()
        except (AxonError, grpc.aio.InternalError):
            return
        except asyncio.CancelledError:
            self._call.cancel()
            raise self._cancelled() from None

    def __aiter__(self) -> AsyncIterator[Any]:
        """Iterate over messages until the peer ends the call without an error; raises as `read` does."""
        return self._messages()

    def cancel(self) -> None:
        """End the call now; every task that waits on it gets `Closed`. Does nothing when it is over."""
        self._call.cancel()

    def done(self) -> bool:
        """Return True if the call is over."""
        return bool(self._call.done())

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

    async def _check_writable(self) -> None:
        if self._half_closed:
            raise Closed(f"{self.target} was half-closed; nothing more can be written to it")
        if self._call.done():
            raise await self._ended()

    async def _connect(self) -> None:
        if self._connected:
            return
        connecting = asyncio.ensure_future(self._call.wait_for_connection())
        self._call.add_done_callback(lambda _: connecting.cancel())  # else it waits forever if the call was cancelled
        try:
            await connecting
        except grpc.aio.AioRpcError as error:
            raise self._error_of(error) from None
        except asyncio.CancelledError:
            if task_is_cancelled():
                raise
            raise await self._ended() from None
        self._connected = True

    async def _ended(self) -> AxonError:
        """Return the error that ended the call; waits until it is known."""
        if self._call._cython_call.is_locally_cancelled():
            return self._closed()
        code, details = await self._call.code(), await self._call.details()
        if code is grpc.StatusCode.OK:
            return Closed(f"{self.target} was ended by the peer; nothing more can be written to it")
        trailing = await self._call.trailing_metadata()
        return error_of_status(
            code, details, trailing, self._peer, self._method, answered=self._answered, timeout_s=self._timeout_s
        )

    def _cancelled(self) -> BaseException:
        """Return the error to raise for a `CancelledError`. See Note: [Whose cancellation]."""
        return asyncio.CancelledError() if task_is_cancelled() else self._closed()

    def _closed(self) -> Closed:
        return Closed(f"{self.target} was cancelled by this side")

    def _error_of(self, error: grpc.aio.AioRpcError) -> AxonError:
        return error_of(error, self._peer, self._method, answered=self._answered, timeout_s=self._timeout_s)


def task_is_cancelled() -> bool:
    """Return True if the current task itself is being cancelled, and not only the future that it awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0

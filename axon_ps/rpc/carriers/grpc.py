"""Calls over gRPC.

Note: [Whose cancellation]
    If a call was cancelled locally, gRPC raises `asyncio.CancelledError` in every task that awaits it, also when
    another task called `cancel()`. A task that was not cancelled itself must not get it: for it the call is over.

Note: [Why a write failed]
    When the peer ends a call under a write, gRPC's `write` overwrites the status that the peer sent with its own
    INTERNAL, "Internal error from Core", and the peer's message is lost. So we pass messages to the call below that
    layer, and wait for the status when that fails. It comes once all messages before it were read: while one task
    writes to a peer that may send, another task must read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc

from axon_ps.rpc.calls.method import Method, Service
from axon_ps.rpc.calls.protocol import EOF, CallOver, Destination, Message, Metadata, joined, task_is_cancelled
from axon_ps.rpc.calls.status import CANCELLED, CallStatus
from axon_ps.rpc.shielded import Shielded
from axon_ps.rpc.status import received_status, status_of_rpc_error

# ---- the client's end ----


class GrpcCarrier:
    """Makes calls on a channel of gRPC, or a `RenewedChannel`. See `calls.protocol.Carrier`."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        self._streams: dict[str, Any] = {}
        self._unary: dict[str, Any] = {}

    def open(self, path: str, timeout_s: float | None, metadata: Metadata | None) -> GrpcCall:
        """Begin a streaming call."""
        if (stream := self._streams.get(path)) is None:
            stream = self._streams[path] = self._channel.stream_stream(path)
        try:
            return GrpcCall(stream(timeout=timeout_s, metadata=metadata))
        except grpc.aio.UsageError as error:
            raise CallOver(str(error)) from None

    async def call(
        self, path: str, request: bytes, timeout_s: float | None, metadata: Metadata | None
    ) -> bytes | CallStatus:
        """Make a unary call."""
        if (unary := self._unary.get(path)) is None:
            unary = self._unary[path] = self._channel.unary_unary(path)
        try:
            reply: bytes = await unary(request, timeout=timeout_s, metadata=metadata)
            return reply
        except grpc.aio.AioRpcError as error:
            return status_of_rpc_error(error)
        except asyncio.CancelledError:
            if task_is_cancelled():
                raise
            return CANCELLED  # see Note: [Whose cancellation]
        except grpc.aio.UsageError as error:
            raise CallOver(str(error)) from None


class GrpcCall:
    """A client's end of a streaming call. See `calls.protocol.ClientCall`."""

    def __init__(self, call: grpc.aio.StreamStreamCall[bytes, bytes]) -> None:
        self._call: Any = call
        self._connected = False
        self._writing = asyncio.Lock()

    async def read(self, destination: Destination | None = None) -> Any:
        """Return the server's next message, or `EOF`."""
        try:
            return await Shielded(self._call.read(), self._call.cancel)
        except grpc.aio.AioRpcError:
            return EOF
        except asyncio.CancelledError:
            if task_is_cancelled():
                raise
            return EOF

    async def write(self, message: Message) -> None:
        """Send the server a message."""
        data = joined(message)
        try:
            async with self._writing:
                await self._connect()
                # See Note: [Why a write failed]
                await Shielded(self._call._cython_call.send_serialized_message(data), self._call.cancel)
        except grpc.aio.InternalError as error:
            raise CallOver(str(error)) from None
        except asyncio.CancelledError:
            self._call.cancel()
            if task_is_cancelled():
                raise
            raise CallOver("the call was cancelled") from None

    async def done_writing(self) -> None:
        """Half-close."""
        try:
            async with self._writing:
                await self._connect()
                await self._call.done_writing()
        except (CallOver, grpc.aio.InternalError):
            return
        except asyncio.CancelledError:
            self._call.cancel()
            if task_is_cancelled():
                raise

    def cancel(self) -> None:
        """End the call from this side."""
        self._call.cancel()

    def done(self) -> bool:
        """Return True if the call has ended."""
        return bool(self._call.done())

    async def status(self) -> CallStatus:
        """Return the status with which the call has ended, as soon as it is known."""
        if self._call._cython_call.is_locally_cancelled():
            return CANCELLED
        code, details = await self._call.code(), await self._call.details()
        return received_status(code, details, await self._call.trailing_metadata())

    async def _connect(self) -> None:
        if self._call.done():
            raise CallOver("the call has ended")
        if self._connected:
            return
        connecting = asyncio.ensure_future(self._call.wait_for_connection())
        self._call.add_done_callback(lambda _: connecting.cancel())  # else it waits forever if the call was cancelled
        try:
            await connecting
        except grpc.aio.AioRpcError as error:
            raise CallOver(str(error)) from None
        except asyncio.CancelledError:
            if task_is_cancelled():
                raise
            raise CallOver("the call has ended") from None
        self._connected = True


# ---- the server's end ----


class GrpcServerCall:
    """A servicer's end of a call. See `calls.protocol.ServerCall`.

    Args:
        context: gRPC's context.
    """

    send_soon: Callable[[bytes], bool] | None = None

    def __init__(self, context: Any) -> None:
        self.received = False
        self._context = context
        self._reading: Shielded[Any] | None = None
        self._input_ended = False

    async def read(self) -> Any:
        """Return the client's next message; `EOF` when there are no more."""
        if not self._is_wanted():
            return EOF
        self._reading = Shielded(self._context.read())
        try:
            message = await self._reading
        except asyncio.CancelledError:
            if self._is_wanted() or task_is_cancelled():  # gRPC cancelled it: the client has gone
                raise
            return EOF
        except grpc.aio.BaseError as error:
            raise self._over(error) from None
        finally:
            self._reading = None
        self.received = True
        return message

    def end_input(self) -> None:
        """Have the read under way, and later ones, return `EOF`."""
        self._input_ended = True
        if self._reading is not None:
            self._reading.drop()

    def receive(self, take: Callable[[Any], None]) -> bool:
        """Return False: the caller must read."""
        return False

    async def write(self, message: Any) -> None:
        """Send the client a message."""
        try:
            await Shielded(self._context.write(message))
        except grpc.aio.BaseError as error:
            raise self._over(error) from None

    def done(self) -> bool:
        """Return True if the call has ended."""
        return bool(self._context.done())

    def peer(self) -> str:
        """Return the address of the client."""
        return str(self._context.peer())

    def _is_wanted(self) -> bool:
        return not self._input_ended

    def _over(self, error: grpc.aio.BaseError) -> Exception:
        """Return the error of an operation that failed: the client has gone, the server stopped, or it is our bug."""
        is_bug = isinstance(error, grpc.aio.UsageError) and not self._context.done()
        return error if is_bug else CallOver(str(error))


class GrpcService(grpc.GenericRpcHandler):
    """A service, as gRPC's servers offer it."""

    def __init__(self, service: Service) -> None:
        self._handlers = {path: _handler(method) for path, method in service.items()}

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """Return the handler of a method; None when it is not served."""
        return self._handlers.get(handler_call_details.method)


def _handler(method: Method) -> Any:
    """Return gRPC's handler of a method. A unary one writes its reply, as if it had several."""

    async def perform(request: Any, context: Any) -> None:
        status = await method.perform(GrpcServerCall(context), None if method.is_stream else request)
        if status.is_ok:
            return
        if context.done():  # a status was sent before: the client gets no other
            raise asyncio.CancelledError
        try:
            await abort(context, status)
        except grpc.aio.InternalError:  # the client has gone meanwhile
            raise asyncio.CancelledError from None

    if method.is_stream:
        return grpc.stream_stream_rpc_method_handler(perform, method.parse, method.serialize)
    return grpc.unary_stream_rpc_method_handler(perform, None, method.serialize)


async def abort(context: Any, status: CallStatus) -> None:
    """End a call with a status that is not OK.

    Args:
        context: gRPC's context.
        status: the status.

    Raises:
        AbortError: the status was sent; gRPC expects it.
        InternalError: gRPC's; the client has gone.
    """
    # See `shielded`, Note: [An operation that is cancelled]
    await Shielded(context.abort(status.code, status.details, status.trailing))

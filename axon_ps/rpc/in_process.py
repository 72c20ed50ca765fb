"""Calls inside one process: `channels.connect` and `server.listen` use them for hosts that end with `SUFFIX`.

Clients and servers of one event loop call each other with their usual code: messages are encoded, and errors are
statuses. It does not use gRPC's core: no sockets, no ports, no threads. A job in one process runs on it.

Owns: the servers of this process by address, and calls between them and their clients. Refuses: calls from another
event loop, and features of a network (TLS, tokens, connections that break).

Invariants:
- A call ends once, with the status that came first, on both ends. The client still reads the messages sent before it.
- A stream queues at most `MAX_QUEUED_BYTES` and one message each way; a writer of more waits for the reader.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from typing import Any, Final, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import grpc

from axon_ps.errors import Misuse, forget
from axon_ps.rpc.auth.credentials import OnRefused, Revocations
from axon_ps.rpc.status import rpc_error

SUFFIX: Final = ".in-process"
"""The end of host names of this process."""

PORT: Final = 1
"""The port of every server; each has a host name of its own."""

MAX_QUEUED_BYTES: Final = 4 << 20
"""Bytes that a stream queues for its reader; as many as a gRPC connection (`channels`)."""

CANCEL_WAIT_S: Final = 5.0
"""Seconds that a server that stops waits for the calls that it has cancelled."""

EOF: Final = grpc.aio.EOF

T = TypeVar("T")
_servers: WeakValueDictionary[str, InProcessServer] = WeakValueDictionary()


def new_network() -> str:
    """Return a suffix for the host names of one job: `"shard-0" + new_network()` is unique to it."""
    return f".{uuid.uuid4().hex}{SUFFIX}"


def is_in_process(host: str) -> bool:
    """Return True if `host` is in this process."""
    return host.endswith(SUFFIX)


class InProcessServer:
    """Services at an address of this process; like `server.Server`, for clients of the same event loop.

    Args:
        host: ends with a result of `new_network`.
        services: from `service.service_handler`.

    Attributes:
        revocations: without effect, since there are no credentials.
    """

    def __init__(self, host: str, services: Sequence[grpc.GenericRpcHandler]) -> None:
        self.revocations = Revocations()
        self.host = host
        self.port = PORT
        self.loop: asyncio.AbstractEventLoop | None = None
        self._services = tuple(services)
        self._calls: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        """The address, "host:port"."""
        return f"{self.host}:{self.port}"

    def report_refused(self, report: OnRefused) -> None:
        """Do nothing, since no caller is refused."""

    async def start(self, *, serving: bool = True) -> int:
        """Serve, and return the port. There is no health service, so `serving` has no effect.

        Raises:
            Misuse: there is a server of that name already.
        """
        if self.address in _servers:
            raise Misuse(f"{self.address} is a server of this process already")
        self.loop = asyncio.get_running_loop()
        _servers[self.address] = self
        return self.port

    async def set_serving(self, serving: bool) -> None:
        """Do nothing, since there is no health service."""

    async def stop(self, grace_s: float) -> None:
        """Accept no new calls, give those under way `grace_s` seconds, then cancel them."""
        if _servers.get(self.address) is self:  # it was not replaced by another one
            del _servers[self.address]
        await end_calls(self._calls, grace_s)

    def handler(self, path: str) -> Any:
        """Return gRPC's handler of "/SERVICE/METHOD"; None when it is not served."""
        return handler_of(self._services, path)

    def perform(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Perform a call."""
        task = asyncio.get_running_loop().create_task(work)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        return task


class InProcessChannel:
    """A client's channel to the server of an address, with the methods that `service.Stub` uses."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._calls: set[_Call] = set()
        self._closed = False

    def stream_stream(self, path: str, *, request_serializer: Any, response_deserializer: Any) -> Callable[..., _Call]:
        """Return a function that opens a stream: `open(timeout=, metadata=)`. Requests are written as bytes."""

        def open(*, timeout: float | None, metadata: object) -> _Call:
            call = self._begin(path, response_deserializer, timeout)
            call.begin(None)
            return call

        return open

    def unary_unary(
        self, path: str, *, request_serializer: Any, response_deserializer: Any
    ) -> Callable[..., Coroutine[Any, Any, Any]]:
        """Return a function that makes a unary call: `await call_once(request, timeout=, metadata=)`."""

        async def call_once(request: Any, *, timeout: float | None, metadata: object) -> Any:
            data = request_serializer(request) if request_serializer else request
            call = self._begin(path, response_deserializer, timeout)
            call.begin(data)
            try:
                reply = await call.read()
            finally:
                call.cancel()
            if reply is EOF:
                raise _error(_Status(grpc.StatusCode.INTERNAL, f"{path} ended without a reply"))
            return reply

        return call_once

    async def close(self, grace_s: float | None = None) -> None:
        """End the calls under way, and make no others."""
        self._closed = True
        for call in list(self._calls):
            call.cancel()

    def _begin(self, path: str, deserialize: Any, timeout_s: float | None) -> _Call:
        if self._closed:
            raise grpc.aio.UsageError("Channel is closed.")
        call = _Call(_servers.get(self._address), self._address, path, deserialize, timeout_s)
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        return call


class _Status(NamedTuple):
    """The end of a call."""

    code: grpc.StatusCode
    details: str = ""
    trailing: tuple[tuple[str, str | bytes], ...] = ()
    local: bool = False
    """True if the client itself ended it."""


class _Queue:
    """Messages in one direction, in order; bounded. `close` wakes every task that waits."""

    def __init__(self) -> None:
        self._messages: deque[bytes] = deque()
        self._queued_bytes = 0
        self._waiting: dict[asyncio.Future[None], None] = {}
        self.closed = False

    async def add(self, message: bytes) -> bool:
        """Add a message once the queue is not full; False when it was closed."""
        while self._queued_bytes >= MAX_QUEUED_BYTES and not self.closed:
            await self._change()
        if self.closed:
            return False
        self._messages.append(message)
        self._queued_bytes += len(message)
        self._wake()
        return True

    async def get(self) -> bytes | None:
        """Return the oldest message as soon as there is one; None when the queue was closed and is empty."""
        while not self._messages and not self.closed:
            await self._change()
        if not self._messages:
            return None
        message = self._messages.popleft()
        self._queued_bytes -= len(message)
        self._wake()
        return message

    def close(self, *, drop: bool = False) -> None:
        """Accept no more messages; with `drop`, discard those that were not read."""
        self.closed = True
        if drop:
            self._messages.clear()
        self._wake()

    async def _change(self) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[future] = None
        try:
            await future
        finally:
            self._waiting.pop(future, None)

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for future in waiting:
            if not future.done():
                future.set_result(None)


class _Call:
    """One call: the client's end, with the methods of gRPC's calls that `stream.Stream` uses, and the shared state."""

    def __init__(
        self, server: InProcessServer | None, address: str, path: str, deserialize: Any, timeout_s: float | None
    ) -> None:
        self.requests, self.replies = _Queue(), _Queue()
        self.status: _Status | None = None
        self._server = server
        self._address = address
        self._path = path
        self._deserialize = deserialize
        self._timeout_s = timeout_s
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._callbacks: list[Callable[[Any], object]] = []
        self._cython_call = self  # `Stream` finds here two methods of gRPC's that are not public

    def begin(self, request: bytes | None) -> None:
        """Start it on the server: a stream, or a unary call with its request."""
        loop = asyncio.get_running_loop()
        if self._server is None or self._server.loop is not loop:
            why = "no server of this process" if self._server is None else "a server of another event loop"
            self.end(_Status(grpc.StatusCode.UNAVAILABLE, f"failed to connect: {self._address} is {why}"))
            return
        handler = self._server.handler(self._path)
        if handler is None:
            self.end(_Status(grpc.StatusCode.UNIMPLEMENTED, f"{self._path} is not served"))
            return
        if self._timeout_s is not None:
            self._timer = loop.call_later(self._timeout_s, self.end, _Status(grpc.StatusCode.DEADLINE_EXCEEDED))
        self._task = self._server.perform(self._perform(handler, request))

    async def _perform(self, handler: Any, request: bytes | None) -> None:
        """Perform the call, and end it with its status."""
        context = _Context(self, handler.request_deserializer, handler.response_serializer)
        status = _Status(grpc.StatusCode.UNKNOWN, "the servicer ended without a status")
        try:
            if handler.stream_stream is not None:
                await handler.stream_stream(None, context)
            else:
                await self.replies.add(await handler.unary_unary(request, context))
            status = _Status(grpc.StatusCode.OK)
        except asyncio.CancelledError:
            status = _Status(grpc.StatusCode.UNAVAILABLE, "the server stopped")
        except grpc.aio.AbortError as error:
            forget(error)  # `_Context.abort` has set the status
        finally:
            self.end(status)

    def end(self, status: _Status) -> None:
        """End the call on both sides, with the first status that comes."""
        if self.status is not None:
            return
        self.status = status
        if self._timer is not None:
            self._timer.cancel()
        self.requests.close(drop=True)
        self.replies.close(drop=status.local)
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)

    # ------------------------------------------------------------------ the interface of gRPC's calls

    async def wait_for_connection(self) -> None:
        """Raise the error of a call that ended before it had begun."""
        if self.status is not None and self._task is None:
            raise _error(self.status)

    async def read(self) -> Any:
        """Return the server's next message, or EOF; raises as gRPC does. Cancelling the reader cancels the call."""
        try:
            message = await self.replies.get()
        except asyncio.CancelledError:
            self.cancel()
            raise
        if message is not None:
            return self._deserialize(message) if self._deserialize else message
        assert self.status is not None, "replies are closed by the end"
        if self.status.local:
            raise asyncio.CancelledError
        if self.status.code is not grpc.StatusCode.OK:
            raise _error(self.status)
        return EOF

    def send_serialized_message(self, message: bytes) -> Awaitable[None]:
        """Send the server a message."""
        return self._send(message)

    async def _send(self, message: bytes) -> None:
        if not await self.requests.add(message):
            raise grpc.aio.InternalError("the call is over")

    async def done_writing(self) -> None:
        """Half-close: no further message is sent."""
        self.requests.close()

    def cancel(self) -> bool:
        """End the call from this side."""
        before = self.status
        self.end(_Status(grpc.StatusCode.CANCELLED, "cancelled by the client", local=True))
        return before is None

    def done(self) -> bool:
        """Return True if the call has ended."""
        return self.status is not None

    def is_locally_cancelled(self) -> bool:
        """Return True if this side ended the call."""
        return self.status is not None and self.status.local

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Have `callback` called with this call when it has ended."""
        if self.status is None:
            self._callbacks.append(callback)
        else:
            callback(self)

    def code(self) -> Awaitable[grpc.StatusCode]:
        """Return the status code of a call that has ended."""
        return _known(self._ended().code)

    def details(self) -> Awaitable[str]:
        """Return the status details of a call that has ended."""
        return _known(self._ended().details)

    def trailing_metadata(self) -> Awaitable[tuple[tuple[str, str | bytes], ...]]:
        """Return the metadata of the status of an ended call."""
        return _known(self._ended().trailing)

    def _ended(self) -> _Status:
        assert self.status is not None, "a write fails only when the call has ended"
        return self.status


class _Context:
    """A servicer's end of a call, with the part of the interface of gRPC's context that servicers use."""

    def __init__(self, call: _Call, parse: Any, serialize: Any) -> None:
        self._call = call
        self._parse = parse
        self._serialize = serialize

    async def read(self) -> Any:
        """Return the client's next message; EOF when there are no more."""
        message = await self._call.requests.get()
        if message is None:
            return EOF
        return self._parse(message) if self._parse else message

    async def write(self, message: Any) -> None:
        """Send the client a message."""
        data = self._serialize(message) if self._serialize else message
        if not await self._call.replies.add(data):
            raise grpc.aio.UsageError("the call is over")

    def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Sequence[tuple[str, bytes]] = ()
    ) -> Awaitable[None]:
        """End the call with a status."""
        self._call.end(_Status(code, details, tuple(trailing_metadata)))
        raise grpc.aio.AbortError("the servicer aborted the call")

    def done(self) -> bool:
        """Return True if the call has ended."""
        return self._call.done()


async def _known(value: T) -> T:
    return value


def _error(status: _Status) -> grpc.aio.AioRpcError:
    return rpc_error(status.code, status.details, status.trailing)


# ---- shared by the servers that are not gRPC's ----


class _Method(NamedTuple):
    """The argument of a generic handler."""

    method: str
    invocation_metadata: tuple[Any, ...]


def handler_of(services: Sequence[grpc.GenericRpcHandler], path: str) -> Any:
    """Return gRPC's handler of "/SERVICE/METHOD"; None when it is not served."""
    details: Any = _Method(path, ())
    return next((found for s in services if (found := s.service(details)) is not None), None)


async def end_calls(calls: Collection[asyncio.Task[None]], grace_s: float) -> None:
    """Give calls under way `grace_s` seconds, then cancel them.

    Args:
        calls: those that have not ended; their owner removes each that ends meanwhile.
        grace_s: seconds that they may take.
    """
    if calls:
        await asyncio.wait(calls, timeout=grace_s)
    for call in calls:
        call.cancel()
    if calls:
        await asyncio.wait(calls, timeout=CANCEL_WAIT_S)

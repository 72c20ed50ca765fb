"""Calls inside one process: `channels.connect` and `server.listen` use them for hosts that end with `SUFFIX`.

Clients and servers of one event loop call each other with their usual code: messages are encoded, and errors are
statuses. gRPC's core is not used: there are no sockets, no ports and no threads. A job in one process runs on these
calls.

Owns: the servers of this process by address, and calls between them and their clients. Refuses: calls from another
event loop, and features of a network (TLS, tokens, connections that break).

Invariants:
- A call ends once, with the status that came first, on both ends. Unless the client has cancelled it, the client still
  reads the messages sent before it.
- A stream queues at most `MAX_QUEUED_BYTES` and one message each way; a writer of more waits for the reader.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final
from weakref import WeakValueDictionary

import grpc

from axon_ps.errors import Misuse
from axon_ps.rpc.auth.credentials import OnRefused, Revocations
from axon_ps.rpc.calls.ending import Ending
from axon_ps.rpc.calls.method import Method, Service, end_calls, method_of
from axon_ps.rpc.calls.protocol import EOF, CallOver, Destination, Message, Metadata, joined
from axon_ps.rpc.calls.queue import MessageQueue
from axon_ps.rpc.calls.status import CANCELLED, CallStatus

SUFFIX: Final = ".in-process"
"""The end of host names of this process."""

PORT: Final = 1
"""The port of every server; each has a host name of its own."""

MAX_QUEUED_BYTES: Final = 4 << 20
"""Bytes that a stream queues for its reader; as many as a stream of gRPC (`channels.LOOKAHEAD_BYTES`)."""

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
        services: handlers of `service.service_handler`.

    Attributes:
        revocations: is not used, since there are no credentials.
    """

    def __init__(self, host: str, services: Sequence[Service]) -> None:
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

    def method(self, path: str) -> Method | None:
        """Return the method of "/SERVICE/METHOD"; None when it is not served."""
        return method_of(self._services, path)

    def perform(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Perform a call."""
        task = asyncio.get_running_loop().create_task(work)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        return task


class InProcessChannel:
    """A client's channel to the server of an address. See `calls.protocol.Carrier`."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._calls: set[InProcessCall] = set()
        self._closed = False

    def open(self, path: str, timeout_s: float | None, metadata: Metadata | None) -> InProcessCall:
        """Begin a streaming call."""
        call = self._made(path, timeout_s)
        call.begin()
        return call

    async def call(
        self, path: str, request: bytes, timeout_s: float | None, metadata: Metadata | None
    ) -> bytes | CallStatus:
        """Make a unary call."""
        call = self._made(path, timeout_s)
        call.requests.put(request)
        call.begin()
        try:
            reply = await call.read()
        finally:
            call.cancel()
        if reply is not EOF:
            return bytes(reply)
        status = await call.status()
        return CallStatus(grpc.StatusCode.INTERNAL, f"{path} ended without a reply") if status.is_ok else status

    async def close(self, grace_s: float | None = None) -> None:
        """End the calls under way, and make no others."""
        self._closed = True
        for call in list(self._calls):
            call.cancel()

    def _made(self, path: str, timeout_s: float | None) -> InProcessCall:
        if self._closed:
            raise CallOver("the channel is closed")
        call = InProcessCall(_servers.get(self._address), self._address, path, timeout_s)
        self._calls.add(call)
        call.ending.add_callback(self._calls.discard)
        return call


class InProcessCall:
    """One call: the client's end, and the state that both ends share. See `calls.protocol.ClientCall`."""

    def __init__(self, server: InProcessServer | None, address: str, path: str, timeout_s: float | None) -> None:
        self.requests: MessageQueue[bytes] = MessageQueue(MAX_QUEUED_BYTES, len)
        self.replies: MessageQueue[bytes] = MessageQueue(MAX_QUEUED_BYTES, len)
        self.ending: Ending[InProcessCall] = Ending(self)
        self._server = server
        self._address = address
        self._path = path
        self._timeout_s = timeout_s
        self._began = False
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Start it on the server."""
        loop = asyncio.get_running_loop()
        if self._server is None or self._server.loop is not loop:
            why = "no server of this process" if self._server is None else "a server of another event loop"
            self.end(CallStatus(grpc.StatusCode.UNAVAILABLE, f"failed to connect: {self._address} is {why}"))
            return
        method = self._server.method(self._path)
        if method is None:
            self.end(CallStatus(grpc.StatusCode.UNIMPLEMENTED, f"{self._path} is not served"))
            return
        if self._timeout_s is not None:
            self._timer = loop.call_later(self._timeout_s, self.end, CallStatus(grpc.StatusCode.DEADLINE_EXCEEDED))
        self._task = self._server.perform(self._perform(method))

    async def _perform(self, method: Method) -> None:
        """Perform the call, and end it with its status."""
        status = CallStatus(grpc.StatusCode.UNAVAILABLE, "the server stopped")
        try:
            request = None if method.is_stream else await self.requests.get()
            status = await method.perform(InProcessServerCall(self, method), request)
        except asyncio.CancelledError:
            pass
        finally:
            self.end(status)

    def end(self, status: CallStatus) -> None:
        """End the call on both sides, with the first status that comes."""
        if not self.ending.set(status):
            return
        if self._timer is not None:
            self._timer.cancel()
        self.requests.close(drop=True)
        self.replies.close(drop=status.local)
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()

    # ------------------------------------------------------------------ the client's end

    async def read(self, destination: Destination | None = None) -> Any:
        """Return the server's next message, or `EOF`."""
        try:
            message = await self.replies.get()
        except asyncio.CancelledError:
            self.cancel()
            raise
        return EOF if message is None else message

    async def write(self, message: Message) -> None:
        """Send the server a message."""
        try:
            if not self._began:
                self._began = True
                await asyncio.sleep(0)  # the server begins, as after connecting
            accepted = await self.requests.add(joined(message))
        except asyncio.CancelledError:
            self.cancel()
            raise
        if not accepted:
            raise CallOver("the call has ended")

    async def done_writing(self) -> None:
        """Half-close."""
        self.requests.close()

    def cancel(self) -> None:
        """End the call from this side."""
        self.end(CANCELLED)

    def done(self) -> bool:
        """Return True if the call has ended."""
        return self.ending.status is not None

    async def status(self) -> CallStatus:
        """Return the status with which the call has ended, as soon as it is known."""
        return await self.ending.wait()


class InProcessServerCall:
    """A servicer's end of a call. See `calls.protocol.ServerCall`."""

    send_soon: Callable[[bytes], bool] | None = None

    def __init__(self, call: InProcessCall, method: Method) -> None:
        self.received = False
        self._call = call
        self._method = method

    async def read(self) -> Any:
        """Return the client's next message; `EOF` when there are no more."""
        message = await self._call.requests.get()
        self.received = True
        if message is None:
            return EOF
        return self._method.parse(message) if self._method.parse else message

    def end_input(self) -> None:
        """Have the read under way, and later ones, return `EOF`."""
        self._call.requests.end_input()

    def receive(self, take: Callable[[Any], None]) -> bool:
        """Return False: the caller must read."""
        return False

    async def write(self, message: Any) -> None:
        """Send the client a message."""
        if not await self._call.replies.add(self._method.serialize(message) if self._method.serialize else message):
            raise CallOver("the call has ended")

    def done(self) -> bool:
        """Return True if the call has ended."""
        return self._call.done()

    def peer(self) -> str:
        """Return nothing: the client has no address."""
        return ""

"""A client's bulk calls, and their negotiation with a server. See `rpc.carriers.bulk`. For one event loop.

Note: [Where a bulk connection cannot be had]
    A server may have no port for bulk calls, or its port may not be reachable from here: behind a NAT, a firewall. Then
    the call is made over gRPC, as are all calls in the next `AGAIN_S`. This is known before a message is sent, so no
    call is lost. Each bulk call takes a file of its process, so calls beyond `limits.max_bulk_calls` are also made over
    gRPC.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import struct
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Protocol
from weakref import WeakSet

import grpc
from google.protobuf.message import DecodeError

from axon_ps.errors import AxonError, ConfigurationError
from axon_ps.rpc.auth.identity import Principal
from axon_ps.rpc.auth.tls_contexts import client_context
from axon_ps.rpc.calls.ending import Ending
from axon_ps.rpc.calls.protocol import EOF, Buffer, CallOver, Destination, Message
from axon_ps.rpc.calls.status import CANCELLED, CallStatus
from axon_ps.rpc.carriers.bulk.connection import Connection, FairLock, FrameKind, status_of_frame
from axon_ps.rpc.carriers.in_process import is_in_process
from axon_ps.rpc.channels import MAX_MESSAGE_BYTES, connected_ports, split_address
from axon_ps.rpc.limits import max_bulk_calls
from axon_ps.rpc.security import Security
from axon_ps.rpc.stream import Stream
from axon_ps.wire.v1 import bulk_pb2

CONNECT_S: Final = 2.0
"""Seconds for connecting, including TLS. See Note: [Where a bulk connection cannot be had]."""

AGAIN_S: Final = 60.0
"""Seconds for which calls are made over gRPC after connecting has failed."""

BULK: Final = bulk_pb2.DESCRIPTOR.services_by_name["Bulk"]
"""The service that `BulkClient` calls, and `server.BulkServer` performs."""

_MIN_RTT_AT: Final = 148
"""Offset of tcpi_min_rtt, a u32 of microseconds, in Linux's struct tcp_info."""

_logger = logging.getLogger(__name__)
_under_way: WeakSet[BulkCall] = WeakSet()  # of this process
_CLOSED: Final = CallStatus(grpc.StatusCode.UNAVAILABLE, "Socket closed: by this side")


class BulkCall:
    """A client's end of a call, whose messages are not parsed. See `calls.protocol.ClientCall`.

    Several tasks may write.

    Args:
        connection: a connection on which HELLO was sent.
    """

    def __init__(self, connection: Connection) -> None:
        self.ending: Ending[BulkCall] = Ending(self)
        self._connection = connection
        self._hung_up = False
        self._unread: deque[memoryview] = deque()
        self._receiving = FairLock()
        connection.on_hangup(self._on_hangup)

    async def read(self, destination: Destination | None = None) -> Any:
        """Return the server's next message, or `EOF`."""
        try:
            while not self._unread and self.ending.status is None:
                await self._receive(destination)
        except asyncio.CancelledError:
            self.cancel()
            raise
        return self._unread.popleft() if self._unread else EOF

    async def write(self, message: Message) -> None:
        """Send the server a message; a tuple is sent without being joined."""
        await self._send(FrameKind.MESSAGE, *(message if isinstance(message, tuple) else (message,)))

    async def done_writing(self) -> None:
        """Half-close."""
        with contextlib.suppress(CallOver):
            await self._send(FrameKind.END)

    def cancel(self) -> None:
        """End the call from this side."""
        self.end(CANCELLED)

    def end(self, status: CallStatus) -> None:
        """End the call, with the first status that comes."""
        if self.ending.set(status):
            self._connection.close(abort=status.local)
            if status.local:
                self._unread.clear()

    def done(self) -> bool:
        """Return True if the server or this side has ended the call. Earlier messages may still be read."""
        return self.ending.status is not None or self._hung_up

    async def status(self) -> CallStatus:
        """Return the status with which the call has ended, as soon as it is known; messages can still be read."""
        while self.ending.status is None:
            await self._receive()
        return self.ending.status

    # ------------------------------------------------------------------ inside

    async def _receive(self, destination: Destination | None = None) -> None:
        """Receive a frame, or wait until another task has received one or ended the call."""
        if self._receiving.taken:
            await self._receiving.wait()
            self._receiving.leave()
            return
        self._receiving.take()
        try:
            kind, body = await self._connection.receive(destination)
            status = status_of_frame(body) if kind is FrameKind.STATUS else None
        except (OSError, DecodeError) as error:
            self.end(CallStatus(grpc.StatusCode.UNAVAILABLE, f"Socket closed: {error}"))
            return
        finally:
            self._receiving.leave()
        if status is not None:
            self.end(status)
        else:
            self._unread.append(body)

    async def _send(self, kind: FrameKind, *buffers: Buffer) -> None:
        if self.done():
            raise CallOver("the call has ended")
        try:
            await self._connection.send(kind, *buffers)
        except OSError as error:
            raise CallOver(str(error)) from None
        except asyncio.CancelledError:
            self.cancel()
            raise

    def _on_hangup(self) -> None:
        self._hung_up = True
        self._connection.wake_writers()


class BulkOpener(Protocol):
    """An opener of calls of `BULK`: a `service.Stub`.

    Attributes:
        peer: the name of the other end in errors.
    """

    peer: str

    def open(self, method: str) -> Stream:
        """Open a streaming call."""

    def credentials(self) -> object:
        """Return a value that identifies the credentials of the next call."""


class _Granted:
    """A server's answer to RPC `Open`: the port of its bulk connections, valid as long as the answer's stream."""

    def __init__(self, credentials: object) -> None:
        self.credentials = credentials
        self.port = 0
        self.capability = b""
        self.is_over = False
        self._calls: set[BulkCall] = set()

    def add(self, call: BulkCall) -> None:
        """Have a call end when the stream breaks."""
        self._calls.add(call)
        call.ending.add_callback(self._calls.discard)

    def end(self, status: CallStatus | None) -> None:
        """Record that the stream has ended; calls under way end with `status`, or continue if it is None."""
        self.is_over = True
        if status is not None:
            for call in list(self._calls):
                call.end(status)


class BulkClient:
    """One client's bulk calls to one server.

    Args:
        caller: makes its gRPC calls.
        host: the server's host.
        tls: returns the TLS context, and the name that the server's certificate must have; None = plaintext.

    Attributes:
        rtt_s: the round trip of the newest connection when it was made, in seconds; 0 = not known.
    """

    def __init__(self, caller: BulkOpener, host: str, tls: Callable[[], tuple[ssl.SSLContext, str]] | None) -> None:
        self._caller = caller
        self._host = host
        self._tls = tls
        self._asking: asyncio.Future[_Granted | None] | None = None
        self._following: set[asyncio.Task[None]] = set()
        self._again_s = 0.0
        self.rtt_s = 0.0

    async def open(self, path: str) -> BulkCall | None:
        """Open a call; None if the call must be made over gRPC.

        Args:
            path: "/SERVICE/METHOD".
        """
        if asyncio.get_running_loop().time() < self._again_s or len(_under_way) >= max_bulk_calls():
            return None
        granted = await self._ask()
        if granted is None:
            return None
        try:
            async with asyncio.timeout(CONNECT_S):
                connection = await self._connect(granted, path)
        except (OSError, TimeoutError) as error:
            if not granted.is_over:
                self._give_up(f"port {granted.port} of {self._host} cannot be reached ({error or 'no answer'})")
            return None
        call = BulkCall(connection)
        _under_way.add(call)
        call.ending.add_callback(_under_way.discard)
        granted.add(call)
        return call

    async def close(self) -> None:
        """End all calls. Harmless when repeated."""
        for task in self._following:
            task.cancel()
        await asyncio.gather(*self._following, return_exceptions=True)

    async def _ask(self) -> _Granted | None:
        """Return the server's grant; None = the server grants no bulk calls."""
        asking = self._asking
        if asking is not None and asking.done():
            granted = asking.result()
            if granted is None or granted.is_over or granted.credentials != self._caller.credentials():
                asking = None
        if asking is None:
            asking = self._asking = asyncio.get_running_loop().create_future()
            task = asyncio.ensure_future(self._follow(asking))
            self._following.add(task)
            task.add_done_callback(self._following.discard)
        return await asyncio.shield(asking)

    async def _follow(self, asking: asyncio.Future[_Granted | None]) -> None:
        """Ask the server, and follow the stream of the answer to its end."""
        granted = _Granted(self._caller.credentials())
        status: CallStatus | None = _CLOSED
        try:
            async with self._caller.open("Open") as stream:
                await stream.write(bulk_pb2.OpenRequest())
                reply = await stream.read()
                if reply is EOF:  # the server stops
                    return
                granted.port, granted.capability = reply.port, reply.capability
                connected_ports.add(reply.port)
                asking.set_result(granted)
                await stream.read()
                status = None  # the server stops, and calls under way may be finished
        except ConfigurationError as error:
            self._give_up(str(error))
        except AxonError as error:
            status = CallStatus(grpc.StatusCode.UNAVAILABLE, f"Socket closed: {error}")
        finally:
            granted.end(status)
            if not asking.done():
                asking.set_result(None)

    def _give_up(self, why: str) -> None:
        _logger.info("bulk calls to %s go over gRPC for %g s: %s", self._caller.peer, AGAIN_S, why)
        self._again_s = asyncio.get_running_loop().time() + AGAIN_S

    async def _connect(self, granted: _Granted, path: str) -> Connection:
        """Return a connection on which HELLO was exchanged."""
        sock, connection = await _connected(self._host, granted.port), None
        try:
            if self._tls is not None:
                context, name = self._tls()
                sock = context.wrap_socket(sock, server_hostname=name, do_handshake_on_connect=False)
            connection = Connection(sock, MAX_MESSAGE_BYTES)
            await connection.handshake()
            hello = bulk_pb2.BulkHello(capability=granted.capability, method=path)
            await connection.send(FrameKind.HELLO, hello.SerializeToString())
            kind, _ = await connection.receive()
            if kind is not FrameKind.HELLO:
                raise ConnectionError(f"it answered with a frame of kind {kind.name}")
            self.rtt_s = _rtt_s(sock)
        except BaseException:
            (connection or sock).close()  # the event loop watches the socket of a connection
            raise
        return connection


def _rtt_s(sock: socket.socket) -> float:
    """Return the shortest round trip of a connection so far, in seconds; 0 if unknown."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _MIN_RTT_AT + 4)
    if len(info) < _MIN_RTT_AT + 4:
        return 0.0
    (shortest_us,) = struct.unpack_from("=I", info, _MIN_RTT_AT)
    return float(shortest_us) / 1e6


async def _connected(host: str, port: int) -> socket.socket:
    """Connect a socket.

    Raises:
        OSError: it cannot be connected to any address of the host.
    """
    loop, failure = asyncio.get_running_loop(), OSError(f"{host} has no address")
    for family, kind, protocol, _, address in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            await loop.sock_connect(sock, address)
            return sock
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:
            sock.close()
            raise
    raise failure


def bulk_client(caller: BulkOpener, address: str, security: Security, to: Principal | None) -> BulkClient | None:
    """Make the client that opens the bulk calls to a server; None if the server is in this process.

    Args:
        caller: makes its gRPC calls.
        address, security, to: see `channels.connect`.

    Raises:
        ConfigurationError: a file of `security` cannot be used.
    """
    host, _ = split_address(address)
    if is_in_process(host):
        return None
    source = security.channel_chain(host)
    if source is None:
        return BulkClient(caller, host, None)
    return BulkClient(caller, host, lambda: (client_context(source.current()), security.target_name(to) or host))

"""A server's end of bulk calls: the listener, the check of capabilities, and a servicer's context. For one event loop.

Note: [Who makes a bulk call]
    The stream of an RPC `Open` has a capability, which is valid while the stream lasts. A call that shows it is one
    of the stream's caller, with its roles, until its credentials end or are revoked (`auth.credentials`). Each call is
    checked against the table of RPCs (`access`), as in gRPC's interceptor. Over TLS the port asks for certificates as
    gRPC's port does, so a stolen capability is useless to a stranger.

Note: [A status arrives]
    A connection that is closed while data of its client has not been read is reset, and a reset may overtake the
    status. So the server shuts down its sending side, and drops received data until the client closes the connection,
    too, at most for `LINGER_S`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import secrets
import socket
import ssl
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError

from axon_ps.errors import InvalidRequest, PermissionDenied
from axon_ps.rpc.access import may_call, refusal
from axon_ps.rpc.auth.credentials import Credentials, Ended, Revocations, Revoked, calling
from axon_ps.rpc.calls.method import Method, Service, end_calls, method_of
from axon_ps.rpc.calls.protocol import EOF, CallOver, ServerCall, task_is_cancelled
from axon_ps.rpc.calls.status import CallStatus
from axon_ps.rpc.carriers.bulk.connection import Connection, FrameError, FrameKind, frame_of_status
from axon_ps.rpc.channels import MAX_MESSAGE_BYTES
from axon_ps.rpc.limits import HANDSHAKE_S, MAX_STRANGERS, max_connections
from axon_ps.rpc.listener import TcpListener
from axon_ps.rpc.status import status_of
from axon_ps.rpc.stream_pool import IdleStreams
from axon_ps.wire.v1 import bulk_pb2

LINGER_S: Final = 5.0
"""See Note: [A status arrives]."""

_MAX_HELLO_BYTES: Final = 1024
_logger = logging.getLogger(__name__)


class BulkServer:
    """Bulk calls of a server's services.

    Args:
        services: handlers of `service.service_handler`.
        revocations: the names that are revoked.
        tls: the TLS context; None = plaintext.
    """

    def __init__(self, services: Sequence[Service], revocations: Revocations, tls: ssl.SSLContext | None) -> None:
        self._services = tuple(services)
        self._revocations = revocations
        self._tls = tls
        self._port = 0
        self._listener: TcpListener | None = None
        self._granted: dict[bytes, _Grant] = {}
        self._serving: set[asyncio.Task[None]] = set()
        self._strangers: set[asyncio.Task[None]] = set()
        self._idle = IdleStreams()

    def start(self, host: str, port: int, advertised: int = 0) -> int:
        """Listen, and return the port.

        Args:
            host: address to listen on.
            port: port to listen on; 0 = any free one.
            advertised: the port at which clients reach it; 0 = the same.

        Raises:
            ConfigurationError: it cannot listen there.
        """
        self._listener = TcpListener(host, port, "bulk connections", self._take)
        self._port = advertised or self._listener.port
        return self._listener.port

    async def open(self, context: ServerCall) -> None:
        """Perform the RPC `Open`: grant bulk calls to the caller while its stream lasts."""
        await context.read()
        capability, granted = secrets.token_bytes(32), _Grant(calling())
        self._granted[_hash(capability)] = granted
        try:
            await context.write(bulk_pb2.OpenReply(port=self._port, capability=capability))
            while await self._idle.next(context) is not EOF:
                pass
            if not self._idle.draining:
                granted.end()
        except BaseException:
            granted.end()
            raise
        finally:
            del self._granted[_hash(capability)]

    async def stop(self, grace_s: float) -> None:
        """Accept nothing more, give calls under way `grace_s` seconds, then cancel them."""
        self._idle.drain()
        if self._listener is not None:
            self._listener.close()
        for stranger in self._strangers:
            stranger.cancel()
        await end_calls(self._serving, grace_s)

    # ------------------------------------------------------------------ inside

    def _take(self, sock: socket.socket) -> None:
        if len(self._strangers) >= MAX_STRANGERS or len(self._serving) >= max_connections():
            sock.close()
            return
        task = asyncio.get_running_loop().create_task(self._serve(sock))
        for of in (self._strangers, self._serving):
            of.add(task)
            task.add_done_callback(of.discard)

    async def _serve(self, sock: socket.socket) -> None:
        """Serve a connection, which has one call."""
        connection: Connection | None = None
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                if self._tls is not None:
                    sock = self._tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
                connection = Connection(sock, _MAX_HELLO_BYTES)
                await connection.handshake()
                hello = await _hello(connection)
            if (granted := self._granted.get(_hash(hello.capability))) is None:
                return
            task = asyncio.current_task()
            assert task is not None, "a coroutine runs in a task"
            self._strangers.discard(task)
            connection.max_bytes = MAX_MESSAGE_BYTES
            with granted.serving(task):
                await connection.send(FrameKind.HELLO)
                await self._perform(connection, hello.method, granted.credentials)
        except (OSError, TimeoutError, DecodeError) as error:
            _logger.debug("a bulk connection has ended: %s", error)
        finally:
            sock.close() if connection is None else connection.close()

    async def _perform(self, connection: Connection, path: str, credentials: Credentials) -> None:
        """Perform a call to its end, and send its status to the client."""
        task = asyncio.current_task()
        assert task is not None, "a coroutine runs in a task"
        method = method_of(self._services, path)
        call = BulkServerCall(connection, task, method)
        connection.on_hangup(call.hang_up)
        try:
            with self._revocations.watching(credentials, is_stream=True):
                if method is None or not method.is_stream:
                    why = f"{path} is no streaming call of this server"
                    status = CallStatus(grpc.StatusCode.UNIMPLEMENTED, why)
                elif not may_call(credentials.roles, path):
                    status = status_of(PermissionDenied(refusal(credentials.roles, path)))
                else:
                    status = await method.perform(call)
        except (Revoked, Ended) as error:
            status = status_of(error)._replace(code=grpc.StatusCode.UNAUTHENTICATED)
        except asyncio.CancelledError:
            if call.done() or not task_is_cancelled():
                raise
            status = CallStatus(grpc.StatusCode.UNAVAILABLE, "the server stopped")
            task.uncancel()
        await call.end(status)


class _Grant:
    """A caller, and its calls under way."""

    def __init__(self, credentials: Credentials) -> None:
        self.credentials = credentials
        self._calls: set[asyncio.Task[None]] = set()

    @contextlib.contextmanager
    def serving(self, task: asyncio.Task[None]) -> Iterator[None]:
        """Register a call as under way in this context."""
        self._calls.add(task)
        try:
            yield
        finally:
            self._calls.discard(task)

    def end(self) -> None:
        """End the calls."""
        for call in self._calls:
            call.cancel()


class BulkServerCall:
    """A servicer's end of a call. See `calls.protocol.ServerCall`.

    Args:
        connection: its connection.
        task: the task that performs it.
        method: its method; None = it is not served.
    """

    send_soon: Callable[[bytes], bool] | None = None

    def __init__(self, connection: Connection, task: asyncio.Task[None], method: Method | None) -> None:
        self.received = False
        self._connection = connection
        self._task = task
        self._parse = None if method is None else method.parse
        self._serialize = None if method is None else method.serialize
        self._over = False
        self._input_ended = False

    def peer(self) -> str:
        """Return the address of the client."""
        return self._connection.peer()

    def done(self) -> bool:
        """Return True if the call has ended."""
        return self._over

    async def read(self) -> Any:
        """Return the client's next message, or EOF. A broken connection gives EOF, too, and cancels the call."""
        if self._input_ended:
            return EOF
        try:
            kind, body = await self._connection.receive()
        except asyncio.CancelledError:
            self._input_ended = True  # a part of a frame may have been read
            raise
        except FrameError as error:
            raise InvalidRequest(str(error)) from None
        except OSError:
            if not self._input_ended:
                asyncio.get_running_loop().call_soon(self.hang_up)
            return EOF
        self.received = True
        if kind is not FrameKind.MESSAGE:
            self._input_ended = True
            return EOF
        return body if self._parse is None else self._parse(bytes(body))

    def end_input(self) -> None:
        """Have the read under way, and later ones, return `EOF`."""
        self._input_ended = True
        self._connection.wake_readers()

    def receive(self, take: Callable[[Any], None]) -> bool:
        """Return False: the caller must read."""
        return False

    async def write(self, message: Any) -> None:
        """Send the client a message."""
        try:
            await self._connection.send(
                FrameKind.MESSAGE, message if self._serialize is None else self._serialize(message)
            )
        except OSError as error:
            self.hang_up()
            raise CallOver(str(error)) from None

    def hang_up(self) -> None:
        """Cancel the call, because the connection has ended or failed."""
        self._over = True
        self._connection.close()
        self._task.cancel()

    async def end(self, status: CallStatus) -> None:
        """Send the status. See Note: [A status arrives]."""
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(LINGER_S):
                await self._connection.send(FrameKind.STATUS, frame_of_status(status))
                self._connection.shut_down()
                await self._connection.discard()


async def _hello(connection: Connection) -> bulk_pb2.BulkHello:
    """Receive the first frame."""
    kind, body = await connection.receive()
    if kind is not FrameKind.HELLO:
        raise ConnectionError(f"a bulk connection began with a frame of kind {kind.name}")
    return bulk_pb2.BulkHello.FromString(bytes(body))


def _hash(capability: bytes) -> bytes:
    """Return the key by which a capability is looked up: the time of a lookup by hash reveals nothing of it."""
    return hashlib.sha256(capability).digest()

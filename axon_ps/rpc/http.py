"""An HTTP endpoint beside a process's gRPC server, for people and their tools: metrics, the page.

Owns: connections, TLS, the check of callers, and the refusal of requests from web pages of other sites.
Refuses: content; each part of the system adds its routes.

Note: [Connections of strangers]
    A connection costs a file, and every client that reaches the port may open one. So there are few (`limits`). For one
    more, the oldest connection without a request of an authenticated caller is ended. If there is none, the new one is
    answered with 503, or closed if it would use TLS. A connection is ended if the head of its first or of a further
    request does not come within `HTTP_HEAD_S` (aiohttp's `keepalive_timeout`), and if its client does not read the
    answer.

The rules are those of the gRPC server. Loopback may be plaintext; any other address needs TLS and credentials or an
explicit `insecure`. The table of `access` has the roles for each path. The token is sent as `Authorization: Bearer
...`, never as a cookie, so that a page of another site cannot make a browser send it. A certificate of the job is
accepted like a token, but none is required, since browsers have none. If no token is required, a page of another site
could still make a browser call (DNS rebinding, forms). So a name in `Host` that is not this machine's, and a foreign
`Origin`, are refused.

aiohttp and the exposition of metrics are imported when an `HttpServer` is made. So a process without an endpoint does
not load them, and the import does not hold up an event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import ipaddress
import logging
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from axon_ps.errors import ConfigurationError, Misuse, PermissionDenied
from axon_ps.observe.metrics.sources import Source
from axon_ps.rpc.access import needs_nothing
from axon_ps.rpc.auth.credentials import Ended, Guard, OnRefused, Revocations, Revoked, Unknown
from axon_ps.rpc.auth.tls_contexts import server_context
from axon_ps.rpc.channels import join_address
from axon_ps.rpc.limits import HANDSHAKE_S, HTTP_ANSWER_S, HTTP_HEAD_S, max_http_connections
from axon_ps.rpc.listener import TcpListener
from axon_ps.rpc.security import Security
from axon_ps.texts import printable

if TYPE_CHECKING:
    from aiohttp import web

_logger = logging.getLogger(__name__)
_GRACE_S: Final = 1.0
_LINGER_S: Final = 2.0
_LOG_EVERY_S: Final = 60.0  # malformed requests are logged once in this time
_FULL: Final = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
_READING: Final = ("GET", "HEAD")


@dataclass(frozen=True, kw_only=True)
class Route:
    """One path that is served.

    Attributes:
        path: the path, in aiohttp's form ("/api/members/{rank}").
        handler: takes aiohttp's request, returns its response.
        method: the HTTP method.
        row: the row of `access.MAY_CALL` with the roles that may call it; empty = "METHOD PATH".
    """

    path: str
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    method: str = "GET"
    row: str = ""


class HttpServer:
    """One endpoint. `add` routes, `start` it once, `stop` it once, all on the same event loop.

    Args:
        host: address to listen on; beyond loopback `security` must allow it.
        port: port to listen on; 0 = any free one.
        security: TLS and tokens, as for the gRPC server.

    Raises:
        ConfigurationError: there is no such port, `security` does not allow to listen on `host`, or its tokens are in
            conflict.
    """

    def __init__(self, host: str, port: int, security: Security) -> None:
        security.check_bind(host, port)
        for module in ("aiohttp.web", "axon_ps.observe.metrics.exposition"):
            importlib.import_module(module)
        self.host = host
        self.port = port
        self._security = security
        self._guard = Guard(security)
        self._routes: list[Route] = []
        self._runner: web.AppRunner | None = None
        self._listener: TcpListener | None = None
        self._tls: ssl.SSLContext | None = None
        self._connections: dict[web.RequestHandler, asyncio.Task[None]] = {}  # with the tasks that begin them, by age
        self._admitted: set[web.RequestHandler] = set()  # their caller has credentials

    @property
    def url(self) -> str:
        """The URL by which it is reached on this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"{'https' if self._security.server_chain(self.host) else 'http'}://{join_address(host, self.port)}/"

    def refuse(self, revocations: Revocations) -> None:
        """Refuse the names that another server of this process refuses; call it before the start."""
        self._guard.revocations = revocations

    def report_refused(self, report: OnRefused) -> None:
        """Have `report` called for each refused caller; see `Guard.on_refused`."""
        self._guard.on_refused = report

    def add(self, *routes: Route) -> None:
        """Add routes.

        Raises:
            Misuse: it was started before.
        """
        if self._runner is not None:
            raise Misuse("this HTTP server was started before; add its routes first")
        self._routes.extend(routes)

    async def start(self) -> str:
        """Bind, serve, and return the URL.

        Raises:
            ConfigurationError: the address or port cannot be bound, or a TLS file cannot be used.
            Misuse: it was started before.
        """
        from aiohttp import web

        if self._runner is not None:
            raise Misuse("this HTTP server was started before; make a new one")

        @web.middleware
        async def check(request: web.Request, handler: Callable[[web.Request], Awaitable[Any]]) -> Any:
            return await self._check(request, handler)

        application = web.Application(middlewares=[check])
        for route in self._routes:
            application.router.add_route(route.method, route.path, self._guarded(route))
        self._tls = self._ssl()
        self._runner = web.AppRunner(
            application,
            access_log=None,
            handle_signals=False,
            shutdown_timeout=_GRACE_S,
            keepalive_timeout=HTTP_HEAD_S,
            lingering_time=_LINGER_S,
            logger=_http_logger(),
        )
        await self._runner.setup()
        try:
            self._listener = TcpListener(self.host, self.port, "HTTP connections", self._take)
        except ConfigurationError:
            await self._runner.cleanup()
            raise
        self.port = self._listener.port
        _logger.info("HTTP at %s", self.url)
        return self.url

    async def stop(self) -> None:
        """Accept no new requests, give those under way a second, then cancel them."""
        if self._listener is not None:
            self._listener.close()
        beginning = [task for task in self._connections.values() if not task.done()]
        for task in beginning:
            task.cancel()
        await asyncio.gather(*beginning, return_exceptions=True)
        if self._runner is not None:
            await self._runner.cleanup()
        for protocol in self._connections:  # their clients do not read the end of their answers
            if protocol.transport is not None:
                protocol.transport.abort()

    # ------------------------------------------------------------------ connections

    def _take(self, sock: socket.socket) -> None:
        """Accept a connection. See Note: [Connections of strangers]."""
        assert self._runner is not None, "it was started"
        assert self._runner.server is not None, "it was set up"
        if len(self._connections) >= max_http_connections() and not self._evicts():
            with contextlib.suppress(OSError), sock:
                if self._tls is None:
                    sock.send(_FULL)
            return
        protocol = self._runner.server()
        task = self._connections[protocol] = asyncio.get_running_loop().create_task(self._begin(sock, protocol))
        task.add_done_callback(lambda began: sock.close() if began.cancelled() else None)

    async def _begin(self, sock: socket.socket, protocol: web.RequestHandler) -> None:
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                await asyncio.get_running_loop().connect_accepted_socket(lambda: protocol, sock, ssl=self._tls)
        except OSError as error:
            _logger.debug("an HTTP connection did not begin: %s", error)

    def _evicts(self) -> bool:
        """Forget connections that are over; if there are none, end the oldest that may be ended. False: none may."""
        over = [p for p, began in self._connections.items() if began.done() and p.transport is None]
        for protocol in over:
            del self._connections[protocol]
        if over:
            return True
        for protocol, began in self._connections.items():
            if protocol not in self._admitted:
                began.cancel()
                if protocol.transport is not None:
                    protocol.transport.abort()
                del self._connections[protocol]
                return True
        return False

    def _ssl(self) -> ssl.SSLContext | None:
        source = self._security.server_chain(self.host)
        return None if source is None else server_context(source, required=self._security.mutual)

    async def _check(self, request: web.Request, handler: Callable[[web.Request], Awaitable[Any]]) -> Any:
        """Refuse requests that a page of another site makes a browser send."""
        from aiohttp import web

        host, origin = request.headers.get("Host", ""), request.headers.get("Origin")
        if not self._guard.asks and not _names_a_machine(host, self.host):
            raise web.HTTPForbidden(text=f"there is no {host!r} here; use the machine's address, or localhost\n")
        if request.method not in _READING and origin is not None and _host_of(origin) != host:
            raise web.HTTPForbidden(text=f"a page of {origin!r} may not ask for this\n")
        try:
            response = await handler(request)
            if not response.prepared:
                response.headers.setdefault("X-Content-Type-Options", "nosniff")
                response.headers.setdefault("Cache-Control", "no-store")
                async with taken(request):
                    await response.prepare(request)
                    await response.write_eof()
            return response
        finally:
            self._admitted.discard(request.protocol)

    def _guarded(self, route: Route) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        from aiohttp import web

        row = route.row or f"{route.method} {route.path}"

        async def guarded(request: web.Request) -> web.StreamResponse:
            if needs_nothing(row):
                return await route.handler(request)
            given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
            try:
                credentials = self._guard.admit(row, given, _certificate_of(request), request.remote or "")
                self._admitted.add(request.protocol)
                with self._guard.revocations.watching(credentials, is_stream=True):
                    return await route.handler(request)
            except (Revoked, Ended) as error:  # it may have been answered in part
                if request.transport is not None:
                    request.transport.close()
                raise web.HTTPUnauthorized(text=f"{error}\n", headers=_CHALLENGE) from None
            except Unknown as error:
                raise web.HTTPUnauthorized(text=f"{error}\n", headers=_CHALLENGE) from None
            except PermissionDenied as error:
                raise web.HTTPForbidden(text=f"{error}\n") from None

        return guarded


_CHALLENGE: Final = {"WWW-Authenticate": 'Bearer realm="axon_ps"'}


def _certificate_of(request: web.Request) -> bytes:
    """Return the certificate that a client has shown, as PEM; empty = none."""
    connection = request.get_extra_info("ssl_object")
    found = connection.getpeercert(binary_form=True) if connection is not None else None
    return ssl.DER_cert_to_PEM_cert(found).encode() if found else b""


@contextlib.asynccontextmanager
async def taken(request: web.Request) -> AsyncIterator[None]:
    """Abort the connection if the client does not read the data sent in this context within `HTTP_ANSWER_S`.

    Raises:
        ConnectionError: the connection was aborted.
    """
    try:
        async with asyncio.timeout(HTTP_ANSWER_S):
            yield
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError(f"{request.remote} has not taken what it was sent") from None


class _ClientsErrors(logging.Filter):
    """Removes clients' errors from aiohttp's log; `_logger` logs a summary of them."""

    def __init__(self) -> None:
        super().__init__()
        self._more = 0
        self._logged_s = -_LOG_EVERY_S

    def filter(self, record: logging.LogRecord) -> bool:
        """Return False for a malformed request, or a request that breaks off."""
        from aiohttp.http_exceptions import HttpProcessingError
        from aiohttp.web import RequestPayloadError

        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, (HttpProcessingError, RequestPayloadError, ConnectionError)):
            return True
        if time.monotonic() - self._logged_s < _LOG_EVERY_S:
            self._more += 1
            return False
        more, self._more, self._logged_s = self._more, 0, time.monotonic()
        reason = printable(" ".join((getattr(error, "message", "") or str(error)).split()), 200)
        _logger.info("a malformed HTTP request was refused: %s%s", reason, f" (and {more} before)" if more else "")
        return False


def _http_logger() -> logging.Logger:
    """Return the logger for aiohttp: a child of this module's, without clients' errors."""
    logger = logging.getLogger(f"{__name__}.server")
    if not any(isinstance(each, _ClientsErrors) for each in logger.filters):
        logger.addFilter(_ClientsErrors())
    return logger


def _host_of(url: str) -> str:
    """Return the host and port of a URL; empty when it is malformed."""
    try:
        return urlsplit(url).netloc
    except ValueError:
        return ""


def _names_a_machine(host: str, own: str) -> bool:
    """Return True if a `Host` header has an address, "localhost" or the bound name: a stranger cannot own any."""
    try:
        name = (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return False
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name in ("localhost", own.strip("[]").lower())
    return True


def healthz(serving: Callable[[], bool]) -> Route:
    """Make the route `/healthz`: 200 while `serving`, else 503; needs no token."""

    async def handler(_: web.Request) -> web.StreamResponse:
        from aiohttp import web

        return web.Response(text="SERVING\n") if serving() else web.Response(status=503, text="NOT_SERVING\n")

    return Route(path="/healthz", handler=handler)


def metrics(sources: Callable[[], Iterable[Source]], labels: Mapping[str, str]) -> Route:
    """Make the route `/metrics` for Prometheus: the numbers of `.statistics()`, read at every scrape on the event loop.

    Args:
        sources: returns the sources, which are read at every scrape.
        labels: the labels of every metric of this process: job, role, rank, node.
    """

    async def handler(request: web.Request) -> web.StreamResponse:
        from aiohttp import web

        from axon_ps.observe.metrics.exposition import Exposition

        began = time.perf_counter()
        await asyncio.sleep(0)  # every task that is ready runs first
        lag_s = time.perf_counter() - began
        lag = Source(kind="process", read=lambda: {"loop_lag_s": lag_s})
        exposition = Exposition(lambda: chain(sources(), (lag,)), labels)
        body, content_type = exposition.encode(request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})

    return Route(path="/metrics", handler=handler)

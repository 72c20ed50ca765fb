"""An HTTP endpoint beside a process's gRPC server, for what is read by people and their tools: metrics, the page.

Owns: the socket, TLS, who may ask for what, and that a request of a web page of somebody else's is refused.
Refuses: what is served; each part of the system adds its routes.

The rules are those of the gRPC server: loopback may be plaintext, any other address needs TLS and credentials or an
explicit `insecure`, and who may ask for what is in the table of `access`. The token travels as `Authorization: Bearer
...`, never as a cookie, so that no other site's page can make a browser send it. A certificate of the job is as good as
a token, but none is asked for, since browsers have none. Where no token is asked for, a browser could still be made to
call by another site's page (DNS rebinding, forms): a name in `Host` that is not this machine's, and a foreign `Origin`,
are refused.

aiohttp is imported by `HttpServer.start`: a process without an endpoint does not load it.
"""

from __future__ import annotations

import ipaddress
import logging
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from axon_ps.errors import ConfigurationError, Misuse, PermissionDenied
from axon_ps.rpc.access import needs_nothing
from axon_ps.rpc.auth.credentials import Ended, Guard, OnRefused, Revocations, Revoked, Unknown
from axon_ps.rpc.auth.tls_contexts import server_context
from axon_ps.rpc.channels import join_address
from axon_ps.rpc.security import Security

if TYPE_CHECKING:
    from aiohttp import web

_logger = logging.getLogger(__name__)
_GRACE_S: Final = 1.0
_READING: Final = ("GET", "HEAD")


@dataclass(frozen=True, kw_only=True)
class Route:
    """One path that is served.

    Attributes:
        path: as aiohttp writes it ("/api/members/{rank}").
        handler: takes aiohttp's request, returns its response.
        method: of HTTP.
        row: the row of `access.MAY_CALL` that says who may ask; empty = "METHOD PATH".
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
        security: TLS and tokens, as of the gRPC server.

    Raises:
        ConfigurationError: there is no such port, `security` does not allow to listen on `host`, or its tokens do not
            go together.
    """

    def __init__(self, host: str, port: int, security: Security) -> None:
        security.check_bind(host, port)
        self.host = host
        self.port = port
        self._security = security
        self._guard = Guard(security)
        self._routes: list[Route] = []
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        """Where it is reached on this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"{'https' if self._security.server_chain(self.host) else 'http'}://{join_address(host, self.port)}/"

    def refuse(self, revocations: Revocations) -> None:
        """Refuse what another server of this process refuses; before it is started."""
        self._guard.revocations = revocations

    def report_refused(self, report: OnRefused) -> None:
        """Have `report` get who is refused; see `Guard.on_refused`."""
        self._guard.on_refused = report

    def add(self, *routes: Route) -> None:
        """Serve these, too.

        Raises:
            Misuse: it was started before.
        """
        if self._runner is not None:
            raise Misuse("this HTTP server was started before; add its routes first")
        self._routes.extend(routes)

    async def start(self) -> str:
        """Bind, serve, and return the URL.

        Raises:
            ConfigurationError: the address or port cannot be had, or a TLS file cannot be used.
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
        self._runner = web.AppRunner(application, access_log=None, handle_signals=False, shutdown_timeout=_GRACE_S)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.host.strip("[]"), self.port, ssl_context=self._ssl())
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            raise ConfigurationError(
                f"cannot listen on {join_address(self.host, self.port)} for HTTP: {error.strerror or error}"
            ) from error
        self.port = self._runner.addresses[0][1]
        _logger.info("HTTP at %s", self.url)
        return self.url

    async def stop(self) -> None:
        """Accept no new requests, give those under way a second, then cancel them."""
        if self._runner is not None:
            await self._runner.cleanup()

    def _ssl(self) -> ssl.SSLContext | None:
        source = self._security.server_chain(self.host)
        return None if source is None else server_context(source, required=self._security.mutual)

    async def _check(self, request: web.Request, handler: Callable[[web.Request], Awaitable[Any]]) -> Any:
        """Refuse what a web page of somebody else's makes a browser send."""
        from aiohttp import web

        host, origin = request.headers.get("Host", ""), request.headers.get("Origin")
        if not self._guard.asks and not _names_a_machine(host, self.host):
            raise web.HTTPForbidden(text=f"there is no {host!r} here; use the machine's address, or localhost\n")
        if request.method not in _READING and origin is not None and urlsplit(origin).netloc != host:
            raise web.HTTPForbidden(text=f"a page of {origin} may not ask for this\n")
        response = await handler(request)
        if not response.prepared:
            response.headers.setdefault("X-Content-Type-Options", "nosniff")
            response.headers.setdefault("Cache-Control", "no-store")
        return response

    def _guarded(self, route: Route) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        from aiohttp import web

        row = route.row or f"{route.method} {route.path}"

        async def guarded(request: web.Request) -> web.StreamResponse:
            if needs_nothing(row):
                return await route.handler(request)
            given = request.headers.get("Authorization", "").encode()
            try:
                credentials = self._guard.admit(row, given, _certificate_of(request), request.remote or "")
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
    """The certificate that a client has shown, as PEM; empty = none."""
    connection = request.get_extra_info("ssl_object")
    found = connection.getpeercert(binary_form=True) if connection is not None else None
    return ssl.DER_cert_to_PEM_cert(found).encode() if found else b""


def _names_a_machine(host: str, own: str) -> bool:
    """Whether a `Host` header has an address, "localhost" or the name that is listened on: nothing a stranger owns."""
    name = (urlsplit(f"//{host}").hostname or "").lower()
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name in ("localhost", own.strip("[]").lower())
    return True


def healthz(serving: Callable[[], bool]) -> Route:
    """`/healthz`: 200 while `serving`, else 503; needs no token."""

    async def handler(_: web.Request) -> web.StreamResponse:
        from aiohttp import web

        return web.Response(text="SERVING\n") if serving() else web.Response(status=503, text="NOT_SERVING\n")

    return Route(path="/healthz", handler=handler)

"""A listening gRPC server: binding with the given security, health, reflection, draining and stopping."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import grpc

from axon_ps.errors import ConfigurationError, Misuse
from axon_ps.rpc.auth.credentials import Guard, OnRefused, Revocations
from axon_ps.rpc.auth.interceptor import CallInterceptor
from axon_ps.rpc.auth.tls_contexts import server_context
from axon_ps.rpc.calls.method import Service
from axon_ps.rpc.carriers.bulk.client import BULK
from axon_ps.rpc.carriers.bulk.server import BulkServer
from axon_ps.rpc.carriers.grpc import GrpcService
from axon_ps.rpc.carriers.in_process import InProcessServer, is_in_process
from axon_ps.rpc.channels import SERVER_OPTIONS, join_address
from axon_ps.rpc.limits import MAX_SERVER_CALLS, max_connections, server_options, too_few_files
from axon_ps.rpc.security import Security
from axon_ps.rpc.service import service_handler

FEW_CONNECTIONS: Final = 256
"""A server that accepts fewer connections logs a warning."""

NO_OPTIONS: Final[Mapping[str, int]] = MappingProxyType({})

_logger = logging.getLogger(__name__)


def listen(
    host: str,
    port: int,
    security: Security,
    services: Sequence[Service],
    service_names: Sequence[str],
    bulk_port: int | None = None,
    advertised_bulk_port: int = 0,
    *,
    options: Mapping[str, int] = NO_OPTIONS,
) -> Server | InProcessServer:
    """Make a server at `host`: a `Server`, or, for a host of this process, a server without a port.

    Args:
        host, port, security, services, service_names, bulk_port, advertised_bulk_port: see `Server`.
        options: see `Server`.

    Raises:
        ConfigurationError: see `Server`.
    """
    if is_in_process(host):
        return InProcessServer(host, services)
    return Server(
        host,
        port,
        security,
        services,
        service_names,
        bulk_port,
        advertised_bulk_port,
        options=options,
    )


class Server:
    """One listening server. `start` it once, `stop` it once, both on the same event loop.

    Args:
        host: address to listen on; beyond loopback `security` must allow it.
        port: port to listen on; 0 = any free one.
        security: TLS and token.
        services: handlers of `service.service_handler`.
        service_names: full names of the services, for health and reflection.
        bulk_port: port for bulk connections (`rpc.carriers.bulk`); 0 = any free one; None = there are none.
        advertised_bulk_port: the port at which clients reach it; 0 = the same.
        options: gRPC options that replace those of `channels.SERVER_OPTIONS`.

    Attributes:
        revocations: the names that are revoked; see `auth.credentials`.

    Raises:
        ConfigurationError: there is no such port, `security` does not allow to listen on `host`, or its tokens are in
            conflict.
    """

    def __init__(
        self,
        host: str,
        port: int,
        security: Security,
        services: Sequence[Service],
        service_names: Sequence[str],
        bulk_port: int | None = None,
        advertised_bulk_port: int = 0,
        *,
        options: Mapping[str, int] = NO_OPTIONS,
    ) -> None:
        security.check_bind(host, port)
        self.host = host
        self.port = port
        self._security = security
        self._guard = Guard(security)
        self.revocations: Revocations = self._guard.revocations
        self._services = tuple(services)
        self._names = tuple(service_names)
        self._bulk_port = bulk_port
        self._advertised_bulk_port = advertised_bulk_port
        self._options = options
        self._bulk: BulkServer | None = None
        self._server: grpc.aio.Server | None = None
        self._health: Any = None

    def report_refused(self, report: OnRefused) -> None:
        """Have `report` called for each refused caller; see `Guard.on_refused`."""
        self._guard.on_refused = report

    async def start(self, *, serving: bool = True) -> int:
        """Bind, serve, and return the port.

        Args:
            serving: the health of the services at first; see `set_serving`.

        Raises:
            ConfigurationError: the address or port cannot be bound, or a TLS file cannot be used.
            Misuse: it was started before.
        """
        if self._server is not None:
            raise Misuse("this server was started before; make a new one")
        credentials = self._security.server_credentials(self.host)
        interceptor = CallInterceptor(self._guard, asks=self._guard.asks or credentials is not None)
        options = tuple({**dict(SERVER_OPTIONS), **dict(server_options()), **self._options}.items())
        server = grpc.aio.server(interceptors=[interceptor], options=options, maximum_concurrent_rpcs=MAX_SERVER_CALLS)
        server.add_generic_rpc_handlers([GrpcService(service) for service in self._services])
        self._add_health(server)
        self._add_reflection(server)
        self._bind(server, credentials)
        self._start_bulk(server)
        self._server = server
        await server.start()
        await self._set_health("", serving=True)
        await self.set_serving(serving)
        if (most := max_connections()) < FEW_CONNECTIONS:
            _logger.warning("at most %d connections of gRPC at a time: %s", most, too_few_files())
        _logger.info("listening on %s", self.address)
        return self.port

    async def set_serving(self, serving: bool) -> None:
        """Set the health of the services; that of the entire server is SERVING until `stop`."""
        for name in self._names:
            await self._set_health(name, serving=serving)

    @property
    def address(self) -> str:
        """The bound address, "host:port"."""
        return join_address(self.host, self.port)

    async def stop(self, grace_s: float) -> None:
        """Report NOT_SERVING, accept no new calls, give those under way `grace_s` seconds, then cancel them."""
        if self._server is None:
            return
        await self._set_health("", serving=False)
        await self.set_serving(False)
        stopping = [self._server.stop(grace_s)]
        if self._bulk is not None:
            stopping.append(self._bulk.stop(grace_s))
        await asyncio.gather(*stopping)

    async def wait(self) -> None:
        """Wait until it has stopped.

        Raises:
            Misuse: it was not started.
        """
        if self._server is None:
            raise Misuse("this server was not started")
        await self._server.wait_for_termination()

    def _bind(self, server: grpc.aio.Server, credentials: grpc.ServerCredentials | None) -> None:
        address = self.address
        if why := _bind_error(self.host, self.port):  # checked first: gRPC would only log the reason, and not raise it
            raise ConfigurationError(f"cannot listen on {address}: {why}")
        try:
            if credentials is None:
                self.port = server.add_insecure_port(address)
            else:
                self.port = server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise ConfigurationError(f"cannot listen on {address}: {error}") from error

    def _start_bulk(self, server: grpc.aio.Server) -> None:
        if self._bulk_port is None:
            return
        source = self._security.server_chain(self.host)
        tls = None if source is None else server_context(source, required=bool(source.current().roots))
        self._bulk = BulkServer(self._services, self.revocations, tls)
        self._bulk.start(self.host, self._bulk_port, self._advertised_bulk_port)
        server.add_generic_rpc_handlers([GrpcService(service_handler(BULK, self._bulk))])

    def _add_health(self, server: grpc.aio.Server) -> None:
        try:
            from grpc_health.v1 import health_pb2_grpc

            from axon_ps.rpc.health_service import BoundedHealth
        except ImportError:
            _logger.warning("no health checks are answered: the package grpcio-health-checking is not installed")
            return
        self._health = BoundedHealth()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)

    def _add_reflection(self, server: grpc.aio.Server) -> None:
        try:
            from grpc_reflection.v1alpha import reflection
        except ImportError:
            _logger.info("no reflection: the package grpcio-reflection is not installed")
            return
        names = (*self._names, "grpc.health.v1.Health", reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)

    async def _set_health(self, name: str, *, serving: bool) -> None:
        if self._health is None:
            return
        from grpc_health.v1 import health_pb2

        status = health_pb2.HealthCheckResponse
        await self._health.set(name, status.SERVING if serving else status.NOT_SERVING)


def _bind_error(host: str, port: int) -> str:
    """Return why a port cannot be bound; empty when it can."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC does: a port in TIME_WAIT is free
            probe.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return f"port {port} is in use by another process; choose another, or 0 for any free one"
        return error.strerror or str(error)
    return ""

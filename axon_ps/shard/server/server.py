"""One shard server: a gRPC server, a session with the coordinator, and the shell between them."""

from __future__ import annotations

import asyncio
import logging
import socket
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from axon_ps.compress import registry as compressors
from axon_ps.coordinator.client.session import CoordinatorClient
from axon_ps.errors import Drained
from axon_ps.host.malloc import retain_message_memory
from axon_ps.observe.metrics.sources import Source
from axon_ps.observe.tracing.tracer import NO_TRACES, TracePolicy
from axon_ps.optim import registry as optimizers
from axon_ps.rpc.auth.identity import Principal
from axon_ps.rpc.carriers.in_process import InProcessServer, is_in_process
from axon_ps.rpc.channels import join_address
from axon_ps.rpc.http import HttpServer, Route, healthz, metrics
from axon_ps.rpc.security import Security
from axon_ps.rpc.server import Server, listen
from axon_ps.rpc.service import service_handler
from axon_ps.shard.core.queued import QueueLimit
from axon_ps.shard.server.capacity import Capacity
from axon_ps.shard.server.departure import JobWatch, hand_over
from axon_ps.shard.server.links import Links
from axon_ps.shard.server.servicer import ShardServicer
from axon_ps.shard.server.shell import ShardShell
from axon_ps.shard.server.subscriptions import SubscriberLimits
from axon_ps.types import Role
from axon_ps.wire.events import Event, KnownNames
from axon_ps.wire.v1 import shard_pb2

QUEUE_FRACTION: Final = 8
"""The free memory divided by this is the default for gradients that arrive out of order."""

_logger = logging.getLogger(__name__)
_SERVICE = shard_pb2.DESCRIPTOR.services_by_name["Shard"]


@dataclass(frozen=True, kw_only=True)
class ShardConfig:
    """The settings of a shard server.

    Attributes:
        coordinator: "host:port" of the coordinator.
        job: name of the job.
        host: address to listen on, or a host of this process (see `rpc.carriers.in_process`).
        port: port to listen on; 0 = any free one.
        advertise: "host" or "host:port" at which workers reach this server; empty = `host`, or the machine's host name
            if that is a wildcard.
        bulk_port: port for bulk connections, on the same host; 0 = any free one; None = there are none.
        advertise_bulk_port: the bulk port that workers connect to; 0 = `bulk_port`. With 0, there are no bulk
            connections if `advertise` names another port than `port`, since the proxy at that port would not forward
            them.
        node: host or container of this server; empty = the host name.
        rank: wanted number among the shard servers; -1 = any.
        threads: threads for applying steps; None = one per core this process may use.
        security: TLS and token.
        limits: limits of subscribers.
        join_timeout_s: seconds that the coordinator may take to answer.
        reconnect_timeout_s: seconds that the coordinator may be away later. Then this server ends, and its parameters
            are lost.
        grace_s: seconds that streams under way may take when this server stops.
        drain_s: seconds to hand over slices to others when this server is asked to stop; 0 = it leaves at once.
        tracing: the steps that are traced.
        memory_bytes: memory limit of this process; 0 = the limit of the machine and its control groups.
        queue_bytes: part of it for gradients that arrive out of order (see `shard.core.queued`); 0 = none, and they
            wait; None = an eighth of the memory that is free at the start.
    """

    coordinator: str
    job: str
    host: str = "127.0.0.1"
    port: int = 0
    advertise: str = ""
    bulk_port: int | None = 0
    advertise_bulk_port: int = 0
    node: str = ""
    rank: int = -1
    threads: int | None = None
    security: Security = field(default_factory=Security)
    limits: SubscriberLimits = field(default_factory=SubscriberLimits)
    join_timeout_s: float = 60.0
    reconnect_timeout_s: float = 600.0
    grace_s: float = 2.0
    drain_s: float = 0.0
    tracing: TracePolicy = NO_TRACES
    memory_bytes: int = 0
    queue_bytes: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "security", self.security.acting(Principal.SHARD, self.job))


async def serve(
    config: ShardConfig, ready: Callable[[int], None], stop: asyncio.Event, http: HttpServer | None = None
) -> None:
    """Serve until `stop` is set, then drain: hand over, report NOT_SERVING, leave the job, end the streams.

    The health of the service is SERVING while no slice of the job lacks a copy, so that another server may leave.

    Args:
        config: the settings.
        ready: called with the port once workers can be served, that is after joining the job.
        stop: set it (on this loop) to end.
        http: its HTTP endpoint, not started; None = it has none.

    Raises:
        ConfigurationError: the address cannot be listened on, or TLS files cannot be used.
        Unreachable: the coordinator did not answer in time.
        PermissionDenied: wrong job name or token.
        AxonError: the session ended permanently, or this server's parameters can no longer be valid.
    """
    retain_message_memory()
    capacity = Capacity(config.memory_bytes)
    queue = QueueLimit(capacity.free_bytes() // QUEUE_FRACTION if config.queue_bytes is None else config.queue_bytes)
    shell, watch = ShardShell(config.job, config.threads, config.limits, capacity, queue), JobWatch()
    servicer = ShardServicer(shell)
    handler = service_handler(_SERVICE, servicer)
    bulk_port = None if _is_behind_another(config) else config.bulk_port
    names = [_SERVICE.full_name]
    server = listen(config.host, config.port, config.security, [handler], names, bulk_port, config.advertise_bulk_port)
    session: CoordinatorClient | None = None
    health: asyncio.Task[None] | None = None

    def on_event(event: Event) -> None:
        shell.on_event(event)
        watch.on_event(event)

    try:
        port = await server.start(serving=False)
        incarnation, node = uuid.uuid4().hex, config.node or socket.gethostname()
        shell.links = Links(config.security, node, config.job, incarnation)
        session = shell.reports = CoordinatorClient(
            config.coordinator,
            job=config.job,
            role=Role.SHARD,
            node=node,
            security=config.security,
            incarnation=incarnation,
            listen_address=_advertised(config, port),
            requested_rank=config.rank,
            known=_known_names(config.host),
            on_event=on_event,
            reconnect_timeout_s=config.reconnect_timeout_s,
        )
        shell.links.probe(session.connectivity)
        session.measure, session.tracer, session.memory = shell.measures, shell.tracer, shell.capacity.report
        session.revocations = server.revocations
        await session.start(config.join_timeout_s)
        about = {"axon_ps.job": config.job, "axon_ps.rank": str(session.rank), "axon_ps.node": node}
        shell.tracer.start(config.tracing, "shard", about)
        _logger.info("shard server %d of job %r at %s", session.rank, config.job, _advertised(config, port))
        health = asyncio.create_task(_report_health(server, watch))
        if http is not None:
            http.refuse(server.revocations)
            http.add(healthz(lambda: watch.safe), _metrics(config.job, session.rank, node, shell))
            await http.start()
        ready(port)
        try:
            await _first_of(stop, shell.failure)
            if config.drain_s:
                await hand_over(session, watch, shell.failure, config.drain_s)
        except Drained as drained:
            _logger.info("%s", drained)
    finally:
        if health is not None:
            health.cancel()
        if http is not None:
            await http.stop()
        servicer.drain()
        stopping = asyncio.create_task(server.stop(config.grace_s))  # NOT_SERVING from here on
        if session is not None:
            await session.close("the shard server stops")
        await stopping
        await asyncio.to_thread(shell.tracer.close)
        await shell.close()


async def _report_health(server: Server | InProcessServer, watch: JobWatch) -> None:
    """Report the health of the job's copies as the health of the service, until cancelled."""
    while True:
        safe = watch.safe
        await server.set_serving(safe)
        await watch.until(lambda before=safe: watch.safe != before)  # type: ignore[misc]


def _known_names(host: str) -> KnownNames | None:
    """Return the optimizers and compressors known here; None beside a worker, which may register more at any time."""
    if is_in_process(host):
        return None
    return KnownNames(optimizers=frozenset(optimizers.names()), compressors=frozenset(compressors.names()))


def _metrics(job: str, rank: int, node: str, shell: ShardShell) -> Route:
    labels = {"job_name": job, "role": "shard", "rank": str(rank), "node": node}
    engine = shell.collectives.engine
    sources = [Source(kind="shard", read=shell.statistics), Source(kind="shard", read=engine.statistics)]
    sources.append(Source(kind="process", read=shell.tracer.statistics))
    return metrics(lambda: sources, labels)


async def _first_of(stop: asyncio.Event, failure: asyncio.Future[None]) -> None:
    """Wait for `stop`; raise the exception of `failure` if it comes first."""
    stopped = asyncio.ensure_future(stop.wait())
    ends: list[asyncio.Future[Any]] = [stopped, failure]
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if failure.done():
            failure.result()
    finally:
        stopped.cancel()


def _advertised(config: ShardConfig, port: int) -> str:
    """Return the address that workers connect to."""
    advertise = config.advertise or ("" if config.host in ("0.0.0.0", "::", "[::]") else config.host)
    if _port_in(advertise) is not None:
        return advertise
    return join_address(advertise or socket.gethostname(), port)


def _is_behind_another(config: ShardConfig) -> bool:
    """Return True if a proxy forwards connections to this server, but not those to its bulk port."""
    return _port_in(config.advertise) not in (None, config.port) and not config.advertise_bulk_port


def _port_in(advertise: str) -> int | None:
    host, colon, port = advertise.rpartition(":")
    return int(port) if colon and port.isdigit() and (":" not in host or host.startswith("[")) else None

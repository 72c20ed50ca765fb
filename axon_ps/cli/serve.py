"""The commands `coordinator`, `shard` and `proxy`: one service in the foreground, until SIGTERM or Ctrl-C.

Either signal asks the service to drain and leave; a second one, or `DRAIN_S` seconds (after the `--drain-s` of a shard
server), ends it as it is. The exit code is 0 after SIGTERM (the way supervisors stop a service) and 130 after Ctrl-C.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import math
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from axon_ps.cli import options as o
from axon_ps.cli.options import leave
from axon_ps.errors import ConfigurationError

if TYPE_CHECKING:
    from axon_ps.cli.settings import Settings
    from axon_ps.coordinator.server.audit import AuditLog
    from axon_ps.rpc.http import HttpServer
    from axon_ps.rpc.security import Security
    from axon_ps.storage.state_store import StateStore

DRAIN_S = 20
"""Seconds that a service gets to finish running calls; SIGALRM ends it after that."""

_OF_SERVERS = ("axon_ps.rpc.health_service", "grpc_reflection.v1alpha.reflection")
"""Modules that a server needs, imported before the event loop runs; `rpc.server` logs those that are not installed."""

Ready = Callable[[int], None]


def coordinator(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 = any free one.")] = 7077,
    job: o.Job = None,
    world_size: Annotated[int, typer.Option(help="Workers the job starts with; 0 = as the first worker requests.")] = 0,
    shards: Annotated[int, typer.Option(help="Shard servers of the job.")] = 1,
    min_workers: Annotated[
        int | None, typer.Option(help="Fewest workers to continue with.", show_default="world size")
    ] = None,
    lease_s: Annotated[float, typer.Option(help="Seconds of silence after which a member is lost.")] = 5.0,
    join_timeout_s: Annotated[
        float, typer.Option(help="Seconds that workers wait for lost members to be replaced.")
    ] = 600.0,
    step_timeout_s: o.StepTimeout = None,
    state: Annotated[
        str | None,
        typer.Option(
            help="sqlite file that survives a restart, 'memory', etcd:HOST:PORT (several coordinators may have it), or "
            "NAME:ADDRESS of another store.",
            show_default="under ~/.local/state",
        ),
    ] = None,
    resume: Annotated[
        str,
        typer.Option(
            help="Checkpoint, or directory of checkpoints, to start from; auto = the newest of --checkpoint-dir.",
            show_default=False,
        ),
    ] = "",
    checkpoint_dir: Annotated[
        str | None,
        typer.Option(
            help="Directory or URI, seen by all services, that the job resumes from by itself.", show_default=False
        ),
    ] = None,
    checkpoint_every: o.CheckpointEvery = "",
    checkpoint_limit: o.CheckpointLimit = 3,
    checkpoint_key_file: o.CheckpointKeyFile = None,
    trust_checkpoint: Annotated[
        list[str] | None,
        typer.Option(help="Checkpoint (or directory of some) to load though it is not signed with the job's key."),
    ] = None,
    replication: o.Replication = 0,
    audit_log: o.AuditLog = None,
    http_port: o.HttpPort = None,
    trace_every: o.TraceEvery = None,
    plugins: o.Plugins = None,
    token: o.Token = None,
    token_file: o.TokenFile = None,
    observer_token_file: o.ObserverTokenFile = None,
    tls_ca: o.TlsCa = None,
    tls_cert: o.TlsCert = None,
    tls_key: o.TlsKey = None,
    tls_dir: o.TlsDir = None,
    tls: o.Tls = None,
    tls_mutual: o.TlsMutual = None,
    insecure: o.Insecure = None,
    debuggable: o.Debuggable = None,
    config: o.Config = None,
    log: o.Log = None,
    log_level: o.LogLevel = None,
    ready_fd: o.ReadyFd = None,
) -> None:
    """Serve a job's coordinator: its membership, and the decisions on its steps."""
    settings = _settings(
        config, job=job, plugins=plugins, token=token, token_file=token_file, observer_token_file=observer_token_file,
        tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key, tls_dir=tls_dir, tls=tls, tls_mutual=tls_mutual,
        insecure=insecure, log=log, log_level=log_level, http_port=http_port, trace_every=trace_every,
        checkpoint_key_file=checkpoint_key_file, audit_log=audit_log, debuggable=debuggable,
    )  # fmt: skip
    security = _security(settings, host, "coordinator")
    http = _http(settings, host, security)
    from axon_ps.host.malloc import return_message_memory

    return_message_memory()
    from axon_ps.coordinator.checkpoint_schedule import CheckpointPolicy
    from axon_ps.coordinator.config import CoordinatorConfig
    from axon_ps.coordinator.server.server import serve
    from axon_ps.storage.files import absolute

    if o.is_auto(resume, checkpoint_dir):
        resume = ""  # a job that is not known yet begins with the newest one in any case
    configuration = CoordinatorConfig(
        job=settings.job,
        world_size=world_size,
        num_shards=shards,
        replication=replication,
        min_workers=min_workers,
        lease_s=lease_s,
        join_timeout_s=join_timeout_s,
        step_timeout_s=math.inf if step_timeout_s is None else step_timeout_s,
        resume=absolute(resume) if resume else "",
        checkpoints=CheckpointPolicy.of(
            absolute(checkpoint_dir) if checkpoint_dir else "", checkpoint_every, checkpoint_limit
        ),
    )
    settings.load_plugins()
    settings.allow_roots(host, checkpoint_dir or "", resume)
    settings.sign_checkpoints(trust_checkpoint or ())
    store = _state_store(state, settings.job)
    _configure_logging(settings, "coordinator")

    def start(ready: Ready, stop: asyncio.Event) -> Awaitable[None]:
        return serve(configuration, host, port, security, store, ready, stop, http, settings.tracing(), audit)

    with store, contextlib.closing(_audit_log(settings, store, security)) as audit:
        leave(_in_foreground(start, host, ready_fd, http))


def shard(
    coordinator: o.Coordinator = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 = any free one.")] = 7078,
    advertise: Annotated[
        str,
        typer.Option(help="host or host:port where others reach this server.", show_default="as the host is bound"),
    ] = "",
    node: Annotated[
        str | None, typer.Option(help="Name of this host \\[env: AXON_PS_NODE].", show_default=False)
    ] = None,
    bulk_port: Annotated[
        int | None,
        typer.Option(
            help="Port of bulk connections; 0 = any free one, -1 = none, all goes over gRPC "
            "\\[env: AXON_PS_BULK_PORT].",
            min=-1,
            show_default="any free one",
        ),
    ] = None,
    advertise_bulk_port: Annotated[
        int,
        typer.Option(
            help="Where others reach the port of bulk connections, if --advertise names a port that is passed on.",
            min=0,
            max=65535,
            show_default="that port",
        ),
    ] = 0,
    rank: Annotated[int, typer.Option(help="Requested rank among the shard servers; -1 = any.", min=-1)] = -1,
    threads: Annotated[int, typer.Option(help="Threads of the arithmetic; 0 = one per CPU.", min=0)] = 0,
    drain_s: Annotated[
        float | None,
        typer.Option(
            help="When stopped: seconds that others may take to get what it holds \\[env: AXON_PS_DRAIN_S].",
            show_default="0: it just leaves",
        ),
    ] = None,
    subscriber_rate: Annotated[
        float | None,
        typer.Option(help="MB per second that all subscribers together get.", min=0.001, show_default="no limit"),
    ] = None,
    subscriber_memory: Annotated[
        float, typer.Option(help="MB of memory for versions that subscribers read, for each model.", min=0)
    ] = 1024,
    queue_memory: Annotated[
        float | None,
        typer.Option(
            help="MB of memory for gradients of workers that are ahead of others; 0: they wait.",
            min=0,
            show_default="an eighth of its memory",
        ),
    ] = None,
    memory_gb: Annotated[
        float | None,
        typer.Option(
            help="GB of memory that it may have in all \\[env: AXON_PS_MEMORY_GB].",
            show_default="what the machine lets it have",
        ),
    ] = None,
    http_port: o.HttpPort = None,
    trace_every: o.TraceEvery = None,
    job: o.Job = None,
    plugins: o.Plugins = None,
    token: o.Token = None,
    token_file: o.TokenFile = None,
    observer_token_file: o.ObserverTokenFile = None,
    tls_ca: o.TlsCa = None,
    tls_cert: o.TlsCert = None,
    tls_key: o.TlsKey = None,
    tls_dir: o.TlsDir = None,
    tls: o.Tls = None,
    tls_mutual: o.TlsMutual = None,
    insecure: o.Insecure = None,
    debuggable: o.Debuggable = None,
    config: o.Config = None,
    log: o.Log = None,
    log_level: o.LogLevel = None,
    ready_fd: o.ReadyFd = None,
) -> None:
    """Serve one shard server: slices of the parameters and of the optimizer's state."""
    settings = _settings(
        config, coordinator=coordinator, node=node, job=job, plugins=plugins, token=token, token_file=token_file,
        observer_token_file=observer_token_file, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key,
        tls_dir=tls_dir, tls=tls,
        tls_mutual=tls_mutual, insecure=insecure, log=log, log_level=log_level, http_port=http_port,
        trace_every=trace_every, memory_gb=memory_gb, debuggable=debuggable, bulk_port=bulk_port,
        drain_s=drain_s,
    )  # fmt: skip
    security = _security(settings, host, "shard")
    http = _http(settings, host, security)
    if not settings.coordinator:
        raise ConfigurationError("a shard server needs its coordinator: --coordinator host:port or AXON_PS_COORDINATOR")
    from axon_ps.shard.server.server import ShardConfig, serve
    from axon_ps.shard.server.subscriptions import SubscriberLimits

    configuration = ShardConfig(
        coordinator=_coordinator_address(settings),
        job=settings.job,
        host=host,
        port=port,
        advertise=advertise,
        bulk_port=None if settings.bulk_port < 0 else settings.bulk_port,
        advertise_bulk_port=advertise_bulk_port,
        node=settings.node,
        rank=rank,
        threads=threads,
        security=security,
        drain_s=settings.drain_s,
        tracing=settings.tracing(),
        memory_bytes=int(settings.memory_gb * 1e9),
        queue_bytes=None if queue_memory is None else int(queue_memory * 1e6),
        limits=SubscriberLimits(
            rate_bytes_s=math.inf if subscriber_rate is None else subscriber_rate * 1e6,
            max_bytes=subscriber_memory * 1e6,
        ),
    )
    _configure_logging(settings, "shard")
    settings.load_plugins()
    settings.allow_roots(host, ordered=True)

    def start(ready: Ready, stop: asyncio.Event) -> Awaitable[None]:
        return serve(configuration, ready, stop, http)

    leave(_in_foreground(start, host, ready_fd, http, settings.drain_s))


def proxy(
    coordinator: o.Coordinator = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 = any free one.")] = 7076,
    job: o.Job = None,
    token: o.Token = None,
    token_file: o.TokenFile = None,
    tls_ca: o.TlsCa = None,
    tls_cert: o.TlsCert = None,
    tls_key: o.TlsKey = None,
    tls: o.Tls = None,
    tls_mutual: o.TlsMutual = None,
    insecure: o.Insecure = None,
    debuggable: o.Debuggable = None,
    config: o.Config = None,
    log: o.Log = None,
    log_level: o.LogLevel = None,
    ready_fd: o.ReadyFd = None,
) -> None:
    """Serve the members of a host as their coordinator: all their sessions go over one, which is the host's."""
    settings = _settings(
        config, coordinator=coordinator, job=job, token=token, token_file=token_file, tls_ca=tls_ca, tls_cert=tls_cert,
        tls_key=tls_key, tls=tls, tls_mutual=tls_mutual, insecure=insecure, log=log, log_level=log_level,
        debuggable=debuggable,
    )  # fmt: skip
    security = settings.security()
    security.check_bind(host, port)
    if not settings.coordinator:
        raise ConfigurationError("a proxy needs the coordinator: --coordinator host:port or AXON_PS_COORDINATOR")
    from axon_ps.coordinator.proxy.server import serve

    address = _coordinator_address(settings)
    _configure_logging(settings, "proxy")

    def start(ready: Ready, stop: asyncio.Event) -> Awaitable[None]:
        return serve(address, settings.job, host, port, security, ready, stop)

    leave(_in_foreground(start, host, ready_fd, None))


def _settings(config: Path | None, **flags: Any) -> Settings:
    """Load the service's settings, and set up its memory before the rest of the service is imported into it."""
    from axon_ps.cli.settings import load, without_blas_threads
    from axon_ps.host.malloc import collect_rarely, limit_arenas
    from axon_ps.host.private_memory import make_memory_private
    from axon_ps.rpc.limits import raise_max_files

    settings = load(config, **flags)
    without_blas_threads()
    limit_arenas()
    collect_rarely()
    raise_max_files()
    if not settings.debuggable:
        make_memory_private()
    return settings


def _security(settings: Settings, host: str, role: str) -> Security:
    from axon_ps.rpc.auth.identity import Principal

    security = settings.security().acting(Principal(role), settings.job)
    security.check_bind(host)
    return security


def _http(settings: Settings, host: str, security: Security) -> HttpServer | None:
    if settings.http_port is None:
        return None
    from axon_ps.rpc.http import HttpServer

    return HttpServer(host, settings.http_port, security)


def _state_store(state: str | None, job: str) -> StateStore:
    from axon_ps.cli.settings import state_directory
    from axon_ps.storage.state_store import open_state

    return open_state(state or str(state_directory() / f"{job}.sqlite"), job)


def _audit_log(settings: Settings, store: StateStore, security: Security) -> AuditLog:
    from axon_ps.cli.settings import state_directory
    from axon_ps.coordinator.server.audit import opened
    from axon_ps.storage.state_store import SqliteStateStore

    state = state_directory() / f"{settings.job}.state"
    if isinstance(store, SqliteStateStore) and store.synchronous:
        state = Path(store.path)
    return opened(settings.audit_log, state.with_suffix(".audit.jsonl"), security.secrets)


def _coordinator_address(settings: Settings) -> str:
    """Return the coordinator's address; `-` reads it from standard input, as a service may start before it is known."""
    if settings.coordinator != "-":
        return settings.coordinator
    address = sys.stdin.readline().strip()
    if not address:
        raise ConfigurationError("--coordinator - was promised an address on standard input, which ended without one")
    return address


def _configure_logging(settings: Settings, role: str) -> None:
    from axon_ps.observe.logging import configure

    configure(role, style=settings.log, level=settings.log_level or "INFO")


def _in_foreground(
    start: Callable[[Ready, asyncio.Event], Awaitable[None]],
    host: str,
    ready_fd: int | None,
    http: HttpServer | None,
    drain_s: float = 0.0,
) -> int:
    """Run a service until it ends or a signal stops it, which may take it `drain_s` longer; returns the exit code."""
    received: list[int] = []

    def ready(port: int) -> None:
        if ready_fd is not None:
            line = _address(host, port) if http is None else f"{_address(host, port)} {http.url}"
            os.write(ready_fd, f"{line}\n".encode())
            os.close(ready_fd)

    async def serve() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()

        def on_signal(number: int) -> None:
            if received:
                os._exit(128 + number)
            received.append(number)
            signal.alarm(DRAIN_S + math.ceil(drain_s))
            stop.set()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, on_signal, number)
        await start(ready, stop)

    for module in _OF_SERVERS:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    gc.collect()
    gc.freeze()  # no collection visits imported objects, which would hold the loop for 50 ms
    asyncio.run(serve())
    signal.alarm(0)
    return 130 if signal.SIGINT in received else 0


def _address(host: str, port: int) -> str:
    from axon_ps.rpc.channels import join_address

    return join_address({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port)

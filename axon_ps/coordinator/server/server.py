"""A coordinator on a port, from start to drain."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import socket
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, Final

from axon_ps.coordinator.client.operator import SERVICE
from axon_ps.coordinator.config import CoordinatorConfig
from axon_ps.coordinator.core import records
from axon_ps.coordinator.core.state import CoordinatorState
from axon_ps.coordinator.server import automatic, retention
from axon_ps.coordinator.server.audit import NO_AUDIT, AuditLog
from axon_ps.coordinator.server.feed import Feed
from axon_ps.coordinator.server.page.routes import page_routes
from axon_ps.coordinator.server.servicer import CoordinatorServicer
from axon_ps.coordinator.server.shell import Shell, StateLearned
from axon_ps.coordinator.server.standby import Switch, rest, stand_by
from axon_ps.errors import Broken, StorageFull
from axon_ps.observe.log_buffer import LogBuffer, collect
from axon_ps.observe.metrics.sources import Source
from axon_ps.observe.tracing.tracer import NO_TRACES, TracePolicy
from axon_ps.rpc.auth.identity import Principal
from axon_ps.rpc.channels import CALL_OPTIONS, join_address, split_address
from axon_ps.rpc.http import HttpServer, Route, healthz, metrics
from axon_ps.rpc.security import Security
from axon_ps.rpc.server import listen
from axon_ps.rpc.service import service_handler
from axon_ps.storage.state_store.base import SharedStateStore, StateStore

_logger = logging.getLogger(__name__)

Begin = Callable[[], Awaitable[None]]
"""Lets members join a coordinator that is about to lead."""

Lead = Callable[[Begin], Awaitable[None]]
"""The function `_lead` of one coordinator."""

GRACE_S: Final = 1.0
"""Seconds that running calls may take when it stops."""

REST_S: Final = 1.0
"""Seconds for which a coordinator that has lost the lead does not try to lead again."""


async def serve(
    config: CoordinatorConfig,
    host: str,
    port: int,
    security: Security,
    store: StateStore,
    ready: Callable[[int], None],
    stop: asyncio.Event,
    http: HttpServer | None = None,
    tracing: TracePolicy = NO_TRACES,
    audit: AuditLog = NO_AUDIT,
) -> None:
    """Run a coordinator until `stop` is set.

    Args:
        config: the job.
        host: address to listen on, or a host of this process (see `rpc.carriers.in_process`).
        port: port to listen on; 0 = any free one.
        security: TLS and token.
        store: durable state. A job found in it goes on. Not closed here.
        ready: called with the port once it listens.
        stop: set it to end the coordinator. Its state stays.
        http: its HTTP endpoint, not started; None = it has none.
        tracing: the policy that chooses the traced steps.
        audit: gets the changes of the job, with the callers; not closed here.

    Raises:
        ConfigurationError: address, security, traces, or the stored state cannot work.
        AxonError: the store failed permanently.

    If several coordinators share the store, calls are refused with `NotLeader` while another one leads.
    """
    switch = Switch(store)
    switch.tracer.start(tracing, "coordinator", {"axon_ps.job": config.job})
    security = security.acting(Principal.COORDINATOR, config.job)
    services = [service_handler(SERVICE, switch)]
    server = listen(host, port, security, services, [SERVICE.full_name], options=CALL_OPTIONS)

    switch.revocations = server.revocations
    server.report_refused(switch.refused)

    async def begin() -> None:
        ready(await server.start())

    log = collect(security.secrets())
    lead = partial(_lead, config, store, switch, stop, log, audit)
    try:
        if http is not None:
            http.refuse(server.revocations)
            http.report_refused(switch.refused)
            metrics = _metrics(config.job, switch)
            http.add(healthz(lambda: switch.servicer is not None), metrics, *page_routes(switch))
            await http.start()
        if isinstance(store, SharedStateStore):
            ready(await server.start(serving=False))
            store.address = _name_of(server.address)
            await _stand_by_and_lead(lead, store, switch, stop, server.set_serving)
        else:
            await _lead_until(lead, begin)
    finally:
        if log is not None:
            log.close()
        await asyncio.to_thread(switch.tracer.close)
        if http is not None:
            await http.stop()
        await server.stop(GRACE_S)


def _metrics(name: str, switch: Switch) -> Route:
    labels = {"job_name": name, "role": "coordinator"}
    job = Source(kind="coordinator", read=switch.statistics, histograms=switch.histograms)
    sources = [job, Source(kind="process", read=switch.tracer.statistics)]
    return metrics(lambda: sources, labels)


async def _stand_by_and_lead(
    lead: Lead,
    store: SharedStateStore,
    switch: Switch,
    stop: asyncio.Event,
    set_serving: Callable[[bool], Awaitable[None]],
) -> None:
    """Stand by and lead alternately until we are to stop; see `_lead`."""
    while await stand_by(store, switch, stop):
        _logger.info("this coordinator leads")
        try:
            await lead(lambda: set_serving(True))
        except (Broken, StorageFull) as error:  # also if the store could not be reached or made ready
            _logger.warning("%s; standing by", error)
        finally:
            switch.servicer, switch.why = None, "this coordinator leads no more; another one does soon"
            await set_serving(False)
            await asyncio.to_thread(store.resign)
        await rest(stop, REST_S)


async def _lead_until(lead: Lead, begin: Begin) -> None:
    """Lead until the server stops. If newer state was learned meanwhile, lead again from that; see `_lead`."""
    while True:
        try:
            return await lead(begin)
        except StateLearned as learned:
            _logger.warning("%s; the job goes on from that", learned)
            begin = _began


async def _began() -> None:
    """Do nothing: the server listens already."""


async def _lead(
    config: CoordinatorConfig,
    store: StateStore,
    switch: Switch,
    stop: asyncio.Event,
    log: LogBuffer | None,
    audit: AuditLog,
    begin: Begin,
) -> None:
    """Run the job from the stored state, until we are to stop. `begin` is called when members may join.

    Raises:
        NotLeader: another coordinator is to lead.
        AxonError: the store failed.
    """
    stored = await asyncio.to_thread(store.load)
    config = dataclasses.replace(config, begin_anew=store.begin_anew)
    policy = config.checkpoints
    durable = records.load(stored)
    durable_models = durable is not None and any(model.spec for model in durable.models.values())
    if not durable_models:
        config = dataclasses.replace(config, resume=await asyncio.to_thread(_resume, config))
    elif config.resume:
        _logger.warning(
            "the job goes on from the coordinator's state, and not from %s, as it was told to: `axon-ps checkpoint "
            "restore` restores that; with another --state, or another --job, it begins with it",
            config.resume,
        )
    state = CoordinatorState(config, asyncio.get_running_loop().time(), stored, new_id=uuid.uuid4().hex)
    shell = Shell(state, store, log=log, tracer=switch.tracer, audit=audit)
    feed = Feed(shell)
    _note_beginning(state, shell, known=bool(durable and durable.membership.generation))
    try:
        switch.servicer = servicer = CoordinatorServicer(shell, feed, switch.revocations)
        await begin()
        save = partial(servicer.checkpoints.save, background=True)
        checkpoints = automatic.AutomaticCheckpoints(shell, policy, save).run() if policy.directory else None
        await _until(stop, shell, checkpoints)
        if config.resume and not (durable_models or servicer.has_registered):
            _logger.warning(
                "nothing was resumed from %s: no worker registered a model with the shard servers; under NO_SHARD, and "
                "with PyTorch's own wrappers, the script loads its checkpoint",
                config.resume,
            )
    finally:
        if switch.servicer is not None:
            switch.servicer.close()
        feed.close()
        await shell.close()


def _note_beginning(state: CoordinatorState, shell: Shell, *, known: bool) -> None:
    """Record the begin of the leadership as the history's first event."""
    after = "; the job goes on, and what happened before is not known here" if known else ""
    state.history.happened("leading", f"this coordinator leads job {state.config.job!r}{after}", shell.now())


def _name_of(address: str) -> str:
    """Return an address under which others may reach it."""
    host, port = split_address(address)
    return join_address(socket.gethostname() if host in ("0.0.0.0", "::") else host, port)


def _resume(config: CoordinatorConfig) -> str:
    """Return the checkpoint that a new job begins with: the configured one, or the newest in its directory, if any.

    Raises:
        CheckpointNotFound: the configured checkpoint does not exist.
        CheckpointError: that checkpoint, or the directory, cannot be read.
    """
    directory = config.checkpoints.directory
    if not (directory or config.resume):
        return ""
    from axon_ps.storage.manifest import log_damaged, nothing_at, read_manifest

    found = retention.newest(directory, log_damaged) if directory else None
    if config.resume:
        reported = read_manifest(config.resume)
        if found is not None and found.uri != reported.uri:
            _logger.warning(
                "the job begins with %s, as it was told to, and not with its newest checkpoint, %s; where it is "
                "started again by itself, give no --resume",
                config.resume,
                found.uri,
            )
        return config.resume
    if found is not None:
        _logger.warning("the job resumes from the newest checkpoint, %s, version %d", found.uri, found.version)
        return found.uri
    _logger.warning("%s; the job begins anew", nothing_at(directory))
    return ""


async def _until(stop: asyncio.Event, shell: Shell, checkpoints: Coroutine[Any, Any, None] | None) -> None:
    """Return when the coordinator is to stop.

    Raises:
        AxonError: the error with which it failed.
    """
    tasks: list[asyncio.Task[Any]] = [asyncio.create_task(stop.wait()), asyncio.create_task(shell.failed())]
    if checkpoints is not None:
        tasks.append(asyncio.create_task(checkpoints))
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task

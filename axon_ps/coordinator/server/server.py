"""A coordinator on a port, from start to drain."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import uuid
from collections.abc import Callable, Coroutine
from typing import Any, Final

from axon_ps.coordinator.client.operator import SERVICE
from axon_ps.coordinator.core import records
from axon_ps.coordinator.core.config import CoordinatorConfig
from axon_ps.coordinator.core.state import CoordinatorState
from axon_ps.coordinator.server import automatic, retention
from axon_ps.coordinator.server.servicer import CoordinatorServicer
from axon_ps.coordinator.server.shell import Shell
from axon_ps.errors import AxonError
from axon_ps.rpc.security import Security
from axon_ps.rpc.server import listen
from axon_ps.rpc.service import service_handler
from axon_ps.storage.state_store import StateStore

_logger = logging.getLogger(__name__)

GRACE_S: Final = 1.0
"""How long running calls may take when it stops."""


async def serve(
    config: CoordinatorConfig,
    host: str,
    port: int,
    security: Security,
    store: StateStore,
    ready: Callable[[int], None],
    stop: asyncio.Event,
) -> None:
    """Run a coordinator until `stop` is set.

    Args:
        config: the job.
        host: address to listen on, or a host of this process (see `rpc.in_process`).
        port: port to listen on; 0 = any free one.
        security: TLS and token.
        store: durable state; a job found in it goes on. Not closed here.
        ready: called with the port once members may join.
        stop: set it to end the coordinator; its state stays.

    Raises:
        ConfigurationError: address, security, or what the store holds cannot work.
        AxonError: the store failed for good.
    """
    stored = await asyncio.to_thread(store.load)
    policy = config.checkpoints
    durable = records.load(stored)
    if policy.directory and not (durable and any(model.spec for model in durable.models.values())):
        config = dataclasses.replace(config, resume=await asyncio.to_thread(_resume, config))
    state = CoordinatorState(config, asyncio.get_running_loop().time(), stored, new_id=uuid.uuid4().hex)
    shell = Shell(state, store)
    servicer = CoordinatorServicer(shell)
    handler = service_handler(SERVICE, servicer)
    server = listen(host, port, security, [handler], [SERVICE.full_name])
    try:
        ready(await server.start())
        checkpoints = automatic.AutomaticCheckpoints(shell, policy, servicer.save).run() if policy.directory else None
        await _until(stop, shell, checkpoints)
    finally:
        await shell.close()
        await server.stop(GRACE_S)


def _resume(config: CoordinatorConfig) -> str:
    """What a new job begins with: what it was told to, or the newest checkpoint in its directory, if any."""

    def damaged(uri: str, error: AxonError) -> None:
        _logger.error("checkpoint %s is passed over: %s", uri, error)

    found = retention.newest(config.checkpoints.directory, damaged)
    if found is None:
        return config.resume
    if not config.resume:
        _logger.warning("the job resumes from the newest checkpoint, %s, version %d", found.uri, found.version)
        return found.uri
    _logger.warning(
        "the job begins with %s, as it was told to, and not with its newest checkpoint, %s; where it is started again "
        "by itself, give no --resume",
        config.resume,
        found.uri,
    )
    return config.resume


async def _until(stop: asyncio.Event, shell: Shell, checkpoints: Coroutine[Any, Any, None] | None) -> None:
    """Return when it is to stop.

    Raises:
        AxonError: what it failed with.
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

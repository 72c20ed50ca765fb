"""A coordinator on a port, from start to drain."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Callable
from typing import Final

from axon_ps.coordinator.client.operator import SERVICE
from axon_ps.coordinator.core.config import CoordinatorConfig
from axon_ps.coordinator.core.state import CoordinatorState
from axon_ps.coordinator.server.servicer import CoordinatorServicer
from axon_ps.coordinator.server.shell import Shell
from axon_ps.rpc.security import Security
from axon_ps.rpc.server import listen
from axon_ps.rpc.service import service_handler
from axon_ps.storage.state_store import StateStore

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
    state = CoordinatorState(config, asyncio.get_running_loop().time(), stored, new_id=uuid.uuid4().hex)
    shell = Shell(state, store)
    handler = service_handler(SERVICE, CoordinatorServicer(shell))
    server = listen(host, port, security, [handler], [SERVICE.full_name])
    try:
        ready(await server.start())
        await _until(stop, shell)
    finally:
        await shell.close()
        await server.stop(GRACE_S)


async def _until(stop: asyncio.Event, shell: Shell) -> None:
    stopped = asyncio.create_task(stop.wait())
    failed = asyncio.create_task(shell.failed())
    try:
        done, _ = await asyncio.wait([stopped, failed], return_when=asyncio.FIRST_COMPLETED)
        if failed in done:
            failed.result()
    finally:
        for task in (stopped, failed):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task

"""The client for commands that call a running coordinator; the commands that change a job: `drain`, `release`."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from axon_ps.cli import options as o
from axon_ps.errors import ConfigurationError, InvalidRequest, Timeout
from axon_ps.types import Role

if TYPE_CHECKING:
    from axon_ps.cli.settings import Settings
    from axon_ps.coordinator.client.operator import OperatorClient
    from axon_ps.observe.work import LongWork

_ASK_S = 0.2
"""Seconds between two looks at a drain's progress."""


def client(settings: Settings) -> OperatorClient:
    """Return a client for the coordinator that the settings name; make and use it on one event loop."""
    from axon_ps.coordinator.client.operator import OperatorClient

    return OperatorClient(settings.coordinator, security=settings.security(), job=settings.job)


@o.of_a_job
def drain(
    server: Annotated[int, typer.Argument(help="Rank of the shard server, as status shows it.", min=0)],
    timeout_s: Annotated[float, typer.Option(help="Seconds that it may take.")] = 3600.0,
    no_progress: o.NoProgress = False,
    *,
    settings: Settings,
) -> None:
    """Move everything that a shard server holds to others while training goes on; then it leaves the job and ends."""
    from axon_ps.cli.terminal.progress import Progress
    from axon_ps.observe.work import LongWork

    work = LongWork("drain")
    with Progress(f"draining shard server {server}", work, None if no_progress else sys.stderr):
        asyncio.run(_drained(settings, server, timeout_s, work))
    print(f"shard server {server} has left the job")


@o.of_a_job
def release(
    model: Annotated[str, typer.Argument(help="Its name, as status shows it.")],
    *,
    settings: Settings,
) -> None:
    """Release a model of a running job: its parameters are gone; also for a model that shard servers cannot hold."""
    asyncio.run(_released(settings, model))
    print(f"model {model!r} was released")


async def _released(settings: Settings, name: str) -> None:
    """Release a model.

    Raises:
        ConfigurationError: the job has no such model.
    """
    async with client(settings) as operator:
        models = {m.name: m.model for m in (await operator.status()).models}
        if name not in models:
            known = ", ".join(map(repr, models)) or "none"
            raise ConfigurationError(f"the job has no model {name!r}; it has {known}")
        await operator.release(models[name], name)


async def _drained(settings: Settings, server: int, timeout_s: float, work: LongWork) -> None:
    """Drain a shard server; returns when it has left. `work` counts the bytes that it held and has given up.

    Raises:
        Timeout: it has not left in time.
    """
    from axon_ps.cli.terminal.members import measures_of

    deadline = time.monotonic() + timeout_s
    async with client(settings) as operator:
        status = await operator.status()
        incarnation = next((m.incarnation for m in status.membership.shards if m.rank == server), "")
        left = await operator.drain(server)
        while any(m.incarnation == incarnation for m in status.membership.shards):
            held = int(measures_of(status.counters, Role.SHARD).get(server, {}).get("slice_bytes", 0))
            work.total_bytes = max(work.total_bytes, held)
            work.done_bytes = work.total_bytes - held
            if time.monotonic() >= deadline:
                raise Timeout(
                    f"shard server {server} still holds {left} slices after {timeout_s:g} s; it goes on giving "
                    "them up while the job trains: run the same command again to wait for it"
                )
            await asyncio.sleep(_ASK_S)
            status = await operator.status()
            with contextlib.suppress(InvalidRequest):  # it has left since
                left = await operator.drain(server) if server in status.draining else left

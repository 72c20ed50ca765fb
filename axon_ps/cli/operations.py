"""Operations on a running coordinator. They need gRPC, so commands import this before their event loop runs."""

from __future__ import annotations

import asyncio
import contextlib
import time

import axon_ps.rpc.health_service  # noqa: F401  # has the messages of `health_of` imported
from axon_ps.cli.settings import Settings
from axon_ps.cli.terminal.members import measures_of
from axon_ps.coordinator.client.operator import OperatorClient
from axon_ps.errors import ConfigurationError, InvalidRequest, Timeout
from axon_ps.observe.work import LongWork
from axon_ps.types import Role

_ASK_S = 0.2
"""Seconds between two looks at a drain's progress."""


def client(settings: Settings) -> OperatorClient:
    """Return a client for the coordinator that the settings name; make and use it on one event loop."""
    return OperatorClient(settings.coordinator, security=settings.security(), job=settings.job)


async def released(settings: Settings, name: str) -> None:
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


async def drained(settings: Settings, server: int, timeout_s: float, work: LongWork) -> None:
    """Drain a shard server; returns when it has left. `work` counts the bytes that it held and has given up.

    Raises:
        Timeout: it has not left in time.
    """
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

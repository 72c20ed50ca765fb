"""Settings and client of the commands that call a running coordinator; and `axon-ps drain`, which changes one."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from axon_ps.cli import options as o
from axon_ps.errors import ConfigurationError, Timeout

if TYPE_CHECKING:
    from axon_ps.cli.settings import Settings
    from axon_ps.coordinator.client.operator import OperatorClient

_ASK_S = 0.2
"""How often a drain asks how far it is."""


def settings_for(config: Path | None, **flags: Any) -> Settings:
    """The settings of a command that needs a coordinator.

    Raises:
        ConfigurationError: none is named.
    """
    from axon_ps.cli.settings import load

    settings = load(config, **flags)
    if not settings.coordinator:
        raise ConfigurationError("which coordinator? Give --coordinator host:port or set AXON_PS_COORDINATOR")
    return settings


def client(settings: Settings) -> OperatorClient:
    """A client for the coordinator that the settings name; make and use it on one event loop."""
    from axon_ps.coordinator.client.operator import OperatorClient

    return OperatorClient(settings.coordinator, security=settings.security(), job=settings.job)


def drain(
    server: Annotated[int, typer.Argument(help="Rank of the shard server, as status shows it.", min=0)],
    coordinator: o.Coordinator = None,
    job: o.Job = None,
    timeout_s: Annotated[float, typer.Option(help="Seconds that it may take.")] = 3600.0,
    token: o.Token = None,
    token_file: o.TokenFile = None,
    tls_ca: o.TlsCa = None,
    tls_cert: o.TlsCert = None,
    tls_key: o.TlsKey = None,
    config: o.Config = None,
) -> None:
    """Move everything that a shard server holds to others while training goes on; then it leaves the job and ends."""
    settings = settings_for(
        config, coordinator=coordinator, job=job, token=token, token_file=token_file, tls_ca=tls_ca,
        tls_cert=tls_cert, tls_key=tls_key,
    )  # fmt: skip

    async def wait() -> None:
        deadline = time.monotonic() + timeout_s
        async with client(settings) as operator:
            left, printed = await operator.drain(server), -1
            members = (await operator.status()).membership.shards
            incarnation = next(m.incarnation for m in members if m.rank == server)
            while any(m.incarnation == incarnation for m in members):
                if left != printed:
                    print(f"shard server {server} holds {left} slices" if left else "it leaves after this step")
                    printed = left
                if time.monotonic() >= deadline:
                    raise Timeout(
                        f"shard server {server} still holds {left} slices after {timeout_s:g} s; it goes on giving "
                        "them up while the job trains: run the same command again to wait for it"
                    )
                await asyncio.sleep(_ASK_S)
                reply = await operator.status()
                members = reply.membership.shards
                if server in reply.draining:
                    left = await operator.drain(server)
        print(f"shard server {server} has left the job")

    asyncio.run(wait())

"""The commands that only look: `status`, `top`, `logs` of a job, `health` of a service, `doctor` for this machine."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from axon_ps.cli import options as o
from axon_ps.cli.options import leave
from axon_ps.errors import ConfigurationError

if TYPE_CHECKING:
    from axon_ps.cli.settings import Settings


@o.of_a_job
def status(
    timeout_s: o.Timeout = 5.0,
    as_json: o.Json = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh in place until the job ends.")] = False,
    every_s: Annotated[float, typer.Option(help="Seconds between two looks of --watch.", min=0.1)] = 1.0,
    *,
    settings: Settings,
) -> None:
    """Show the members of a job, its version and what it waits for."""
    if watch and as_json:
        raise ConfigurationError("--watch is for people and --json for programs: give one of them")
    from axon_ps.cli.terminal.live import show_status, watch_status

    asyncio.run(
        watch_status(settings, every_s, timeout_s) if watch else show_status(settings, timeout_s, as_json=as_json)
    )


@o.of_a_job
def top(*, settings: Settings) -> None:
    """Show a job live: its members and what they are busy with, steps, loss, events. Keys: q, p, s."""
    from rich.console import Console

    from axon_ps.cli.terminal.live import LiveTop, show_top

    console = Console()
    live = console.is_terminal and sys.stdin.isatty()
    asyncio.run(LiveTop(settings, console).run() if live else show_top(settings, console))


@o.of_a_job
def logs(
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what is logged from now on.")] = False,
    rank: Annotated[
        list[int] | None, typer.Option(help="Only the worker of this rank; may be repeated.", show_default="all")
    ] = None,
    server: Annotated[
        list[int] | None, typer.Option(help="Only the shard server of this rank; may be repeated.", show_default="all")
    ] = None,
    level: Annotated[str, typer.Option(help="The lowest level: debug, info, warning, error or critical.")] = "info",
    since: Annotated[
        str, typer.Option(help="Only what is not older than 30s, 5m, 2h.", show_default="all that is known")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one object a line.")] = False,
    *,
    settings: Settings,
) -> None:
    """Show what coordinator, shard servers and workers have logged, in one stream."""
    from axon_ps.cli.terminal.log_view import Wanted
    from axon_ps.cli.terminal.logs import show_logs

    wanted = Wanted.of(level, since, rank or (), server or (), time.time())
    asyncio.run(show_logs(settings, wanted, follow=follow, as_json=as_json))


def health(
    address: Annotated[
        str, typer.Argument(help="host:port of a service; of several, one that serves is enough.", show_default=False)
    ],
    service: Annotated[str, typer.Option(help="Full name of one service.", show_default="the server as a whole")] = "",
    timeout_s: o.Timeout = 3.0,
    tls_ca: o.TlsCa = None,
    tls_cert: o.TlsCert = None,
    tls_key: o.TlsKey = None,
    tls_dir: o.TlsDir = None,
    tls: o.Tls = None,
    token_file: o.TokenFile = None,
    config: o.Config = None,
) -> None:
    """Ask a service for its health; exit code 0 when it is serving."""
    import axon_ps.rpc.health_service  # noqa: F401  # has the messages of `health_of` imported
    from axon_ps.cli.settings import load
    from axon_ps.errors import AxonError, Unreachable
    from axon_ps.rpc.auth.identity import Principal
    from axon_ps.rpc.auth.tokens import is_strong
    from axon_ps.rpc.health import SERVING, health_of

    async def healthy(address: str) -> str:
        try:
            return await health_of(address, security, service=service, timeout_s=timeout_s)
        except Unreachable:  # in a container 127.0.0.1 is called, and the service listens for the network, by TLS
            if security.tls or security.ca_file or not any(map(is_strong, security.tokens()[:1])):
                raise
            by_tls = dataclasses.replace(security, tls=True)
            return await health_of(address, by_tls, service=service, timeout_s=timeout_s)

    async def ask() -> str:
        addresses = address.split(",")
        asked = (healthy(each.strip()) for each in addresses)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        states = [answer for answer in answers if isinstance(answer, str)]
        for error in answers:
            if isinstance(error, BaseException) and (not states or not isinstance(error, AxonError)):
                raise error
        return SERVING if SERVING in states else states[0]

    settings = load(
        config, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key, tls_dir=tls_dir, tls=tls, token_file=token_file
    )
    security = settings.security().acting(Principal.OPERATOR, settings.job)
    state = asyncio.run(ask())
    print(state)
    leave(0 if state == SERVING else 1)


@partial(o.of_a_job, named=False)
def doctor(
    measure: Annotated[
        Path | None,
        typer.Option(
            help="Measure what this library costs here, in half a minute, and write it to this file for `axon-ps "
            "simulate`; nothing else is looked at.",
            metavar="FILE",
            show_default=False,
        ),
    ] = None,
    as_json: o.Json = False,
    *,
    settings: Settings,
) -> None:
    """Look at this machine: versions, limits, memory, environment, and whether the coordinator answers."""
    from axon_ps.cli.doctor import examine, print_findings

    if measure is not None:
        importlib.import_module("axon_ps_lab.commands.measure").run(measure, as_json=as_json)
        return
    findings = examine(settings)
    if as_json:
        print(json.dumps([{"what": f.what, "found": f.found, "problem": f.problem} for f in findings], indent=2))
    else:
        print_findings(findings)
    leave(1 if any(f.problem for f in findings) else 0)

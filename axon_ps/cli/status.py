"""The commands that only look: `status` of a job, `health` of a service, `doctor` for this machine."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from axon_ps.cli import options as o
from axon_ps.cli.options import leave

if TYPE_CHECKING:
    from axon_ps.coordinator.events import Status


def status(
    coordinator: o.Coordinator = None,
    job: o.Job = None,
    timeout_s: o.Timeout = 5.0,
    as_json: o.Json = False,
    token: o.Token = None,
    token_file: o.TokenFile = None,
    tls_ca: o.TlsCa = None,
    tls_cert: o.TlsCert = None,
    tls_key: o.TlsKey = None,
    config: o.Config = None,
) -> None:
    """Show who is in a job, which version it is at and what it waits for."""
    from axon_ps.cli.operate import client, settings_for

    settings = settings_for(
        config, coordinator=coordinator, job=job, token=token, token_file=token_file, tls_ca=tls_ca,
        tls_cert=tls_cert, tls_key=tls_key,
    )  # fmt: skip

    async def ask() -> Status:
        async with client(settings) as operator:
            return await operator.status(timeout_s=timeout_s)

    reply = asyncio.run(ask())
    if as_json:
        print(json.dumps(_as_dict(reply), indent=2))
    else:
        _print_status(reply, settings.coordinator)


def health(
    address: Annotated[str, typer.Argument(help="host:port of a service.", show_default=False)],
    service: Annotated[str, typer.Option(help="Full name of one service.", show_default="the server as a whole")] = "",
    timeout_s: o.Timeout = 3.0,
    tls_ca: o.TlsCa = None,
    tls_cert: o.TlsCert = None,
    tls_key: o.TlsKey = None,
    config: o.Config = None,
) -> None:
    """Ask a service for its health; exit code 0 when it is serving."""
    from grpc_health.v1 import health_pb2

    from axon_ps.cli.settings import load
    from axon_ps.transport.channels import connect
    from axon_ps.transport.service import Stub

    settings = load(config, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key, token="")

    async def ask() -> Any:
        channel = connect(address, settings.security())
        try:
            stub = Stub(channel, health_pb2.DESCRIPTOR.services_by_name["Health"], peer=address)
            return await stub.call("Check", health_pb2.HealthCheckRequest(service=service), timeout_s=timeout_s)
        finally:
            await channel.close()

    reply = asyncio.run(ask())
    name = health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)
    print(name)
    leave(0 if reply.status == health_pb2.HealthCheckResponse.SERVING else 1)


def doctor(
    coordinator: o.Coordinator = None,
    job: o.Job = None,
    as_json: o.Json = False,
    token: o.Token = None,
    token_file: o.TokenFile = None,
    tls_ca: o.TlsCa = None,
    tls_cert: o.TlsCert = None,
    tls_key: o.TlsKey = None,
    config: o.Config = None,
) -> None:
    """Look at this machine: versions, limits, memory, environment, and whether the coordinator answers."""
    from axon_ps.cli.doctor import examine, print_findings
    from axon_ps.cli.settings import load

    settings = load(
        config, coordinator=coordinator, job=job, token=token, token_file=token_file, tls_ca=tls_ca,
        tls_cert=tls_cert, tls_key=tls_key,
    )  # fmt: skip
    findings = examine(settings)
    if as_json:
        print(json.dumps([{"what": f.what, "found": f.found, "problem": f.problem} for f in findings], indent=2))
    else:
        print_findings(findings)
    leave(1 if any(f.problem for f in findings) else 0)


def _as_dict(reply: Status) -> dict[str, Any]:
    values = dataclasses.asdict(reply)
    membership = values["membership"]
    for member in (*membership["workers"], *membership["shards"], *membership["finished"]):
        member["role"] = member["role"].value
    return values


def _print_status(reply: Status, address: str) -> None:
    from rich.console import Console
    from rich.table import Table

    membership = reply.membership
    console = Console()
    state = "complete" if membership.complete else f"waiting for {membership.waiting_for or 'members'}"
    console.print(f"job [bold]{reply.job}[/bold] at {address}: {state}", highlight=False)
    held = f"{reply.parameters:,} parameters" if reply.registered else "no layout yet"
    console.print(
        f"version {reply.version}, step {reply.step}, generation {membership.generation}, {held}"
        f"{'' if reply.initialized or not reply.registered else ' (not uploaded yet)'}, up {_duration(reply.uptime_s)}",
        highlight=False,
    )
    if len(reply.models) > 1:
        models = Table("model", "version", "step", "parameters", "")
        for model in reply.models:
            state = "" if model.initialized else "not uploaded yet"
            models.add_row(model.name, str(model.version), str(model.step), f"{model.parameters:,}", state)
        console.print(models)
    table = Table("role", "rank", "node", "address", "replica", "incarnation")
    for m in (*membership.shards, *membership.workers, *membership.finished):
        replica = str(m.replica) if m.replica >= 0 else "finished" if m in membership.finished else ""
        table.add_row(m.role.value, str(m.rank), m.node, m.address, replica, m.incarnation[:8])
    console.print(table)
    for line in reply.pending:
        console.print(f"pending: {line}", highlight=False)
    for name, value in sorted(reply.counters.items()):
        console.print(f"{name} {value:g}", highlight=False)


def _duration(seconds: float) -> str:
    minutes, s = divmod(int(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}h{m:02d}m" if hours else f"{m}m{s:02d}s" if m else f"{s}s"

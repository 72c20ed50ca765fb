"""The commands that only look: `status` of a job, `health` of a service, `doctor` for this machine."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from axon_ps.cli import options as o
from axon_ps.cli.options import leave

if TYPE_CHECKING:
    from axon_ps.coordinator.core.events import CheckpointStatus, Status

_OLD_S = 10.0
"""A report older than this is shown with its age."""


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
    """Show the members of a job, its version and what it waits for."""
    from axon_ps.cli.operate import client, settings_for

    settings = settings_for(
        config, coordinator=coordinator, job=job, token=token, token_file=token_file, tls_ca=tls_ca,
        tls_cert=tls_cert, tls_key=tls_key,
    )  # fmt: skip

    from axon_ps.worker.progress import progress_of

    async def ask() -> tuple[Status, dict[str, Any] | None]:
        async with client(settings) as operator:
            reply = await operator.status(timeout_s=timeout_s)
            return reply, await progress_of(lambda key: operator.kv_get(key, timeout_s=timeout_s))

    reply, progress = asyncio.run(ask())
    if as_json:
        print(json.dumps(_as_dict(reply) | {"finished": _finished(reply), "progress": progress}, indent=2))
    else:
        _print_status(reply, progress, settings.coordinator)


def health(
    address: Annotated[
        str, typer.Argument(help="host:port of a service; of several, one that serves is enough.", show_default=False)
    ],
    service: Annotated[str, typer.Option(help="Full name of one service.", show_default="the server as a whole")] = "",
    timeout_s: o.Timeout = 3.0,
    tls_ca: o.TlsCa = None,
    tls_cert: o.TlsCert = None,
    tls_key: o.TlsKey = None,
    config: o.Config = None,
) -> None:
    """Ask a service for its health; exit code 0 when it is serving."""
    from axon_ps.cli.settings import load
    from axon_ps.errors import AxonError
    from axon_ps.rpc.health import SERVING, health_of

    async def ask() -> str:
        security, addresses = settings.security(), address.split(",")
        asked = (health_of(each.strip(), security, service=service, timeout_s=timeout_s) for each in addresses)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        states = [answer for answer in answers if isinstance(answer, str)]
        for error in answers:
            if isinstance(error, BaseException) and (not states or not isinstance(error, AxonError)):
                raise error
        return SERVING if SERVING in states else states[0]

    settings = load(config, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key, token="")
    state = asyncio.run(ask())
    print(state)
    leave(0 if state == SERVING else 1)


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


def _finished(reply: Status) -> bool:
    """Whether the job is over: its workers have finished and left."""
    return bool(reply.membership.finished) and not reply.membership.workers


def _state(reply: Status) -> str:
    """The state of the job, for its headline."""
    count = len(reply.membership.finished)
    if _finished(reply):
        return f"finished: {'its worker has' if count == 1 else f'all {count} workers have'} done all there was to do"
    return "complete" if reply.membership.complete else f"waiting for {reply.membership.waiting_for or 'members'}"


def progress_line(report: Mapping[str, Any], now: float) -> str:
    """The last progress report of the training script, as text.

    Args:
        report: as `worker.progress` stores it.
        now: the time, as seconds since 1970.
    """
    step, steps, rate = report.get("step", 0), report.get("steps"), report.get("steps_per_s") or 0.0
    fields = [f"step {step}" + (f" of {steps} ({100 * step // max(1, steps)} %)" if steps else "")]
    if report.get("loss") is not None:
        fields.append(f"loss {report['loss']:.4g}")
    if rate:
        fields.append(f"{rate:.3g} steps/s")
    for name, value in (report.get("values") or {}).items():
        number = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
        fields.append(f"{number} {name.removesuffix('_per_s')}/s" if name.endswith("_per_s") else f"{name} {number}")
    age_s = now - report.get("at", now)
    if age_s >= _OLD_S:
        fields.append(f"reported {_duration(age_s)} ago")
    elif steps and rate and step < steps:
        fields.append(f"{_duration((steps - step) / rate)} left")
    return ", ".join(fields)


def checkpoint_lines(known: CheckpointStatus) -> list[str]:
    """What is known of the job's checkpoints, as text."""
    lines = []
    if known.uri:
        took = f", written in {known.took_s:.3g} s" if known.took_s else ""
        lines.append(
            f"newest checkpoint: {known.uri}, version {known.version}, {known.bytes:,} bytes, "
            f"{_duration(known.age_s)} ago{took}"
        )
    if known.activity:
        lines.append(f"checkpoints: {known.activity}")
    if known.failure:
        lines.append(f"newest failure of a checkpoint, {_duration(known.failure_age_s)} ago: {known.failure}")
    return lines


def _print_status(reply: Status, progress: Mapping[str, Any] | None, address: str) -> None:
    from rich.console import Console
    from rich.table import Table

    membership = reply.membership
    console = Console()
    console.print(f"job [bold]{reply.job}[/bold] at {address}: {_state(reply)}", highlight=False)
    if progress is not None:
        console.print(progress_line(progress, time.time()), highlight=False)
    held = f"{reply.parameters:,} parameters" if reply.registered else "no layout yet"
    console.print(
        f"version {reply.version}, step {reply.step}, generation {membership.generation}, {held}"
        f"{'' if reply.initialized or not reply.registered else ' (not uploaded yet)'}, up {_duration(reply.uptime_s)}",
        highlight=False,
    )
    if reply.registered:
        lacking = sum(model.lacking for model in reply.models)
        slices = sum(model.slices for model in reply.models)
        short = f"; {lacking} of {slices} slices have too few copies" if lacking else ""
        console.print(f"replication {reply.replication}{short}", highlight=False)
    if len(reply.models) > 1:
        models = Table("model", "version", "step", "parameters", "")
        for model in reply.models:
            state = "" if model.initialized else "not uploaded yet"
            models.add_row(model.name, str(model.version), str(model.step), f"{model.parameters:,}", state)
        console.print(models)
    table = Table("role", "rank", "node", "address", "replica", "incarnation")
    for m in (*membership.shards, *membership.workers, *membership.finished):
        replica = str(m.replica) if m.replica >= 0 else "finished" if m in membership.finished else ""
        if m in membership.shards and m.rank in reply.draining:
            replica = "draining"
        table.add_row(m.role.value, str(m.rank), m.node, m.address, replica, m.incarnation[:8])
    console.print(table)
    for line in checkpoint_lines(reply.checkpoints):
        console.print(line, highlight=False, markup=False)
    for line in () if _finished(reply) else reply.pending:
        console.print(f"pending: {line}", highlight=False)
    for name, value in sorted(reply.counters.items()):
        console.print(f"{name} {value:g}", highlight=False)


def _duration(seconds: float) -> str:
    minutes, s = divmod(int(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}h{m:02d}m" if hours else f"{m}m{s:02d}s" if m else f"{s}s"

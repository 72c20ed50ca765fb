"""`axon-ps simulate`: estimates for a cluster that is not rented yet."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from axon_ps.cli import options as o
from axon_ps.errors import ConfigurationError, InvalidRequest

if TYPE_CHECKING:
    from axon_ps_lab.simulate.estimate import Estimate
    from axon_ps_lab.simulate.scenario import Scenario


def simulate(
    scenario: Annotated[Path, typer.Argument(help="TOML file with model, job and cluster.", show_default=False)],
    servers: Annotated[
        str, typer.Option(help="Numbers of shard servers to compare, with commas between them.", show_default=False)
    ] = "",
    profile: Annotated[
        Path | None,
        typer.Option(help="Costs on your machines, from doctor --measure.", show_default="those of two EPYC cores"),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="SVG file to draw the comparison to.", show_default=False)] = None,
    as_json: o.Json = False,
) -> None:
    """Tell step time, bytes, memory, goodput and cost of a model on a cluster that a file describes."""
    try:
        from axon_ps_lab.simulate import estimate
        from axon_ps_lab.simulate import profile as profiles
        from axon_ps_lab.simulate.scenario import Scenario
    except ImportError as error:
        raise ConfigurationError(f"simulations need {error.name}; pip install axon-ps[simulate]") from error

    counts = _counts(servers)
    if plot is not None and not counts:
        raise ConfigurationError("--plot draws a comparison of numbers of servers; give some with --servers 1,2,4")
    read = Scenario.read(scenario)
    costs = profiles.DEFAULT if profile is None else profiles.Profile.read(profile)
    found = estimate.sweep(read, costs, counts or [read.servers.count])
    best = estimate.best(found)
    if plot is not None:
        from axon_ps_lab.simulate.plot import picture

        plot.write_text(picture(found, best), encoding="utf-8")
    if as_json:
        print(json.dumps([_as_dict(each, read) | {"best": each is best} for each in found], indent=2))
    elif counts:
        _print_comparison(found, best)
    else:
        _print_one(found[0], read)


def _counts(text: str) -> list[int]:
    try:
        counts = sorted({int(each) for each in text.split(",") if each.strip()})
    except ValueError:
        raise InvalidRequest(f"--servers is {text!r}; give numbers with commas between them, as 1,2,4") from None
    if counts and counts[0] < 1:
        raise InvalidRequest(f"--servers has {counts[0]}; there is at least 1")
    return counts


def _as_dict(each: Estimate, scenario: Scenario) -> dict[str, Any]:
    hours = each.hours(scenario.job.steps) if scenario.job.steps else None
    return {
        **dataclasses.asdict(each),
        "bottleneck": each.step.bottleneck,
        "useful_tokens_per_s": each.useful_tokens_per_s,
        "per_million_tokens": _finite(each.per_million_tokens if each.per_hour else None),
        "hours": _finite(hours),
        "cost": _finite(None if hours is None or not each.per_hour else hours * each.per_hour),
    }


def _finite(value: float | None) -> float | None:
    """Return None for infinity, as of a job that never ends: JSON has no infinity."""
    return value if value is not None and math.isfinite(value) else None


def _print_one(each: Estimate, scenario: Scenario) -> None:
    from axon_ps.sharding.memory import format_bytes

    step = each.step
    inner = "an inner step" if scenario.job.strategy == "local_steps" else "a step"
    rows = [
        (inner, f"{step.step_s:.3f} s"),
        ("  forward and backward", f"{step.compute_s:.3f} s"),
        ("  waits for parameters", f"{step.gather_wait_s:.3f} s"),
        ("  waits for gradients to leave", f"{step.push_wait_s:.3f} s"),
        ("  waits for the decision", f"{step.decision_wait_s:.3f} s"),
        ("bottleneck", step.bottleneck),
        ("a worker host receives", f"{format_bytes(step.received_bytes)} a step"),
        ("a worker host sends", f"{format_bytes(step.sent_bytes)} a step"),
        ("memory of a worker", f"{format_bytes(each.worker_bytes)}, without activations"),
        ("memory of a shard server", format_bytes(each.server_bytes)),
        ("a shard server is busy", f"{step.server_busy:.2f} cores"),
        ("goodput", f"{each.goodput.useful:.1%} of the time that workers are there"),
        (
            "throughput",
            f"{each.useful_tokens_per_s:,.0f} tokens/s ({each.goodput.throughput:.1%} of one without deaths)",
        ),
    ]
    steps = scenario.job.steps
    if each.per_hour:
        rows.append(("price", f"{each.per_hour:.2f} an hour, {each.per_million_tokens:.4g} a million tokens"))
    if steps:
        cost = f", {each.hours(steps) * each.per_hour:.2f}" if each.per_hour else ""
        rows.append((f"{steps:,} steps", f"{each.hours(steps):.1f} hours{cost}"))
    _print_table(("", ""), rows, header=False)


def _print_comparison(found: Sequence[Estimate], best: Estimate) -> None:
    from axon_ps.sharding.memory import format_bytes

    columns = ["servers", "step", "waits for parameters", "busy cores", "memory", "goodput", "tokens/s"]
    columns += ["bottleneck"]
    priced = all(each.per_hour for each in found)
    columns += ["a million tokens"] if priced else []
    rows = []
    for each in found:
        step = each.step
        row = [
            f"{'→ ' if each is best else ''}{each.servers}",
            f"{step.step_s:.3f} s",
            f"{step.gather_wait_s:.3f} s",
            f"{step.server_busy:.2f}",
            format_bytes(each.server_bytes),
            f"{each.goodput.useful:.1%}",
            f"{each.useful_tokens_per_s:,.0f}",
            step.bottleneck,
        ]
        rows.append((*row, f"{each.per_million_tokens:.4g}") if priced else tuple(row))
    _print_table(columns, rows)


def _print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, header: bool = True) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, show_header=header, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if header else "left")
    for row in rows:
        table.add_row(*row)
    Console(highlight=False).print(table)

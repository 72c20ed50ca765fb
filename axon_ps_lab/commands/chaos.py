"""The command `chaos run`: a campaign of faults, against a job of its own or a running one, and its report."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from axon_ps.cli import options as o
from axon_ps.cli.options import leave

if TYPE_CHECKING:
    from axon_ps.cli.settings import Settings
    from axon_ps_lab.chaos.campaign import Campaign
    from axon_ps_lab.chaos.runner import Emit, Result

app = o.Commands(help="Strike a job with a campaign of faults.")

NAME = "chaos"
"""The name of the report's files."""


@app.callback()
def _chaos() -> None:
    """Strike a job with a campaign of faults, and report what each of them cost."""


@app.command()
@partial(o.of_a_job, named=False)
def run(
    file: Annotated[Path, typer.Argument(help="The campaign, a TOML file; see docs/chaos.md.", show_default=False)],
    out: Annotated[Path, typer.Option(help="Directory for chaos.json and chaos.html.")] = Path("."),
    seed: Annotated[int | None, typer.Option(help="In place of the file's.", show_default=False)] = None,
    faults: Annotated[
        int | None, typer.Option(help="How many, in place of the file's number.", min=1, show_default=False)
    ] = None,
    *,
    settings: Settings,
) -> None:
    """Inject the faults of a campaign FILE into a job, and report their effects; exit code 1 if something was lost."""
    from axon_ps_lab.chaos.campaign import load
    from axon_ps_lab.chaos.page import page
    from axon_ps_lab.chaos.report import report

    campaign = load(file)
    campaign = dataclasses.replace(campaign, seed=campaign.seed if seed is None else seed)
    campaign = dataclasses.replace(campaign, faults=faults or campaign.faults)
    out.mkdir(parents=True, exist_ok=True)
    result = _result(campaign, settings, _emitter())
    content = report(result)
    (out / f"{NAME}.json").write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (out / f"{NAME}.html").write_text(page(content), encoding="utf-8")
    _show(content, out)
    if not result.is_good:
        leave(130 if result.interrupted else 1)


def _result(campaign: Campaign, settings: Settings, emit: Emit) -> Result:
    """Run a campaign; returns its outcome."""
    from axon_ps_lab.chaos.campaign import Job
    from axon_ps_lab.chaos.run import run_embedded, run_outside

    if isinstance(campaign.target, Job):
        return run_outside(campaign, settings.coordinator, settings.security(), settings.job, emit)
    return run_embedded(campaign, emit)


def _emitter() -> Emit:
    """Return a function that prints a line for every fault; on a terminal it redraws the same line."""
    if not sys.stderr.isatty():
        return lambda line: print(line, file=sys.stderr, flush=True)
    width = shutil.get_terminal_size().columns - 1
    return lambda line: print(f"\r\x1b[K{line[:width]}", end="", file=sys.stderr, flush=True)


def _show(content: Mapping[str, Any], out: Path) -> None:
    """Print the summary."""
    if sys.stderr.isatty():
        print(file=sys.stderr)
    for line in summary(content):
        print(line)
    print(f"the report is in {out / NAME}.json and {out / NAME}.html")


def summary(content: Mapping[str, Any]) -> list[str]:
    """Return a report as a few lines."""
    unknown = "not known"
    figures = {name: unknown if content[name] is None else content[name] for name in content}
    lines = [
        f"{content['faults']} of {content['planned']} faults (seed {content['seed']}) in {content['seconds']:.0f} s, "
        f"{content['steps']} steps",
        f"steps lost: {figures['steps_lost']}; samples lost: {figures['samples_lost']}, doubled: "
        f"{figures['samples_doubled']}; bits different: {figures['bits_different']}",
        f"next commit: median {figures['next_commit_median_s']} s, worst {figures['next_commit_worst_s']} s",
    ]
    grown = [m for m in content["memory"] if not m["is_flat"]]
    lines += [f"memory of {m['process']} grew to {m['growth']:.2f} of what it was" for m in grown]
    lines += [f"WRONG: {problem}" for problem in content["problems"]]
    return [*lines, *([f"it ended early: {content['stopped']}"] if content["stopped"] else [])]

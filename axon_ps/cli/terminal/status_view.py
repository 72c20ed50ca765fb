"""The status of a job as text and tables."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

from rich.console import Group
from rich.table import Table
from rich.text import Text

from axon_ps.cli.terminal.feed import JobView, is_finished
from axon_ps.cli.terminal.members import measures_of, of_the_job, works_of
from axon_ps.cli.terminal.quantities import duration, size, work_line
from axon_ps.coordinator.core.events import CheckpointStatus, Status
from axon_ps.types import Role

_OLD_S: Final = 10.0
"""A report older than this is shown with its age."""


def _state(reply: Status) -> str:
    """The state of the job, for its headline."""
    count = len(reply.membership.finished)
    if is_finished(reply):
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
        fields.append(f"reported {duration(age_s)} ago")
    elif steps and rate and step < steps:
        fields.append(f"{duration((steps - step) / rate)} left")
    return ", ".join(fields)


def checkpoint_lines(known: CheckpointStatus) -> list[str]:
    """What is known of the job's checkpoints, as text."""
    lines = []
    if known.uri:
        took = f", written in {known.took_s:.3g} s" if known.took_s else ""
        lines.append(
            f"newest checkpoint: {known.uri}, version {known.version}, {known.bytes:,} bytes, "
            f"{duration(known.age_s)} ago{took}"
        )
    if known.activity:
        lines.append(f"checkpoints: {known.activity}")
    if known.failure:
        lines.append(f"newest failure of a checkpoint, {duration(known.failure_age_s)} ago: {known.failure}")
    return lines


def rendered(view: JobView, address: str) -> Group:
    """The status, for a terminal of any width."""
    reply, table = view.status, _members_table(view.status)
    head = Text.assemble("job ", (reply.job, "bold"), f" at {address}: {_state(reply)}")
    lines = [head] if not view.error else [head, _silence(view)]
    if view.progress is not None:
        lines.append(Text(progress_line(view.progress, time.time())))
    lines += map(Text, _position_lines(reply))
    last = [*checkpoint_lines(reply.checkpoints), *map(work_line, works_of(reply))]
    last += [] if is_finished(reply) else [f"pending: {line}" for line in reply.pending]
    last += [f"{name} {value:g}" for name, value in sorted(of_the_job(reply.counters).items())]
    return Group(*lines, *([_models_table(reply)] if len(reply.models) > 1 else []), table, *map(Text, last))


def _silence(view: JobView) -> Text:
    return Text(f"the coordinator has not answered for {duration(view.silent_s)}, trying again: {view.error}", "red")


def _position_lines(reply: Status) -> Iterator[str]:
    held = f"{reply.parameters:,} parameters" if reply.registered else "no layout yet"
    uploaded = "" if reply.initialized or not reply.registered else " (not uploaded yet)"
    generation, up = reply.membership.generation, duration(reply.uptime_s)
    yield f"version {reply.version}, step {reply.step}, generation {generation}, {held}{uploaded}, up {up}"
    if reply.registered:
        lacking = sum(model.lacking for model in reply.models)
        slices = sum(model.slices for model in reply.models)
        short = f"; {lacking} of {slices} slices have too few copies" if lacking else ""
        yield f"replication {reply.replication}{short}"


def _models_table(reply: Status) -> Table:
    models = Table("model", "version", "step", "parameters", "")
    for model in reply.models:
        state = "" if model.initialized else "not uploaded yet"
        models.add_row(model.name, str(model.version), str(model.step), f"{model.parameters:,}", state)
    return models


def _members_table(reply: Status) -> Table:
    membership = reply.membership
    measured = {role: measures_of(reply.counters, role) for role in Role}
    table = Table("role", "rank", "node", "address", "replica", "memory", "incarnation")
    for m in (*membership.shards, *membership.workers, *membership.finished):
        replica = str(m.replica) if m.replica >= 0 else "finished" if m in membership.finished else ""
        if m in membership.shards and m.rank in reply.draining:
            replica = "draining"
        resident = measured[m.role].get(m.rank, {}).get("memory_bytes", 0.0)
        memory = size(resident) if resident else ""
        table.add_row(m.role.value, str(m.rank), m.node, m.address, replica, memory, m.incarnation[:8])
    return table

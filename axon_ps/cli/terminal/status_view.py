"""The status of a job as text and tables."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Final

from rich.console import Group
from rich.table import Table
from rich.text import Text

from axon_ps.cli.terminal.members import measures_of, of_the_job, works_of
from axon_ps.cli.terminal.quantities import duration, size, work_line
from axon_ps.types import Role
from axon_ps.wire.events import CheckpointStatus, Status
from axon_ps.wire.report import Report

_OLD_S: Final = 10.0
"""A report older than this is shown with its age."""

_WIDE: Final = 70
_DAY_S: Final = 86400.0


def progress_line(report: Report, now: float, *, steps_per_s: float = 0.0, over: bool = False) -> str:
    """Return the training script's progress by its last report, as text.

    Args:
        report: the report.
        now: the time, as seconds since 1970.
        steps_per_s: the job's rate; 0 = unknown.
        over: whether the job has finished.
    """
    step, steps = report.step, report.steps
    fields = [f"step {step}" + (f" of {steps} ({100 * step // max(1, steps)} %)" if steps else "")]
    if report.loss is not None:
        fields.append(f"loss {report.loss:.4g}")
    if steps_per_s and not over:
        fields.append(f"{steps_per_s:.3g} steps/s")
    for name, value in report.values.items():
        number = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
        fields.append(f"{number} {name.removesuffix('_per_s')}/s" if name.endswith("_per_s") else f"{name} {number}")
    if report.at and now - report.at >= _OLD_S:
        fields.append(f"reported {duration(now - report.at)} ago")
    if not over and (left_s := report.left_s(now)) is not None:
        ends = time.strftime("%H:%M" if left_s < _DAY_S else "%a %d %b, %H:%M", time.localtime(now + left_s))
        fields.append(f"{duration(left_s)} left, until {ends}")
    return ", ".join(fields)


def checkpoint_lines(known: CheckpointStatus) -> list[str]:
    """Return the state of the job's checkpoints, as text."""
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


def rendered(reply: Status, address: str, note: str = "", *, width: int = _WIDE) -> Group:
    """Render the status, for a terminal of any width.

    Args:
        reply: the status.
        address: address of the coordinator.
        note: the reason why nothing newer is known; empty = none.
        width: width of the terminal; a narrow one has fewer columns.
    """
    table, over = _members_table(reply, width), reply.membership.is_over
    lines = [Text.assemble("job ", (reply.job, "bold"), f" at {address}: {reply.headline}")]
    if note:
        lines.append(Text(note, "red"))
    if reply.progress is not None:
        line = progress_line(reply.progress, time.time(), steps_per_s=reply.steps_per_s, over=over)
        lines.append(Text(line))
    lines += map(Text, _position_lines(reply))
    last = [*checkpoint_lines(reply.checkpoints), *map(work_line, works_of(reply))]
    last += [] if reply.membership.is_over else [f"pending: {line}" for line in reply.pending]
    last += [f"{name} {value:g}" for name, value in sorted(of_the_job(reply.counters).items())]
    return Group(*lines, *([_models_table(reply)] if len(reply.models) > 1 else []), table, *map(Text, last))


def _position_lines(reply: Status) -> Iterator[str]:
    held = f"{reply.parameters:,} parameters" if reply.registered else "no layout yet"
    uploaded = "" if reply.initialized or not reply.registered else " (not uploaded yet)"
    generation, up = reply.membership.generation, duration(reply.uptime_s)
    yield f"version {reply.version}, generation {generation}, {held}{uploaded}, up {up}"
    if reply.registered:
        yield f"replication {reply.replication}"


def _models_table(reply: Status) -> Table:
    models = Table("model", "version", "steps/s", "parameters", "")
    for model in reply.models:
        state = "" if model.initialized else "not uploaded yet"
        rate = f"{model.steps_per_s:.3g}" if model.steps_per_s else ""
        models.add_row(model.name, str(model.version), rate, f"{model.parameters:,}", state)
    return models


def _members_table(reply: Status, width: int) -> Table:
    membership = reply.membership
    measured = {role: measures_of(reply.counters, role) for role in Role}
    columns = ["role", "rank", "node", "address", "replica", "memory", "incarnation"]
    columns = [name for name in columns if width >= _WIDE or name not in ("address", "incarnation")]
    table = Table(*columns, padding=(0, 1) if width >= _WIDE else (0, 0))
    for m in (*membership.shards, *membership.workers, *membership.finished):
        replica = str(m.replica) if m.replica >= 0 else "finished" if m in membership.finished else ""
        if m in membership.workers and m.replica < 0:
            replica = "in none"
        if m in membership.shards and m.rank in reply.draining:
            replica = "draining"
        if m.incarnation in reply.awaited:
            replica = "not back yet"
        resident = measured[m.role].get(m.rank, {}).get("memory_bytes", 0.0)
        memory = size(resident) if resident else ""
        row = {"role": m.role.value, "rank": str(m.rank), "node": m.node, "address": m.address}
        row |= {"replica": replica, "memory": memory, "incarnation": m.incarnation[:8]}
        table.add_row(*(row[name] for name in columns))
    return table

"""The lines of `axon-ps top`: as many as there is space for, the most important first."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from axon_ps.cli.terminal.quantities import duration, size, sparkline
from axon_ps.cli.terminal.watched_job import Row, WatchedJob
from axon_ps.types import Role
from axon_ps.wire.v1 import status_pb2, watch_pb2

_COLUMNS: Final = {
    "member": 8, "node": 4, "sent/s": 8, "received/s": 10, "memory": 8, "cores": 5, "slices; lag, last of 100": 8
}  # fmt: skip
"""The table's columns, and the least width of each."""

KEYS: Final = "q quit · p pause · s sort"
_HEAD, _TABLE_HEAD, _FOOT, _FEWEST_EVENTS = 5, 2, 1, 3
_STYLES: Final = {
    "lost": "red",
    "aborted": "red",
    "checkpoint failed": "red",
    "corrupt": "red",
    "cut": "red",
    "joined": "green",
    "copied": "green",
}


def rendered(
    state: WatchedJob, address: str, width: int, height: int, *, sort: str = "rank", note: str = "", keys: bool = True
) -> RenderableType:
    """Render the job, for a terminal of this size.

    Args:
        state: its known state.
        address: address of the coordinator.
        width, height: size of the terminal.
        sort: the order of members; see `WatchedJob.members`.
        note: a further line, such as the reason why nothing new comes.
        keys: whether the keys are shown.
    """
    if state.status is None:
        return Text(note or "waiting for the coordinator's first message", "yellow")
    members = state.members(sort)
    max_rows = max(1, height - _HEAD - _TABLE_HEAD - (_FOOT if keys else 0) - _FEWEST_EVENTS)
    fitting = members if len(members) <= max_rows else members[: max_rows - 1]
    lines: list[RenderableType] = [*_head(state, state.status, address, width, note), _table(state, fitting)]
    if len(fitting) < len(members):
        lines.append(Text(f"  and {len(members) - len(fitting)} more", "dim"))
    free = height - _HEAD - _TABLE_HEAD - len(fitting) - (len(fitting) < len(members)) - (_FOOT if keys else 0)
    lines += _events(state, max(0, free))
    if keys:
        lines.append(Text(f"{KEYS} ({sort})", "dim", no_wrap=True))
    return Group(*lines)


def _head(state: WatchedJob, status: status_pb2.StatusReply, address: str, width: int, note: str) -> list[Text]:
    rate = f", {status.steps_per_s:.3g} steps/s" if status.steps_per_s else ""
    counts = f"version {status.version:g}, generation {state.membership.generation}, up {duration(status.uptime_s)}"
    last = state.steps[-1] if state.steps else None
    points = max(8, width - 46)
    waits = "; ".join(status.pending) if not state.finished else ""
    lines = [
        Text.assemble("job ", (status.job, "bold"), f" at {address}: {status.headline}"),
        Text(counts + rate + _position(state)),
        _line("step", _steps_text(last), sparkline([s.duration_s for s in state.steps][-points:])),
        _line(
            "loss", f"{loss[-1]:.4g}" if (loss := state.curve("loss")) else "not reported", sparkline(loss[-points:])
        ),
        Text(note, "yellow") if note else Text(f"waits for: {waits}" if waits else "", "dim"),
    ]
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
    return lines


def _position(state: WatchedJob) -> str:
    """Return the progress of the training script, by its own report, and the time that the rest will take."""
    report = None if state.status is None else state.as_status().progress
    if report is None or not report.steps:
        return ""
    left_s = None if state.finished else report.left_s(time.time())
    return f", step {report.step} of {report.steps}" + (f", {duration(left_s)} left" if left_s else "")


def _steps_text(last: watch_pb2.StepRecord | None) -> str:
    if last is None:
        return "none yet"
    waited = f", {1000 * last.waiting_s:.0f} for worker {last.waited_for}" if last.waited_for >= 0 else ""
    return f"{1000 * last.duration_s:.0f} ms{waited}" if last.outcome == "commit" else last.outcome


def _line(name: str, value: str, drawn: str) -> Text:
    return Text.assemble((f"{name:<5}", "bold"), f"{value:<28} ", (drawn, "cyan"))


def _table(state: WatchedJob, rows: Sequence[Row]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold", expand=False)
    for name, least in _COLUMNS.items():
        table.add_column(name, no_wrap=True, overflow="ellipsis", min_width=least)
    for role, member, load in rows:
        table.add_row(
            f"{role.value} {member.rank}",
            member.node[:16],
            _size(load.sent_bytes_per_s),
            _size(load.received_bytes_per_s),
            _size(load.memory_bytes),
            f"{load.cpu:.2f}" if load.cpu else "",
            _slices(load, draining=member.rank in _draining(state)) if role is Role.SHARD else _lag(load),
        )
    return table


def _draining(state: WatchedJob) -> Sequence[int]:
    return () if state.status is None else state.status.draining


def _slices(load: watch_pb2.MemberLoad, *, draining: bool) -> str:
    counts = (("primary", load.primary_slices), ("backup", load.backup_slices), ("copying", load.copying_slices))
    return ", ".join([f"{count} {name}" for name, count in counts if count] + ["draining"] * draining)


def _lag(load: watch_pb2.MemberLoad) -> str:
    return f"{1000 * load.lag_s:.0f} ms, {load.last_in}" + (f", cost {load.cost_s:.2g} s" if load.cost_s else "")


def _size(count: float) -> str:
    return size(count) if count else ""


def _events(state: WatchedJob, rows: int) -> list[Text]:
    events = list(state.events)[-rows:] if rows else []
    lines = [
        Text.assemble((f"{duration(max(0.0, state.at_s - e.at_s)):>7} ago  ", "dim"), (e.text, _STYLES.get(e.kind, "")))
        for e in events
    ]
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
    return lines

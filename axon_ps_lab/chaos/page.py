"""A campaign's report as a page: one file of HTML and SVG, without scripts, dark and light. It is pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Final

_WIDTH: Final = 1160
_LEFT, _RIGHT = 118, 12
_ROW: Final = 24
_PLOT: Final = 110

_STYLE: Final = """
:root { color-scheme: light dark; --back: #f5f6f8; --card: #fff; --ink: #1b2230; --quiet: #5d6675; --line: #e3e6ec;
  --coordinator: #b45309; --shard: #2f6fde; --worker: #0f8a6d; --bad: #c2362f; --good: #0f8a6d; }
@media (prefers-color-scheme: dark) { :root { --back: #0f131a; --card: #171d27; --ink: #e6eaf2; --quiet: #98a3b5;
  --line: #283142; --coordinator: #f2a541; --shard: #6ea2ff; --worker: #3ecfa9; --bad: #ff7b72; --good: #3ecfa9; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink);
  font: 14px/1.45 system-ui, "Liberation Sans", sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 18px 20px 40px; }
h1 { font-size: 19px; margin: 0 0 4px; } h2 { font-size: 14px; margin: 0 0 10px; }
p { margin: 0 0 12px; color: var(--quiet); max-width: 90ch; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 14px 16px;
  margin-top: 14px; overflow-x: auto; }
dl { display: flex; flex-wrap: wrap; gap: 8px 34px; margin: 14px 0 0; } dt { font-size: 11px; color: var(--quiet); }
dd { margin: 0; font-size: 20px; font-weight: 650; font-variant-numeric: tabular-nums; } dd.bad { color: var(--bad); }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px; }
th, td { padding: 3px 12px 3px 0; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th { color: var(--quiet); font-weight: 500; } td.text, th.text { text-align: left; } td.wide { white-space: normal; }
svg { display: block; } svg text { fill: var(--quiet); font-size: 11px; } .grid { stroke: var(--line); }
.coordinator { fill: var(--coordinator); } .shard { fill: var(--shard); } .worker { fill: var(--worker); }
.area { fill: var(--shard); opacity: .35; } .curve { fill: none; stroke-width: 1.5; }
.curve.coordinator { stroke: var(--coordinator); } .curve.shard { stroke: var(--shard); }
.curve.worker { stroke: var(--worker); } .mark { opacity: .8; } .mark:hover { opacity: 1; stroke: var(--ink); }
.key { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin: 0 5px 0 14px; }
summary { cursor: pointer; color: var(--quiet); }
"""

_ROLES: Final = ("coordinator", "shard", "worker")
_COLUMNS: Final = (
    ("kind", "kind"), ("role", "role"), ("faults", "faults"), ("detected", "told of"),
    ("detection_median_s", "detection, s"), ("next_commit_median_s", "next commit, s"),
    ("next_commit_worst_s", "worst, s"), ("longest_worst_s", "longest without, s"),
    ("complete_median_s", "complete again, s"), ("aborted", "attempts aborted"),
    ("steps_lost", "steps lost"),
)  # fmt: skip
_EACH: Final = (
    ("number", "#"), ("at_s", "at, s"), ("fault", "fault"), ("target", "process"), ("detection_s", "detection, s"),
    ("sign", "told"), ("next_commit_s", "next commit, s"), ("complete_s", "complete, s"), ("steps_lost", "steps lost"),
    ("note", "note"),
)  # fmt: skip
_TEXT: Final = ("kind", "role", "fault", "target", "sign", "note")

Report = Mapping[str, Any]


def page(report: Report) -> str:
    """Return the page of a report."""
    title = f"Chaos: {report['faults']} faults, seed {report['seed']}"
    sections = (
        f"<h1>{escape(title)}</h1>",
        f"<p>{escape(_lead(report))}</p>",
        _facts(report),
        _card("When what happened", _legend() + _timeline(report)),
        _card("From each fault to the next committed step, seconds", _waits(report)),
        _card("Committed steps a second", _commits(report)),
        _memory(report),
        _card("By kind", _table(_COLUMNS, report["by_kind"])),
        f"<div class=card><details><summary>Every fault</summary>{_table(_EACH, report['timeline'])}</details></div>",
    )
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    return f'<!doctype html>\n<html lang="en"><head>{head}<style>{_STYLE}</style></head>\n<body><main>\n' + (
        "\n".join(sections) + "\n</main></body></html>\n"
    )


def _lead(report: Report) -> str:
    job = report["job"]
    if not job["embedded"]:
        return "A running job was struck; its samples and bits are not known to the campaign."
    return (
        f"One job of {job['shards']} shard servers (replication {job['replication']}), {job['workers']} workers and "
        f"{job['standbys']} standby, and a coordinator with its state on disk; lease {job['lease_s']:g} s, a pause of "
        f"{job['pause_s']:g} s between steps. Each fault waits until the job has all its members and copies again. The "
        "same seed gives the same faults."
    )


def _facts(report: Report) -> str:
    bad = ("steps_lost", "samples_lost", "samples_doubled", "bits_different")
    wanted = {
        "faults": "faults", "seconds": "seconds", "steps": "steps", "steps_lost": "steps lost",
        "samples_lost": "samples lost", "samples_doubled": "samples doubled", "bits_different": "bits different",
        "next_commit_median_s": "next commit, median s", "next_commit_worst_s": "worst, s",
    }  # fmt: skip
    found = [
        f"<div><dt>{name}</dt><dd{' class=bad' if key in bad and report[key] else ''}>{_number(report[key])}</dd></div>"
        for key, name in wanted.items()
    ]
    wrong = [*report["problems"], *([f"It ended early: {report['stopped']}"] if report["stopped"] else [])]
    return f"<dl>{''.join(found)}</dl>" + "".join(f"<p style='color:var(--bad)'>{escape(line)}</p>" for line in wrong)


def _number(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3f}".rstrip("0").rstrip(".")


def _card(title: str, content: str) -> str:
    return f"<div class=card><h2>{escape(title)}</h2>{content}</div>"


def _legend() -> str:
    keys = "".join(f'<span class=key style="background:var(--{role})"></span>{role}' for role in _ROLES)
    return f"<p>Struck: {keys}. A bar is as long as its fault lasted; point at it for more.</p>"


# ---------------------------------------------------------------------- pictures


def _x(seconds: float, report: Report) -> float:
    return _LEFT + (_WIDTH - _LEFT - _RIGHT) * seconds / float(max(1.0, report["seconds"]))


def _svg(height: int, content: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" role="img">{"".join(content)}</svg>'
    )


def _axis(report: Report, height: int) -> list[str]:
    """Draw the times below a picture."""
    step = _round_step(report["seconds"] / 8)
    ticks = []
    for number in range(int(report["seconds"] / step) + 1):
        x = _x(number * step, report)
        label = f"{number * step / 60:g} min" if step >= 60 else f"{number * step:g} s"
        ticks.append(f'<line class=grid x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height}"/>')
        ticks.append(f'<text x="{x:.1f}" y="{height + 14}" text-anchor="middle">{label}</text>')
    return ticks


def _round_step(seconds: float) -> float:
    steps = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1200, 3600)
    return next((step for step in steps if step >= seconds), 7200)


def _timeline(report: Report) -> str:
    kinds = sorted({entry["kind"] for entry in report["timeline"]})
    height = _ROW * len(kinds)
    content = _axis(report, height)
    for row, kind in enumerate(kinds):
        top = row * _ROW
        content.append(
            f'<text x="{_LEFT - 8}" y="{top + 16}" text-anchor="end">{escape(kind.replace("_", " "))}</text>'
        )
        content.append(f'<line class=grid x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{top + _ROW}" y2="{top + _ROW}"/>')
    for entry in report["timeline"]:
        x = _x(entry["at_s"], report)
        width = max(1.6, _x(entry["at_s"] + entry["lasted_s"], report) - x)
        top = kinds.index(entry["kind"]) * _ROW + 3 + 6 * _ROLES.index(entry["role"])
        content.append(
            f'<rect class="mark {entry["role"]}" x="{x:.1f}" y="{top}" width="{width:.1f}" height="6">'
            f"<title>{escape(_hint(entry))}</title></rect>"
        )
    return _svg(height + 20, content)


def _hint(entry: Mapping[str, Any]) -> str:
    lines = [f"{entry['number']}: {entry['fault']}", f"at {entry['at_s']:.1f} s, {entry['target']}"]
    if entry["detection_s"] is not None:
        lines.append(f"told of after {entry['detection_s']:.3f} s: {entry['sign']}")
    if entry["next_commit_s"] is not None:
        lines.append(f"next commit after {entry['next_commit_s']:.3f} s")
    return "\n".join([*lines, *([entry["note"]] if entry["note"] else [])])


def _waits(report: Report) -> str:
    """Draw a point for each fault, the time to the next commit on a logarithmic scale."""
    low, high = -2.0, 2.0
    content = _axis(report, _PLOT + 40)
    for decade in range(int(low), int(high) + 1):
        y = (_PLOT + 40) * (high - decade) / (high - low)
        content.append(f'<line class=grid x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        content.append(f'<text x="{_LEFT - 8}" y="{max(y + 4, 10):.1f}" text-anchor="end">{10.0**decade:g} s</text>')
    for entry in report["timeline"]:
        if (seconds := entry["next_commit_s"]) is not None:
            power = min(high, max(low, math.log10(max(seconds, 1e-3))))
            y = (_PLOT + 40) * (high - power) / (high - low)
            content.append(
                f'<circle class="mark {entry["role"]}" cx="{_x(entry["at_s"], report):.1f}" cy="{y:.1f}" r="2">'
                f"<title>{escape(_hint(entry))}</title></circle>"
            )
    return _svg(_PLOT + 60, content)


def _commits(report: Report) -> str:
    values, bin_s = report["commits_per_s"]["values"], report["commits_per_s"]["bin_s"]
    top = max([*values, 1.0])
    content = _axis(report, _PLOT)
    content.append(f'<text x="{_LEFT - 8}" y="12" text-anchor="end">{top:g}</text>')
    content.append(f'<text x="{_LEFT - 8}" y="{_PLOT}" text-anchor="end">0</text>')
    points = [f"{_x(0, report):.1f},{_PLOT}"]
    for number, value in enumerate(values):
        points.append(f"{_x(number * bin_s, report):.1f},{_PLOT - (_PLOT - 6) * value / top:.1f}")
    points.append(f"{_x(min(report['seconds'], len(values) * bin_s), report):.1f},{_PLOT}")
    content.append(f'<polygon class=area points="{" ".join(points)}"/>')
    return _svg(_PLOT + 20, content)


def _memory(report: Report) -> str:
    """Draw the resident bytes of processes that lived long, over the faults."""
    series = report["memory_mib"]
    if not series:
        return ""
    top = max(mib for some in series.values() for _, mib in some)
    content = [f'<text x="{_LEFT - 8}" y="12" text-anchor="end">{top:.0f} MiB</text>']
    content.append(f'<line class=grid x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{_PLOT}" y2="{_PLOT}"/>')
    for process, some in series.items():
        role = next((role for role in _ROLES if process.startswith(role)), "worker")
        spots = [
            f"{_LEFT + (_WIDTH - _LEFT - _RIGHT) * number / max(1, report['faults']):.1f},"
            f"{_PLOT - (_PLOT - 6) * mib / top:.1f}"
            for number, mib in some
        ]
        content.append(
            f'<polyline class="curve {role}" points="{" ".join(spots)}"><title>{escape(process)}</title></polyline>'
        )
    rows = [
        {
            "process": m["process"], "faults": m["faults"], "second": round(m["early_bytes"] / 2**20, 1),
            "last": round(m["late_bytes"] / 2**20, 1), "growth": m["growth"],
        }
        for m in report["memory"]
    ]  # fmt: skip
    columns = (
        ("process", "process"), ("faults", "faults lived through"), ("second", "second quarter, MiB"),
        ("last", "last quarter, MiB"), ("growth", "ratio"),
    )  # fmt: skip
    return _card("Memory of the processes that lived long", _svg(_PLOT + 6, content) + _table(columns, rows))


def _table(columns: Sequence[tuple[str, str]], rows: Sequence[Mapping[str, Any]]) -> str:
    head = "".join(f"<th{_class(key)}>{escape(name)}</th>" for key, name in columns)
    body = "".join(
        "<tr>" + "".join(f"<td{_class(key)}>{_field(row[key])}</td>" for key, _ in columns) + "</tr>\n" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table>"


def _class(key: str) -> str:
    return " class=text" if key in (*_TEXT, "process") else ""


def _field(value: Any) -> str:
    return escape(value) if isinstance(value, str) else _number(value)

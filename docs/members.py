"""Draws docs/members.svg from what benchmarks/results/members.json holds: how a job's control plane grows.

python docs/members.py          writes it
python docs/members.py --check  fails if it is not what it would write
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROWS = Path(__file__).parents[1] / "benchmarks" / "results" / "members.json"
PICTURE = Path(__file__).with_suffix(".svg")

CHARTS = (
    ("all have joined", "join_s", 1.0),
    ("a barrier of all", "barrier_s", 1.0),
    ("a decision, of votes at once", "decision_ms", 1e-3),
    ("a death is known", "death_s", 1.0),
)
"""What each chart shows: its title, the column, and seconds a unit of that."""

WIDTH, HEIGHT, LEFT, TOP, GAP_X, GAP_Y = 360, 210, 60, 84, 70, 72
MEMBERS = (50.0, 20_000.0)
SECONDS = (0.002, 20.0)
SERIES = (("a session each", "a"), ("hosts of 40, a session a host", "h"))


def place(members: float, seconds: float) -> tuple[float, float]:
    """Where a point is in its chart: both axes are logarithmic."""
    x, y = (
        math.log(value / low) / math.log(high / low) for value, (low, high) in ((members, MEMBERS), (seconds, SECONDS))
    )
    return round(WIDTH * x, 1), round(HEIGHT * (1 - y), 1)


def chart(title: str, rows: Sequence[Mapping[str, float]], column: str, unit_s: float) -> Iterator[str]:
    """One chart, at the origin."""
    yield f'<text x="0" y="-10" class="h">{title}</text>'
    for seconds in (0.01, 0.1, 1.0, 10.0):
        _, y = place(MEMBERS[0], seconds)
        yield f'<path d="M0 {y}H{WIDTH}" class="g"/>'
        yield f'<text x="-8" y="{y + 4}" text-anchor="end" class="s">{seconds:g} s</text>'
    for members in (100, 1000, 10_000):
        x, _ = place(members, SECONDS[0])
        yield f'<path d="M{x} 0V{HEIGHT}" class="g"/>'
        yield f'<text x="{x}" y="{HEIGHT + 16}" text-anchor="middle" class="s">{members:,}</text>'
    for (_, css), on_hosts in zip(SERIES, (False, True), strict=True):
        points = [place(row["members"], row[column] * unit_s) for row in rows if bool(row["host_sessions"]) is on_hosts]
        yield f'<path d="M{" L".join(f"{x} {y}" for x, y in points)}" class="{css}"/>'
        yield "".join(f'<circle cx="{x}" cy="{y}" r="3" class="{css}p"/>' for x, y in points)
    start = place(200, 0.02)
    end = place(2000, 0.2)
    yield f'<path d="M{start[0]} {start[1]}L{end[0]} {end[1]}" class="l"/>'
    yield f'<text x="{end[0] + 6}" y="{end[1] + 4}" class="s">linear</text>'


def draw(rows: Sequence[Mapping[str, float]]) -> str:
    """The picture."""
    width, height = 2 * (WIDTH + GAP_X) + LEFT, TOP + 2 * (HEIGHT + GAP_Y)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        'aria-label="Seconds by members of one job; benchmarks/results/members.json has the numbers">',
        "<style>text{font:13px sans-serif;fill:#1c2733}.s{font-size:11px;fill:#5a6a7a}.h{font:600 13px sans-serif}"
        ".w{fill:#fff}.g{stroke:#e2e8ee}.l{stroke:#8a97a5;stroke-dasharray:4 3}path{fill:none}"
        ".a{stroke:#b36200;stroke-width:2}.h{stroke-width:2}path.h{stroke:#2f7ed8}.ap{fill:#b36200}.hp{fill:#2f7ed8}"
        "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.s{fill:#9aa7b4}.w{fill:#0d1117}.g{stroke:#26303b}"
        "path.h{stroke:#4c9bf0}.hp{fill:#4c9bf0}.a{stroke:#f0a04b}.ap{fill:#f0a04b}}</style>",
        f'<rect width="{width}" height="{height}" rx="6" class="w"/>',
        '<text x="20" y="26" class="h">Seconds by members of one job (both axes logarithmic)</text>',
    ]
    for i, (name, css) in enumerate(SERIES):
        x = 20 + 150 * i
        out.append(f'<path d="M{x} 42h22" class="{css}"/><text x="{x + 28}" y="46" class="s">{name}</text>')
    for i, (title, column, unit_s) in enumerate(CHARTS):
        x, y = LEFT + (i % 2) * (WIDTH + GAP_X), TOP + (i // 2) * (HEIGHT + GAP_Y)
        out += [f'<g transform="translate({x} {y})">', *chart(title, rows, column, unit_s), "</g>"]
    return "\n".join([*out, "</svg>", ""])


def main() -> int:
    """Write or check; the exit code."""
    made = draw(json.loads(ROWS.read_text(encoding="utf-8"))["rows"])
    if "--check" in sys.argv:
        return PICTURE.read_text(encoding="utf-8") != made
    PICTURE.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Throughput and price by the number of shard servers, as an SVG picture of two charts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from axon_ps_lab.simulate.estimate import Estimate

_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 380, 220, 70, 70, 100

_STYLE = (
    "text{font:13px sans-serif;fill:#1c2733}.s{font-size:11px;fill:#5a6a7a}.h{font:600 13px sans-serif}.w{fill:#fff}"
    ".g{stroke:#e2e8ee}path{fill:none}.a{stroke:#2f7ed8;stroke-width:2}.d{fill:#2f7ed8}.b{fill:#b36200}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.s{fill:#9aa7b4}.w{fill:#0d1117}.g{stroke:#26303b}"
    ".a{stroke:#4c9bf0}.d{fill:#4c9bf0}.b{fill:#f0a04b}}"
)


def picture(estimates: Sequence[Estimate], best: Estimate) -> str:
    """Draw the picture; the estimate to rent has another colour.

    Args:
        estimates: the estimates, by rising number of servers.
        best: the estimate to rent.
    """
    charts: list[tuple[str, Callable[[Estimate], float]]] = [
        ("tokens a second that count", lambda each: each.useful_tokens_per_s),
        ("seconds of a step", lambda each: each.step.step_s),
    ]
    if all(each.per_hour for each in estimates):
        charts[1] = ("price of a million tokens", lambda each: each.per_million_tokens)
    width, height = _LEFT + 2 * (_WIDTH + _GAP), _TOP + _HEIGHT + 60
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        'aria-label="Throughput and price by the number of shard servers">',
        f"<style>{_STYLE}</style>",
        f'<rect width="{width}" height="{height}" rx="6" class="w"/>',
        '<text x="20" y="28" class="h">By the number of shard servers</text>',
    ]
    for number, (title, value) in enumerate(charts):
        out.append(f'<g transform="translate({_LEFT + number * (_WIDTH + _GAP)} {_TOP})">')
        out += [*_chart(title, [(each.servers, value(each), each is best) for each in estimates]), "</g>"]
    return "\n".join([*out, "</svg>", ""])


def _chart(title: str, points: Sequence[tuple[int, float, bool]]) -> Iterator[str]:
    """Draw a chart, without infinite values, such as the price of a job that never ends."""
    most = max((value for _, value, _ in points if math.isfinite(value)), default=0.0) or 1.0
    last = max(len(points) - 1, 1)
    yield f'<text x="0" y="-12">{title}</text>'
    for quarter in range(5):
        y = _HEIGHT * (1 - quarter / 5)
        yield f'<path d="M0 {y:g}H{_WIDTH}" class="g"/>'
        yield f'<text x="-8" y="{y + 4:g}" text-anchor="end" class="s">{most * quarter / 4:.3g}</text>'
    placed = [
        (_WIDTH * i / last, _HEIGHT * (1 - 0.8 * value / most), servers, is_best)
        for i, (servers, value, is_best) in enumerate(points)
        if math.isfinite(value)
    ]
    if placed:
        yield f'<path d="M{" L".join(f"{x:.1f} {y:.1f}" for x, y, _, _ in placed)}" class="a"/>'
    for x, y, servers, is_best in placed:
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{6 if is_best else 4}" class="{"b" if is_best else "d"}"/>'
        yield f'<text x="{x:.1f}" y="{_HEIGHT + 20}" text-anchor="middle" class="s">{servers}</text>'

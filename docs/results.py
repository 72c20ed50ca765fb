"""Draws docs/results.svg and writes the table of docs/results.md, from what benchmarks/results/ holds.

python docs/results.py          # write both
python docs/results.py --check  # exit 1 if they are not what this script makes
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PICTURE = Path(__file__).with_suffix(".svg")
PAGE = Path(__file__).with_suffix(".md")
BEGIN, END = "<!-- table -->", "<!-- end of the table -->"

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Bar:
    """Our time, as a part of a peer's in the same run.

    Attributes:
        job: what was timed.
        where: on what.
        peer: whose time is 1.
        file: of benchmarks/results/, without its ending.
        ours: picks our row.
        peers: picks the peer's row.
        seconds: the column.
    """

    job: str
    where: str
    peer: str
    file: str
    ours: Callable[[Row], bool]
    peers: Callable[[Row], bool]
    seconds: str = "step_s"

    def times(self) -> tuple[float, float]:
        """Our seconds and the peer's."""
        rows = json.loads((ROOT / f"benchmarks/results/{self.file}.json").read_text(encoding="utf-8"))["rows"]
        (ours,) = [row[self.seconds] for row in rows if self.ours(row)]
        (peers,) = [row[self.seconds] for row in rows if self.peers(row)]
        return ours, peers


def where(**wanted: object) -> Callable[[Row], bool]:
    """Whether a row has these values."""
    return lambda row: all(row[key] == value for key, value in wanted.items())


def step(job: str, hosts: str, file: str, side: str = "axon", **wanted: object) -> Bar:
    """A training step beside FSDP2's over gloo."""
    ours, peers = where(side=side, **wanted), where(side="fsdp2", **wanted)
    return Bar(job=job, where=hosts, peer="FSDP2, gloo", file=file, ours=ours, peers=peers)


def collective(operation: str) -> Bar:
    """A collective of 64 MiB beside gloo's."""
    ours, peers = (where(servers="dedicated", operation=operation, side=side) for side in ("axon", "gloo"))
    name = operation.replace("_", "-")
    return Bar(
        job=f"{name}, 64 MiB", where=FOUR, peer="gloo", file="collectives_netns", ours=ours, peers=peers,
        seconds="median_s",
    )  # fmt: skip


FOUR = "4 hosts, 500 Mbit/s"
FULL, GRAD, HYBRID = ({"strategy": s} for s in ("full_shard", "shard_grad_op", "hybrid_shard"))
F32, BF16 = {"dtype": "float32"}, {"dtype": "bfloat16"}
AT_500 = {"place": "500 Mbit/s"}
BARS = (
    step("FULL_SHARD step, f32", FOUR, "whole_step", **FULL, **F32, **AT_500),
    step("FULL_SHARD step, bf16", FOUR, "whole_step_bf16", **FULL, **BF16),
    step("FULL_SHARD step, int8 on the wire", FOUR, "whole_step", "axon-int8", **FULL, **F32, **AT_500),
    step("SHARD_GRAD_OP step, f32", FOUR, "whole_step", **GRAD, **F32, **AT_500),
    step("HYBRID_SHARD step, f32", "2 hosts of 2, 500 Mbit/s", "hybrid", **HYBRID, **F32),
    step("FULL_SHARD step, f32", "4 workers on one host", "one_host", workers="4", **F32),
    step("FULL_SHARD step, bf16", "4 workers on one host", "one_host", workers="4", **BF16),
    Bar(
        job="DDP step, fp16 on the wire", where=FOUR, peer="DDP, gloo, fp16 hook", file="ddp",
        ours=where(side="axon fp16"), peers=where(side="gloo fp16"),
    ),
    collective("all_reduce"),
    collective("all_gather"),
    collective("reduce_scatter"),
)  # fmt: skip

WIDTH, ROW, TOP, LEFT, SCALE = 860, 36, 66, 400, 330


def text(x: float, y: float, words: str, css: str = "", anchor: str = "start") -> str:
    """Words at a place."""
    return f'<text x="{x:g}" y="{y:g}" class="{css}" text-anchor="{anchor}">{escape(words)}</text>'


def draw(bars: Sequence[Bar]) -> str:
    """The picture: a bar each, whose length is our time; the line is the peer's."""
    height = TOP + ROW * len(bars) + 16
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        'aria-label="Time of axon_ps as a part of its peers\' in the same run; docs/results.md has the numbers">',
        "<style>text{font:13px sans-serif;fill:#1c2733}.s{font-size:11px;fill:#5a6a7a}.h{font:600 14px sans-serif}"
        ".b{fill:#2f7ed8}.l{stroke:#8a97a5;stroke-dasharray:3 3}.g{fill:#fff}"
        "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.s{fill:#9aa7b4}.g{fill:#0d1117}.b{fill:#4c9bf0}}</style>",
        f'<rect width="{WIDTH}" height="{height}" rx="6" class="g"/>',
        text(20, 26, "Time, the peer's in the same run = 1 (less is better)", "h"),
        text(20, 46, "two cores; hosts are network namespaces, shard servers have cards of their own", "s"),
        f'<line x1="{LEFT + SCALE}" x2="{LEFT + SCALE}" y1="{TOP - 12}" y2="{height - 12}" class="l"/>',
    ]
    for i, bar in enumerate(bars):
        y = TOP + ROW * i
        ours, peers = bar.times()
        length = SCALE * ours / peers
        out += [
            text(LEFT - 12, y + 12, bar.job, "", "end"),
            text(LEFT - 12, y + 24, f"{bar.where} · {bar.peer}", "s", "end"),
            f'<rect x="{LEFT}" y="{y + 3}" width="{length:.1f}" height="17" rx="3" class="b"/>',
            text(LEFT + SCALE + 12, y + 17, f"{ours / peers:.2f}"),
            text(LEFT + SCALE + 50, y + 17, f"{ours:.2f} s", "s"),
        ]
    return "\n".join([*out, "</svg>", ""])


def table(bars: Sequence[Bar]) -> str:
    """The same as a table in Markdown."""
    lines = ["| what | where | beside | theirs, s | ours, s | ratio |", "|---|---|---|--:|--:|--:|"]
    for bar in bars:
        ours, peers = bar.times()
        name = f"[{bar.file}](../benchmarks/results/{bar.file}.json)"
        lines.append(
            f"| {bar.job} ({name}) | {bar.where} | {bar.peer} | {peers:.3f} | {ours:.3f} | {ours / peers:.2f} |"
        )
    return "\n".join(lines)


def page(bars: Sequence[Bar]) -> str:
    """The page, with its table as it is to be."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return f"{before}{BEGIN}\n{table(bars)}\n{END}{rest.partition(END)[2]}"


def main() -> int:
    """Write or check; the exit code."""
    made = {PICTURE: draw(BARS), PAGE: page(BARS)}
    if "--check" in sys.argv:
        return any(path.read_text(encoding="utf-8") != content for path, content in made.items())
    for path, content in made.items():
        path.write_text(content, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Draws docs/architecture.svg: the rooms in their order, as pyproject.toml has it, and what one training step does.

python docs/architecture.py          # write the picture
python docs/architecture.py --check  # exit 1 if it is not what this script draws
"""

from __future__ import annotations

import sys
import tomllib
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
PICTURE = Path(__file__).with_suffix(".svg")

SAYS = {
    "cli": "the command line",
    "testing": "LocalCluster, mock devices",
    "huggingface": "Accelerator, Trainer",
    "lightning": "strategies",
    "ray": "actors, Ray Train",
    "simulate": "clusters not yet rented",
    "parallel": "PyTorch: fsdp, ddp, tensor, pipeline, c10d",
    "worker": "World; gather, push, vote",
    "collectives": "process groups and their backends",
    "shard": "slices, optimizer, checkpoints",
    "aggregation": "collectives on the servers",
    "coordinator": "members, steps, barriers",
    "rpc": "gRPC: channels, streams, security",
    "wire": "messages and their conversion",
    "storage": "files, manifests, durable state",
    "sharding": "layout, plan, slices",
    "reduction": "sum, mean, min, max",
    "optim": "what optimizers mean",
    "compress": "what compressors mean",
    "kernels": "compiled loops",
    "host": "shared memory, processes",
    "data": "who trains on which sample",
    "observe": "logs, reminders",
    "plugins": "classes by name",
    "types": "values that all share",
    "texts": "what others wrote, in bounds",
    "errors": "the error tree",
    "version": "of this package",
}
SPLIT = {"shard", "aggregation", "coordinator"}
"""Rooms that are a core without I/O, a server and a client."""

STEP = (
    ("worker", "gather", "parameters of a unit come from the shard servers (shard/client → shard/server)"),
    ("parallel", "compute", "forward and backward; a unit is freed after its use (parallel/fsdp/runtime)"),
    ("shard", "push", "its gradient goes to the servers, which add up replicas in order (shard/core/accumulator)"),
    ("coordinator", "vote", "workers vote, servers report sums; the coordinator decides (coordinator/core/steps)"),
    ("shard", "apply", "servers update their slices; that is the next version (shard/server/apply)"),
)
WIDTH, ROW, BOX, LEFT = 860, 46, 34, 20


def layers() -> list[list[str]]:
    """The rooms, top first."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (order,) = [c["layers"] for c in project["tool"]["importlinter"]["contracts"] if c["name"] == "Layers"]
    return [[room.strip() for room in layer.split("|")] for layer in order]


def text(x: float, y: float, words: str, css: str) -> str:
    """Words at a place."""
    return f'<text x="{x:g}" y="{y:g}" class="{css}">{escape(words)}</text>'


def box(x: float, y: float, width: float, css: str) -> str:
    """A frame, of one row's height."""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{BOX}" rx="5" class="{css}"/>'


def draw() -> str:
    """The picture."""
    rooms = layers()
    height = ROW * (len(rooms) + len(STEP)) + 80
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        'aria-label="The rooms of axon_ps, each importing only those below it, and the way of one training step">',
        "<style>text{font:13px sans-serif;fill:#1c2733}.n{font-weight:600}.s{font-size:11px;fill:#4a5a6a}"
        ".h{font-weight:600;font-size:14px}rect{stroke:#7d8fa3;fill:#f3f6f9}.core{fill:#e2ecf7}.step{fill:#eaf5ea}</style>",
        f'<rect width="{WIDTH}" height="{height}" style="fill:#fff;stroke:none"/>',
        text(LEFT, 24, "Rooms: each imports only rooms below it", "h"),
    ]
    y = 36.0
    for layer in rooms:
        width = (WIDTH - 2 * LEFT - 10 * (len(layer) - 1)) / len(layer)
        for i, room in enumerate(layer):
            x = LEFT + i * (width + 10)
            out += [box(x, y, width, "core" if room in SPLIT else ""), text(x + 10, y + 15, room, "n")]
            said = SAYS[room] + (" · core, server, client" if room in SPLIT else "")
            out.append(text(x + 10, y + 29, said, "s"))
        y += ROW
    y += 24
    out.append(text(LEFT, y, "One training step", "h"))
    y += 12
    for number, (room, name, what) in enumerate(STEP, 1):
        out += [box(LEFT, y, WIDTH - 2 * LEFT, "step"), text(LEFT + 10, y + 21, f"{number}  {name}", "n")]
        out += [text(LEFT + 110, y + 21, room, "s"), text(LEFT + 210, y + 21, what, "s")]
        y += ROW
    return "\n".join([*out, "</svg>", ""])


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(PICTURE.read_text(encoding="utf-8") != draw())
    PICTURE.write_text(draw(), encoding="utf-8")

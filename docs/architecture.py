"""Draws docs/architecture.svg: the processes of a job with the bytes between them, and the packages in their order.

The order of the packages is that of pyproject.toml.

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
    "testing": "LocalCluster, run_threads",
    "huggingface": "Accelerator, Trainer",
    "lightning": "strategies",
    "ray": "actors, Ray Train",
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
    "optim": "definitions of optimizers",
    "compress": "definitions of compressors",
    "kernels": "compiled loops",
    "host": "memory, processes",
    "data": "samples of each rank",
    "observe": "logs, reminders",
    "plugins": "classes by name",
    "types": "values that all share",
    "texts": "foreign texts, in bounds",
    "errors": "the error tree",
    "renamed": "old names of modules",
    "version": "of this package",
}
SPLIT = {"shard", "aggregation", "coordinator"}
"""Rooms that are a core without I/O, a server and a client."""

PROCESSES = (
    (
        "Node a: worker processes",
        20,
        60,
        230,
        84,
        ("rank 0, rank 1, ... : one each GPU", "hold the units in use", "in the node: NCCL, shared memory"),
    ),
    (
        "Node b: worker processes",
        20,
        210,
        230,
        84,
        ("rank 2, rank 3, ...", "hold the units in use", "in the node: NCCL, shared memory"),
    ),
    (
        "Shard server 0: primary of A",
        590,
        60,
        250,
        84,
        (
            "slices: f32 masters, optimizer state",
            "adds gradients in replica order",
            "updates its slices on a commit",
        ),
    ),
    (
        "Shard server 1: backup of A",
        590,
        210,
        250,
        84,
        ("the same values, bit for bit", "primary of slice B", ""),
    ),
    ("Coordinator", 305, 360, 250, 66, ("members, ranks, barriers", "the one decision on each step")),
    ("State: sqlite or etcd", 20, 370, 200, 46, ("written before a decision is sent",)),
    ("Checkpoints: disk or S3", 640, 370, 200, 46, ("safetensors and a manifest",)),
)
"""Boxes of the picture: title, x, y, width, height, lines."""

ARROWS = (
    (590, 82, 250, 82, 260, 76, "1  gather: b bytes a parameter, at each use"),
    (250, 122, 590, 122, 260, 116, "2  push: b bytes a gradient, chunks of 1 to 4 MiB"),
    (250, 252, 590, 252, 260, 246, "1 and 2 go to every shard server"),
    (700, 144, 700, 210, 530, 182, "3  sums: b bytes a parameter"),
    (135, 294, 350, 360, 20, 340, "4  vote, heartbeat: small messages"),
    (510, 360, 660, 294, 596, 338, "5  decision: a small message"),
    (305, 395, 220, 395, 246, 389, "write"),
    (800, 294, 800, 370, 806, 336, "snapshot"),
)
"""Arrows of the picture: from x, y to x, y; the label's x, y and text."""

WIDTH, ROW, BOX, LEFT, TOP = 860, 46, 34, 20, 486


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


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    """An arrow between two boxes."""
    return f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" class="a" marker-end="url(#head)"/>'


def processes() -> list[str]:
    """The upper part: processes, and arrows with their bytes."""
    out = []
    for title, x, y, width, height, lines in PROCESSES:
        css = "core" if title == "Coordinator" else "step" if title.startswith("Shard") else ""
        out.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5" class="{css}"/>')
        out.append(text(x + 10, y + 18, title, "n"))
        out += [text(x + 10, y + 36 + 17 * i, line, "s") for i, line in enumerate(lines) if line]
    for x1, y1, x2, y2, x, y, label in ARROWS:
        out += [arrow(x1, y1, x2, y2), text(x, y, label, "s")]
    return out


def draw() -> str:
    """The picture."""
    rooms = layers()
    height = TOP + ROW * len(rooms) + 20
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        'aria-label="The processes of a job and the bytes between them; the packages of axon_ps, each importing only '
        'those below it">',
        "<style>text{font:13px sans-serif;fill:#1c2733}.n{font-weight:600}.s{font-size:11px;fill:#4a5a6a}"
        ".h{font-weight:600;font-size:14px}rect{stroke:#7d8fa3;fill:#f3f6f9}.core{fill:#e2ecf7}.step{fill:#eaf5ea}"
        ".a{stroke:#4a5a6a;stroke-width:1.5}</style>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#4a5a6a"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{height}" style="fill:#fff;stroke:none"/>',
        text(LEFT, 24, "Processes and bytes of one training step (b: bytes of an element as it travels)", "h"),
        *processes(),
        text(LEFT, TOP - 12, "Packages: each imports only packages below it", "h"),
    ]
    y = float(TOP)
    for layer in rooms:
        width = (WIDTH - 2 * LEFT - 10 * (len(layer) - 1)) / len(layer)
        for i, room in enumerate(layer):
            x = LEFT + i * (width + 10)
            out += [box(x, y, width, "core" if room in SPLIT else ""), text(x + 10, y + 15, room, "n")]
            said = SAYS[room] + (" · core, server, client" if room in SPLIT else "")
            out.append(text(x + 10, y + 29, said, "s"))
        y += ROW
    return "\n".join([*out, "</svg>", ""])


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(PICTURE.read_text(encoding="utf-8") != draw())
    PICTURE.write_text(draw(), encoding="utf-8")

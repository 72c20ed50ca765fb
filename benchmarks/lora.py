"""Bytes and time of a LoRA step on a frozen base of 50M parameters: axon_ps against FSDP2 and DeepSpeed's ZeRO-3.

Four workers of one thread are on hosts of their own, and four shard servers, too (network namespaces, see netns.py),
with cards of 1 Gbit/s each way. Adapters of rank 16 are in bfloat16, as they are sent and computed with. The base is
bfloat16, or of four bits a number. Runs of the sides alternate. A step's time is the median over the timed steps of all
rounds. Bytes are those that the mean card of a worker's host received and sent per step.

DeepSpeed may have an interpreter of its own (`--deepspeed-python`). Without it the side is left out.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from axon_ps_lab import report
from cluster import Loopback, Sockets
from lora_worker import RANK
from netns import CONGESTION, Network, NetworkUnavailable
from whole_step import Figures, Team, one_run

WORKER = Path(__file__).with_name("lora_worker.py")
WORKERS = 4
SIDES = {
    "FSDP2, bf16 base": ("fsdp2", False),
    "ZeRO-3, bf16 base": ("zero3", False),
    "axon_ps, bf16 base": ("axon", False),
    "FSDP2, 4-bit base": ("fsdp2", True),
    "axon_ps, 4-bit base": ("axon", True),
}
COLUMNS = ("side", "step_s", "ratio", "theory_rx_mib", "rx_mib", "theory_tx_mib", "tx_mib", "cpu_s_per_step")
MIB = 1 << 20


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--place", default="1000", help="Mbit/s of a card, or sockets (one device for all)")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--deepspeed-python", default=sys.executable, help="an interpreter that has DeepSpeed")
    parser.add_argument("--quick", action="store_true", help="one round of three steps, six blocks")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.steps, options.blocks = 1, 3, 6
    return options


def theory_mib(side: str, options: argparse.Namespace) -> tuple[float, float]:
    """Return the MiB that a worker's card has to receive and send in a step.

    FSDP2 gathers the base and the adapters for forward and again for backward, ZeRO-3 once, as it retains up to 10^9
    parameters. Both reduce-scatter gradients. A host carries 3/4 of these bytes each way. A worker of axon_ps receives
    the adapters and sends their gradients.
    """
    kind, quantised = SIDES[side]
    base = 2 * options.blocks * options.width**2 * (0.5 if quantised else 2.0)
    adapters = 2 * options.blocks * 2 * RANK * options.width * 2.0
    if kind == "axon":
        return adapters / MIB, adapters / MIB
    gathers = 1 if kind == "zero3" else 2
    moved = (WORKERS - 1) / WORKERS * (gathers * (base + adapters) + adapters)
    return moved / MIB, moved / MIB


def command_of(side: str, options: argparse.Namespace) -> list[str]:
    """Return the command of one worker."""
    kind, quantised = SIDES[side]
    shape = [f"--{name}={getattr(options, name)}" for name in ("width", "blocks", "tokens", "steps", "warmup")]
    python = options.deepspeed_python if kind == "zero3" else sys.executable
    return [python, str(WORKER), kind, *shape, *(["--quantised"] if quantised else [])]


def main() -> int:
    """Measure and write the table."""
    options = parse()
    found = subprocess.run([options.deepspeed_python, "-c", "import deepspeed"], capture_output=True)
    sides = [s for s in options.sides if SIDES[s][0] != "zero3" or not found.returncode]
    team = Team.of(WORKERS)
    figures = {side: Figures() for side in sides}
    try:
        local = options.place == "sockets"
        with Sockets(team.all_hosts) if local else Network(team.all_hosts, rate_mbit=float(options.place)) as place:
            for _ in range(options.rounds):
                for side, into in figures.items():
                    replication = int(SIDES[side][0] == "axon")
                    one_run(place, team, command_of(side, options), options.steps, into, replication=replication)
                    print(f"{side}: {into.median_s:.3f} s a step, {into.worker_mib}", file=sys.stderr, flush=True)
            congestion = None if isinstance(place, Loopback) else CONGESTION
    except NetworkUnavailable as error:
        print(f"left out: {error}", file=sys.stderr)
        return 1
    rows = []
    for side, into in figures.items():
        theory, peer = theory_mib(side, options), figures.get(f"FSDP2, {side.partition(', ')[2]}")
        rows.append(
            {
                "side": side,
                "step_s": round(into.median_s, 3),
                "ratio": None if peer is None else round(into.median_s / peer.median_s, 3),
                "theory_rx_mib": round(theory[0], 2),
                "rx_mib": round(into.worker_mib[0], 2),
                "theory_tx_mib": round(theory[1], 2),
                "tx_mib": round(into.worker_mib[1], 2),
                "cpu_s_per_step": round(sum(into.cpu_s) / len(into.cpu_s), 2),
                "times_s": into.times_s,
                "losses": into.losses,
            }
        )
    report.table("LoRA step", COLUMNS, [[row[c] for c in COLUMNS] for row in rows])
    settings = {k: v for k, v in vars(options).items() if k not in ("quick", "deepspeed_python")}
    report.write("lora", rows, settings=settings, congestion=congestion)
    return 0


if __name__ == "__main__":
    sys.exit(main())

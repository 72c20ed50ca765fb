"""Step time of DDP on a 17M-parameter residual MLP: axon_ps against torch over gloo, by kind of hook.

The place is four worker hosts plus four server hosts (network namespaces, see netns.py) whose cards carry 500 Mbit/s
each way, or loopback. Runs of the sides alternate. A step's time is the median over the timed steps of all rounds. CPU
seconds are those of all processes of a side, workers and servers. Bytes are those that one worker's card received and
sent per step.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

from axon_ps_lab import report
from cluster import Loopback
from netns import CONGESTION, Network, NetworkUnavailable
from whole_step import Figures, Team, one_run, server_hosts

WORKER = Path(__file__).with_name("ddp_worker.py")
SIDES = {
    "gloo f32": ("gloo", "all_reduce"),
    "gloo fp16": ("gloo", "fp16"),
    "axon f32": ("axon", "all_reduce"),
    "axon fp16": ("axon", "fp16"),
    "axon int8": ("axon", "int8"),
    "axon top-k": ("axon", "top_k"),
}
BASELINE = "gloo fp16"


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--place", default="500", help="Mbit/s of a card, or loopback")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--quick", action="store_true", help="one round of three steps: fp16 over gloo, our int8")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.steps, options.sides = 1, 3, [BASELINE, "axon int8"]
    return options


def main() -> int:
    """Measure and write the table."""
    options = parse()
    figures = {side: Figures() for side in options.sides}
    arguments = ["--steps", str(options.steps), "--tokens", str(options.tokens)]
    team = Team.of(4)
    hosts = [*team.hosts, *server_hosts()]
    try:
        with (
            Loopback(hosts) if options.place == "loopback" else Network(hosts, rate_mbit=float(options.place)) as place
        ):
            for _ in range(options.rounds):
                for side, into in figures.items():
                    kind, hook = SIDES[side]
                    command = [sys.executable, str(WORKER), kind, "--hook", hook, *arguments]
                    one_run(place, team, command, options.steps, into, replication=int(kind == "axon"))
    except NetworkUnavailable as error:
        print(f"skipped: {error}")
        return 0
    peer = figures[BASELINE].median_s if BASELINE in figures else None
    rows = [
        {
            "place": options.place,
            "side": side,
            "step_s": round(f.median_s, 3),
            "slowest_s": round(max(f.times_s), 3),
            "to_gloo_fp16": round(f.median_s / peer, 3) if peer else None,
            "cpu_s_per_step": round(statistics.median(f.cpu_s), 2),
            "worker_rx_mib": round(f.worker_mib[0], 1),
            "worker_tx_mib": round(f.worker_mib[1], 1),
            "last_loss": f.losses[-1],
            "steps": len(f.times_s),
        }
        for side, f in figures.items()
    ]
    report.table(f"DDP, {options.place}", list(rows[0]), [list(row.values()) for row in rows])
    report.write("ddp", rows, congestion=CONGESTION if options.place != "loopback" else None)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Sequences of unequal lengths: FULL_SHARD against FSDP2 over gloo, with emulated accelerators.

Four workers and four shard servers have a host each, whose cards carry 1 Gbit/s. A step has several micro-batches, and
both sides send gradients with the last one. An accelerator's time for a micro-batch is proportional to the length of
its sequences. Lengths are either all equal, or log-uniform over a range of 20 times, as in long-context data (the same
numbers for all sides). FSDP2's workers wait for each other at every unit of every micro-batch, axon_ps's workers only
in the vote at the end. The columns are:

    own            what the slowest worker's accelerator takes in the step
    over own       the step over "own", the mean of all steps
    times_equal    the ratio of sequences a second to FSDP2's, over the same ratio with equal lengths

The side axon-waits has shard servers without memory for early gradients. At the end axon_ps runs some more times, with
lengths drawn anew for the same batches, so that gradients arrive in another order: the parameters must have the same
bits.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

from axon_ps_lab import report
from netns import CONGESTION, Network
from whole_step import Figures, Team, one_run, server_hosts

HERE = Path(__file__).parent
SIDES = {
    "fsdp2": (["fsdp2"], 0, []),
    "axon": (["axon"], 1, []),
    "axon-waits": (["axon"], 1, ["--queue-memory", "0"]),
}
"""By side, the arguments of step_worker.py, the copies of each slice, and options of the shard servers."""

COLUMNS = ("lengths", "side", "step_s", "own_s", "over_own", "sequences_s", "times_fsdp2", "times_equal")


def row(lengths: str, side: str, figures: Figures, sequences: int, peer: Figures) -> dict[str, Any]:
    """Return a line of the table."""
    step_s, own_s = statistics.mean(figures.times_s), statistics.mean(figures.slowest_s)
    return {
        "lengths": lengths,
        "side": side,
        "step_s": round(step_s, 3),
        "own_s": round(own_s, 3),
        "over_own": round(step_s / own_s, 3),
        "sequences_s": round(sequences / step_s, 2),
        "times_fsdp2": round(statistics.mean(peer.times_s) / step_s, 3),
        "steps": len(figures.times_s),
        "last_loss": figures.losses[-1],
        "times_s": [round(t, 3) for t in figures.times_s],
    }


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--spread", type=float, default=20.0, help="the longest sequence over the shortest one")
    parser.add_argument("--micro", type=int, default=16, help="micro-batches of a step, of each worker")
    parser.add_argument("--device-s", type=float, default=0.5, help="an accelerator's seconds a mean micro-batch")
    parser.add_argument("--rate-mbit", type=float, default=1000.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--orders", type=int, default=5, help="runs for the same bits in another order")
    parser.add_argument("--quick", action="store_true", help="one round of three steps")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.steps, options.orders = 1, 3, 2
    return options


def main() -> None:
    """Run both kinds of lengths; sides alternate."""
    options = parse()
    team, rows = Team.of(4), []
    arguments = [
        *("--width", str(options.width), "--device-s", str(options.device_s), "--tokens", "16"),
        *("--steps", str(options.steps), "--micro", str(options.micro)),
    ]
    with Network([*team.hosts, *server_hosts()], rate_mbit=options.rate_mbit) as network:
        for lengths, spread in (("equal", 1.0), (f"{options.spread:g} times", options.spread)):
            figures = {side: Figures() for side in options.sides}
            for _ in range(options.rounds):
                for side, into in figures.items():
                    told, copies, shard = SIDES[side]
                    command = [sys.executable, str(HERE / "step_worker.py"), *told, *arguments, "--spread", str(spread)]
                    one_run(network, team, command, options.steps, into, replication=copies, shard=shard)
                    print(f"{lengths} {side}: {statistics.mean(into.times_s):.3f} s", file=sys.stderr, flush=True)
            peer, sequences = figures[options.sides[0]], team.size * options.micro
            rows += [row(lengths, side, into, sequences, peer) for side, into in figures.items()]
        told, copies, shard = SIDES["axon"]
        orders = Figures()
        for order in range(options.orders):
            command = [sys.executable, str(HERE / "step_worker.py"), *told, *arguments]
            command += ["--spread", f"{options.spread:g}", "--order", str(order)]
            one_run(network, team, command, options.steps, orders, replication=copies, shard=shard)
            print(f"order {order}: parameters {orders.digests[-1][:16]}", file=sys.stderr, flush=True)
    equal = {r["side"]: r["times_fsdp2"] for r in rows if r["lengths"] == "equal"}
    for r in rows:
        r["times_equal"] = round(r["times_fsdp2"] / equal[r["side"]], 3)
    if len(set(orders.digests)) > 1:
        raise SystemExit(f"parameters depend on the order in which gradients arrive: {orders.digests}")
    report.table("Unequal sequences", COLUMNS, [[r[c] for c in COLUMNS] for r in rows])
    report.write("unequal", rows, settings=vars(options), congestion=CONGESTION, digests=orders.digests)


if __name__ == "__main__":
    main()

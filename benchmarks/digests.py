"""Cost of digests: of the check in each step that shard servers' memory still holds what was written to it.

Two workers train a residual MLP of 2M parameters with AdamW under FULL_SHARD on two shard servers that hold two copies.
With the coordinator they are five processes, all on this machine, so every cycle of the servers is taken from the
workers. Turns of equally many steps alternate between a job without digests and one with them: without, with, with,
without. Each round has new jobs. An interval is of 95 %, by Student's t over the rounds.

    python benchmarks/digests.py [--rounds 8] [--steps 40] [--quick]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path

from axon_ps.host.ports import free_ports
from axon_ps_lab import report
from observability import (
    BLOCKS,
    PROCESSES,
    SHARDS,
    TOKENS,
    WIDTH,
    WORKERS,
    Difference,
    Job,
    difference,
    row,
)

PATH = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])


def measure(steps: int) -> Difference:
    """Measure one round."""
    port = free_ports(2 * PROCESSES)
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        without, with_ = (
            Job(Path(directory) / str(n), port + n * PROCESSES, *flags, PYTHONPATH=PATH)
            for n, flags in enumerate((("--plugins", "without_digests"), ()))
        )
        for job in (without, with_):
            stack.callback(job.close)
            job.turn(steps // 2 + 1)  # warm up
        return difference(without, with_, steps)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=40, help="of a turn")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    rounds = [measure(options.steps) for _ in range(1 if options.quick else options.rounds)]
    rows = [row("digests", "as they are", [d.cpu for d in rounds], [d.time for d in rounds])]
    step_ms = 1e3 * statistics.mean(d.without.wall_s for d in rounds) / (2 * options.steps)
    by_round = [round(1 + d.time, 3) for d in rounds]
    report.table("What digests add to a step", list(rows[0]), [list(each.values()) for each in rows])
    print(f"a step without takes {step_ms:.1f} ms; with, by round, {by_round} times as long")
    if not options.quick:
        size = {"width": WIDTH, "blocks": BLOCKS, "tokens": TOKENS, "workers": WORKERS, "shards": SHARDS}
        figures = {"rounds": len(rounds), "steps": options.steps, "step_ms": round(step_ms, 1), "by_round": by_round}
        print(report.write("digests", rows, **size, **figures))


if __name__ == "__main__":
    main()

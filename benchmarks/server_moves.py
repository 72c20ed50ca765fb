"""Step time while a shard server is added, and while one is drained, against step time otherwise, in one job.

Two workers and two shard servers run on this machine, with a 17M-parameter residual MLP under FULL_SHARD. A batch has
few rows, so that a step is mostly the servers' work. In each round a server is added, and slices move to it until the
loads are even. Then one is drained, whose slices move to the others. No step may be aborted. A phase lasts until
nothing has been copied for two seconds. All processes share the cores of this machine. The start of a new server, a
second of one core, is not counted.

    python benchmarks/server_moves.py [--rounds 3] [--replication 1 2] [--quick]
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import steady_job
from axon_ps.testing import LocalCluster
from axon_ps_lab import report
from step_worker import Block, ResidualMLP

WIDTH, BLOCKS, TOKENS = 1024, 8, 8
QUIET_S = 2.0
LIMIT_S = 120.0


def train(directory: Path) -> dict[str, Any]:
    """Run one worker; see `steady_job.train`."""
    return steady_job.train(directory, lambda: ResidualMLP(WIDTH, BLOCKS), Block, (TOKENS, WIDTH))


def copied(cluster: LocalCluster) -> float:
    """Return the number of slices that servers have received so far."""
    return float(cluster.status().counters.get("slices_copied", 0.0))


def settle(cluster: LocalCluster, servers: int) -> None:
    """Wait until there are so many servers, and nothing has been copied for a while."""
    deadline, count, since = time.monotonic() + LIMIT_S, -1.0, time.monotonic()
    while time.monotonic() - since < QUIET_S:
        if time.monotonic() > deadline:
            raise RuntimeError(f"slices still move after {LIMIT_S:g} s")
        if len(cluster.status().membership.shards) != servers or copied(cluster) != count:
            count, since = copied(cluster), time.monotonic()
        time.sleep(0.05)


def measure(replication: int, rounds: int) -> list[dict[str, Any]]:
    """Run the phases of a job; returns a row for each."""
    phases: list[tuple[str, float, float, float]] = []
    directory = Path(tempfile.mkdtemp())
    with LocalCluster(shards=2, world_size=2, replication=replication) as cluster:

        def phase(name: str, began: float, ended: float, before: float) -> None:
            phases.append((name, began, ended, copied(cluster) - before))

        workers = cluster.start_workers(train, args=(directory,))
        while cluster.status().version < 20:
            time.sleep(0.1)
        for _ in range(rounds):
            settle(cluster, 2)
            began = time.monotonic()
            time.sleep(4.0)
            phase("nothing moves", began, time.monotonic(), copied(cluster))
            before = copied(cluster)
            index = cluster.add_shard()
            began = time.monotonic()
            settle(cluster, 3)
            phase("added", began, time.monotonic() - QUIET_S, before)
            began = time.monotonic()
            time.sleep(4.0)
            phase("three servers", began, time.monotonic(), copied(cluster))
            before, began = copied(cluster), time.monotonic()
            cluster.drain(index)
            phase("drained", began, time.monotonic(), before)
        results = steady_job.finish(cluster, workers, directory)
    if aborted := sum(result["aborted"] for result in results):
        raise RuntimeError(f"{aborted} steps were aborted; none may be")
    return table(replication, phases, results[0]["commits"])


def table(
    replication: int, phases: list[tuple[str, float, float, float]], commits: list[float]
) -> list[dict[str, Any]]:
    """Return a row for each phase, with all rounds together."""
    rows: list[dict[str, Any]] = []
    for name in ("nothing moves", "added", "three servers", "drained"):
        times = [
            b - a
            for what, began, ended, _ in phases
            for a, b in itertools.pairwise(commits)
            if what == name and began <= a and b <= ended
        ]
        median, mean = statistics.median(times), statistics.mean(times)
        base = rows[0] if rows else {"median_s": median, "mean_s": mean}
        rows.append(
            {
                "replication": replication,
                "phase": name,
                "steps": len(times),
                "median_s": round(median, 4),
                "mean_s": round(mean, 4),
                "median_ratio": round(median / base["median_s"], 3),
                "mean_ratio": round(mean / base["mean_s"], 3),
                "slices copied": int(sum(count for what, _, _, count in phases if what == name)),
            }
        )
    return rows


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--replication", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--quick", action="store_true", help="one round, replication 2")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.replication = 1, [2]
    rows = [row for replication in options.replication for row in measure(replication, options.rounds)]
    columns = tuple(rows[0])
    report.table("Steps while shard servers come and go", columns, [[r[c] for c in columns] for r in rows])
    settings = {"width": WIDTH, "blocks": BLOCKS, "tokens": TOKENS, "rounds": options.rounds}
    report.write("server_moves", rows, settings=settings)


if __name__ == "__main__":
    main()

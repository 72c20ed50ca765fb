"""Cost of the death of a shard server: time to the next committed step, and until every slice has its copies.

A job of two workers and two shard servers runs on this machine, with replication 2 and a small transformer-sized MLP
under FULL_SHARD. One server after the other is killed (SIGKILL, so that its connections are reset) or frozen (SIGSTOP,
which is noticed only after its lease), and then restarted or woken.

    python benchmarks/server_death.py [--kills 50] [--freezes 10] [--quick]
"""

from __future__ import annotations

import argparse
import itertools
import math
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

import steady_job
from axon_ps.testing import LocalCluster
from axon_ps.types import Role
from axon_ps_lab import report

WIDTH, BLOCKS, LEASE_S = 256, 4, 1.0


class Block(nn.Sequential):
    """One unit."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


def train(directory: Path) -> dict[str, Any]:
    """Run one worker; see `steady_job.train`."""
    return steady_job.train(directory, lambda: nn.Sequential(*(Block() for _ in range(BLOCKS))), Block, (16, WIDTH))


def until(true: Callable[[], bool]) -> None:
    """Wait for a condition on other processes."""
    deadline = time.monotonic() + 60.0
    while not true():
        if time.monotonic() > deadline:
            raise RuntimeError("the job did not come to rest within a minute")
        time.sleep(0.02)


def complete(cluster: LocalCluster) -> bool:
    """Return True if both servers are members and every slice has its copies."""
    status = cluster.status()
    return len(status.membership.shards) == 2 and status.version > 0 and not any(m.lacking for m in status.models)


def measure(kills: int, freezes: int) -> dict[str, Any]:
    """Strike so often; returns the times of each strike and of the copies, and the workers' results."""
    struck: list[tuple[str, float]] = []
    copied: list[float] = []
    directory = Path(tempfile.mkdtemp())
    with LocalCluster(shards=2, world_size=2, replication=2, lease_s=LEASE_S) as cluster:
        workers = cluster.start_workers(train, args=(directory,))
        until(lambda: complete(cluster))
        for number in range(kills + freezes):
            index, how = number % 2, "killed" if number < kills else "frozen"
            time.sleep(0.3)
            struck.append((how, time.monotonic()))
            cluster.kill(Role.SHARD, index, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
            if how == "killed":
                cluster.restart(Role.SHARD, index)
            else:
                time.sleep(LEASE_S + 1.0)
                cluster.kill(Role.SHARD, index, signal.SIGCONT)
            back = time.monotonic()
            until(lambda: complete(cluster))
            copied.append(time.monotonic() - back)
        results = steady_job.finish(cluster, workers, directory)
    return {"struck": struck, "copied": copied, "workers": results}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--freezes", type=int, default=10)
    parser.add_argument("--quick", action="store_true", help="4 kills and 2 freezes")
    options = parser.parse_args()
    if options.quick:
        options.kills, options.freezes = 4, 2
    found = measure(options.kills, options.freezes)
    commits = found["workers"][0]["commits"]
    steps = statistics.median(b - a for a, b in itertools.pairwise(commits))
    rows, ends = [], [*(at for _, at in found["struck"][1:]), math.inf]
    for how in ("killed", "frozen"):
        # The step under way may still commit, so the longest time without a commit after the strike counts.
        waits = []
        for (what, at), end in zip(found["struck"], ends, strict=True):
            if what == how:
                times = [at, *(t for t in commits if at < t < end)]
                waits.append(max(b - a for a, b in itertools.pairwise(times)))
        if waits:
            median, worst = round(statistics.median(waits), 3), round(max(waits), 3)
            rows.append({"server": how, "times": len(waits), "median_s": median, "worst_s": worst})
    columns = ("server", "times", "median_s", "worst_s")
    report.table("From the death of a server to the next commit", columns, [[r[c] for c in columns] for r in rows])
    aborted = [worker["aborted"] for worker in found["workers"]]
    copies = [round(statistics.median(found["copied"]), 3), round(max(found["copied"]), 3)]
    print(
        f"a step takes {steps:.3f} s; steps not committed, by worker: {aborted}; until all copies are there: {copies} s"
    )
    settings = {"lease_s": LEASE_S, "width": WIDTH, "blocks": BLOCKS}
    report.write("server_death", rows, step_s=round(steps, 4), aborted=aborted, copies_s=copies, settings=settings)


if __name__ == "__main__":
    main()

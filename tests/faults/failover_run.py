"""What a leader's death costs, several times each: `make failover`.

Three etcd members, two coordinators, two shard servers, two workers; each fault happens to whoever leads, and the
longest time without a committed step is what is shown. Fails if a step was lost, if a coordinator wrote after another
one had begun to, or if a step took longer than promised to commit again.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from axon_ps.testing import preloaded
from axon_ps.testing.faults.cluster import MODULES
from axon_ps.testing.faults.failover import FailoverCluster

sys.path.insert(0, str(Path(__file__).parent.parent / "integration"))
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import _report
from failover_job import FAULTS, Job, check, etcd_member_killed

PRELOADED = ("torch", "axon_ps.parallel", "axon_ps.worker.world", *MODULES)
PROMISED_S = 5.0
LEASE_S = 1.5


def measure(rounds: int, away_s: float) -> tuple[dict[str, list[float]], dict[str, list[float]], int]:
    """The gaps of each fault, for how long the machine let nobody run meanwhile, and how many steps did not commit."""
    gaps: dict[str, list[float]] = {}
    stalls: dict[str, list[float]] = {}
    with (
        tempfile.TemporaryDirectory() as directory,
        FailoverCluster(shards=2, world_size=2, lease_s=LEASE_S) as cluster,
    ):
        job = Job(cluster, Path(directory))
        for fault in (*FAULTS * rounds, etcd_member_killed):
            cluster.take_stall()
            gap_s = fault(job, away_s)
            stall_s = cluster.take_stall()
            gaps.setdefault(fault.__name__, []).append(gap_s)
            stalls.setdefault(fault.__name__, []).append(stall_s)
            print(f"{fault.__name__}: {gap_s:.2f} s (the machine was busy for {stall_s:.2f} s)", flush=True)
        return gaps, stalls, check(job)


def main() -> int:
    """0 when nothing was lost, and everything in time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="how often each fault happens")
    parser.add_argument("--away-s", type=float, default=20.0, help="how long a leader is frozen or cut off")
    parser.add_argument("--quick", action="store_true", help="write no file")
    options = parser.parse_args()
    began = time.monotonic()
    with preloaded(PRELOADED):
        gaps, stalls, aborted = measure(options.rounds, options.away_s)
    rows: list[dict[str, Any]] = [
        {
            "what": what,
            "times": len(each),
            "median_s": statistics.median(each),
            "worst_s": max(each),
            "machine_busy_s": max(stalls[what]),
        }
        for what, each in gaps.items()
    ]
    columns = ("what", "times", "median_s", "worst_s", "machine_busy_s")
    _report.table("The longest time without a committed step", columns, [[row[c] for c in columns] for row in rows])
    print(f"0 steps lost, {aborted} attempts aborted, nobody wrote in vain; {time.monotonic() - began:.0f} s in all")
    if not options.quick:
        _report.write("failover", rows, away_s=options.away_s, aborted=aborted, lease_s=LEASE_S)
    return int(any(row["worst_s"] > PROMISED_S for row in rows))


if __name__ == "__main__":
    sys.exit(main())

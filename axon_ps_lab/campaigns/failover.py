"""The cost of faults of the leader and of etcd, several times each: `make lab NAME=failover`.

The job has three members of etcd, and two each of coordinators, shard servers and workers. Each fault happens to the
leader, or to etcd: a member is killed, disks are slow, it is compacted, or its quota is used up. The longest time
without a committed step is shown. The campaign fails if a step was lost, if a coordinator wrote after another one had
begun to, or if that time is longer than promised.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from axon_ps.testing import preloaded
from axon_ps_lab import report
from axon_ps_lab.campaigns.failover_job import (
    ETCD_FAULTS,
    FAULTS,
    FailoverJob,
    check,
    etcd_follower_killed,
    etcd_leader_killed,
)
from axon_ps_lab.faults.cluster import MODULES
from axon_ps_lab.faults.failover import FailoverCluster

PRELOADED = ("torch", "axon_ps.parallel", "axon_ps.worker.world", *MODULES)
PROMISED_S = 5.0
LEASE_S = 1.5
QUOTA_BYTES = 64 << 20


LeaderFault = Callable[[FailoverJob, float], float]


@dataclass
class Times:
    """The gaps of one fault, and the times for which the proxies did not run meanwhile, in seconds."""

    gaps: list[float] = field(default_factory=list)
    stalls: list[float] = field(default_factory=list)


def measure(faults: Sequence[LeaderFault], away_s: float, times: dict[str, Times]) -> int:
    """Inject faults into a job, one after the other; returns the number of attempts that did not commit."""
    with (
        tempfile.TemporaryDirectory() as directory,
        FailoverCluster(shards=2, world_size=2, lease_s=LEASE_S, quota_bytes=QUOTA_BYTES) as cluster,
    ):
        job = FailoverJob(cluster, Path(directory))
        for fault in faults:
            cluster.take_stall()
            of = times.setdefault(fault.__name__, Times())
            of.gaps.append(fault(job, away_s))
            of.stalls.append(cluster.take_stall())
            busy = f"the machine was busy for {of.stalls[-1]:.2f} s"
            print(f"{fault.__name__}: {of.gaps[-1]:.2f} s ({busy})", flush=True)
        return check(job)


def main() -> int:
    """Run the campaign; returns 0 if steps committed again in time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="how often each fault happens")
    parser.add_argument("--away-s", type=float, default=20.0, help="how long a leader is frozen or cut off")
    parser.add_argument("--quick", action="store_true", help="write no file")
    options = parser.parse_args()
    began, times = time.monotonic(), dict[str, Times]()
    with preloaded(PRELOADED):
        aborted = measure([*FAULTS * options.rounds, etcd_follower_killed], options.away_s, times)
        aborted += measure([etcd_leader_killed], options.away_s, times)
        aborted += measure([*ETCD_FAULTS * options.rounds], options.away_s, times)
    rows: list[dict[str, Any]] = [
        {
            "what": what,
            "times": len(each.gaps),
            "median_s": statistics.median(each.gaps),
            "worst_s": max(each.gaps),
            "machine_busy_s": max(each.stalls),
        }
        for what, each in times.items()
    ]
    columns = ("what", "times", "median_s", "worst_s", "machine_busy_s")
    report.table("The longest time without a committed step", columns, [[row[c] for c in columns] for row in rows])
    print(f"0 steps lost, {aborted} attempts aborted, nobody wrote in vain; {time.monotonic() - began:.0f} s in all")
    if not options.quick:
        report.write("failover", rows, away_s=options.away_s, aborted=aborted, lease_s=LEASE_S)
    return int(any(row["worst_s"] > PROMISED_S for row in rows))


if __name__ == "__main__":
    sys.exit(main())

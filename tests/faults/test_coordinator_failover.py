"""A coordinator that may die: three etcd members, two coordinators, a job that makes steps; all of them real processes.

`make lab NAME=failover` does each several times, freezes for longer, and prints a table of times.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from axon_ps_lab.campaigns.failover_job import (
    FailoverJob,
    check,
    cut_from_etcd,
    cut_from_workers,
    etcd_compacted,
    etcd_follower_killed,
    etcd_full,
    etcd_slow_disks,
    frozen,
    killed,
)
from axon_ps_lab.etcd import NEEDED, is_installed
from axon_ps_lab.faults.failover import FailoverCluster

pytestmark = pytest.mark.skipif(not is_installed(), reason=NEEDED)

NEEDS_STRACE = pytest.mark.skipif(shutil.which("strace") is None, reason="there is no strace: apt-get install strace")
"""It makes the disks of etcd slow."""

Fault = Callable[[FailoverJob, float], float]

AGAIN_S = 5.0
"""The promise: a step commits again within this."""

STALLS = 4
"""How often in a row a busy machine may let nobody run, in a failover: lease, election, sessions, the step."""

QUOTA_BYTES = 16 << 20
"""What etcd stores."""

AWAY_S = 5.0
"""How long the leader is away here: longer than its lease."""


@pytest.mark.parametrize(
    ("faults", "proxied"),
    [
        ((frozen, killed), False),
        ((cut_from_etcd, cut_from_workers, etcd_follower_killed), False),
        ((frozen, killed, cut_from_workers), True),
        pytest.param((etcd_slow_disks, etcd_compacted, etcd_full), False, marks=NEEDS_STRACE),
    ],
)
def test_a_job_outlives_whatever_happens_to_its_leader(
    faults: tuple[Fault, ...], proxied: bool, tmp_path: Path
) -> None:
    with FailoverCluster(shards=2, world_size=2, lease_s=1.5, quota_bytes=QUOTA_BYTES) as cluster:
        job = FailoverJob(cluster, tmp_path, proxied=proxied)
        gaps = {fault.__name__: fault(job, AWAY_S) for fault in faults}
        aborted, stalled_s = check(job), cluster.take_stall()
    late = {name: gap_s for name, gap_s in gaps.items() if gap_s > AGAIN_S + STALLS * stalled_s}
    assert late == {}, f"the machine was busy for up to {stalled_s:.1f} s at a time"
    assert aborted <= len(faults) or stalled_s > 0.5

"""Hosts whose members reach the coordinator through a proxy: a job trains as without, and outlives the proxy.

Tests of `coordinator/proxy/server.py` and `coordinator/proxy/upstream.py`.
"""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from axon_ps.coordinator.client.operator import OperatorClient
from axon_ps.rpc.security import Security
from axon_ps.testing import LocalCluster
from axon_ps.testing.processes import PROXY
from axon_ps.testing.workers import WorkerFailed, WorkerProcess, results_of
from axon_ps.types import Role
from axon_ps_lab.campaigns.failover_job import plain, steps_of, train, until
from deadlines import HANG_S

SOON_S = HANG_S
LEASE_S = 2.0
TLS = pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])


def on_hosts(cluster: LocalCluster, directory: Path, hosts: int) -> list[WorkerProcess]:
    """All workers, divided among hosts with a proxy each."""
    workers: list[WorkerProcess] = []
    for host in range(hosts):
        ranks = range(cluster.world_size * host // hosts, cluster.world_size * (host + 1) // hosts)
        env = {"AXON_PS_COORDINATOR": cluster.add_proxy(), "AXON_PS_NODE": f"host-{host}"}
        workers += cluster.start_workers(train, args=(directory,), ranks=ranks, env=env)
    return workers


def finish(directory: Path, workers: list[WorkerProcess], more: int = 10) -> list[Any]:
    """The values after some more steps."""
    (directory / "stop").write_text(str(steps_of(directory, 0)[-1][1] + more))
    return [result.value for result in results_of(workers, timeout_s=SOON_S, check=True)]


@TLS
def test_a_job_trains_through_proxies(tmp_path: Path, tls: bool) -> None:
    with LocalCluster(shards=1, world_size=4, security=Security(tls=tls)) as cluster:
        workers = on_hosts(cluster, tmp_path, 2)
        until(lambda: len(steps_of(tmp_path, 0)) > 10)
        members = cluster.status().membership
        assert {m.rank: m.node for m in members.workers} == {0: "host-0", 1: "host-0", 2: "host-1", 3: "host-1"}
        values = finish(tmp_path, workers)
    made = steps_of(tmp_path, 0)
    assert all(committed for _, _, committed, _ in made)
    assert all(np.array_equal(value, plain([4] * made[-1][1])) for value in values)


def test_a_worker_that_dies_is_lost_at_once_and_the_others_of_its_host_go_on(tmp_path: Path) -> None:
    with LocalCluster(shards=1, world_size=2, min_workers=1, lease_s=30.0) as cluster:
        workers = on_hosts(cluster, tmp_path, 1)
        until(lambda: len(steps_of(tmp_path, 0)) > 5)
        killed_s = time.monotonic()
        cluster.kill(Role.WORKER, 1)
        until(lambda: [s for s in steps_of(tmp_path, 0) if s[2] and s[3] == 1])
        assert time.monotonic() - killed_s < 10.0, "long before its lease is over"
        finish(tmp_path, workers[:1])
        workers[1].end()


def test_a_host_that_dies_is_lost_in_one_generation(tmp_path: Path) -> None:
    with LocalCluster(shards=1, world_size=4, min_workers=1, lease_s=30.0) as cluster:
        workers = on_hosts(cluster, tmp_path, 2)
        until(lambda: len(steps_of(tmp_path, 0)) > 5)
        before = cluster.status().membership
        for worker in workers[2:]:
            worker.process.send_signal(signal.SIGSTOP)  # they do not come back by another way
        cluster.kill(PROXY, 1)
        after = until(lambda: [s for s in [cluster.status().membership] if len(s.workers) == 2])[0]
        assert after.generation == before.generation + 1
        until(lambda: [s for s in steps_of(tmp_path, 0) if s[2] and s[3] == 2])
        for worker in workers[2:]:
            worker.kill()
            worker.end()
        finish(tmp_path, workers[:2])


def test_who_is_revoked_behind_a_proxy_is_out_alone(tmp_path: Path) -> None:
    async def revoke(cluster: LocalCluster) -> None:
        async with OperatorClient(cluster.address, security=cluster.security, job=cluster.job) as operator:
            await operator.revoke("worker/2", "the laptop was stolen")

    with LocalCluster(shards=1, world_size=4, min_workers=1, security=Security(tls=True)) as cluster:
        workers = on_hosts(cluster, tmp_path, 2)
        until(lambda: len(steps_of(tmp_path, 0)) > 5)
        asyncio.run(revoke(cluster))
        with pytest.raises(WorkerFailed, match="revoked: the laptop was stolen"):
            results_of(workers[2:3], timeout_s=SOON_S, check=True)
        until(lambda: [s for s in steps_of(tmp_path, 0) if s[2] and s[3] == 3])
        assert [m.rank for m in cluster.status().membership.workers] == [0, 1, 3]
        assert cluster.process(PROXY, 1).exit_code is None
        finish(tmp_path, [worker for rank, worker in enumerate(workers) if rank != 2])


def test_a_worker_that_is_frozen_is_lost_when_its_lease_is_over(tmp_path: Path) -> None:
    with LocalCluster(shards=1, world_size=2, min_workers=1, lease_s=LEASE_S) as cluster:
        workers = on_hosts(cluster, tmp_path, 1)
        until(lambda: len(steps_of(tmp_path, 0)) > 5)
        cluster.kill(Role.WORKER, 1, signal.SIGSTOP)
        until(lambda: [s for s in steps_of(tmp_path, 0) if s[2] and s[3] == 1])
        assert f"was silent for {LEASE_S:g} s" in cluster.log("coordinator")
        workers[1].kill()
        workers[1].end()
        finish(tmp_path, workers[:1])


@TLS
def test_a_proxy_that_is_started_again_has_its_members_back(tmp_path: Path, tls: bool) -> None:
    with LocalCluster(shards=1, world_size=2, security=Security(tls=tls)) as cluster:
        workers = on_hosts(cluster, tmp_path, 1)
        until(lambda: len(steps_of(tmp_path, 0)) > 5)
        cluster.kill(PROXY)
        until(lambda: not cluster.status().membership.workers)
        cluster.restart(PROXY)
        began = len(steps_of(tmp_path, 0))
        until(lambda: [s for s in steps_of(tmp_path, 0)[began:] if s[2]])
        values = finish(tmp_path, workers)
    made = [s for s in steps_of(tmp_path, 0) if s[2]]
    assert all(np.array_equal(value, plain([2] * made[-1][1])) for value in values)


def test_a_coordinator_that_is_started_again_has_its_hosts_back(tmp_path: Path) -> None:
    with LocalCluster(shards=1, world_size=2, durable=True) as cluster:
        workers = on_hosts(cluster, tmp_path, 1)
        until(lambda: len(steps_of(tmp_path, 0)) > 5)
        cluster.kill("coordinator")
        cluster.restart("coordinator")
        began = len(steps_of(tmp_path, 0))
        until(lambda: [s for s in steps_of(tmp_path, 0)[began:] if s[2]])
        values = finish(tmp_path, workers)
    made = [s for s in steps_of(tmp_path, 0) if s[2]]
    assert all(np.array_equal(value, plain([2] * made[-1][1])) for value in values)

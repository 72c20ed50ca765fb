"""Forks of a worker: data loaders of every kind, pools, programs; what a fork may not do; deaths among them."""

from __future__ import annotations

from pathlib import Path

import pytest

from axon_ps.testing import LocalCluster
from axon_ps_lab.campaigns import loader_worker

PROGRAM = Path(loader_worker.__file__)


@pytest.mark.parametrize("kind", loader_worker.KINDS)
@pytest.mark.parametrize("environment", [{}, loader_worker.WITHOUT_SHARED_MEMORY], ids=["shared memory", "gRPC only"])
def test_loaders_train(kind: str, environment: dict[str, str]) -> None:
    cells = [(0, "fork"), (1, "fork"), (4, "fork")]
    with LocalCluster(shards=1, world_size=2, lease_s=30.0) as cluster:
        for result in cluster.run_workers(loader_worker.runs, args=(kind, cells, 2), env=environment):
            assert result.value == {f"{n} {method}": 2 for n, method in cells}


def test_loaders_of_other_start_methods_train() -> None:
    cells = [(1, "forkserver"), (1, "spawn")]
    with LocalCluster(shards=1, lease_s=30.0) as cluster:
        (result,) = cluster.run_workers(loader_worker.runs, args=("fsdp", cells, 1))
        assert len(result.value) == 2


def test_a_dead_loader_worker_is_torchs_error() -> None:
    with LocalCluster(shards=1, lease_s=30.0) as cluster:
        (result,) = cluster.run_workers(loader_worker.killed, args=("fsdp", "fork"))
    assert "DataLoader worker (pid" in result.value


def test_persistent_workers_pools_and_programs() -> None:
    with LocalCluster(shards=1, lease_s=30.0) as cluster:
        cluster.run_workers(loader_worker.others, args=("fsdp",))


def test_a_fork_may_use_and_close_nothing() -> None:
    with LocalCluster(shards=1, lease_s=30.0) as cluster:
        (result,) = cluster.run_workers(loader_worker.refusals)
    told = result.value
    for harmless in loader_worker.HARMLESS:
        assert told.pop(harmless) == "", harmless
    for what, message in told.items():
        assert message.startswith("Misuse: this process was forked from process"), f"{what}: {message}"
        assert "'spawn'" in message


def test_a_death_is_seen_at_once_though_a_fork_outlives_it() -> None:
    """The fork has the worker's descriptors: were its connections among them, only the lease would end it."""
    with LocalCluster(shards=1, world_size=2, min_workers=1, lease_s=40.0) as cluster:
        survivor, _ = cluster.run_workers(loader_worker.outlived, check=False)
    assert survivor.error == ""
    assert survivor.value < 3.0

"""Checkpoints that nobody asks for: written, verified, removed, and restored by the job itself when servers die.

The oracle is plain torch: a job that went back to a checkpoint ends with the values of one that was never disturbed.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import axon_ps
from axon_ps import parallel
from axon_ps.sharding.plan import PlanOptions
from axon_ps.storage.manifest import list_checkpoints
from axon_ps.testing import LocalCluster
from axon_ps.testing.cluster import COORDINATOR
from axon_ps.testing.workers import WorkerProcess
from axon_ps.types import Role
from parity_model import Block, Values, assert_close, batch, build, plain
from pausing import make_pipes, pause, paused

STEPS, FATAL = 12, 7
SOON_S = 30.0


def train(pipes: Path | None, follow: Path | None = None) -> tuple[int, Values]:
    """Train to version STEPS; the version with which it began, and the values.

    Args:
        pipes: pause once, at version FATAL.
        follow: never be more than a step ahead of the checkpoints in this directory, so that they are of even versions.
    """
    torch.set_num_threads(1)
    with axon_ps.World.init(timeout_s=60.0) as world:
        model = parallel.FSDP(
            build(),
            world.default_group,
            unit_types={Block},
            plan_options=PlanOptions(chunk_numel=512, min_slice_numel=128),
        )
        optimizer = parallel.SGD(model, lr=0.1, momentum=0.9)
        began, to_pause = world.version, True
        while world.version < STEPS:
            step = world.version
            if step == FATAL and to_pause and pipes is not None:
                pause(pipes)
                to_pause = False
            model(batch(step, world.replica)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if follow is not None and world.version > 1:
                until(lambda: max(versions(follow), default=0) >= world.version - 1)
        return began, {name: value.numpy().copy() for name, value in model.state_dict().items()}


def cluster_of(directory: Path, **options: Any) -> LocalCluster:
    chosen = {"checkpoint_every": "2", "lease_s": 3.0, "replication": 1} | options
    return LocalCluster(shards=2, world_size=1, checkpoint_dir=directory, **chosen)


def until(true: Callable[[], bool]) -> None:
    """Wait for what other processes do."""
    deadline = time.monotonic() + SOON_S
    while not true():
        assert time.monotonic() < deadline, "it has not happened"
        time.sleep(0.01)


def versions(directory: Path) -> list[int]:
    return [manifest.version for manifest in list_checkpoints(str(directory))]


def value_of(worker: WorkerProcess) -> Any:
    result: Any = worker.result()
    assert not result.error, result.error
    return result.value


def test_they_are_written_verified_and_the_old_ones_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = tmp_path / "by-hand"
    mine.mkdir()
    (mine / "note").write_text("not the job's")
    monkeypatch.chdir(tmp_path)
    with cluster_of(Path(), checkpoint_limit=2) as cluster:
        (worker,) = cluster.start_workers(train, args=(None, tmp_path))
        _, values = value_of(worker)
        until(lambda: max(versions(tmp_path)) >= STEPS - 1 and len(versions(tmp_path)) == 2)
        assert cluster.log(COORDINATOR).count("is complete and verified") >= 4
        assert f"checkpoint {tmp_path}/step-" in cluster.log(COORDINATOR), "shard servers may run in another directory"
    assert_close(values, plain([1] * STEPS))
    assert (mine / "note").read_text() == "not the job's"
    names = {f"step-{version:010d}" for version in versions(tmp_path)}
    assert {path.name for path in tmp_path.iterdir()} == {"by-hand", *names}


def test_a_shard_server_that_dies_costs_the_steps_since_the_last_one_and_no_word(tmp_path: Path) -> None:
    make_pipes(tmp_path)
    checkpoints = tmp_path / "checkpoints"
    with cluster_of(checkpoints) as cluster:
        (worker,) = cluster.start_workers(train, args=(tmp_path, checkpoints))
        with paused(tmp_path):
            until(lambda: 6 in versions(checkpoints))
            cluster.kill(Role.SHARD, 1)
            cluster.restart(Role.SHARD, 1)
        began, values = value_of(worker)
        log = cluster.log(COORDINATOR)
    assert began == 0
    assert "trying again" not in log
    assert_close(values, plain([1] * STEPS))
    assert "shard server 1 was lost with its parameters: restoring" in log
    assert "the job goes on from" in log


@pytest.mark.parametrize("how", ["truncated", "altered", "without its manifest's end", "gone"])
def test_a_damaged_one_is_refused_loudly_for_the_one_before(how: str, tmp_path: Path) -> None:
    make_pipes(tmp_path)
    checkpoints = tmp_path / "checkpoints"
    with cluster_of(checkpoints) as cluster:
        (worker,) = cluster.start_workers(train, args=(tmp_path, checkpoints))
        with paused(tmp_path):
            until(lambda: {4, 6} <= set(versions(checkpoints)))
            until(lambda: cluster_is_idle(checkpoints))
            damage(checkpoints / f"step-{6:010d}", how)
            cluster.kill(Role.SHARD, 0)
            cluster.restart(Role.SHARD, 0)
        _, values = value_of(worker)
        log = cluster.log(COORDINATOR)
    assert_close(values, plain([1] * STEPS))
    assert f"{checkpoints}/step-{6:010d} is passed over" in log
    assert f"goes on from {checkpoints}/step-{4:010d}, version 4" in log


def cluster_is_idle(checkpoints: Path) -> bool:
    """Whether the third checkpoint is complete: nothing is written or removed any more while the worker is paused."""
    return versions(checkpoints) == [2, 4, 6]


def damage(directory: Path, how: str) -> None:
    data = sorted(path for path in directory.iterdir() if path.suffix != ".json")[0]
    manifest = next(path for path in directory.iterdir() if path.suffix == ".json")
    content = data.read_bytes()
    if how == "truncated":
        data.write_bytes(content[:-1])
    elif how == "altered":
        data.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    elif how == "gone":
        data.unlink()
    else:
        manifest.write_bytes(manifest.read_bytes()[:-20])


@pytest.mark.parametrize("durable", [False, True])
def test_everything_may_die_at_once(durable: bool, tmp_path: Path) -> None:
    make_pipes(tmp_path)
    checkpoints = tmp_path / "checkpoints"
    with cluster_of(checkpoints, durable=durable) as cluster:
        (worker,) = cluster.start_workers(train, args=(tmp_path, checkpoints))
        with paused(tmp_path):
            until(lambda: 6 in versions(checkpoints))
            for rank in range(2):
                cluster.kill(Role.SHARD, rank)
            cluster.kill(COORDINATOR)
        worker.kill()
        cluster.restart(COORDINATOR)
        for rank in range(2):
            cluster.restart(Role.SHARD, rank)
        (worker,) = cluster.start_workers(train, args=(None,))
        began, values = value_of(worker)
    assert began == 6
    assert_close(values, plain([1] * STEPS))


def test_who_restores_an_older_one_goes_on_from_that(tmp_path: Path) -> None:
    make_pipes(tmp_path)
    checkpoints = tmp_path / "checkpoints"
    with cluster_of(checkpoints, checkpoint_limit=1) as cluster:
        (worker,) = cluster.start_workers(train, args=(None, checkpoints))
        value_of(worker)
        until(lambda: versions(checkpoints) == [STEPS])
    future = checkpoints / f"step-{STEPS:010d}"
    shutil.move(future, tmp_path / "future")
    with cluster_of(checkpoints, checkpoint_limit=1) as cluster:
        (worker,) = cluster.start_workers(train, args=(tmp_path, checkpoints))
        with paused(tmp_path):
            until(lambda: versions(checkpoints) == [6])
        worker.kill()
    shutil.move(tmp_path / "future", future)
    with cluster_of(checkpoints) as cluster:  # the future was written before what it is newer than
        (worker,) = cluster.start_workers(train, args=(None,))
        began, values = value_of(worker)
    assert began == 6
    assert_close(values, plain([1] * STEPS))


def test_where_there_is_none_it_is_said_and_the_job_waits_for_one(tmp_path: Path) -> None:
    make_pipes(tmp_path)
    with cluster_of(tmp_path / "checkpoints", checkpoint_every="1h") as cluster:
        (worker,) = cluster.start_workers(train, args=(tmp_path,))
        with paused(tmp_path):
            cluster.kill(Role.SHARD)
            cluster.restart(Role.SHARD)
            until(lambda: "has no checkpoint that can be restored" in cluster.log(COORDINATOR))
        worker.kill()


def test_two_servers_that_die_at_once_take_both_copies_with_them_and_the_newest_is_restored(tmp_path: Path) -> None:
    make_pipes(tmp_path)
    checkpoints = tmp_path / "checkpoints"
    with cluster_of(checkpoints, replication=2) as cluster:
        (worker,) = cluster.start_workers(train, args=(tmp_path, checkpoints))
        with paused(tmp_path):
            until(lambda: 6 in versions(checkpoints))
            for rank in range(2):
                cluster.kill(Role.SHARD, rank)
            for rank in range(2):
                cluster.restart(Role.SHARD, rank)
        _, values = value_of(worker)
        log = cluster.log(COORDINATOR)
    assert_close(values, plain([1] * STEPS))
    assert "the job goes on from" in log

"""Checkpoints that nobody asks for: written, verified, removed, and restored by the job itself when servers die.

The oracle is plain torch: a job that went back to a checkpoint ends with the values of one that was never disturbed.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from axon_ps.testing import LocalCluster
from axon_ps.testing.processes import COORDINATOR
from axon_ps.types import Role
from checkpointed_job import FATAL, STEPS, train, until, value_of, versions
from parity_model import assert_close, plain
from pausing import make_pipes, paused


def cluster_of(directory: Path, **options: Any) -> LocalCluster:
    chosen = {"checkpoint_every": "2", "lease_s": 3.0, "replication": 1} | options
    return LocalCluster(shards=2, world_size=1, checkpoint_dir=directory, **chosen)


def kill_servers(cluster: LocalCluster) -> None:
    for rank in range(2):
        cluster.kill(Role.SHARD, rank)


def restart_servers(cluster: LocalCluster) -> None:
    for rank in range(2):
        cluster.restart(Role.SHARD, rank)


def kill_services(cluster: LocalCluster) -> None:
    kill_servers(cluster)
    cluster.kill(COORDINATOR)


def restart_services(cluster: LocalCluster) -> None:
    cluster.restart(COORDINATOR)
    restart_servers(cluster)


def test_they_are_written_verified_and_the_old_ones_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = tmp_path / "by-hand"
    mine.mkdir()
    (mine / "note").write_text("not the job's")
    monkeypatch.chdir(tmp_path)
    with cluster_of(Path(), checkpoint_limit=2) as cluster:
        (worker,) = cluster.start_workers(train, args=(None, tmp_path))
        _, values = value_of(worker)
        until(lambda: max(versions(tmp_path)) >= STEPS - 1 and len(versions(tmp_path)) == 2)
        until(lambda: cluster.log(COORDINATOR).count("is complete and verified") >= 4)
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


DAMAGES = {
    7: ("flip", ".safetensors"),
    6: ("cut", ".safetensors"),
    5: ("remove", ".safetensors"),
    4: ("flip", ".json"),
    3: ("cut", ".json"),
    2: ("empty", ".json"),
}
"""By the version of the checkpoint; that of version 1 is the newest that nothing happens to."""


@pytest.mark.parametrize("everything", [False, True])
def test_damaged_ones_are_passed_over_loudly_for_the_one_before(everything: bool, tmp_path: Path) -> None:
    make_pipes(tmp_path)
    checkpoints = tmp_path / "checkpoints"
    with cluster_of(checkpoints, checkpoint_every="1", checkpoint_limit=20) as cluster:
        (worker,) = cluster.start_workers(train, args=(tmp_path, checkpoints, 0))
        with paused(tmp_path):
            until(lambda: cluster.log(COORDINATOR).count("is complete and verified") == FATAL)
            kill_servers(cluster)
            if everything:
                cluster.kill(COORDINATOR)
            for version, how in DAMAGES.items():
                damage(checkpoints / f"step-{version:010d}", *how)
            for name in HOSTILE:
                put_hostile(checkpoints / name, name)
        if everything:
            worker.kill()
            cluster.restart(COORDINATOR)
        restart_servers(cluster)
        if everything:
            (worker,) = cluster.start_workers(train, args=(None,))
        began, values = value_of(worker)
        log = cluster.log(COORDINATOR)
    assert_close(values, plain([1] * STEPS))
    for version in DAMAGES:
        assert f"{checkpoints}/step-{version:010d} is passed over: " in log, version
    for name in HOSTILE:
        assert f"{checkpoints}/{name} is passed over: {checkpoints}/{name}/manifest.json" in log, name
    assert f"goes on from {checkpoints}/step-{1:010d}, version 1" in log
    assert began == (1 if everything else 0)


HOSTILE = ("nested", "pipe", "link", "of-4294967295-servers")
"""Directories that somebody has put beside the job's checkpoints."""


def put_hostile(directory: Path, kind: str) -> None:
    directory.mkdir()
    manifest = directory / "manifest.json"
    if kind == "nested":
        manifest.write_bytes(b"[" * 100_000)
    elif kind == "pipe":
        os.mkfifo(manifest)
    elif kind == "link":
        manifest.symlink_to(manifest.name)
    else:
        value = json.loads((directory.parent / f"step-{1:010d}" / "manifest.json").read_text())
        del value["sha256"]  # it is read as one of before there was a hash
        manifest.write_text(json.dumps(value | {"num_servers": 4294967295, "created": "2999-01-01T00:00:00+00:00"}))


def damage(directory: Path, how: str, suffix: str) -> None:
    file = sorted(path for path in directory.iterdir() if path.suffix == suffix)[-1]
    content = file.read_bytes()
    at = len(content) // 2
    if how == "flip":
        file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    elif how == "cut":
        file.write_bytes(content[:at])
    elif how == "remove":
        file.unlink()
    else:
        file.write_bytes(b"")


@pytest.mark.parametrize("durable", [False, True])
def test_everything_may_die_at_once(durable: bool, tmp_path: Path) -> None:
    make_pipes(tmp_path)
    checkpoints = tmp_path / "checkpoints"
    with cluster_of(checkpoints, durable=durable) as cluster:
        (worker,) = cluster.start_workers(train, args=(tmp_path, checkpoints))
        with paused(tmp_path):
            until(lambda: 6 in versions(checkpoints))
            kill_services(cluster)
        worker.kill()
        restart_services(cluster)
        (worker,) = cluster.start_workers(train, args=(None,))
        began, values = value_of(worker)
    assert began == 6
    assert_close(values, plain([1] * STEPS))


def test_what_processes_that_were_killed_have_left_is_removed(tmp_path: Path) -> None:
    half, mine = tmp_path / f"step-{3:010d}", tmp_path / "step-by-step"
    for directory in (half, mine):
        directory.mkdir()
        for name in ("shard-00000-of-00002-v3-0.safetensors", ".shard-00001-of-00002-v3-0.safetensors.0.partial"):
            (directory / name).write_bytes(b"half")
    with cluster_of(tmp_path):
        until(lambda: not half.exists())
    assert len(list(mine.iterdir())) == 2


def test_a_job_that_lost_everything_before_its_first_one_begins_again(tmp_path: Path) -> None:
    make_pipes(tmp_path)
    with cluster_of(tmp_path / "checkpoints", durable=True, checkpoint_every="1h") as cluster:
        (worker,) = cluster.start_workers(train, args=(tmp_path,))
        with paused(tmp_path):
            kill_services(cluster)
        worker.kill()
        restart_services(cluster)
        (worker,) = cluster.start_workers(train, args=(None,))
        began, values = value_of(worker)
        log = cluster.log(COORDINATOR)
    assert began == 0
    assert "no checkpoint was written" in log
    assert "the job begins again" in log
    assert_close(values, plain([1] * STEPS))


def test_a_directory_that_is_gone_is_no_reason_to_begin_again(tmp_path: Path) -> None:
    make_pipes(tmp_path)
    checkpoints = tmp_path / "checkpoints"
    with cluster_of(checkpoints, durable=True) as cluster:
        (worker,) = cluster.start_workers(train, args=(tmp_path,))
        with paused(tmp_path):
            until(lambda: "is complete and verified" in cluster.log(COORDINATOR))
            kill_services(cluster)
            checkpoints.rename(tmp_path / "elsewhere")
        worker.kill()
        restart_services(cluster)
        until(lambda: "has no checkpoint that can be restored" in cluster.log(COORDINATOR))
        (tmp_path / "elsewhere").rename(checkpoints)
        (worker,) = cluster.start_workers(train, args=(None,))
        _, values = value_of(worker)
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
            kill_servers(cluster)
            restart_servers(cluster)
        _, values = value_of(worker)
        log = cluster.log(COORDINATOR)
    assert_close(values, plain([1] * STEPS))
    assert "the job goes on from" in log

"""Checkpoints that nobody asks for, on S3, which fails now and then: written, verified, removed, restored."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from axon_ps.storage.contents import verify
from axon_ps.testing import LocalCluster
from axon_ps.testing.processes import COORDINATOR
from axon_ps.types import Role
from checkpointed_job import STEPS, train, until, value_of, versions
from command_line import axon_ps
from parity_model import assert_close, plain
from pausing import make_pipes, paused
from s3_server import SECRET, Fault, S3Server, s3_server


@pytest.fixture(scope="module")
def started() -> Iterator[S3Server]:
    with s3_server() as server:
        server.boto3().create_bucket(Bucket="bucket")
        yield server


@pytest.fixture
def server(started: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    for name, value in started.environment.items():
        monkeypatch.setenv(name, value)
    started.faults.clear()
    yield started
    started.faults.clear()


def cluster_on(uri: str, server: S3Server) -> LocalCluster:
    return LocalCluster(
        shards=2, world_size=1, lease_s=3.0, replication=1, checkpoint_dir=uri, checkpoint_every="5",
        checkpoint_limit=1, environment=server.environment,
    )  # fmt: skip


def test_they_are_written_removed_and_restored_though_requests_fail(server: S3Server, tmp_path: Path) -> None:
    make_pipes(tmp_path)
    uri = "s3://bucket/run"
    for method, url, fault in (
        ("PUT", ".safetensors", Fault.SLOW_DOWN),
        ("PUT", ".safetensors", Fault.RESET),
        ("PUT", "manifest.json", Fault.INTERNAL),
        ("GET", "list-type", Fault.SLOW_DOWN),
        ("DELETE", "", Fault.INTERNAL),
    ):
        server.faults.add(method, url, fault, times=2)
    with cluster_on(uri, server) as cluster:
        (worker,) = cluster.start_workers(train, args=(tmp_path,))
        with paused(tmp_path):
            until(lambda: "is complete and verified" in cluster.log(COORDINATOR))
            (first,) = versions(uri)
            cluster.kill(Role.SHARD, 1)
            server.faults.add("GET", ".safetensors", Fault.RESET, times=1)
            cluster.restart(Role.SHARD, 1)
        _, values = value_of(worker)
        until(lambda: cluster.log(COORDINATOR).count("is complete and verified") == 2)
        until(lambda: len(versions(uri)) == 1)
        log = cluster.log(COORDINATOR) + cluster.log(Role.SHARD, 0) + cluster.log(Role.SHARD, 1)
    assert_close(values, plain([1] * STEPS))
    assert f"the job goes on from {uri}/step-{first:010d}, version {first}" in log
    assert SECRET not in log
    listed = axon_ps("checkpoint", "ls", uri)
    assert re.search(rf"{uri}/step-\d+  version \d+", listed.stdout), listed.stderr
    assert verify(uri).version >= first + 5


def test_one_that_cannot_be_written_is_no_checkpoint_and_is_tried_again(server: S3Server, tmp_path: Path) -> None:
    uri = "s3://bucket/denied"
    server.faults.add("PUT", "/denied/step-", Fault.DENIED)
    make_pipes(tmp_path)
    with cluster_on(uri, server) as cluster:
        (worker,) = cluster.start_workers(train, args=(tmp_path,))
        with paused(tmp_path):
            until(lambda: "trying again" in cluster.log(COORDINATOR))
            assert versions(uri) == []
            server.faults.clear()
            until(lambda: "is complete and verified" in cluster.log(COORDINATOR))
        value_of(worker)
        log = cluster.log(COORDINATOR)
    assert re.search(r"bucket/denied/step-\d+/shard-\S+ cannot be written: .*credentials and its policy; trying", log)
    assert verify(uri).version >= 5

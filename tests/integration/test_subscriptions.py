"""A running job's parameters, pulled by what is no member: never torn, encoded once, through deaths of servers."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import axon_ps
import subscribed_job
from axon_ps.compress import cast
from axon_ps.errors import InvalidRequest, Misuse, PermissionDenied, Timeout
from axon_ps.rpc.channels import connect
from axon_ps.rpc.security import Security
from axon_ps.rpc.service import Stub
from axon_ps.testing import LocalCluster
from axon_ps.testing.workers import WorkerProcess
from axon_ps.types import DType, Role
from axon_ps.wire.v1 import common_pb2, shard_pb2
from subscribed_job import check

NAME = "policy"


@dataclass
class Running:
    cluster: LocalCluster
    worker: WorkerProcess

    def subscribe(self, token: str | None = None, **options: object) -> axon_ps.Subscription:
        given = self.cluster.observer_token if token is None else token
        return axon_ps.subscribe(
            **{"model": NAME, "timeout_s": 60.0, **options},  # type: ignore[arg-type]
            coordinator=self.cluster.address,
            job=self.cluster.job,
            security=Security(token=given),
        )

    def counters(self) -> dict[str, float]:
        """The sums over all shard servers."""

        async def ask(address: str) -> dict[str, float]:
            channel = connect(address, Security())
            try:
                request = shard_pb2.StatsRequest(context=common_pb2.CallContext(job=self.cluster.job))
                stub = Stub(
                    channel,
                    shard_pb2.DESCRIPTOR.services_by_name["Shard"],
                    Security(token=self.cluster.observer_token),
                )
                return dict((await stub.call("Stats", request, timeout_s=10.0)).values)
            finally:
                await channel.close()

        each = [asyncio.run(ask(shard.address)) for shard in self.cluster.status().membership.shards]
        return {name: sum(one[name] for one in each) for name in each[0]}


@contextmanager
def running(directory: Path) -> Iterator[Running]:
    with LocalCluster(shards=2, world_size=1, replication=2, lease_s=1.0) as cluster:
        (worker,) = cluster.start_workers(subscribed_job.train, args=(directory, NAME))
        yield Running(cluster, worker)
        (directory / "stop").touch()
        result = worker.result()
        assert not result.error, result.error
        assert result.value > 0


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A job of two shard servers."""
    with running(tmp_path_factory.mktemp("job")) as job:
        yield job


def bf16(values: np.ndarray) -> np.ndarray:
    return cast.decoded(np.ascontiguousarray(values).reshape(-1), DType.BF16)


def test_versions_one_after_the_other(job: Running) -> None:
    with job.subscribe() as subscription:  # before the job has the model
        versions = []
        for version, parameters in subscription:
            check(version, parameters)
            versions.append(version)
            if len(versions) == 5:
                break
        assert versions == sorted(set(versions))
        assert parameters["units.0.weight"].shape == (300, 64)
        first = subscription.values
        check(*subscription.latest())
        assert subscription.values is not None
        assert first is not None
        frozen = next(i for i, unit in enumerate(first.spec.layout.units) if not unit.trainable)
        assert subscription.values.units[frozen] is first.units[frozen]
        assert subscription.at(subscription.values.version + 3).version == subscription.values.version
        with pytest.raises(InvalidRequest, match="version 1 is not there any more"):
            subscription.at(1)
        assert subscription.statistics()["pulls"] == 7


def test_an_export_is_loaded_by_others(job: Running, tmp_path: Path) -> None:
    class Config:
        def save_pretrained(self, save_directory: Path) -> None:
            (save_directory / "config.json").write_text('{"dtype": "float32"}')

    with job.subscribe(dtype="f16") as subscription:
        with pytest.raises(Misuse, match="call latest"):
            subscription.export(tmp_path)
        version, parameters = subscription.latest()
        file = subscription.export(tmp_path, Config())
    loaded = load_file(file)
    assert list(loaded) == list(parameters)
    check(version, loaded)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert json.loads((tmp_path / "config.json").read_text()) == {"dtype": "float16"}


def test_one_encoding_a_version_for_all_subscribers(job: Running) -> None:
    pulled: list[list[int]] = [[], [], []]

    def pull(number: int) -> None:
        with job.subscribe(dtype="bf16", every=20, changes=number == 2) as subscription:
            for version, parameters in itertools.islice(subscription, 4):
                check(version, parameters, bf16)
                pulled[number].append(version)

    before = job.counters()
    threads = [threading.Thread(target=pull, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    after = job.counters()
    assert [len(each) for each in pulled] == [4, 4, 4]
    assert all(version % 20 == 0 for each in pulled for version in each[1:]), "the first one is the present version"
    versions = {version for each in pulled for version in each}
    assert len(versions) < 12, "subscribers with the same interval pull the same versions"
    delta = {name: after[name] - before.get(name, 0) for name in after}
    assert delta["published_pulls"] >= 2 * 3 * 4
    assert delta["published"] <= 2 * 2 * (len(versions) + 1)  # each server's versions, the next one among them
    chunks = job.counters()["slices"] / 2  # of this model each slice is one chunk, and has two holders
    assert delta["published_encodings"] <= math.ceil(chunks / 2) * delta["published"]  # one server may have one more


def test_whoever_may_not_or_asks_for_what_is_not_there(job: Running) -> None:
    with job.subscribe("wrong") as subscription, pytest.raises(PermissionDenied, match="is none of this server's"):
        subscription.latest()
    with job.subscribe(model="critic") as subscription, pytest.raises(Timeout, match="does not have model 'critic'"):
        subscription.latest(timeout_s=0.3)
    with pytest.raises(InvalidRequest, match="give versions, as 10"):
        job.subscribe(every="soon")
    with pytest.raises(InvalidRequest, match="dtype is 'i64'; use one of float32"):
        job.subscribe(dtype="i64")


def test_nothing_is_retained_when_nobody_subscribes(job: Running) -> None:
    before = job.counters()
    version = job.cluster.status().version
    while job.cluster.status().version < version + 3:  # the job has a step every few milliseconds
        pass
    assert job.counters()["published"] == before["published"]


def test_servers_die(tmp_path: Path) -> None:
    with running(tmp_path) as job, job.subscribe() as subscription:
        for kill in (0, 1):
            check(*next(subscription))
            while any(model.lacking for model in job.cluster.status().models):
                check(*next(subscription))
            job.cluster.kill(Role.SHARD, kill)
            for _ in range(5):
                check(*next(subscription))
            job.cluster.restart(Role.SHARD, kill)
        check(*next(subscription))
        assert subscription.statistics()["retries"] > 0

"""Shard servers die, freeze, come and go while a job trains: nothing is lost, and at most one step a death.

The oracle is the same job with nobody dying: every bit of every parameter is to be the same, whoever summed it.
"""

from __future__ import annotations

import asyncio
import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import axon_ps
from axon_ps import parallel
from axon_ps.rpc.health import SERVING, health_of
from axon_ps.sharding.plan import PlanOptions
from axon_ps.testing import LocalCluster
from axon_ps.types import Role
from axon_ps_lab.campaigns.ended_job import EndedJob, Trained, assert_same_bits, until
from deadlines import HANG_S
from parity_model import Block, batch, build, wrapped

KINDS: dict[str, dict[str, Any]] = {
    "FULL_SHARD": {},
    "SHARD_GRAD_OP-bf16": {
        "sharding_strategy": parallel.ShardingStrategy.SHARD_GRAD_OP,
        "mixed_precision": parallel.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
    },
    "int8": {"mixed_precision": parallel.MixedPrecision(wire_dtype="int8")},
    "int4": {"mixed_precision": parallel.MixedPrecision(param_dtype=torch.bfloat16, wire_dtype="int4")},
    "restored": {},
    "three backwards": {},
    "three backwards-bf16": {"mixed_precision": parallel.MixedPrecision(reduce_dtype=torch.bfloat16)},
    "three backwards-int8": {"mixed_precision": parallel.MixedPrecision(reduce_dtype="int8")},
}
RESTORED_AT = 2
"""The version that the kind "restored" saves, and restores: servers that come later get copies of another epoch."""


SENT = {"AXON_PS_DIRECT_MEMORY": "0"}
"""What travels goes through sockets, though all are on one host."""


def train(kind: str, end: Path) -> Trained:
    """Train until the version in the file `end`, once there is one."""
    torch.set_num_threads(1)
    trained = Trained()
    with axon_ps.World.init(timeout_s=HANG_S) as world:
        model = wrapped(world, **KINDS[kind])
        optimizer = parallel.AdamW(model, lr=0.01)
        last = 0
        while not last or world.version < last:
            for part in range(3 if kind.startswith("three backwards") else 1):
                model(batch(world.version + 1000 * part, world.replica)).backward()
            model.clip_grad_norm(0.5)
            result = optimizer.step()
            optimizer.zero_grad()
            if not result.committed:
                trained.aborted.append(result.reason)
            elif kind == "restored" and result.version == RESTORED_AT:
                model.save_checkpoint(f"{end}-checkpoint")
                model.load_checkpoint(f"{end}-checkpoint")
            if not last and end.exists():
                last = int(end.read_text() or 0)
        trained.version = world.version
        trained.values = {name: value.float().numpy().copy() for name, value in model.state_dict().items()}
    return trained


@pytest.mark.parametrize(("kind", "environment"), [*((kind, {}) for kind in KINDS), ("SHARD_GRAD_OP-bf16", SENT)])
def test_servers_die_one_after_the_other(kind: str, environment: dict[str, str], tmp_path: Path) -> None:
    with LocalCluster(shards=2, world_size=2, environment=environment) as cluster:
        job = EndedJob(cluster, train, kind, tmp_path / "end")
        for index in (0, 1, 0):
            cluster.kill(Role.SHARD, index)
            job.go_on()
            cluster.restart(Role.SHARD, index)
            job.settle(2)
            job.go_on()
        found = job.finish()
    for trained in found:
        assert len(trained.aborted) <= 3, trained.aborted
        # a push may hear of the death before the worker hears of the coordinator's decision
        assert all("was lost" in reason or "membership changed" in reason for reason in trained.aborted), (
            trained.aborted
        )
    assert_same_bits(found, train, kind, tmp_path, replication=2 if "bf16" in kind else 1)


AT = 3
"""The version at which `train_held` waits between two backwards."""


def train_held(backwards: int, directory: Path) -> Trained:
    """Train with two backwards a step; in one step wait after so many, until a shard server is gone."""
    torch.set_num_threads(1)
    trained, gone = Trained(), directory / "gone"
    with axon_ps.World.init(timeout_s=HANG_S) as world:
        model = wrapped(world)
        optimizer = parallel.AdamW(model, lr=0.01)
        while world.version < AT + 3:
            at = world.version
            for part in (1, 2):
                model(batch(2 * at + part, world.replica)).backward()
                if (at, part) == (AT, backwards) and not gone.exists():
                    (directory / f"held-{world.rank}").touch()
                    until(gone.exists, "a server is gone")
            result = optimizer.step()
            optimizer.zero_grad()
            if not result.committed:
                trained.aborted.append(result.reason)
        trained.values = {name: value.float().numpy().copy() for name, value in model.state_dict().items()}
    return trained


@pytest.mark.parametrize("backwards", [1, 2])
def test_a_server_dies_between_two_backwards_of_a_step(backwards: int, tmp_path: Path) -> None:
    with LocalCluster(shards=2, world_size=2) as cluster:
        workers = cluster.start_workers(train_held, args=(backwards, tmp_path))
        until(lambda: all((tmp_path / f"held-{rank}").exists() for rank in (0, 1)), "the workers are held")
        cluster.kill(Role.SHARD, 0)
        until(lambda: [m.rank for m in cluster.status().membership.shards] == [1], "the server is gone")
        (tmp_path / "gone").touch()
        results: Any = [worker.result() for worker in workers]
    assert [result.error for result in results] == ["", ""]
    assert [len(result.value.aborted) for result in results] == [1, 1]
    with LocalCluster(shards=2, world_size=2, replication=1) as cluster:
        right: Any = cluster.run_workers(train_held, args=(backwards, tmp_path))[0].value
    assert not right.aborted
    for result in results:
        assert all(np.array_equal(result.value.values[name], values) for name, values in right.values.items())


def test_a_frozen_server_is_replaced_by_its_backup_and_comes_back_as_if_new(tmp_path: Path) -> None:
    with LocalCluster(shards=2, world_size=2, lease_s=1.0) as cluster:
        job = EndedJob(cluster, train, "FULL_SHARD", tmp_path / "end")
        cluster.kill(Role.SHARD, 0, signal.SIGSTOP)
        until(lambda: job.servers == [1], "its lease is over")
        job.go_on()
        cluster.kill(Role.SHARD, 0, signal.SIGCONT)
        job.settle(2)
        cluster.kill(Role.SHARD, 1)
        job.go_on()
        found = job.finish()
    assert all(len(trained.aborted) <= 2 for trained in found), found
    assert_same_bits(found, train, "FULL_SHARD", tmp_path)


@pytest.mark.parametrize("replication", [1, 2])
def test_servers_come_and_go_and_no_step_is_aborted(replication: int, tmp_path: Path) -> None:
    with LocalCluster(shards=2, world_size=2, replication=replication) as cluster:
        job = EndedJob(cluster, train, "FULL_SHARD", tmp_path / "end")
        assert cluster.status().replication == replication
        added = cluster.add_shard()
        until(lambda: cluster.status().counters.get("slices_copied", 0) > 0, "slices move to the new server")
        job.go_on()
        cluster.drain(0)
        assert job.servers == [1, 2]
        job.settle(2)
        job.go_on()
        cluster.add_shard()
        cluster.drain(added)
        job.settle(2)
        assert job.servers == [0, 1], "a rank that is free is given again"
        job.go_on()
        found = job.finish()
        assert cluster.process(Role.SHARD, 0).exit_code == 0
    assert [trained.aborted for trained in found] == [[], []]
    assert_same_bits(found, train, "FULL_SHARD", tmp_path)


def is_safe(cluster: LocalCluster, index: int) -> bool:
    """What an orchestrator asks before it stops the next server."""
    address = cluster.address_of(Role.SHARD, index)
    health = health_of(address, cluster.security, service="axon_ps.wire.v1.Shard", timeout_s=HANG_S)
    return asyncio.run(health) == SERVING


@pytest.mark.parametrize("servers", [2, 3])
def test_a_rolling_update_of_the_servers_aborts_no_step(servers: int, tmp_path: Path) -> None:
    with LocalCluster(shards=servers, world_size=2, environment={"AXON_PS_DRAIN_S": "30"}) as cluster:
        job = EndedJob(cluster, train, "FULL_SHARD", tmp_path / "end")
        for index in reversed(range(servers)):
            cluster.kill(Role.SHARD, index, signal.SIGTERM)
            assert cluster.process(Role.SHARD, index).wait(HANG_S) == 0, cluster.log(Role.SHARD, index)
            assert "was drained; it holds nothing any more" in cluster.log(Role.SHARD, index)
            cluster.restart(Role.SHARD, index)
            until(partial(is_safe, cluster, index), "every slice has its copies")
            assert not sum(model.lacking for model in cluster.status().models)
        found = job.finish()
    assert [trained.aborted for trained in found] == [[], []]
    assert_same_bits(found, train, "FULL_SHARD", tmp_path)


def test_a_server_that_is_stopped_when_nobody_trains_just_leaves(tmp_path: Path) -> None:
    with LocalCluster(shards=2, world_size=2, environment={"AXON_PS_DRAIN_S": "600"}) as cluster:
        job = EndedJob(cluster, train, "FULL_SHARD", tmp_path / "end")
        job.finish()
        cluster.kill(Role.SHARD, 1, signal.SIGTERM)
        assert cluster.process(Role.SHARD, 1).wait(HANG_S) == 0, cluster.log(Role.SHARD, 1)


def test_four_servers_survive_the_death_of_one_after_the_other_until_two_are_left(tmp_path: Path) -> None:
    with LocalCluster(shards=4, world_size=2) as cluster:
        job = EndedJob(cluster, train, "FULL_SHARD", tmp_path / "end")
        for index in (2, 0):
            left = len(job.servers) - 1
            cluster.kill(Role.SHARD, index)
            job.settle(left)
            job.go_on()
        found = job.finish()
    assert all(len(trained.aborted) <= 2 for trained in found), found


def train_others(kind: str, end: Path) -> Trained:
    """As `train`: replicas that step asynchronously, or a second model that follows the average of the first."""
    torch.set_num_threads(1)
    trained, asynchronous = Trained(), kind == "asynchronous"
    with axon_ps.World.init(timeout_s=HANG_S) as world:
        common: dict[str, Any] = {
            "sharding_strategy": parallel.ShardingStrategy.SHARD_GRAD_OP,
            "unit_types": {Block},
            "plan_options": PlanOptions(chunk_numel=512, min_slice_numel=128),
        }
        policy = parallel.BoundedStaleness(max_staleness=2) if asynchronous else None
        model = parallel.FSDP(build(), world.default_group, policy=policy, **common)
        average = None if asynchronous else parallel.FSDP(build(), world.default_group, name="average", **common)
        optimizer = parallel.AdamW(model, lr=0.01)
        last = 0
        while not last or model.version < last:
            model(batch(model.version, world.replica)).backward()
            result = optimizer.step()
            optimizer.zero_grad()
            if not result.committed:
                trained.aborted.append(result.reason)
            if average is not None:
                average.copy_from(model, weight=0.5)
            if not last and end.exists():
                last = int(end.read_text() or 0)
        trained.version = model.version
        trained.values = {name: value.numpy().copy() for name, value in (average or model).state_dict().items()}
    return trained


@pytest.mark.parametrize("kind", ["asynchronous", "copies"])
def test_asynchronous_replicas_and_copies_of_models_survive_too(kind: str, tmp_path: Path) -> None:
    with LocalCluster(shards=2, world_size=2) as cluster:
        job = EndedJob(cluster, train_others, kind, tmp_path / "end")
        for index in (0, 1):
            cluster.kill(Role.SHARD, index)
            job.go_on()
            cluster.restart(Role.SHARD, index)
            job.settle(2)
            job.go_on()
        found = job.finish()
    assert all(np.isfinite(values).all() for trained in found for values in trained.values.values())

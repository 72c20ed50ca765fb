"""A worker that is killed and started again, as a container's restart policy does, under every strategy and wrapper.

Nobody knows which worker will be new: all run the same program from its first line. What a constructor sends to the
other workers (a gather, a broadcast, a barrier) would wait for ever for those that train already, so where parameters
are on the servers there may be none, and the others are not started again. Where parameters are the workers' own, a
death ends the others' collectives, they fail, too, and all begin anew.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import axon_ps
from axon_ps import parallel
from axon_ps.host.children import wait_for_any
from axon_ps.testing import LocalCluster
from axon_ps.testing.workers import WorkerProcess
from deadlines import HANG_S
from parity_model import Block, batch, build

STEPS, FATAL = 12, 5
SOON_S = HANG_S
MOST_RESTARTS = 5
ON_SERVERS = ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "two models", "asynchronous", "elastic loader", "int4")
OWN = ("NO_SHARD", "DDP", "SyncBatchNorm")


def live(kind: str, directory: Path, rank: int) -> int:
    """Train to version STEPS; in its first life rank 1 kills itself on the way. Returns how many steps it made."""
    torch.set_num_threads(1)
    first_life = directory / f"{rank}"
    victim = rank == 1 and not first_life.exists()
    first_life.touch()
    return train_own(kind, victim) if kind in OWN else train_on_servers(kind, victim)


def die(victim: bool, step: int) -> None:
    if victim and step >= FATAL:
        os.kill(os.getpid(), signal.SIGKILL)


def train_on_servers(kind: str, victim: bool) -> int:
    strategies = parallel.ShardingStrategy.__members__
    options: dict[str, Any] = {
        "unit_types": {Block},
        "sharding_strategy": strategies.get(kind, strategies["FULL_SHARD"]),
    }
    if kind == "asynchronous":
        options["sharding_strategy"] = strategies["SHARD_GRAD_OP"]
        options["policy"] = parallel.BoundedStaleness(max_staleness=2)
    if kind == "int4":
        options["sharding_strategy"] = strategies["SHARD_GRAD_OP"]
        options["mixed_precision"] = parallel.MixedPrecision(wire_dtype="int4")
    if kind == "HYBRID_SHARD":
        options["mixed_precision"] = parallel.MixedPrecision(param_dtype=torch.bfloat16)
    made = 0
    with axon_ps.World.init(timeout_s=HANG_S) as world:
        model = parallel.FSDP(build(), world.default_group, **options)
        others = [parallel.FSDP(build(), world.default_group, name="target", **options)] if kind == "two models" else []
        optimizer = parallel.AdamW(model.parameters(), lr=1e-3)
        if kind == "elastic loader":
            data = torch.utils.data.TensorDataset(batch(0, 0))
            loader = parallel.ElasticLoader(data, model, batch_size=4)
        while model.version < STEPS:
            die(victim, model.version)
            inputs = [x for (x,) in loader] if kind == "elastic loader" else [batch(model.version, world.replica)]
            for x in inputs:
                if model.version >= STEPS:
                    break
                die(victim, model.version)
                model(x).backward()
                made += optimizer.step().committed
                optimizer.zero_grad()
            for other in others:
                other.copy_from(model, weight=0.5)
    return made


def train_own(kind: str, victim: bool) -> int:
    with axon_ps.World.init(timeout_s=HANG_S) as world:
        group = world.default_group
        if kind == "NO_SHARD":
            model = parallel.FSDP(nn.Linear(8, 1), group, sharding_strategy=parallel.ShardingStrategy.NO_SHARD)
        elif kind == "DDP":
            model = parallel.DistributedDataParallel(nn.Linear(8, 1), group)
        else:
            layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
            synced = parallel.SyncBatchNorm.convert_sync_batchnorm(layers, group)
            model = parallel.DistributedDataParallel(synced, group)
        steps(model, victim)
    return STEPS


def steps(model: nn.Module, victim: bool) -> None:
    optimizer = (parallel.SGD if isinstance(model, parallel.FSDP) else torch.optim.SGD)(model.parameters(), lr=0.01)
    for step in range(STEPS):
        die(victim, step)
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", [*ON_SERVERS, *OWN])
def test_a_worker_that_is_killed_and_started_again_trains_on(kind: str, tmp_path: Path) -> None:
    restarts, made = Counter[int](), {}
    with LocalCluster(shards=2, world_size=2) as cluster:

        def start(rank: int) -> WorkerProcess:
            env = {"AXON_PS_NODE": f"container-{rank}"}
            return cluster.start_workers(live, ranks=[rank], args=(kind, tmp_path, rank), env=env)[0]

        alive = {rank: start(rank) for rank in (0, 1)}
        deadline = time.monotonic() + SOON_S
        while alive:
            processes = [worker.process for worker in alive.values()]
            ended = wait_for_any(processes, deadline)
            assert ended, {rank: worker.process.output for rank, worker in alive.items()}
            for rank in [rank for rank, worker in alive.items() if worker.process in ended]:
                result: Any = alive.pop(rank).end()
                if not result.error:
                    made[rank] = result.value
                    continue
                restarts[rank] += 1
                assert restarts[rank] <= MOST_RESTARTS, result.error
                assert kind in OWN or result.exit_code == -signal.SIGKILL, result.error
                alive[rank] = start(rank)
    assert set(made) == {0, 1}
    assert restarts[1] >= 1
    if kind in ON_SERVERS:
        assert restarts == {1: 1}, "nobody else was started again"
        assert made[0] >= (1 if kind == "asynchronous" else STEPS - FATAL)  # there each replica's step is a version

"""Members that die in the middle of training: what was committed stays, the others go on, and the values are right.

The oracle is plain torch over the replicas that took part in each step.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import axon_ps
from axon_ps import parallel
from axon_ps.errors import AxonError
from axon_ps.testing import LocalCluster
from axon_ps.testing.workers import results_of
from axon_ps.types import Role
from deadlines import HANG_S, WHOLE_S
from parity_model import Values, assert_close, batch, plain, wrapped
from pausing import make_pipes, pause, paused

STEPS, FATAL = 12, 5


def train(
    strategy: str, victim: int, when: str, pipes: Path, node_size: int | None = None
) -> tuple[Values, list[int], int]:
    """Train to version STEPS; rank `victim` kills itself at version FATAL. Values, replicas per version, aborts."""
    torch.set_num_threads(1)
    with axon_ps.World.init(timeout_s=HANG_S) as world:
        chosen = parallel.ShardingStrategy[strategy]
        model = wrapped(world, sharding_strategy=chosen, intra_node_size=node_size)
        optimizer = parallel.SGD(model, lr=0.1, momentum=0.9)
        participated: list[int] = []
        aborted = 0
        while world.version < STEPS:
            step = world.version
            if step == FATAL and when == "pause" and not aborted:
                pause(pipes)
            dies = world.rank == victim and step == FATAL
            if dies and when == "forward":
                os.kill(os.getpid(), signal.SIGKILL)
            if dies and when == "backward":
                last = model.runtime.units[-1].module
                last.register_full_backward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            model(batch(step, world.replica)).backward()
            if dies and when == "step":
                os.kill(os.getpid(), signal.SIGKILL)
            replicas = world.num_replicas
            result = optimizer.step()
            optimizer.zero_grad()
            if result.committed:
                participated.append(replicas)
            aborted += not result.committed
        values = {name: value.numpy().copy() for name, value in model.state_dict().items()}
        return values, participated, aborted


@pytest.mark.parametrize("when", ["forward", "backward", "step"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_a_worker_that_is_killed_costs_one_attempt_and_no_committed_step(
    strategy: str, when: str, tmp_path: Path
) -> None:
    mapped = strategy == "FULL_SHARD" and when != "forward"  # one server: workers read its memory, and it theirs
    with LocalCluster(shards=1 if mapped else 2, world_size=2, min_workers=1) as cluster:
        results = cluster.run_workers(train, args=(strategy, 1, when, tmp_path), check=False)
    survivor, victim = results
    assert victim.exit_code == -signal.SIGKILL
    assert not survivor.error, survivor.error
    values, participated, aborted = survivor.value
    assert participated == [2] * FATAL + [1] * (STEPS - FATAL)
    assert aborted <= 1
    assert_close(values, plain(participated))


@pytest.mark.parametrize(
    ("when", "nodes"), [("forward", "ab"), ("backward", "ab"), ("step", "ab"), ("backward", "aa"), ("step", "aa")]
)
def test_a_worker_that_is_killed_ends_its_node_and_the_other_nodes_go_on(when: str, nodes: str, tmp_path: Path) -> None:
    """Four workers of one host may be two nodes, too."""
    with LocalCluster(shards=2, world_size=4, min_workers=2) as cluster:
        args = ("HYBRID_SHARD", 3, when, tmp_path, 2)
        workers = [
            *cluster.start_workers(train, ranks=(0, 1), args=args, env=node(nodes[0])),
            *cluster.start_workers(train, ranks=(2, 3), args=args, env=node(nodes[1])),
        ]
        results = results_of(workers, timeout_s=WHOLE_S, check=False)
    *survivors, widow, victim = results
    assert victim.exit_code == -signal.SIGKILL
    assert "rank 3" in widow.error
    for survivor in survivors:
        assert not survivor.error, survivor.error
        values, participated, aborted = survivor.value
        assert participated == [2] * FATAL + [1] * (STEPS - FATAL)
        assert aborted <= 2
        assert_close(values, plain(participated))


def node(name: str) -> dict[str, str]:
    return {"AXON_PS_NODE": name}


def test_a_coordinator_that_is_killed_and_comes_back_costs_nothing(tmp_path: Path) -> None:
    make_pipes(tmp_path)
    with LocalCluster(shards=2, world_size=1, durable=True) as cluster:
        (worker,) = cluster.start_workers(train, args=("FULL_SHARD", -1, "pause", tmp_path))
        with paused(tmp_path):
            cluster.kill("coordinator")
            cluster.restart("coordinator")
        result = worker.result()
    assert not result.error, result.error
    values, participated, _ = result.value
    assert participated == [1] * STEPS
    assert_close(values, plain(participated))


def lose_a_server(pipes: Path) -> str:
    """Train until a step is impossible; what it says then."""
    with axon_ps.World.init(timeout_s=5.0) as world:
        model = parallel.FSDP(nn.Linear(4, 4), world.default_group)
        optimizer = parallel.SGD(model, lr=0.1)
        model(torch.ones(1, 4)).sum().backward()
        assert optimizer.step().committed
        optimizer.zero_grad()
        pause(pipes)
        try:
            for _ in range(3):
                model(torch.ones(1, 4)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        except AxonError as error:
            return str(error)
        return ""


def test_a_shard_server_that_is_lost_with_its_parameters_is_named_and_what_to_do(tmp_path: Path) -> None:
    make_pipes(tmp_path)
    with LocalCluster(shards=1, world_size=1, lease_s=3.0) as cluster:
        (worker,) = cluster.start_workers(lose_a_server, args=(tmp_path,))
        with paused(tmp_path):
            cluster.kill(Role.SHARD)
            cluster.restart(Role.SHARD)
        result: Any = worker.result()
    assert not result.error, result.error
    assert "shard server 0" in result.value
    assert "restore" in result.value

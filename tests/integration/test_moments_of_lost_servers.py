"""Moments in a state dict of a worker alone, also after the death of the server that they were read from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import axon_ps
from axon_ps.parallel import fully_shard
from axon_ps.testing import LocalCluster
from axon_ps.types import Role
from deadlines import HANG_S
from pausing import make_pipes, pause, paused

STEPS = 3


def train() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(200, 100), nn.Linear(100, 1))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for seed in range(STEPS):
        torch.manual_seed(seed)
        model(torch.randn(4, 200)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def read_twice(pipes: Path) -> Any:
    with axon_ps.World.init(timeout_s=HANG_S) as world:
        _, optimizer = train()
        found = []
        if world.rank == 1:
            found.append(optimizer.state_dict()["state"])
            pause(pipes)
            found.append(optimizer.state_dict()["state"])
        world.barrier("read")
        return [{f"{key}.{n}": v.numpy() for key, s in state.items() for n, v in s.items()} for state in found]


def test_a_backup_has_them(tmp_path: Path) -> None:
    make_pipes(tmp_path)
    with LocalCluster(shards=2, world_size=2, lease_s=3.0, replication=2) as cluster:
        workers = cluster.start_workers(read_twice, args=(tmp_path,))
        with paused(tmp_path):
            cluster.kill(Role.SHARD, 0)
        results = [worker.result() for worker in workers]
    assert not any(result.error for result in results), results
    before, after = results[1].value
    assert before["0.step"] == STEPS
    assert before["0.exp_avg"].any()
    assert {name: value.tobytes() for name, value in before.items()} == {n: v.tobytes() for n, v in after.items()}

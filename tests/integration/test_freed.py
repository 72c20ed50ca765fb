"""What a failed job leaves in the process of its worker: nothing, once the program has dropped it."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from axon_ps import parallel
from axon_ps.errors import Timeout
from axon_ps.rpc.security import Security
from axon_ps.worker.environment import WorkerConfig
from axon_ps.worker.world import World
from deadlines import HANG_S
from job_services import TOKEN, JobServices

WAITS_S = 0.5
"""How long the job waits for a server that it has lost."""


def joined(address: str) -> World:
    """The only worker of a job."""
    config = WorkerConfig(coordinator=address, rank=0, world_size=1, node="here", security=Security(token=TOKEN))
    return World.init(config, timeout_s=HANG_S, join_timeout_s=HANG_S)


def train(model: nn.Module, optimizer: parallel.AdamW) -> None:
    """A step."""
    model(torch.ones(2, 12)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def outlived() -> tuple[weakref.ref[World], weakref.ref[nn.Module]]:
    """Train a model until its job gives up, whose only shard server has gone."""
    with JobServices([(1, 1)], join_timeout_s=WAITS_S) as services:
        world = joined(services.addresses[0])
        model = parallel.FSDP(nn.Linear(12, 10), world.default_group)
        optimizer = parallel.AdamW(model, lr=1e-3)
        train(model, optimizer)
        services.end_shards()
        for _ in range(2):  # what it failed with is raised again
            with pytest.raises(Timeout, match="the job waited"):
                train(model, optimizer)
        world.close()
    return weakref.ref(world), weakref.ref(model)


def test_a_world_that_failed_is_freed_with_its_model() -> None:
    references = outlived()
    gc.collect()
    assert [reference() for reference in references] == [None, None]

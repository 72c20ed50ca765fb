"""Status, page and `top` on a job of real processes, beside the counts of its worker."""

from __future__ import annotations

import asyncio
import time

import pytest
import torch
from torch import nn

import axon_ps
from axon_ps.coordinator.client.operator import OperatorClient
from axon_ps.coordinator.core.history.step_rate import StepRate
from axon_ps.parallel import FSDP, AdamW
from axon_ps.rpc.security import Security
from axon_ps.testing import LocalCluster
from axon_ps.wire.events import Status

STEPS = 8
STEP_S = 0.3
JITTER = 2.0
"""A worker hears of a decision later than it is made: its rate and the coordinator's are equal up to this factor."""


async def ask(address: str, security: Security) -> Status:
    async with OperatorClient(address, security=security) as operator:
        return await operator.status()


def train(address: str, security: Security) -> tuple[float, Status]:
    """Steps of `STEP_S` and more: the rate that the worker counts, and what the coordinator says then."""
    counted = StepRate()
    with axon_ps.World.init() as world:
        model = FSDP(nn.Linear(8, 1), world.default_group)
        optimizer = AdamW(model.parameters(), lr=1e-3)
        for _ in range(STEPS):
            begin_s = time.monotonic()
            model(torch.ones(4, 8)).square().mean().backward()
            while time.monotonic() < begin_s + STEP_S:
                torch.ones(64, 64) @ torch.ones(64, 64)
            assert optimizer.step().committed
            optimizer.zero_grad()
            counted.made(time.monotonic())
            world.report(steps=STEPS)
        status = asyncio.run(ask(address, security))
        return counted.steps_per_s(time.monotonic()), status


def test_a_job_is_said_to_be_where_its_worker_is() -> None:
    with LocalCluster(shards=1, world_size=1) as cluster:
        (result,) = cluster.run_workers(train, args=(cluster.address, cluster.security))
        counted, status = result.value
    assert (status.version, status.headline) == (STEPS, "training")
    assert status.progress is not None
    assert (status.progress.step, status.progress.steps) == (STEPS, STEPS)
    assert counted / JITTER < status.steps_per_s < counted * JITTER
    assert status.steps_per_s <= 1.1 / STEP_S
    assert status.models[0].steps_per_s == pytest.approx(status.steps_per_s)

"""A model begins with the values of the worker of lowest rank, as torch's DDP does; workers whose own differ say so."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
import torch
from torch import nn

from axon_ps import World
from axon_ps.parallel import FSDP, DiLoCo, ShardingStrategy
from axon_ps.parallel.fsdp import materialize, wrap
from axon_ps.testing import run_threads

LIMIT_S = 300.0
"""For a hang: compiled loops may be cold, and others busy."""

pytestmark = pytest.mark.timeout(600)

SERVED = [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.HYBRID_SHARD]


def module(value: float, **where: Any) -> nn.Module:
    made = nn.Sequential(nn.Linear(4, 3, **where), nn.Tanh(), nn.Linear(3, 2, **where))
    for p in made.parameters():
        if not p.is_meta:
            nn.init.constant_(p, value)
    return made


def rank_0_comes_last(world: World, others_register: threading.Barrier) -> None:
    """Rank 0 registers when all others do."""
    register = world.models.register

    def late(*args: Any) -> Any:
        world.models.register = register  # type: ignore[method-assign]
        others_register.wait(LIMIT_S)
        reply = register(*args)
        assert reply[1].upload == (world.rank == 0)
        return reply

    world.models.register = late  # type: ignore[method-assign]


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == materialize.__name__ and r.levelno == logging.WARNING]


@pytest.mark.parametrize("strategy", ShardingStrategy)
def test_rank_0_counts_when_it_comes_last(strategy: ShardingStrategy, caplog: pytest.LogCaptureFixture) -> None:
    barrier = threading.Barrier(3)

    def worker(world: World) -> list[torch.Tensor]:
        if strategy is not ShardingStrategy.NO_SHARD:
            rank_0_comes_last(world, barrier)
        made = FSDP(module(float(world.rank)), sharding_strategy=strategy, unit_types={nn.Linear})
        return list(made.state_dict().values())

    for values in run_threads(worker, 3, timeout_s=LIMIT_S):
        assert all(bool((v == 0.0).all()) for v in values)
    if strategy in SERVED:
        told = warnings_of(caplog)
        assert len(told) == 2, "one on each rank whose values are dropped"
        for rank in (1, 2):
            assert any(f"rank {rank} has given model 'model 0'" in text and "of rank 0" in text for text in told)


def test_the_outer_model_of_diloco_too() -> None:
    barrier = threading.Barrier(2)

    def worker(world: World) -> list[torch.Tensor]:
        rank_0_comes_last(world, barrier)
        made = module(float(world.rank))
        DiLoCo(made, torch.optim.SGD(made.parameters(), lr=0.1), inner_steps=2)
        return list(made.state_dict().values())

    for values in run_threads(worker, 2, timeout_s=LIMIT_S):
        assert all(bool((v == 0.0).all()) for v in values)


@pytest.mark.parametrize("kind", ["equal", "on the meta device", "in bf16"])
def test_equal_values_and_none_at_all_are_no_reason_to_warn(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    def worker(world: World) -> None:
        if kind == "on the meta device" and world.rank:
            FSDP(module(1.0, device="meta"))
        else:
            FSDP(module(1.0, dtype=torch.bfloat16 if kind == "in bf16" else torch.float32))

    run_threads(worker, 2, timeout_s=LIMIT_S)
    assert not warnings_of(caplog)


def test_a_single_element_makes_a_difference() -> None:
    def digest(change: float = 0.0) -> str:
        made = module(1.0)
        with torch.no_grad():
            made[2].weight[1, 2] += change  # type: ignore[index, operator]
        return materialize.digest(wrap.partition(made, lambda child: False, ()))

    assert digest() == digest() != digest(1e-6)

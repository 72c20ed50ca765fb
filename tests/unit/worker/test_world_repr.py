"""The text that a notebook shows of a world, a group and a model."""

from __future__ import annotations

import pytest
from torch import nn

from axon_ps import World
from axon_ps.parallel import FSDP, ShardingStrategy
from axon_ps.testing import run_threads


def test_a_world_and_its_groups_say_who_is_in_them() -> None:
    def run(world: World) -> list[str]:
        return [repr(world), repr(world.new_group([1]))]

    (first, other), (_, own) = run_threads(run, 2)
    assert first.startswith("<World of job ")
    assert "rank 0 of 2 workers, 1 shard servers, generation " in first
    assert first.endswith("complete>")
    assert "of ranks [1], without this worker" in other
    assert "of ranks [1], this worker at position 0" in own


@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD])
def test_a_model_says_its_strategy_and_version(strategy: ShardingStrategy) -> None:
    def run(world: World) -> str:
        return repr(FSDP(nn.Linear(2, 2), world, sharding_strategy=strategy, name="policy"))

    said = run_threads(run, 2)[0]
    assert f"'policy': {strategy.name}, 2 workers, version 0" in said

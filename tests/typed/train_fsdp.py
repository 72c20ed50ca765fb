"""Parameters on the shard servers: FSDP with a server optimizer, clipping, accumulation and full parameters."""

from __future__ import annotations

from typing import assert_type

import torch
from torch import nn

import axon_ps
from axon_ps import StepResult
from axon_ps.parallel import FSDP, AdamW, MixedPrecision, ShardingStrategy


def main(world: axon_ps.World) -> StepResult:
    """Train; return the result of the last step."""
    model = FSDP(
        nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)),
        world,
        sharding_strategy="full_shard",
        unit_types=nn.Linear,
        mixed_precision=MixedPrecision(param_dtype=torch.float32, reduce_dtype="bf16"),
        policy="sync",
    )
    optimizer = AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    result = StepResult(committed=False, version=0, grad_norm=0.0)
    for _ in range(3):
        with model.no_sync():
            model(torch.randn(4, 8)).sum().backward()
        model(torch.randn(4, 8)).sum().backward()
        assert_type(model.clip_grad_norm_(1.0), torch.Tensor)
        result = assert_type(optimizer.step(), StepResult)
        optimizer.zero_grad()
    assert_type(model.strategy, ShardingStrategy)
    assert_type(model.version, int)
    with model.summon_full_params():
        print(world.rank, [tuple(param.shape) for param in model.parameters()])
    return result


if __name__ == "__main__":
    with axon_ps.World.init() as joined:
        print(main(joined))

"""FSDP2's `fully_shard`, with torch's own AdamW and schedule, on the shard servers."""

from __future__ import annotations

from typing import assert_type

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import axon_ps
from axon_ps.parallel import FSDP, FSDPModule, fully_shard, sharded_model


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x: [batch, 8] and more."""
        return x + torch.relu(self.inner(x))


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, schedule: torch.optim.lr_scheduler.LRScheduler, steps: int
) -> None:
    """Train as without axon_ps."""
    for _ in range(steps):
        model(torch.randn(4, 8)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def main(world: axon_ps.World) -> int:
    """Train; return the version."""
    blocks = [Block() for _ in range(2)]
    for block in blocks:
        assert_type(fully_shard(block, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32)), Block)
    model = fully_shard(
        nn.Sequential(*blocks, nn.Linear(8, 1)),
        reshard_after_forward=True,
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
    train(model, optimizer, schedule, steps=2)
    first = blocks[0]
    if isinstance(first, FSDPModule):
        first.unshard(async_op=True).wait()
        first.reshard()
    found = assert_type(sharded_model(model), FSDP)
    return found.version


if __name__ == "__main__":
    with axon_ps.World.init() as joined:
        print(main(joined))

"""Replicas on every worker: DDP with a plain optimizer of torch's."""

from __future__ import annotations

from typing import assert_type

import torch
from torch import nn

import axon_ps
from axon_ps.parallel import DDP, DistributedSampler


def train(
    model: DDP, optimizer: torch.optim.Optimizer, data: torch.Tensor, sampler: DistributedSampler
) -> torch.Tensor:
    """Make a step of each sample; return the mean of the losses."""
    total = torch.zeros(())
    for index in sampler:
        loss = model(data[index]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total += loss.detach()
    return total / len(sampler)


def main(world: axon_ps.World) -> float:
    """Train; return the mean loss of all workers."""
    model = DDP(nn.Linear(4, 1), world, grad_sync_strategy="overlapped")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    sampler = DistributedSampler(len(data), world.world_size, world.rank)
    losses: list[torch.Tensor] = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        losses.append(assert_type(axon_ps.all_reduce_mean(train(model, optimizer, data, sampler)), torch.Tensor))
    return losses[-1].item()


if __name__ == "__main__":
    with axon_ps.World.init() as joined:
        print(main(joined))

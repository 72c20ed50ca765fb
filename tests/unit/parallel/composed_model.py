"""A model of blocks, its batches, and its training by plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from axon_ps.parallel import FSDPModule, fully_shard
from mock_ranks import generator

State = dict[str, torch.Tensor]
STEPS, ROWS = 8, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    """The same values every time."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.out = nn.Linear(16, 4)
        values = generator(1)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=values) * 0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.emb(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)

    def score(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward(x).sum()


INPUTS = torch.randn(STEPS, ROWS, 8, generator=generator(2))
TARGETS = torch.randn(STEPS, ROWS, 4, generator=generator(3))


def init() -> State:
    return Model().state_dict()


def shard(model: Any, **options: Any) -> Any:
    """As a program of FSDP2 does it."""
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rank: int = 0,
    world_size: int = 1,
    *,
    accumulate: bool = False,
    after: Callable[[], object] = lambda: None,
) -> State:
    """Train with clipping and a schedule; return the values."""
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    parts = 2 if accumulate else 1
    for step in range(STEPS):
        rows = slice(rank * ROWS // world_size, (rank + 1) * ROWS // world_size)
        pairs = zip(INPUTS[step, rows].chunk(parts), TARGETS[step, rows].chunk(parts), strict=True)
        for part, (inputs, targets) in enumerate(pairs):
            if accumulate and isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(part == parts - 1)
            (nn.functional.mse_loss(model(inputs), targets) / parts).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        after()
    return model.state_dict()


def plain(make: Callable[[nn.Module], torch.optim.Optimizer], **how: Any) -> State:
    """Return the values that one process of torch trains."""
    model = Model()
    return train(model, make(model), **how)


def difference(values: State, others: State) -> float:
    assert values.keys() == others.keys()
    return max((values[name].float() - others[name].float()).abs().max().item() for name in values)

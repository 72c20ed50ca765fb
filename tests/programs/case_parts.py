"""What the cases share: a block, data, and a loop that trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from sides import Side, Values, built

ROWS, WIDTH = 12, 8
Make = Callable[[], nn.Module]
Loss = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]
Batch = tuple[torch.Tensor, torch.Tensor]


class Block(nn.Sequential):
    """What is gathered together."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))


def three() -> nn.Module:
    """Two blocks and a head."""
    return nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 1))


def two() -> nn.Module:
    """A block and a head."""
    return nn.Sequential(Block(), nn.Linear(WIDTH, 1))


def small() -> nn.Module:
    """No block at all."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))


def batches(side: Side, dtype: torch.dtype = torch.float32) -> list[Batch]:
    """Ten batches; each rank has its part of the rows."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for _ in range(10):
        x, y = torch.randn(ROWS, WIDTH, generator=generator), torch.randn(ROWS, 1, generator=generator)
        made.append((x.chunk(side.workers)[side.rank].to(dtype), y.chunk(side.workers)[side.rank].to(dtype)))
    return made


def mse(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The mean squared error."""
    return (model(x) - y).square().mean()


def wrapped(side: Side, make: Make = three, units: Sequence[type[nn.Module]] = (Block,), **options: Any) -> nn.Module:
    """The module that `make` makes, wrapped."""
    return side.wrap(built(make), unit_types=tuple(units), **options)


def trained(
    side: Side,
    make: Make = three,
    loss: Loss = mse,
    *,
    steps: int = 3,
    optimizer: str = "AdamW",
    hyper: dict[str, Any] | None = None,
    units: Sequence[type[nn.Module]] = (Block,),
    dtype: torch.dtype = torch.float32,
    each: Callable[[int, Any], None] = lambda step, module: None,
    prepare: Callable[[Any], None] = lambda module: None,
    ready: Callable[[Any], None] = lambda module: None,
    **options: Any,
) -> Values:
    """Train a few steps; the values of the model afterwards.

    Args:
        side: on which.
        make: makes the module.
        loss: of the model and a batch.
        steps: how many.
        optimizer: its name.
        hyper: its hyperparameters.
        units: classes of units.
        dtype: of the batches.
        each: done with the user's own module before each step.
        prepare: done with it before it is wrapped.
        ready: done with it after it is wrapped.
        options: of the wrapper.
    """
    module = built(make)
    prepare(module)
    model = side.wrap(module, unit_types=tuple(units), **options)
    ready(side.inner(model))
    made = side.optimizer(optimizer, model.parameters(), **(hyper or {"lr": 1e-2}))
    for step, (x, y) in enumerate(batches(side, dtype)[:steps]):
        each(step, side.inner(model))
        made.zero_grad()
        loss(model, x, y).backward()
        made.step()
    return side.values(model)


def go_on(side: Side, model: nn.Module, optimizer: torch.optim.Optimizer, begin: int, steps: int = 2) -> None:
    """Train on, from a batch on."""
    for x, y in batches(side)[begin : begin + steps]:
        mse(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()

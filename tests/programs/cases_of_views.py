"""Views of parameters that are read after their unit has run, and graphs that are made where all parameters are."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from case_parts import WIDTH, Block, batches, mse, three, trained
from case_table import SHARDED, add
from sides import Side, Values, built

SGD = {"optimizer": "SGD", "hyper": {"lr": 0.1}}


class Positions(nn.Module):
    """Learned positions, of which forward gives a view."""

    def __init__(self, view: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
        super().__init__()
        self.table, self.view = nn.Parameter(torch.randn(4 * WIDTH, WIDTH) * 0.1), view

    def forward(self, n: int) -> torch.Tensor:
        return self.view(self.table, n)


class Positioned(nn.Module):
    """The view is read after blocks that need the memory of its unit."""

    def __init__(self, view: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
        super().__init__()
        self.positions = Positions(view)
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = self.positions(len(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x * (1 + seen))


VIEWS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "a slice": lambda table, n: table[:n],
    "an expansion": lambda table, n: table[:1].expand(n, -1),
    "a detached slice": lambda table, n: table.detach()[:n],
}
for _name, _view in VIEWS.items():
    add(
        f"views: a unit returns {_name} of its parameter",
        lambda side, v=_view: trained(side, lambda: Positioned(v), units=(Block, Positions), **SGD),
    )


class Policy(nn.Module):
    """A distribution that expands a parameter of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.mean = Block(), nn.Linear(WIDTH, 1)
        self.deviation = nn.Parameter(torch.full((1,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.distributions.Normal:
        return torch.distributions.Normal(self.mean(self.body(x)), self.deviation)


def _policy(side: Side, read: str) -> Values:
    model = side.wrap(built(Policy), unit_types=(Block,))
    optimizer = side.optimizer("SGD", model.parameters(), lr=0.01)
    seen = []
    for x, y in batches(side)[:3]:
        optimizer.zero_grad()
        with torch.no_grad():
            made = model(x)
        if read == "under no_grad":
            seen.append(made.entropy().mean().detach())
        made = model(x)
        (-made.log_prob(y).mean()).backward()
        if read == "after backward":
            seen.append(made.entropy().mean().detach())
        optimizer.step()
    return side.values(model) | {"seen": torch.stack(seen)}


for _read in ("under no_grad", "after backward"):
    add(f"views: forward returns a distribution, which is read {_read}", lambda side, r=_read: _policy(side, r))


def _decayed(side: Side, *, inside: bool, units: Any) -> Values:
    model: Any = side.wrap(built(three), unit_types=units)
    optimizer = side.optimizer("SGD", model.parameters(), lr=0.1)
    for x, y in batches(side)[:3]:
        optimizer.zero_grad()
        loss = mse(model, x, y)
        with getattr(model, "summon_full_params", contextlib.nullcontext)():
            penalty = sum((p.square().sum() for p in model.parameters()), start=torch.zeros(())) * 0.1
            if inside:
                (loss + penalty).backward()
        if not inside:
            (loss + penalty).backward()
        optimizer.step()
    return side.values(model)


for _where in ("inside", "after"):
    for _units in ((), (Block,)):
        _by = " and ".join(u.__name__ for u in _units) or "the root alone"
        add(
            f"views: a penalty of weights in summon_full_params, backward {_where}, units {_by}",
            lambda side, w=_where, u=_units: _decayed(side, inside=w == "inside", units=u),
            wrappers=SHARDED,
        )

"""Every LR scheduler of torch on our optimizers, with a resume in the middle: rates and parameters are torch's.

`make test` runs each scheduler with one optimizer, and each optimizer with one scheduler, on the servers or under
NO_SHARD. `make lab NAME=schedulers` runs all with all, under both.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as of_torch
from torch.optim import swa_utils

import axon_ps.parallel as ours
from axon_ps import World
from axon_ps.parallel import FSDP, ShardingStrategy
from mock_ranks import close, generator

STEPS, RESUMED = 8, 4
INPUTS = torch.randn(STEPS, 4, 6, generator=generator(2))
TARGETS = torch.randn(STEPS, 4, 1, generator=generator(3))
Schedule = Callable[[torch.optim.Optimizer], Any]


def halved(epoch: int) -> float:
    return 0.5**epoch


def by_a_little(epoch: int) -> float:
    return 0.9


def up_and_down(x: float) -> float:
    return 0.5 * x


def in_sequence(optimizer: torch.optim.Optimizer) -> Any:
    warm_up = of_torch.LinearLR(optimizer, 0.1, total_iters=2)
    return of_torch.SequentialLR(optimizer, [warm_up, of_torch.CosineAnnealingLR(optimizer, 6)], [2])


def chained(optimizer: torch.optim.Optimizer) -> Any:
    return of_torch.ChainedScheduler([of_torch.ConstantLR(optimizer, 0.5, 3), of_torch.ExponentialLR(optimizer, 0.9)])


def has_momentum(optimizer: torch.optim.Optimizer) -> bool:
    group = optimizer.param_groups[0]
    return "betas" in group or "momentum" in group


SCHEDULERS: dict[str, Schedule] = {
    "LambdaLR": lambda o: of_torch.LambdaLR(o, halved),
    "MultiplicativeLR": lambda o: of_torch.MultiplicativeLR(o, by_a_little),
    "StepLR": lambda o: of_torch.StepLR(o, 2),
    "MultiStepLR": lambda o: of_torch.MultiStepLR(o, [1, 3, 5]),
    "ConstantLR": lambda o: of_torch.ConstantLR(o, 0.5, 3),
    "LinearLR": lambda o: of_torch.LinearLR(o, 0.1, total_iters=6),
    "ExponentialLR": lambda o: of_torch.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: of_torch.PolynomialLR(o, 6, 2.0),
    "CosineAnnealingLR": lambda o: of_torch.CosineAnnealingLR(o, 6),
    "CosineAnnealingWarmRestarts": lambda o: of_torch.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: of_torch.CyclicLR(o, 0.001, 0.02, 2, cycle_momentum=has_momentum(o)),
    "CyclicLR without momentum": lambda o: of_torch.CyclicLR(o, 0.001, 0.02, 2, cycle_momentum=False),
    "CyclicLR of a function": lambda o: of_torch.CyclicLR(
        o, 0.001, 0.02, 2, scale_fn=up_and_down, cycle_momentum=False
    ),
    "OneCycleLR": lambda o: of_torch.OneCycleLR(o, 0.02, total_steps=STEPS + 1, cycle_momentum=has_momentum(o)),
    "ReduceLROnPlateau": lambda o: of_torch.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": in_sequence,
    "ChainedScheduler": chained,
    "SWALR": lambda o: swa_utils.SWALR(o, swa_lr=0.001, anneal_epochs=4),
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.01, "momentum": 0.9},
    "Adam": {"lr": 0.01},
    "AdamW": {"lr": 0.01},
    "Adagrad": {"lr": 0.01},
    "RMSprop": {"lr": 0.01, "momentum": 0.5},
    "Lion": {"lr": 0.001, "weight_decay": 0.1},
}
STRATEGIES = (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD)
SAMPLE = [
    *((scheduler, "SGD", STRATEGIES[index % 2]) for index, scheduler in enumerate(SCHEDULERS)),
    *(("SequentialLR", optimizer, STRATEGIES[index % 2]) for index, optimizer in enumerate(OPTIMIZERS) if index),
]
ALL = [
    pytest.param(*row, marks=[] if row in SAMPLE else [pytest.mark.whole])
    for row in itertools.product(SCHEDULERS, OPTIMIZERS, STRATEGIES)
]


class LionOfPaper(torch.optim.Optimizer):
    """Lion, which torch does not have: algorithm 2 of Chen et al. 2023, in torch's operations."""

    def __init__(self, params: Any, lr: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(torch.sign(m * beta1 + p.grad * (1 - beta1)), alpha=-group["lr"])
                m.mul_(beta2).add_(p.grad, alpha=1 - beta2)


def module() -> nn.Module:
    made = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
    values = generator(1)
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(torch.randn(p.shape, generator=values) * 0.3)
    return made


def groups_of(made: nn.Module) -> list[dict[str, Any]]:
    heavy = [p for p in made.parameters() if p.ndim > 1]
    return [{"params": heavy}, {"params": [p for p in made.parameters() if p.ndim <= 1], "lr": 0.003}]


def rates(optimizer: torch.optim.Optimizer) -> list[tuple[float, ...]]:
    return [
        (float(g["lr"]), float(g.get("momentum", 0.0)), *map(float, g.get("betas", ()))) for g in optimizer.param_groups
    ]


def train(made: nn.Module, optimizer: Any, scheduler: Any, first: int, last: int) -> list[Any]:
    seen = []
    for step in range(first, last):
        seen.append(rates(optimizer))
        nn.functional.mse_loss(made(INPUTS[step]), TARGETS[step]).backward()
        optimizer.step()
        optimizer.zero_grad()
        measured = (1.0,) if isinstance(scheduler, of_torch.ReduceLROnPlateau) else ()
        scheduler.step(*measured)
    return seen


@pytest.mark.parametrize(("schedule", "name", "strategy"), ALL)
def test_rates_and_parameters_are_those_of_torch(
    schedule: str, name: str, strategy: ShardingStrategy, tmp_path: Path
) -> None:
    make, hyper = SCHEDULERS[schedule], OPTIMIZERS[name]
    plain = module()
    kind = LionOfPaper if name == "Lion" else getattr(torch.optim, name)
    optimizer = kind(groups_of(plain), **hyper)
    scheduler = make(optimizer)
    expected = train(plain, optimizer, scheduler, 0, RESUMED)
    state = copy.deepcopy((optimizer.state_dict(), scheduler.state_dict()))
    optimizer = kind(groups_of(plain), **hyper)
    scheduler = make(optimizer)
    optimizer.load_state_dict(state[0])
    scheduler.load_state_dict(state[1])
    expected += train(plain, optimizer, scheduler, RESUMED, STEPS)

    uri, found = str(tmp_path / "checkpoint"), list[Any]()
    with World.mock():
        made = FSDP(module(), sharding_strategy=strategy)
        mine = getattr(ours, name)(groups_of(made), **hyper)
        schedules = make(mine)
        found += train(made, mine, schedules, 0, RESUMED)
        made.save_checkpoint(uri, mine, state={"scheduler": schedules})
        made.release()
        made = FSDP(module(), sharding_strategy=strategy)
        mine = getattr(ours, name)(groups_of(made), **hyper)
        schedules = make(mine)
        made.load_checkpoint(uri, mine, state={"scheduler": schedules})
        found += train(made, mine, schedules, RESUMED, STEPS)
        assert found == expected
        for key, value in plain.state_dict().items():
            close(made.state_dict()[key], value, 2e-5)

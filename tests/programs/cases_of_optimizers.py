"""Optimizers: schedulers, groups and flags, what becomes of them while the job runs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers
from torch.optim import swa_utils

from case_parts import batches, go_on, mse, small
from case_table import SHARDED, WHERE_WRITTEN, Wrong, add, case
from sides import Side, Values, built

Made = torch.optim.Optimizer


def _head() -> nn.Module:
    return nn.Linear(8, 1)


SCHEDULERS: dict[str, Callable[[Made], Any]] = {
    "StepLR": lambda o: schedulers.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [1, 3], 0.5),
    "LinearLR": lambda o: schedulers.LinearLR(o, 0.1, total_iters=3),
    "ConstantLR": lambda o: schedulers.ConstantLR(o, 0.5, 2),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.9),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 4),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, max_lr=0.1, total_steps=6),
    "OneCycleLR without momentum": lambda o: schedulers.OneCycleLR(o, max_lr=0.1, total_steps=6, cycle_momentum=False),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, step_size_up=2, cycle_momentum=False),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 2),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=0),
    "SWALR": lambda o: swa_utils.SWALR(o, swa_lr=0.05),
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda n: 0.9**n),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.1, total_iters=2), schedulers.CosineAnnealingLR(o, 4)], [2]
    ),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(o, 0.5, 2), schedulers.ExponentialLR(o, 0.9)]
    ),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, 5),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda n: 0.9),
}


def _scheduled(side: Side, name: str, optimizer: str, hyper: dict[str, Any]) -> Values:
    if optimizer == "SGD" and name == "OneCycleLR":
        hyper = {"momentum": 0.9} | hyper
    model = side.wrap(built(_head))
    made = side.optimizer(optimizer, model.parameters(), **copy.deepcopy(hyper))
    scheduler = SCHEDULERS[name](made)
    rates = []
    for step, (x, y) in enumerate(batches(side)[:5]):
        mse(model, x, y).backward()
        made.step()
        made.zero_grad()
        scheduler.step(float(step)) if name == "ReduceLROnPlateau" else scheduler.step()
        rates.append(float(made.param_groups[0]["lr"]))
    return side.values(model) | {"rates": torch.tensor(rates)}


def _with_each(side: Side, name: str) -> Values:
    values: Values = {}
    for what, optimizer, hyper in (
        ("AdamW", "AdamW", {"lr": 0.02}),
        ("SGD", "SGD", {"lr": 0.02, "momentum": 0.9}),
        ("tensor", "SGD", {"lr": torch.tensor(0.02)}),
    ):
        values |= {f"{what}.{n}": v for n, v in _scheduled(side, name, optimizer, hyper).items()}
    return values


for _name in SCHEDULERS:
    add(f"schedulers: {_name}", lambda side, n=_name: _with_each(side, n))

# ---------------------------------------------------------------------- groups and flags


def _normed() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 1))


def _decayed(model: Any, module: Any, **more: Any) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    return [
        {"params": [p for _, p in named if p.ndim > 1], "weight_decay": 0.1, **more},
        {"params": [p for _, p in named if p.ndim <= 1], "weight_decay": 0.0, **more},
    ]


Groups = Callable[[Any, Any], Any]
GROUPS: dict[str, tuple[Groups, dict[str, Any], str]] = {
    "two groups by decay": (_decayed, {}, ""),
    "a rate for each layer": (
        lambda model, m: [{"params": list(m[i].parameters()), "lr": 0.01 * 0.5**i} for i in range(3)],
        {},
        "",
    ),
    "a group of rate 0": (
        lambda model, m: [
            {"params": m[0].parameters(), "lr": 0.0},
            {"params": [*m[1].parameters(), *m[2].parameters()]},
        ],
        {},
        "",
    ),
    "named_parameters()": (lambda model, m: model.named_parameters(), {}, ""),
    "a group with a name": (lambda model, m: _decayed(model, m, name="g"), {}, ""),
    "a group with a key of one's own": (lambda model, m: _decayed(model, m, lr_scale=0.5), {}, ""),
    "a parameter in two groups": (
        lambda model, m: [{"params": model.parameters()}, {"params": m[0].parameters()}],
        {},
        "",
    ),
    "parameters of one layer alone": (lambda model, m: m[0].parameters(), {}, r"in no parameter group|in no group"),
    "fused": (lambda model, m: model.parameters(), {"fused": True}, WHERE_WRITTEN),
    "foreach": (lambda model, m: model.parameters(), {"foreach": False}, WHERE_WRITTEN),
    "amsgrad": (lambda model, m: model.parameters(), {"amsgrad": True}, WHERE_WRITTEN),
    "maximize": (lambda model, m: model.parameters(), {"maximize": True}, WHERE_WRITTEN),
    "capturable": (lambda model, m: model.parameters(), {"capturable": False}, WHERE_WRITTEN),
    "a rate that is a tensor": (lambda model, m: model.parameters(), {"lr": torch.tensor(0.01)}, ""),
    "betas in a list": (lambda model, m: model.parameters(), {"betas": [0.8, 0.9]}, ""),
}


def _grouped(side: Side, groups: Groups, flags: dict[str, Any]) -> Values:
    model = side.wrap(built(_normed))
    made = side.optimizer("AdamW", groups(model, side.inner(model)), **{"lr": 0.01, **copy.deepcopy(flags)})
    for x, y in batches(side)[:3]:
        mse(model, x, y).backward()
        made.step()
        made.zero_grad()
    return side.values(model)


for _name, (_groups, _flags, _says) in GROUPS.items():
    add(f"groups: {_name}", lambda side, g=_groups, f=_flags: _grouped(side, g, f), says=_says)

# ---------------------------------------------------------------------- an optimizer's life


def again(side: Side, model: Any) -> Iterator[Any]:
    yield side.optimizer("AdamW", model.parameters(), lr=0.01)
    yield side.optimizer("AdamW", model.parameters(), lr=0.01)


def switched(side: Side, model: Any) -> Iterator[Any]:
    yield side.optimizer("AdamW", model.parameters(), lr=0.01)
    yield side.optimizer("SGD", model.parameters(), lr=0.01, momentum=0.9)


def other_groups(side: Side, model: Any) -> Iterator[Any]:
    yield side.optimizer("AdamW", model.parameters(), lr=0.01)
    inner = side.inner(model)
    groups = [{"params": inner[0].parameters(), "lr": 0.1}, {"params": inner[2].parameters()}]
    yield side.optimizer("AdamW", groups, lr=0.01)


def round_trip(side: Side, model: Any) -> Iterator[Any]:
    made = side.optimizer("AdamW", model.parameters(), lr=0.01)
    yield made
    made.load_state_dict(made.state_dict())
    yield made


def carried(side: Side, model: Any) -> Iterator[Any]:
    old = side.optimizer("AdamW", model.parameters(), lr=0.01)
    yield old
    new = side.optimizer("AdamW", model.parameters(), lr=0.02)
    new.load_state_dict(old.state_dict())
    yield new


def added(side: Side, model: Any) -> Iterator[Any]:
    inner = side.inner(model)
    made = side.optimizer("AdamW", inner[0].parameters(), lr=0.01)
    yield made
    made.add_param_group({"params": inner[2].parameters()})
    yield made


def added_anew(side: Side, model: Any) -> Iterator[Any]:
    inner = side.inner(model)
    made = side.optimizer("AdamW", inner[0].parameters(), lr=0.01)
    yield made
    model.zero_grad()
    made.add_param_group({"params": inner[2].parameters()})
    yield made


def step_hook(side: Side, model: Any) -> Iterator[Any]:
    made = side.optimizer("AdamW", model.parameters(), lr=0.01)
    made.register_step_pre_hook(lambda o, _, __: o.param_groups[0].update(lr=0.05))
    yield made
    yield made


class _Both:
    def __init__(self, *optimizers: Made) -> None:
        self._optimizers = optimizers

    def step(self) -> None:
        for each in self._optimizers:
            each.step()

    def zero_grad(self) -> None:
        for each in self._optimizers:
            each.zero_grad()


def both(side: Side, model: Any) -> Iterator[Any]:
    inner = side.inner(model)
    made = _Both(
        side.optimizer("AdamW", inner[0].parameters(), lr=0.01), side.optimizer("SGD", inner[2].parameters(), lr=0.1)
    )
    yield made
    yield made


def momentum_later(side: Side, model: Any) -> Iterator[Any]:
    made = side.optimizer("SGD", model.parameters(), lr=0.1)
    yield made
    made.param_groups[0]["momentum"] = 0.9
    yield made


def _by_layer(side: Side, model: Any) -> Any:
    inner = side.inner(model)
    groups = [{"params": list(inner[0].parameters()), "lr": 0.1}, {"params": list(inner[2].parameters())}]
    return side.optimizer("SGD", groups, lr=0.01, momentum=0.9)


def exchanged(side: Side, model: Any) -> Iterator[Made]:
    made = _by_layer(side, model)
    yield made
    one, other = made.param_groups
    one["params"], other["params"] = other["params"], one["params"]
    yield made


def cleared(side: Side, model: Any) -> Iterator[Made]:
    made = side.optimizer("AdamW", model.parameters(), lr=0.05)
    yield made
    made.state.clear()
    yield made
    made.state = type(made.state)(dict) if not hasattr(side, "world") else {}  # type: ignore[assignment]
    yield made


def one_cleared(side: Side, model: Any) -> Iterator[Made]:
    made = side.optimizer("AdamW", model.parameters(), lr=0.05)
    yield made
    made.state.pop(next(iter(model.parameters())))
    yield made


def _lived(side: Side, life: Callable[[Side, Any], Iterator[Any]]) -> Values:
    model = side.wrap(built(small))
    for number, made in enumerate(life(side, model)):
        go_on(side, model, made, 2 * number)
    return side.values(model)


for _name, _life, _says in (
    ("made again", again, ""),
    ("another one later", switched, ""),
    ("made again with other groups", other_groups, ""),
    ("its own state loaded", round_trip, ""),
    ("a new one with the old one's state", carried, ""),
    ("a group added later", added, r"add_param_group"),
    ("a group added later, its gradients dropped", added_anew, ""),
    ("a hook before each step", step_hook, ""),
    ("two of one model", both, r"two optimizers"),
    ("momentum from 0 to 0.9", momentum_later, ""),
    ("parameters are exchanged between groups", exchanged, ""),
    ("its state is cleared", cleared, ""),
    ("the state of one parameter is cleared", one_cleared, r"the state of one parameter"),
):
    add(f"optimizers: {_name}", lambda side, life=_life: _lived(side, life), says=_says)


LATE: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "dampening": 0.5},
    "Adam": {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1},
    "AdamW": {"lr": 0.01, "amsgrad": True, "maximize": True},
    "Adagrad": {"lr": 0.1, "lr_decay": 0.5, "initial_accumulator_value": 0.1},
    "RMSprop": {"lr": 0.01, "centered": True, "momentum": 0.5, "weight_decay": 0.1},
}


class _Late(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, late: bool) -> torch.Tensor:
        x = self.a(x)
        return self.head(self.b(x) if late else x)


def _first_gradient_late(side: Side, name: str) -> Values:
    """Moments, and what corrects their bias, begin with a parameter's own first gradient."""
    model = side.wrap(built(_Late))
    made = side.optimizer(name, model.parameters(), **LATE[name])
    for step, (x, y) in enumerate(batches(side)[:5]):
        made.zero_grad()
        (model(x, step in (2, 4)) - y).square().mean().backward()
        made.step()
    return side.values(model)


for _name in LATE:
    add(
        f"optimizers: a layer's first gradient comes late, {_name}", lambda side, n=_name: _first_gradient_late(side, n)
    )


@case("optimizers: torch's LBFGS after ours", wrappers=SHARDED[:3], says=r"use `axon_ps.parallel.AdamW`|torch.optim")
def _(side: Side) -> Values:
    model = side.wrap(built(small))
    go_on(side, model, side.optimizer("SGD", model.parameters(), lr=0.1), 0)
    theirs = torch.optim.LBFGS(model.parameters(), max_iter=1)
    x, y = batches(side)[2]

    def closure() -> torch.Tensor:
        theirs.zero_grad()
        loss = mse(model, x, y)
        loss.backward()
        return loss

    if not hasattr(side, "world"):
        return side.values(model)
    theirs.step(closure)  # type: ignore[arg-type]
    raise Wrong("LBFGS has stepped on parameters that are on the servers")


@case("optimizers: the state of another model's", wrappers=SHARDED, says=r"of another model's optimizer")
def _(side: Side) -> Values:
    names: tuple[dict[str, str], ...] = ({"name": "a"}, {"name": "b"}) if hasattr(side, "world") else ({}, {})
    models: list[Any] = [side.wrap(built(small, seed), **name) for seed, name in enumerate(names)]
    made = [side.optimizer("AdamW", model.parameters(), lr=0.05) for model in models]
    go_on(side, models[0], made[0], 0)
    go_on(side, models[1], made[1], 2)
    models[1].load_state_dict(models[0].state_dict())
    made[1].load_state_dict(made[0].state_dict())
    go_on(side, models[1], made[1], 4)
    return side.values(models[1])


@case("optimizers: one of two models", wrappers=SHARDED, says=r"optimizer.*two models|one optimizer.*model")
def _(side: Side) -> Values:
    first, second = side.wrap(built(small)), side.wrap(built(small))
    made = side.optimizer("AdamW", [*first.parameters(), *second.parameters()], lr=0.1)
    for x, y in batches(side)[:2]:
        (mse(first, x, y) + mse(second, x, y)).backward()
        made.step()
        made.zero_grad()
    return side.values(first) | {f"second.{n}": v for n, v in side.values(second).items()}


@case("optimizers: the rate after a resume", wrappers=SHARDED)
def _(side: Side) -> Values:
    def make() -> tuple[Any, Made, Any]:
        model = side.wrap(built(small), **({"name": "resumed"} if hasattr(side, "world") else {}))
        made = side.optimizer("AdamW", model.parameters(), lr=1.0)
        return model, made, schedulers.LambdaLR(made, lambda n: 1 / (n + 1))

    def train(model: Any, made: Made, scheduler: Any, begin: int) -> None:
        for x, y in batches(side)[begin : begin + 3]:
            mse(model, x, y).backward()
            made.step()
            made.zero_grad()
            scheduler.step()

    model, made, scheduler = make()
    train(model, made, scheduler, 0)
    side.save(model, made)
    kept = copy.deepcopy(scheduler.state_dict())
    if hasattr(model, "release") and getattr(side, "strategy", "NO_SHARD") != "NO_SHARD":
        model.release()
    model, made, scheduler = make()
    side.load(model, made)
    scheduler.load_state_dict(kept)
    rate = float(made.param_groups[0]["lr"])
    train(model, made, scheduler, 3)
    return side.values(model) | {"rate after the resume": torch.tensor(rate)}

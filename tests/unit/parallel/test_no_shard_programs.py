"""NO_SHARD against plain torch where programs write values, and where a loss does not come from forward's tensors.

Tests of `parallel/fsdp/no_shard/replicated_unit.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from axon_ps import World
from axon_ps.errors import InvalidRequest, Misuse
from axon_ps.parallel import FSDP, SGD, MixedPrecision, ShardingStrategy
from axon_ps.testing import run_threads

STEPS, ROWS = 3, 8
INPUTS = torch.randn(STEPS, ROWS, 4, generator=torch.Generator().manual_seed(1))
PRECISIONS = {"f32": None, "bf16": MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
State = dict[str, torch.Tensor]

LIMIT_S = 300.0
"""For a hang: compiled loops may be cold, and others busy."""

pytestmark = pytest.mark.timeout(600)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.lin(x)) + x


def seeded(module: nn.Module) -> nn.Module:
    """Workers are threads, which share torch's own generator."""
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=random) * 0.5)
    return module


def plain() -> nn.Module:
    return seeded(nn.Sequential(Block(), Block()))


def wrapped(module: nn.Module, precision: str = "f32", unit_types: Any = Block) -> FSDP:
    return FSDP(
        module,
        sharding_strategy=ShardingStrategy.NO_SHARD,
        unit_types=unit_types,
        mixed_precision=PRECISIONS[precision],
    )


def rows(step: int, rank: int, world_size: int) -> torch.Tensor:
    return INPUTS[step].chunk(world_size)[rank]


# ---------------------------------------------------------------------- values that the program sets


def weight(module: Any) -> nn.Parameter:
    found: nn.Parameter = module[1].lin.weight
    return found


def value() -> torch.Tensor:
    return torch.linspace(-1.0, 1.0, 16).view(4, 4)


WRITES: dict[str, Callable[[Any], object]] = {
    "data =": lambda m: setattr(weight(m), "data", value()),
    "data = a view with strides": lambda m: setattr(weight(m), "data", value().t().contiguous().t()),
    "data.copy_": lambda m: weight(m).data.copy_(value()),
    "no_grad fill_": lambda m: torch.no_grad()(weight(m).fill_)(0.25),
    "no_grad clamp_": lambda m: torch.no_grad()(weight(m).clamp_)(-0.1, 0.1),
    "nn.init": lambda m: nn.init.constant_(weight(m), 0.5),
    "vector_to_parameters": lambda m: vector_to_parameters(
        parameters_to_vector(m.parameters()).detach() * 0.5, m.parameters()
    ),
    "module.load_state_dict": lambda m: getattr(m, "module", m).load_state_dict(
        {k: v * 0.5 for k, v in plain().state_dict().items()}
    ),
    "load_state_dict": lambda m: m.load_state_dict({k: v * 0.5 for k, v in plain().state_dict().items()}),
}


def read_and_trained(
    module: Any, optimizer: torch.optim.Optimizer, write: str, steps_before: int, rank: int, world_size: int
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The values read after a write, in every way there is, and after each step; and the loss after the write."""
    seen: list[torch.Tensor] = []
    first = torch.zeros(())
    for step in range(STEPS):
        if step == steps_before:
            WRITES[write](module)
            seen += [weight(module).detach().clone(), module.state_dict()["1.lin.weight"].clone()]
        loss = module(rows(step, rank, world_size)).square().mean()
        if step == steps_before:
            first = loss.detach().float()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen += [weight(module).detach().clone(), module.state_dict()["1.lin.weight"].clone()]
    return seen, first


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", [SGD, torch.optim.SGD])
def test_forward_optimizer_and_state_dict_have_what_was_written(kind: Any, precision: str) -> None:
    programs = [(write, steps_before) for write in WRITES for steps_before in (0, 1)]

    def worker(world: World) -> list[list[torch.Tensor]]:
        found = []
        for write, steps_before in programs:
            model = wrapped(plain(), precision)
            optimizer = kind(model.parameters(), lr=0.1)
            seen, loss = read_and_trained(model, optimizer, write, steps_before, world.rank, 2)
            found.append([*seen, world.default_group.all_gather(loss.reshape(1)).mean()])
        return found

    tolerance = 1e-6 if precision == "f32" else 2e-2
    for found in run_threads(worker, 2, timeout_s=LIMIT_S):
        for (write, steps_before), got in zip(programs, found, strict=True):
            reference = plain()
            optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
            want, loss = read_and_trained(reference, optimizer, write, steps_before, 0, 1)
            for at, (a, b) in enumerate(zip(got, [*want, loss], strict=True)):
                where = f"{write}, after {steps_before} steps, value {at}"
                torch.testing.assert_close(a.float(), b, rtol=tolerance, atol=tolerance, msg=where)


@pytest.mark.parametrize("data", [torch.zeros(2, 2), torch.zeros(4, 4, dtype=torch.float64)])
def test_data_of_another_kind_is_refused_by_name(data: torch.Tensor) -> None:
    (world,) = World.mock(1)
    with world:
        model = wrapped(plain())
        weight(model).data = data
        with pytest.raises(InvalidRequest, match=r"parameter '1.lin.weight' was set to torch.float\d\d\["):
            model.state_dict()


# ---------------------------------------------------------------------- losses that are no output


class Holder:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class Returning(nn.Module):
    """Its forward gives what `kind` says."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.second = Block(), Block()
        self.loss = torch.zeros(())
        seeded(self)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.second(self.first(x))
        if self.kind == "attribute":
            self.loss = y.square().mean()
            return y.detach()
        if self.kind == "nothing":
            self.loss = y.square().mean()
            return None
        if self.kind == "distribution":
            return torch.distributions.Normal(y, 1.0)
        return Holder(y)


def loss_of(model: Any, kind: str, x: torch.Tensor) -> torch.Tensor:
    output = model(x)
    if kind in ("attribute", "nothing"):
        loss: torch.Tensor = model.loss
        return loss
    if kind == "distribution":
        return -output.log_prob(torch.ones_like(x)).mean()
    return output.x.square().mean()


@pytest.mark.parametrize("optimizer", [SGD, torch.optim.SGD])
def test_gradients_are_averaged_wherever_the_loss_comes_from(optimizer: Any) -> None:
    programs = [(kind, units) for kind in ("attribute", "nothing", "distribution", "object") for units in (Block, ())]

    def trained(model: Any, kind: str, made: torch.optim.Optimizer, rank: int, world_size: int) -> State:
        for step in range(STEPS):
            made.zero_grad()
            loss_of(model, kind, rows(step, rank, world_size)).backward()
            made.step()
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def worker(world: World) -> list[State]:
        models = [wrapped(Returning(kind), unit_types=units) for kind, units in programs]
        return [
            trained(model, kind, optimizer(model.parameters(), lr=0.1), world.rank, 2)
            for model, (kind, _) in zip(models, programs, strict=True)
        ]

    for states in run_threads(worker, 2, timeout_s=LIMIT_S):
        for (kind, _), state in zip(programs, states, strict=True):
            reference = Returning(kind)
            want = trained(reference, kind, torch.optim.SGD(reference.parameters(), lr=0.1), 0, 1)
            for name, tensor in want.items():
                torch.testing.assert_close(state[name], tensor, rtol=1e-6, atol=1e-6, msg=f"{kind}: {name}")


@pytest.mark.parametrize("optimizer", [SGD, torch.optim.SGD])
def test_no_step_is_made_of_gradients_that_were_not_averaged(optimizer: Any) -> None:
    def worker(world: World) -> State:
        model = wrapped(plain())
        made = optimizer(model.parameters(), lr=0.1)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with model.no_sync():
            model(rows(0, world.rank, 2)).square().mean().backward()
        with pytest.raises(Misuse, match=r"inside no_sync\(\).*sync_gradients\(\)"):
            made.step()
        torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
        model.sync_gradients()
        made.step()
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}

    reference = plain()
    made = torch.optim.SGD(reference.parameters(), lr=0.1)
    reference(rows(0, 0, 1)).square().mean().backward()
    made.step()
    for state in run_threads(worker, 2, timeout_s=LIMIT_S):
        torch.testing.assert_close(state, dict(reference.state_dict()), rtol=1e-6, atol=1e-6)


def test_gradients_that_were_dropped_need_no_average() -> None:
    def worker(world: World) -> None:
        model = wrapped(plain())
        made = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.no_sync():
            model(rows(0, world.rank, 2)).square().mean().backward()
        made.zero_grad()
        made.step()

    run_threads(worker, 2, timeout_s=LIMIT_S)

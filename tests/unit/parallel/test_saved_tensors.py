"""Backward by every way: what autograd saved of a unit's parameters is gathered when it is read.

Tests of `parallel/fsdp/tensors/saved_tensors.py`.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from axon_ps.errors import Misuse
from axon_ps.parallel import FSDP, SGD, CPUOffload, ShardingStrategy
from parallel_fakes import FakeGroup, FakeSteps

SERVED = [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.HYBRID_SHARD]
OFFLOADS = [CPUOffload.NONE, CPUOffload.PARAMS, CPUOffload.FULL]


class Block(nn.Module):
    """x + up(tanh(down(x))); the flags are what a block does beside."""

    def __init__(self, **does: bool) -> None:
        super().__init__()
        self.down, self.up, self.does = nn.Linear(6, 4), nn.Linear(4, 6), does
        self.seen: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> Any:
        inner = torch.tanh(self.down(x))
        if self.does.get("checkpoints"):
            out = x + checkpoint(self.inside, inner, use_reentrant=False)  # type: ignore[operator]
        else:
            out = x + self.up(inner)
        if self.does.get("detaches"):
            out = out + torch.tanh(x @ self.up.weight.detach() @ self.down.weight.detach())
        if self.does.get("puts aside"):
            self.seen = self.up(inner).square()
        return torch.distributions.Normal(out, 1.0) if self.does.get("wraps") else out

    def inside(self, inner: torch.Tensor) -> torch.Tensor:
        """A part of forward that reads parameters of the block by name."""
        return torch.tanh(self.up(inner) @ self.down.weight.detach().T @ self.down.weight)


class Net(nn.Module):
    def __init__(self, *calls: int, **does: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(**does) for _ in range(3))
        self.head, self.calls = nn.Linear(6, 2), calls or (0, 1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in self.calls:
            found = self.blocks[number](x)
            x = found.mean if isinstance(found, torch.distributions.Normal) else found
        out: torch.Tensor = self.head(x)
        return out


def penalty(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    out = model(x)
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return out.square().mean() + grad.square().mean()


def output(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).square().mean()
    return loss


def aside(model: Any, x: torch.Tensor) -> torch.Tensor:
    model(x)
    loss: torch.Tensor = sum(block.seen.mean() for block in model.blocks)  # type: ignore[assignment]
    return loss


WAYS: dict[str, Any] = {
    "its output": (Net(), output),
    "a gradient's gradient": (Net(), penalty),
    "what a block put aside": (Net(**{"puts aside": True}), aside),
    "an object that a block returned": (Net(wraps=True), output),
    "a detached weight": (Net(detaches=True), output),
    "a block twice in a row": (Net(0, 0, 1, 1), output),
    "a checkpoint inside a block": (Net(checkpoints=True), output),
    "a checkpoint inside, with a penalty": (Net(checkpoints=True), penalty),
}


def make(module: nn.Module, strategy: ShardingStrategy, **options: Any) -> tuple[FSDP, SGD, FakeSteps]:
    group = FakeGroup()
    model = FSDP(module, group, unit_types={Block}, sharding_strategy=strategy, **options)  # type: ignore[arg-type]
    return model, SGD(model, lr=0.1), group.world.steps


def frozen(module: nn.Module) -> nn.Module:
    """One weight of each block is frozen, so that a unit is of two parts."""
    for name, param in module.named_parameters():
        param.requires_grad_("down.weight" not in name)
    return module


@pytest.mark.parametrize("freeze", [False, True], ids=["all", "partly frozen"])
@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("strategy", SERVED)
@pytest.mark.parametrize("way", list(WAYS))
def test_training_equals_plain_torch(way: str, strategy: ShardingStrategy, offload: CPUOffload, freeze: bool) -> None:
    module, loss = WAYS[way]
    plain = copy.deepcopy(module)
    if freeze:
        frozen(plain)
    model, optimizer, _ = make(copy.deepcopy(plain), strategy, cpu_offload=offload)
    reference = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.1)
    for step in range(3):
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(step))
        for trained, stepper in ((plain, reference), (model, optimizer)):
            loss(trained, x).backward()
            stepper.step()
            stepper.zero_grad()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("strategy", SERVED)
def test_a_graph_of_gradients_is_read_by_several_backwards(strategy: ShardingStrategy) -> None:
    """As `torch.autograd.functional.hessian` does, with a backward for each element."""
    plain = Net()
    model, optimizer, _ = make(copy.deepcopy(plain), strategy)
    x = torch.randn(2, 6)

    def hessian(of: nn.Module) -> torch.Tensor:
        found: torch.Tensor = torch.autograd.functional.hessian(lambda z: of(z).square().sum(), x)
        return found

    torch.testing.assert_close(hessian(model), hessian(plain), rtol=1e-5, atol=1e-6)
    optimizer.zero_grad()
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    for trained, stepper in ((plain, reference), (model, optimizer)):
        output(trained, x).backward()
        stepper.step()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("strategy", SERVED)
def test_an_activation_checkpoint_around_a_unit_saves_nothing_of_its_inside(strategy: ShardingStrategy) -> None:
    class Outer(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)  # type: ignore[assignment]
            out: torch.Tensor = self.head(x)
            return out

    saved: list[torch.Size] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.shape)
        return tensor

    model, _, _ = make(Outer(), strategy)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(torch.randn(5, 6, requires_grad=True)).sum().backward()
    assert torch.Size([5, 4]) not in saved[:4]  # the inside of a block, before backward computes it again


def test_what_is_changed_in_place_after_it_was_saved_is_refused_as_by_torch() -> None:
    class Changes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = self.linear(x).exp()
            kept = out * 2
            out.add_(1.0)
            return kept

    for module in (Changes(), make(Changes(), ShardingStrategy.FULL_SHARD)[0]):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            module(torch.randn(5, 6)).sum().backward()


@pytest.mark.parametrize("strategy", SERVED)
def test_a_graph_from_before_a_step_is_refused(strategy: ShardingStrategy) -> None:
    model, optimizer, _ = make(Net(), strategy)
    x = torch.randn(5, 6)
    loss = output(model, x)
    loss.backward(retain_graph=True)
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(Misuse, match="Run forward again"):
        loss.backward()
    optimizer.zero_grad()
    output(model, x).backward()
    assert optimizer.step().committed

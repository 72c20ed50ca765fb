"""Changes by a program to parameters and gradients of a wrapped model: as in torch, or refused by name.

Tests of `parallel/fsdp/tensors/sharded_parameter.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from axon_ps.errors import InvalidRequest, Misuse
from axon_ps.parallel import FSDP, SGD, CPUOffload, ShardingStrategy
from parallel_fakes import FakeGroup, FakeSteps

SERVED = [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.HYBRID_SHARD]
ALL = list(ShardingStrategy)


class Block(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(4, 1))


def make(module: nn.Module, strategy: ShardingStrategy, **options: Any) -> tuple[FSDP, SGD, FakeSteps]:
    group = FakeGroup()
    model = FSDP(module, group, unit_types={Block}, sharding_strategy=strategy, **options)  # type: ignore[arg-type]
    return model, SGD(model, lr=0.1), group.world.steps


def backward(model: nn.Module, seed: int = 0) -> None:
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))
    model(x).square().mean().backward()


def assert_equal(model: nn.Module, plain: nn.Module) -> None:
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------------- written in forward


def clamped(block: Any) -> None:
    with torch.no_grad():
        block[0].weight.clamp_(-0.1, 0.1)


def through_data(block: Any) -> None:
    block[0].weight.data.mul_(0.9)


def through_detach(block: Any) -> None:
    block[0].bias.detach()[0] = 1.0


WRITES: list[Callable[[Any], None]] = [clamped, through_data, through_detach]


class Writing(Block):
    def __init__(self, write: Callable[[Any], None]) -> None:
        super().__init__()
        self.write = write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.write(self)
        out: torch.Tensor = super().forward(x)
        return out


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("strategy", ALL)
@pytest.mark.parametrize("frozen", [False, True])
def test_what_forward_writes_into_a_parameter_counts_or_is_refused(
    strategy: ShardingStrategy, write: Callable[[Any], None], frozen: bool
) -> None:
    plain = nn.Sequential(Writing(write), nn.Linear(4, 1))
    plain[0].requires_grad_(not frozen)
    model, optimizer, steps = make(copy.deepcopy(plain), strategy)
    if strategy is not ShardingStrategy.NO_SHARD:
        for _ in range(2):  # the second time, too
            with pytest.raises(Misuse, match=r"'0\.0\.(weight|bias)' was changed in place.*docs/wrapped_model\.md"):
                backward(model)
        assert not steps.units("push")
        return
    backward(plain)
    torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.1).step()
    backward(model)
    optimizer.step()
    assert_equal(model, plain)


def test_a_norm_that_an_embedding_keeps_is_refused() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(5, 4, max_norm=0.5), nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.head(self.embed(x))
            return out

    model, _, _ = make(Net(), ShardingStrategy.FULL_SHARD)
    with pytest.raises(Misuse, match=r"'embed\.weight' was changed in place.*max_norm"):
        model(torch.arange(5))


READERS: dict[str, Callable[[FSDP, SGD, torch.Tensor], Any]] = {
    "forward": lambda model, _, __: model(torch.ones(2, 4)),
    "backward": lambda _, __, loss: loss.backward(),
    "step": lambda _, optimizer, __: optimizer.step(),
    "state_dict": lambda model, _, __: model.state_dict(),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("strategy", SERVED)
def test_what_is_written_between_forward_and_backward_is_refused_by_whatever_comes_next(
    strategy: ShardingStrategy, reader: str
) -> None:
    model, optimizer, steps = make(build(), strategy)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    loss = model(torch.ones(2, 4)).sum()
    with torch.no_grad():
        model.module[2].bias.mul_(0.5)  # the root's, which stays unsharded until backward
    with pytest.raises(Misuse, match=r"'2\.bias' was changed in place"):
        READERS[reader](model, optimizer, loss)
    assert not steps.units("push")
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Parameter(torch.arange(12.0).view(3, 4)), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.head(x + self.table[0]), self.table[1:]


@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD])
def test_a_view_of_a_parameter_has_its_values_until_a_step_makes_others(strategy: ShardingStrategy) -> None:
    model, optimizer, _ = make(Table(), strategy)
    with torch.no_grad():
        _, view = model(torch.ones(2, 4))
        model(torch.ones(2, 4))  # other memory
    assert view.tolist() == [[4.0, 5.0, 6.0, 7.0], [8.0, 9.0, 10.0, 11.0]]
    loss, again = model(torch.ones(2, 4))
    loss.sum().backward()
    assert view.tolist() == again.tolist()
    optimizer.step()
    assert torch.isnan(view).all()
    assert torch.isnan(again).all()


# ---------------------------------------------------------------------- frozen, unfrozen, replaced


@pytest.mark.parametrize("strategy", ALL)
def test_a_parameter_that_is_unfrozen_after_wrapping_is_refused(strategy: ShardingStrategy) -> None:
    plain = build()
    plain[0].requires_grad_(False)
    model, optimizer, _ = make(plain, strategy)
    backward(model)
    optimizer.step()
    optimizer.zero_grad()
    model.module[0][0].weight.requires_grad_(True)  # type: ignore[index]
    with pytest.raises(Misuse, match=r"'0\.0\.weight' was frozen when.*freeze it afterwards"):
        backward(model)


def replaced(model: Any) -> None:
    model.module[0][0].weight = nn.Parameter(torch.ones(8, 4))


def assigned(model: Any) -> None:
    model.module.load_state_dict(build().state_dict(), assign=True)


@pytest.mark.parametrize("strategy", ALL)
@pytest.mark.parametrize("replace", [replaced, assigned])
def test_a_parameter_that_is_replaced_after_wrapping_is_refused(
    strategy: ShardingStrategy, replace: Callable[[Any], None]
) -> None:
    model, _, _ = make(build(), strategy)
    with pytest.raises(Misuse, match="was replaced since the model was wrapped|on a module inside the wrapped model"):
        replace(model)
        backward(model)


class Around(nn.Module):
    """A module around another one, with a frozen parameter of its own."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside
        self.scale = nn.Parameter(torch.full((1,), 0.5), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inside(x) * self.scale
        return out


def another_head(module: Any) -> None:
    module[2] = nn.Linear(4, 1)


def another_frozen_head(module: Any) -> None:
    module[2] = nn.Linear(4, 1).requires_grad_(False)


def another_block(module: Any) -> None:
    module[0] = Block()


def one_more_layer(module: Any) -> None:
    module.append(nn.Linear(1, 1))


def an_adapter(module: Any) -> None:
    module[1] = Around(module[1])
    module[1].scale.requires_grad_(True)


def a_parameter(module: Any) -> None:
    module[1].gain = nn.Parameter(torch.ones(1))


CHANGES = {
    another_head: "'2.weight' was replaced",
    another_frozen_head: "'2.weight' was replaced",
    another_block: "'0.0.weight' was replaced",
    one_more_layer: "'3.weight' was added",
    an_adapter: "'1.scale' was added",
    a_parameter: "'1.gain' was added",
}


@pytest.mark.parametrize("strategy", ALL)
@pytest.mark.parametrize("change", CHANGES)
def test_a_module_that_is_replaced_or_added_after_wrapping_is_refused(
    strategy: ShardingStrategy, change: Callable[[Any], None]
) -> None:
    module = build()
    model, optimizer, steps = make(module, strategy)
    backward(model)
    optimizer.step()
    optimizer.zero_grad()
    sent = len(steps.units("push"))
    change(module)
    for _ in range(2):  # the second time, too
        with pytest.raises(Misuse, match=CHANGES[change] + " since the model was wrapped"):
            backward(model)
    if "replaced" in CHANGES[change]:
        with pytest.raises(Misuse, match=CHANGES[change]):
            model.state_dict()
    with pytest.raises(InvalidRequest, match=rf"{CHANGES[change]}.*model\.sharded_parameters\(\)"):
        SGD(model.parameters(), lr=0.1)
    assert len(steps.units("push")) == sent


@pytest.mark.parametrize("strategy", ALL)
def test_a_group_of_parameters_that_were_added_is_refused_as_such(strategy: ShardingStrategy) -> None:
    module = build()
    model, optimizer, _ = make(module, strategy)
    new = nn.Linear(1, 1)
    module.append(new)
    with pytest.raises(InvalidRequest, match=r"'3\.weight' was added since the model was wrapped"):
        optimizer.add_param_group({"params": new.parameters()})
        backward(model)
        optimizer.step()


def wrapped_in_another(module: Any) -> None:
    module[1] = Around(module[1])


def without_parameters(module: Any) -> None:
    module.append(nn.Tanh())


def without_a_block(module: Any) -> None:
    module[1] = nn.Identity()


@pytest.mark.parametrize("strategy", ALL)
@pytest.mark.parametrize("change", [wrapped_in_another, without_parameters, without_a_block])
def test_a_change_of_the_tree_that_adds_nothing_to_train_is_as_in_torch(
    strategy: ShardingStrategy, change: Callable[[Any], None]
) -> None:
    plain = build()
    module = copy.deepcopy(plain)
    model, optimizer, _ = make(module, strategy)
    change(plain)
    change(module)
    reference = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.1)
    for step in range(2):
        for trained, stepper in ((plain, reference), (model, optimizer)):
            backward(trained, step)
            stepper.step()
            stepper.zero_grad()
    x = torch.ones(2, 4)
    torch.testing.assert_close(model(x), plain(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("strategy", ALL)
def test_ignored_parameters_are_nobodys_to_refuse(strategy: ShardingStrategy) -> None:
    plain = build()
    plain.append(nn.Linear(1, 1))
    module = copy.deepcopy(plain)
    model, optimizer, _ = make(module, strategy, ignored_parameters=list(module[3].parameters()))
    own = torch.optim.SGD(module[3].parameters(), lr=0.1)
    module.append(nn.Tanh())
    plain.append(nn.Tanh())
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    backward(plain)
    reference.step()
    backward(model)
    optimizer.step()
    own.step()
    assert_equal(model, plain)


def test_transforms_of_functions_are_refused() -> None:
    model, _, _ = make(build(), ShardingStrategy.FULL_SHARD)
    x = torch.randn(3, 4)
    values = {name: torch.ones(p.shape) for name, p in model.module.named_parameters()}
    for call in (
        lambda: functional_call(model.module, values, (x,)),
        lambda: vmap(model)(x[None]),
        lambda: grad(lambda y: model(y).sum())(x),
    ):
        with pytest.raises(Misuse, match=r"functional_call|torch\.func's transforms"):
            call()


# ---------------------------------------------------------------------- gradients


@pytest.mark.parametrize("strategy", ALL)
def test_hooks_of_the_user_see_the_gradient_before_it_leaves_whenever_they_are_registered(
    strategy: ShardingStrategy,
) -> None:
    plain = build()
    model, optimizer, _ = make(copy.deepcopy(plain), strategy)
    backward(model)  # nothing was registered yet
    optimizer.step()
    optimizer.zero_grad()

    def halve(param: torch.Tensor) -> None:
        param.grad.mul_(0.5)  # type: ignore[union-attr]

    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    backward(plain)
    reference.step()
    reference.zero_grad()
    for module in (plain, model):
        for param in module.parameters():
            param.register_post_accumulate_grad_hook(halve)
    backward(plain)
    reference.step()
    backward(model)
    optimizer.step()
    assert_equal(model, plain)
    optimizer.zero_grad()
    inner: Any = model.module
    inner[0][0].weight.register_post_accumulate_grad_hook(halve)
    inner[0].requires_grad_(False)
    backward(model)  # torch registers no hook any more


@pytest.mark.parametrize("strategy", SERVED)
@pytest.mark.parametrize("offload", [CPUOffload.NONE, CPUOffload.FULL])
def test_gradients_of_no_sync_are_dropped_by_zero_grad(strategy: ShardingStrategy, offload: CPUOffload) -> None:
    plain = build()
    model, optimizer, _ = make(copy.deepcopy(plain), strategy, cpu_offload=offload)
    with model.no_sync():
        backward(model, 1)
    optimizer.zero_grad()
    assert model.statistics()["grad_buffer_bytes"] == 0
    for trained, stepper in ((plain, torch.optim.SGD(plain.parameters(), lr=0.1)), (model, optimizer)):
        backward(trained)
        stepper.step()
    assert_equal(model, plain)


class Broken(Exception):
    pass


@pytest.mark.parametrize("strategy", SERVED)
@pytest.mark.parametrize("at", ["0.0.weight", "1.0.weight", "2.weight"])
def test_a_backward_that_is_broken_off_is_withdrawn_by_zero_grad(strategy: ShardingStrategy, at: str) -> None:
    plain = build()
    model, optimizer, steps = make(copy.deepcopy(plain), strategy)

    def fail(_: torch.Tensor) -> None:
        raise Broken

    hook = dict(model.module.named_parameters())[at].register_hook(fail)
    with pytest.raises(Broken):
        backward(model, 1)
    hook.remove()
    if steps.units("push"):
        with pytest.raises(Misuse, match=r"optimizer\.zero_grad\(\)"):
            optimizer.step()
        with pytest.raises(Misuse, match=r"optimizer\.zero_grad\(\)"):
            backward(model)
    optimizer.zero_grad()
    assert model.version == 0
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(2):
        for trained, stepper in ((plain, reference), (model, optimizer)):
            backward(trained, step)
            stepper.step()
            stepper.zero_grad()
    assert model.version == 2
    assert_equal(model, plain)


@pytest.mark.parametrize("strategy", SERVED)
def test_a_gradient_that_was_sent_is_withdrawn_by_zero_grad(strategy: ShardingStrategy) -> None:
    plain = build()
    model, optimizer, _ = make(copy.deepcopy(plain), strategy)
    for trained, stepper in ((plain, torch.optim.SGD(plain.parameters(), lr=0.1)), (model, optimizer)):
        backward(trained, 1)
        stepper.zero_grad()
        backward(trained)
        stepper.step()
    assert_equal(model, plain)


@pytest.mark.parametrize("strategy", SERVED)
def test_a_step_behind_a_withdrawal_is_the_one_that_was_withdrawn(strategy: ShardingStrategy) -> None:
    model, optimizer, steps = make(build(), strategy)
    backward(model)
    optimizer.zero_grad()
    votes = len(steps.units("vote"))
    result = optimizer.step()
    assert not result.committed
    assert len(steps.units("vote")) == votes, "the others make one step"
    backward(model)
    assert optimizer.step().committed


@pytest.mark.parametrize("strategy", SERVED)
def test_a_gradient_that_torch_would_apply_again_is_refused(strategy: ShardingStrategy) -> None:
    model, optimizer, _ = make(build(), strategy)
    backward(model)
    optimizer.step()
    with pytest.raises(Misuse, match=r"torch would apply it again.*zero_grad"):
        optimizer.step()
    optimizer.zero_grad()
    backward(model)
    assert optimizer.step().committed


@pytest.mark.parametrize("strategy", SERVED)
def test_values_are_not_loaded_into_a_part_of_a_model(strategy: ShardingStrategy) -> None:
    model, _, _ = make(build(), strategy)
    head: Any = model.module[2]  # type: ignore[index]
    with pytest.raises(Misuse, match=r"model\.load_state_dict\(\{'2\.weight': \.\.\.\}, strict=False\)"):
        head.load_state_dict({"weight": torch.ones(1, 4), "bias": torch.ones(1)})
    model.load_state_dict({"2.weight": torch.ones(1, 4)}, strict=False)
    assert bool((model.state_dict()["2.weight"] == 1.0).all())


@pytest.mark.parametrize("strategy", ALL)
def test_a_step_that_forward_makes_is_made_once(strategy: ShardingStrategy) -> None:
    class Stepping(nn.Module):
        """As Lightning's manual optimization has it: the wrapper's forward trains."""

        def __init__(self) -> None:
            super().__init__()
            self.inside, self.scale, self.steps = build(), nn.Parameter(torch.ones(1)), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(2):
                (self.inside(x) * self.scale).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                self.steps += 1
            out: torch.Tensor = self.inside(x) * self.scale
            return out

    module = Stepping()
    plain = copy.deepcopy(module)
    x = torch.randn(6, 4)
    optimizer: Any = torch.optim.SGD(plain.parameters(), lr=0.1)
    plain(x)
    model, optimizer, _ = make(module, strategy)
    model(x)
    assert module.steps == 2
    assert_equal(model, plain)

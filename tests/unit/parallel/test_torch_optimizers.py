"""Optimizers of torch.optim on the servers. Tests of `parallel/fsdp2/optimizers.py`."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from axon_ps import World
from axon_ps.errors import InvalidRequest, Misuse
from axon_ps.parallel import AdamW, GradScaler, ServerOptimizer, fully_shard, sharded_model
from axon_ps.testing import run_threads
from composed_model import INPUTS, STEPS, TARGETS, Model, State, difference, init, plain, shard, train


def groups(model: Any) -> list[dict[str, Any]]:
    return [{"params": model.emb.parameters(), "lr": 0.02, "name": "emb"}, {"params": model.blocks.parameters()}]


def added_later(model: Any) -> torch.optim.Optimizer:
    made = torch.optim.SGD(groups(model), lr=0.05, momentum=0.9)
    made.add_param_group({"params": list(model.out.parameters()), "lr": 0.01})
    return made


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
    "AdamW fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, fused=True),
    "AdamW foreach": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, foreach=True),
    "AdamW amsgrad": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, amsgrad=True),
    "Adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, weight_decay=0.1),
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "Adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.1),
    "RMSprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01, centered=True),
    "groups": added_later,
}


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_its_steps_are_those_of_torch(name: str) -> None:
    make = OPTIMIZERS[name]

    def run(world: World) -> State:
        model = shard(Model())
        optimizer = make(model)
        kind = type(make(Model()))
        assert isinstance(optimizer, kind)
        assert type(optimizer).__name__ == kind.__name__
        assert repr(optimizer).startswith(kind.__name__)
        values = train(model, optimizer, world.rank, world.world_size)
        assert optimizer.last.committed  # type: ignore[attr-defined]
        assert all(t.is_meta for of in optimizer.state.values() for t in of.values()), "moments are on the servers"
        return values

    for values in run_threads(run, 2):
        assert difference(values, plain(make)) < 1e-5


def test_one_without_a_counterpart_is_refused_when_it_is_made() -> None:
    model = shard(Model())
    with pytest.raises(InvalidRequest, match="Adamax has no form on shard servers"):
        torch.optim.Adamax(model.parameters())
    with pytest.raises(InvalidRequest, match="differentiable=True has no form"):
        torch.optim.SGD(model.parameters(), lr=0.1, differentiable=True)


def test_of_other_parameters_torchs_optimizers_stay_as_they_are() -> None:
    shard(Model())
    other = torch.optim.AdamW(Model().parameters())
    assert type(other) is torch.optim.AdamW


def test_parameters_of_two_models_are_refused() -> None:
    one, two = shard(Model()), shard(Model())
    with pytest.raises(InvalidRequest, match="16 of 32 parameters are not of the Model"):
        torch.optim.AdamW([*one.parameters(), *two.parameters()])
    with pytest.raises(InvalidRequest, match="14 of 18 parameters are not of the Model|2 of 18"):
        torch.optim.AdamW([*one.parameters(), *nn.Linear(2, 2).parameters()])


def test_one_of_ignored_parameters_stays_as_it_is() -> None:
    model = Model()
    fully_shard(model, ignored_params=set(model.emb.parameters()))
    assert type(torch.optim.AdamW(model.emb.parameters())) is torch.optim.AdamW
    with pytest.raises(InvalidRequest, match="2 of 16 parameters are ignored_params of the Model"):
        torch.optim.AdamW(model.parameters())


def test_one_that_is_made_between_the_calls_is_of_the_model() -> None:
    def run(world: World) -> None:
        model = Model()
        fully_shard(model.blocks[0])
        optimizer = torch.optim.SGD(model.blocks[0].parameters(), lr=0.1)
        train(fully_shard(model), optimizer)
        assert sharded_model(model).version == STEPS

    run_threads(run, 1)


def test_a_step_with_gradients_of_another_optimizer_is_refused() -> None:
    """They would be dropped: a step on the servers is one of the whole model."""

    def run(world: World) -> None:
        model = shard(Model())
        one = torch.optim.SGD(model.blocks.parameters(), lr=0.1)
        other = torch.optim.SGD(model.out.parameters(), lr=0.1)
        model(INPUTS[0]).sum().backward()
        with pytest.raises(Misuse, match="2 parameters with gradients are in another optimizer"):
            one.step()
        del other
        one.step()
        assert one.last.committed  # type: ignore[attr-defined]

    run_threads(run, 1)


def test_a_step_before_gradients_are_to_be_sent_is_refused() -> None:
    def run(world: World) -> None:
        model = shard(Model())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.set_requires_gradient_sync(False)
        model(INPUTS[0]).sum().backward()
        with pytest.raises(Misuse, match=r"after set_requires_gradient_sync\(False\)"):
            optimizer.step()
        model.set_requires_gradient_sync(True)
        optimizer.step()
        assert optimizer.last.committed  # type: ignore[attr-defined]

    run_threads(run, 1)


def test_a_loss_is_scaled() -> None:
    def run(world: World) -> State:
        model = shard(Model())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = GradScaler(sharded_model(model), init_scale=2.0**10)
        for step in range(STEPS):
            scaler.scale(model(INPUTS[step]).square().mean() * (math.inf if step == 2 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scaler.get_scale() == 2.0**9
        return model.state_dict()

    reference = Model()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(STEPS):
        reference(INPUTS[step]).square().mean().backward()
        if step != 2:
            optimizer.step()
        optimizer.zero_grad()
    (values,) = run_threads(run, 1)
    assert difference(values, reference.state_dict()) < 1e-5


def test_a_closure_runs_once_and_its_loss_is_returned() -> None:
    def run(world: World) -> None:
        model = shard(Model())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(INPUTS[0]), TARGETS[0])
            loss.backward()
            losses.append(loss)
            return loss

        assert optimizer.step(closure) is losses[0]  # type: ignore[arg-type]
        assert len(losses) == 1
        assert sharded_model(model).version == 1

    run_threads(run, 1)


def test_hooks_of_torch_run_around_a_step() -> None:
    def run(world: World) -> list[str]:
        model = shard(Model())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen: list[str] = []
        optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
        optimizer.register_step_post_hook(lambda *_: seen.append("after"))
        train(model, optimizer)
        return seen

    assert run_threads(run, 1) == [["before", "after"] * STEPS]


def test_gradients_that_are_not_finite_change_nothing() -> None:
    def run(world: World) -> None:
        model = shard(Model())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        (model(INPUTS[0]).sum() * float("nan")).backward()
        optimizer.step()
        assert not optimizer.last.committed  # type: ignore[attr-defined]
        assert difference(model.state_dict(), init()) == 0

    run_threads(run, 1)


def test_our_own_optimizer_takes_the_parameters_too() -> None:
    def run(world: World) -> State:
        model = shard(Model())
        model(INPUTS[0])
        optimizer = AdamW(model.parameters(), lr=0.01)
        assert isinstance(optimizer, ServerOptimizer)
        return train(model, optimizer)

    (values,) = run_threads(run, 1)
    assert difference(values, plain(OPTIMIZERS["AdamW"])) < 1e-5


def test_torchs_own_method_is_what_is_extended() -> None:
    shard(Model())
    assert inspect.signature(torch.optim.Optimizer.add_param_group).parameters.keys() == {"self", "param_group"}

"""torch's optimizers and schedulers, moved to the shard servers: torch is the oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from axon_ps import World
from axon_ps.errors import InvalidRequest
from axon_ps.parallel import FSDP, AdamW
from axon_ps.parallel.counterpart import counterpart
from axon_ps.parallel.from_torch import MovedOptimizer, load_servers, moved, save_servers


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3, bias=False), nn.BatchNorm1d(3), nn.Linear(3, 1))


def adamw(model: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Two groups, one with a weight decay, and a learning rate that changes with each step."""
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.05, betas=(0.8, 0.9))
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (step + 1))


def trained(
    model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: torch.optim.lr_scheduler.LRScheduler
) -> None:
    for step in range(4):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def test_a_moved_optimizer_and_its_scheduler_do_what_torchs_do() -> None:
    expected = net()
    trained(expected, *adamw(expected))
    with World.mock():
        model = FSDP(net())
        optimizer, scheduler = adamw(model)
        ours = moved(optimizer)
        assert isinstance(ours, MovedOptimizer)
        assert type(ours).__name__ == "AdamW", "frameworks log it"
        scheduler.optimizer = ours
        trained(model, ours, scheduler)
        assert ours.param_groups[0]["lr"] == pytest.approx(0.05 / 5)
        for name, value in expected.state_dict().items():
            torch.testing.assert_close(model.state_dict()[name], value, msg=name)


def test_a_group_that_is_added_has_the_defaults_of_torchs() -> None:
    expected = net()
    with World.mock() as world:
        ours = FSDP(net(), world.default_group)
        both_trained(expected, ours)
        for name, value in expected.state_dict().items():
            torch.testing.assert_close(ours.state_dict()[name], value, msg=name)


def both_trained(*models: nn.Module) -> None:
    for model in models:
        first, *others = model.parameters()
        optimizer = moved(torch.optim.SGD([{"params": [first], "lr": 0.01}], lr=0.5, momentum=0.9))
        optimizer.add_param_group({"params": others})
        assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.5]
        assert optimizer.defaults["lr"] == 0.5
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
        for _ in range(2):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def test_a_step_without_any_gradient_does_nothing() -> None:
    with World.mock():
        model = FSDP(net())
        optimizer = moved(torch.optim.AdamW(model.parameters()))
        before = model.state_dict()
        assert not optimizer.step().committed  # type: ignore[attr-defined]
        assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())


def test_a_step_that_torch_would_make_of_the_gradients_before_is_named() -> None:
    """As Lightning's averaging makes one at its end."""
    with World.mock():
        model = FSDP(net())
        optimizer = moved(torch.optim.SGD(model.parameters(), lr=0.1))
        model(torch.ones(2, 4)).sum().backward()
        assert optimizer.step().committed
        expected = model.state_dict()
        with pytest.warns(UserWarning, match=r"not dropped \(zero_grad\(\)\).* a second time"):
            optimizer.step()
        for name, value in expected.items():
            assert torch.equal(model.state_dict()[name], value), name


def in_sequence(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    after = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [warm_up, after], [2])


def chained(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    of = torch.optim.lr_scheduler
    return of.ChainedScheduler([of.ConstantLR(optimizer, 0.5, 2), of.ExponentialLR(optimizer, 0.5)])


@pytest.mark.parametrize("schedule", [in_sequence, chained])
@pytest.mark.parametrize("rebound", [False, True], ids=["of torch's", "of ours"])
def test_a_step_applies_what_the_groups_of_either_optimizer_say(schedule: Any, rebound: bool) -> None:
    expected = net()
    plain, _ = adamw(expected)
    trained(expected, plain, schedule(plain))
    with World.mock():
        model = FSDP(net())
        optimizer, _ = adamw(model)
        scheduler = schedule(optimizer)
        ours = moved(optimizer)
        if rebound:
            scheduler.optimizer = ours
        trained(model, ours, scheduler)
        assert ours.param_groups is optimizer.param_groups
        assert [g["lr"] for g in ours.param_groups] == [g["lr"] for g in plain.param_groups]
        for name, value in expected.state_dict().items():
            torch.testing.assert_close(model.state_dict()[name], value, msg=name)
        state = ours.state_dict()
        state["param_groups"][0]["lr"] = 0.25
        ours.load_state_dict(state)
        assert optimizer.param_groups[0]["lr"] == 0.25
        optimizer.param_groups[0]["lr"] = 0.125
        assert ours.param_groups[0]["lr"] == 0.125


def test_what_is_not_torchs_of_a_wrapped_model_stays() -> None:
    with World.mock():
        plain = torch.optim.SGD(net().parameters(), lr=0.1)
        assert moved(plain) is plain
        ours = AdamW(FSDP(net()))
        assert moved(ours) is ours


def test_an_optimizer_without_a_form_on_the_servers_is_refused() -> None:
    optimizer = torch.optim.NAdam([nn.Parameter(torch.ones(1))])
    with pytest.raises(InvalidRequest, match=r"NAdam has no form on shard servers.*adamw.*, or do without"):
        counterpart(optimizer, "do without")


def test_buffers_are_saved_beside_the_servers_checkpoint(tmp_path: Path) -> None:
    with World.mock():
        model = FSDP(net())
        optimizer, scheduler = adamw(model)
        scheduler.optimizer = moved(optimizer)
        trained(model, scheduler.optimizer, scheduler)
        save_servers(model, tmp_path / "saved")
        expected = model.state_dict()
    with World.mock():
        model = FSDP(net())
        optimizer, _ = adamw(model)
        moved(optimizer)
        load_servers(model, tmp_path / "saved")
        for name, value in expected.items():
            assert torch.equal(model.state_dict()[name], value), name

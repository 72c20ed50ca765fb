"""What torch's functions do to sharded parameters and their gradients is right, or an error that says what to call.

Tests of `parallel/fsdp/tensors/torch_functions.py`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from axon_ps.errors import InvalidRequest, Misuse
from axon_ps.parallel import FSDP, SGD, CPUOffload, ShardingStrategy
from axon_ps.types import Outcome
from parallel_fakes import FakeGroup, FakeSteps

SERVED = [s for s in ShardingStrategy if s is not ShardingStrategy.NO_SHARD]
GRAD = "sent to the shard servers.*clip_grad_norm_.*axon_ps.parallel.AdamW"
VALUE = r"summon_full_params.*axon_ps\.parallel\.AdamW"


class Block(nn.Sequential):
    """A unit."""


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(nn.Linear(4, 8), nn.Tanh()), Block(nn.Linear(8, 4)), nn.LayerNorm(4))


def make(strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD, **options: Any) -> tuple[FSDP, SGD, FakeSteps]:
    group = FakeGroup()
    model = FSDP(build(), group, unit_types={Block}, sharding_strategy=strategy, **options)  # type: ignore[arg-type]
    return model, SGD(model, lr=0.1), group.world.steps


def backward(model: nn.Module) -> None:
    model(torch.linspace(-1, 1, 24).view(6, 4)).square().sum().backward()


# ---------------------------------------------------------------------- clipping


@pytest.mark.parametrize("foreach", [None, False, True])
@pytest.mark.parametrize("strategy", list(ShardingStrategy))
def test_torchs_clipping_clips_all_of_them_and_its_norm_is_known_after_the_step(
    strategy: ShardingStrategy, foreach: bool | None
) -> None:
    model, optimizer, steps = make(strategy)
    plain = build()
    backward(plain)
    expected = float(nn.utils.clip_grad_norm_(plain.parameters(), 1e-6))
    backward(model)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-6, foreach=foreach)
    if strategy is not ShardingStrategy.NO_SHARD:
        for read in (float, Tensor.item, lambda n: n > 1.0, lambda n: n + 1.0 + 1.0):
            with pytest.raises(Misuse, match=r"after optimizer\.step\(\)"):
                read(norm)
        assert "known when" in f"{norm}"
    optimizer.step()
    assert steps.max_norms == ([1e-6] if strategy is not ShardingStrategy.NO_SHARD else [])
    assert float(norm) == pytest.approx(expected, rel=1e-5)
    assert f"{norm:.3f}" == f"{expected:.3f}"
    assert float((norm * 2).sqrt()) == pytest.approx(math.sqrt(2 * expected), rel=1e-5)
    optimizer.zero_grad()
    backward(model)
    optimizer.step()  # not clipped again
    assert steps.max_norms[1:] == ([0.0] if strategy is not ShardingStrategy.NO_SHARD else [])


@pytest.mark.parametrize("strategy", list(ShardingStrategy))
def test_the_wrappers_own_clipping_is_that_of_torchs_fsdp(strategy: ShardingStrategy) -> None:
    model, optimizer, steps = make(strategy)
    backward(model)
    norm = model.clip_grad_norm_(0.5)
    model.clip_grad_norm_(0.25)
    model.clip_grad_norm_(max_norm=torch.tensor(math.inf), norm_type=2)  # measures
    result = optimizer.step()
    assert isinstance(norm, Tensor)
    if strategy is not ShardingStrategy.NO_SHARD:
        assert float(norm) == pytest.approx(result.grad_norm)
        assert steps.max_norms == [0.25]
    with pytest.raises(InvalidRequest, match="max_norm is 0"):
        model.clip_grad_norm_(0.0)
    with pytest.raises(InvalidRequest, match="norm_type is inf"):
        model.clip_grad_norm_(1.0, norm_type=math.inf)


def test_a_norm_of_a_step_that_was_broken_off_is_nan() -> None:
    model, optimizer, steps = make()
    backward(model)
    norm = model.clip_grad_norm_(1.0)
    steps.vote = lambda *_, **__: 1 / 0  # type: ignore[method-assign,assignment]
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    assert math.isnan(float(norm))
    del steps.vote
    steps.grads.clear()
    steps.outcome = Outcome.ABORT
    backward(model)
    norm = model.clip_grad_norm_(1.0)
    result = optimizer.step()
    assert float(norm) == pytest.approx(result.grad_norm)


@pytest.mark.parametrize("foreach", [False, True])
def test_what_cannot_be_clipped_is_refused(foreach: bool) -> None:
    model, optimizer, steps = make()
    other, _, _ = make()
    mine = nn.Linear(2, 2)
    backward(model)
    backward(other)
    mine(torch.ones(1, 2)).sum().backward()
    params = list(model.parameters())
    cases: list[tuple[list[nn.Parameter], dict[str, Any], str]] = [
        (params[:2], {}, "the norm of 2 of 6 gradients"),
        (params + params[:2], {"norm_type": math.inf}, "norm_type is inf"),
        (params, {"error_if_nonfinite": True}, "after optimizer"),
        ([*params, *mine.parameters()], {}, "together with 2 that were not sent"),
        ([*mine.parameters(), *params], {}, "together with 2 that were not sent"),
        ([*params, *other.parameters()], {}, "one wrapped model"),
    ]
    for given, options, message in cases:
        with pytest.raises((Misuse, InvalidRequest), match=message):
            nn.utils.clip_grad_norm_(given, 1.0, foreach=foreach, **options)
    with pytest.raises(Misuse, match=GRAD):
        nn.utils.clip_grad_value_(params, 1.0, foreach=foreach)
    norm = nn.utils.get_total_norm([p.grad for p in params if p.grad is not None], foreach=foreach)
    nn.utils.clip_grads_with_norm_(params[:3], 1.0, norm, foreach=foreach)
    with pytest.raises(Misuse, match="3 of the 6 gradients sent were clipped"):
        optimizer.step()
    optimizer.step()
    assert steps.max_norms == [0.0]


# ---------------------------------------------------------------------- gradients


READS: list[Callable[[nn.Parameter], object]] = [
    lambda p: p.grad.norm(),  # type: ignore[union-attr]
    lambda p: p.grad.data.abs(),  # type: ignore[union-attr]
    lambda p: p.grad + 1,  # type: ignore[operator]
    lambda p: torch.isfinite(p.grad),  # type: ignore[arg-type]
    lambda p: p.grad.mul_(torch.ones(2)),  # type: ignore[union-attr]
    lambda p: setattr(p, "grad", torch.zeros(p.shape)),
    lambda p: setattr(p, "grad", None),
]


@pytest.mark.parametrize("strategy", SERVED)
def test_a_gradient_that_was_sent_is_there_and_has_no_values(strategy: ShardingStrategy) -> None:
    model, optimizer, _ = make(strategy)
    assert all(p.grad is None for p in model.parameters())
    backward(model)
    for param in model.parameters():
        assert param.grad is not None
        assert param.grad.shape == param.shape
        assert param.grad.dtype == param.dtype
        assert "sent" in repr(param.grad)
        for read in READS:
            with pytest.raises(Misuse, match=GRAD):
                read(param)
    optimizer.step()
    assert all(p.grad is not None for p in model.parameters())  # as in torch
    with pytest.raises(Misuse, match="optimizer\\.zero_grad"):
        backward(model)
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    model.zero_grad()


@pytest.mark.parametrize("offload", [CPUOffload.NONE, CPUOffload.FULL])
def test_gradients_that_wait_are_clipped_and_dropped_wherever_they_wait(offload: CPUOffload) -> None:
    model, optimizer, steps = make(cpu_offload=offload)
    with model.no_sync():
        backward(model)
    model.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    with model.no_sync():
        backward(model)
    backward(model)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    assert steps.max_norms == [0.1]


@pytest.mark.parametrize("strategy", SERVED)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop])
def test_torchs_optimizers_are_refused_at_their_first_step(kind: Any, strategy: ShardingStrategy) -> None:
    for options in ({"foreach": True}, {"foreach": False}):
        model, _, _ = make(strategy)
        optimizer = kind(model.parameters(), lr=0.1, **options)
        backward(model)
        with pytest.raises(Misuse, match=r"axon_ps\.parallel\.AdamW"):
            optimizer.step()
        optimizer = kind(model.parameters(), lr=0.1, **options)
        with pytest.raises(Misuse, match=r"axon_ps\.parallel\.AdamW"), model.summon_full_params():
            optimizer.step()


def test_torchs_scaler_is_refused() -> None:
    model, optimizer, _ = make()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    with pytest.raises(Misuse, match=r"axon_ps\.parallel\.GradScaler"):
        scaler.step(optimizer)


# ---------------------------------------------------------------------- values


@pytest.mark.parametrize("strategy", SERVED)
def test_values_are_read_while_a_unit_runs_and_inside_summon_and_nowhere_else(strategy: ShardingStrategy) -> None:
    model, optimizer, _ = make(strategy)
    seen: list[float] = []
    model.module[0][0].register_forward_hook(lambda m, *_: seen.append(float(m.weight.detach().norm())))  # type: ignore[index]

    def refused() -> None:
        for param in model.parameters():
            assert (param.shape, param.numel(), param.requires_grad, param.device.type) == (
                param.data.shape,
                param.detach().numel(),
                True,
                "cpu",
            )
            assert "shard servers" in repr(param)
            assert "shard servers" in f"{param}"
            writes: list[Callable[[nn.Parameter], object]] = [
                lambda p: p.data.zero_(),
                lambda p: setattr(p, "data", torch.zeros(p.shape)),
                lambda p: nn.init.zeros_(p),
                lambda p: p.copy_(torch.zeros(p.shape)),
            ]
            reads: list[Callable[[nn.Parameter], object]] = [
                torch.sum,
                copy.deepcopy,
                lambda p: p.detach().numpy(),
                lambda p: p.data.tolist(),
                lambda p: p * 2,
                lambda p: nn.utils.parameters_to_vector([p]),
                lambda p: torch.stack([p]),
                lambda p: torch.empty(p.shape).copy_(p),
            ]
            for function in writes + reads:
                with torch.no_grad(), pytest.raises(Misuse, match=VALUE):
                    function(param)

    refused()
    backward(model)
    refused()
    optimizer.step()
    refused()
    with model.summon_full_params():
        assert all(math.isfinite(float(p.detach().sum())) for p in model.parameters())
        copied = copy.deepcopy([p.detach() for p in model.parameters()])
    refused()
    assert all(torch.isfinite(c).all() for c in copied)
    assert all(math.isfinite(norm) for norm in seen)


def test_under_no_shard_parameters_are_torchs_own() -> None:
    model, _, _ = make(ShardingStrategy.NO_SHARD)
    assert all(type(p) is nn.Parameter for p in model.parameters())


def test_parameters_keep_their_identity_and_their_class() -> None:
    class Special(nn.Parameter):
        """A user's own class."""

        note = "mine"

    module = build()
    module[2].weight = Special(torch.ones(4))  # type: ignore[index]
    before = list(module.parameters())
    model = FSDP(module, FakeGroup(), unit_types={Block})  # type: ignore[arg-type]
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    assert isinstance(module[2].weight, Special)  # type: ignore[index]
    assert module[2].weight.note == "mine"  # type: ignore[index]
    assert all(isinstance(p, nn.Parameter) for p in model.parameters())

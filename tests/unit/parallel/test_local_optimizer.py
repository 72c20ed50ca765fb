"""The servers' optimizers on masters in this process, against those of torch.

Tests of `parallel/fsdp/no_shard/local_optimizer.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from axon_ps.errors import InvalidRequest
from axon_ps.parallel.fsdp.no_shard.local_optimizer import LocalOptimizer
from axon_ps.sharding.layout import Unit, build_unit
from axon_ps.types import DType, Hyper, OptimizerSpec

SHAPES: list[list[tuple[int, ...]]] = [[(2, 3), (4,)], [(5,)]]
RATES: list[Hyper] = [{"lr": 0.1}, {"lr": 0.02}]
GROUP_OF = (0, 1, 0)


@dataclass
class FlatUnit:
    """A unit with its masters: what the optimizer reads of a `ReplicatedUnit`."""

    index: int
    unit: Unit
    master: torch.Tensor
    trainable: bool = True
    params: list[torch.nn.Parameter] = field(default_factory=list)


def flats(dtype: torch.dtype = torch.float32) -> list[Any]:
    """Units whose parameters are views of their masters."""
    made = []
    generator = torch.Generator().manual_seed(0)
    for index, shapes in enumerate(SHAPES):
        unit = build_unit(f"u{index}", [(f"p{index}{i}", shape, DType.F32) for i, shape in enumerate(shapes)])
        master = torch.randn(unit.numel, generator=generator).to(dtype)
        params = [
            torch.nn.Parameter(master[spec.offset : spec.end].view(shape))
            for spec, shape in zip(unit.parameters, shapes, strict=True)
        ]
        made.append(FlatUnit(index, unit, master, params=params))
    return made


def spec(name: str = "adamw", groups: list[Hyper] = RATES) -> OptimizerSpec:
    return OptimizerSpec(name=name, groups=tuple(groups), group_of=GROUP_OF)


def torchs(kind: Any, units: list[Any]) -> tuple[Any, list[torch.nn.Parameter]]:
    """The same optimizer of torch, on copies of the parameters."""
    copies = [torch.nn.Parameter(param.detach().clone()) for flat in units for param in flat.params]
    groups = [
        {"params": [p for p, g in zip(copies, GROUP_OF, strict=True) if g == i], **hyper}
        for i, hyper in enumerate(RATES)
    ]
    return kind(groups), copies


def give_gradients(step: int, *sets: list[torch.nn.Parameter], without: tuple[int, ...] = ()) -> None:
    for params in sets:
        generator = torch.Generator().manual_seed(step)
        for position, param in enumerate(params):
            grad = torch.randn(param.shape, generator=generator)
            param.grad = None if position in without else grad


@pytest.mark.parametrize(("name", "kind"), [("adamw", torch.optim.AdamW), ("rmsprop", torch.optim.RMSprop)])
def test_parameters_and_state_are_torchs_and_one_without_a_gradient_stays(name: str, kind: Any) -> None:
    units = flats()
    ours, mine = LocalOptimizer(spec(name), units), [p for flat in units for p in flat.params]
    oracle, theirs = torchs(kind, units)
    for step in range(4):
        give_gradients(step, mine, theirs, without=(1,) if step < 2 else ())
        ours.apply(RATES)
        oracle.step()
    for own, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)
    states = ours.states()
    for own, other in zip(mine, theirs, strict=True):
        assert states[own].keys() == oracle.state[other].keys()
        for key, value in oracle.state[other].items():
            torch.testing.assert_close(states[own][key], value, rtol=1e-5, atol=1e-6)
    assert ours.updates == {0: [4, 2], 1: [4]}


def test_a_state_of_torchs_goes_on_here_and_parameters_without_one_begin_anew() -> None:
    units = flats()
    mine = [p for flat in units for p in flat.params]
    oracle, theirs = torchs(torch.optim.AdamW, units)
    give_gradients(0, theirs, without=(1,))
    oracle.step()
    with torch.no_grad():
        for own, other in zip(mine, theirs, strict=True):
            own.copy_(other)
    ours = LocalOptimizer(spec(), units)
    give_gradients(7, mine)
    ours.apply(RATES)  # is forgotten, but for the parameters
    with torch.no_grad():
        for own, other in zip(mine, theirs, strict=True):
            own.copy_(other)
    ours.load_states({own: oracle.state.get(other, {}) for own, other in zip(mine, theirs, strict=True)}, RATES)
    assert ours.updates == {0: [1, 0], 1: [1]}
    give_gradients(1, mine, theirs)
    ours.apply(RATES)
    oracle.step()
    for own, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)


def test_a_state_of_another_optimizer_is_refused() -> None:
    units = flats()
    ours = LocalOptimizer(spec(), units)
    with pytest.raises(InvalidRequest, match="the state dict has 'momentum_buffer' of a parameter, which adamw"):
        ours.load_states({units[0].params[0]: {"momentum_buffer": torch.zeros(2, 3)}}, RATES)


def test_moments_are_made_when_hyperparameters_need_them_and_those_there_are_stay() -> None:
    units = flats()
    mine = [p for flat in units for p in flat.params]
    ours = LocalOptimizer(spec("sgd"), units)
    give_gradients(0, mine)
    ours.apply(RATES)
    assert ours.nbytes() == 0
    with_momentum: list[Hyper] = [{"lr": 0.1, "momentum": 0.9}, {"lr": 0.1}]
    ours.apply(with_momentum)
    assert ours.nbytes() == 4 * sum(flat.unit.numel for flat in units)
    moments = {index: dict(state) for index, state in ours.state.items()}
    ours.apply(RATES)
    for index, state in ours.state.items():
        assert all(state[name] is tensor for name, tensor in moments[index].items())


def test_an_optimizer_takes_over_the_moments_of_one_of_its_kind_alone() -> None:
    units = flats()
    before = LocalOptimizer(spec(), units)
    give_gradients(0, [p for flat in units for p in flat.params])
    before.apply(RATES)
    after = LocalOptimizer(spec(), units, before)
    assert after.updates == {0: [1, 1], 1: [1]}
    assert all(after.state[0][name] is moment for name, moment in before.state[0].items())
    other = LocalOptimizer(spec("rmsprop"), units, before)
    assert other.updates == {0: [0, 0], 1: [0]}
    assert all(not moment.any() for state in other.state.values() for moment in state.values())


def test_masters_of_another_dtype_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="unit 'u0' has masters of torch.bfloat16 on cpu"):
        LocalOptimizer(spec(), flats(torch.bfloat16))

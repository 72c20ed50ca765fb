"""Parameters that several stages share: found, equal at first, and with the sum of all gradients.

Tests of `parallel/pipeline/ties.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from axon_ps.collectives.process_group import ProcessGroup
from axon_ps.parallel.pipeline.ties import TiedParameters, find_ties
from mock_ranks import on_ranks

TIE = (((0, "weight"), (2, "weight")),)
OWNER = [0, 1, 1]  # the rank of each stage


def linear(value: float) -> nn.Linear:
    made = nn.Linear(2, 2, bias=False)
    nn.init.constant_(made.weight, value)
    return made


def test_parameters_of_several_stages_are_found_under_all_their_names() -> None:
    stages = [nn.Sequential(linear(0.0), linear(1.0)), linear(2.0), nn.Sequential(linear(3.0), linear(4.0))]
    stages[0][1].weight = stages[0][0].weight  # in one stage: no tie
    stages[1].weight = stages[2][1].weight
    assert find_ties(stages) == (((1, "weight"), (2, "1.weight")),)
    stages[2][0].weight = stages[2][1].weight
    assert find_ties(stages) == (((1, "weight"), (2, "0.weight"), (2, "1.weight")),)


def on_two_ranks(body: Any) -> list[Any]:
    """`body(tied, weight)` on each of two ranks; each has a copy of the shared weight, with a value of its own."""

    def one(group: ProcessGroup) -> Any:
        modules = {stage: linear(10.0 + stage) for stage, rank in enumerate(OWNER) if rank == group.rank}
        weight = modules[2 if group.rank else 0].weight
        return body(TiedParameters(TIE, OWNER, modules, group), weight)

    return on_ranks(2, one)


def test_copies_begin_as_the_first_ranks_and_only_that_one_is_counted() -> None:
    def body(tied: TiedParameters, weight: nn.Parameter) -> Any:
        return weight.tolist(), [copy is weight for copy in tied.counted_elsewhere]

    assert on_two_ranks(body) == [([[10.0, 10.0]] * 2, []), ([[10.0, 10.0]] * 2, [True])]


def test_a_gradient_from_before_the_step_is_added_once() -> None:
    def body(tied: TiedParameters, weight: nn.Parameter) -> Any:
        results = []
        for step in range(2):
            tied.begin()
            assert weight.grad is None
            if weight is not None and tied.counted_elsewhere == ():
                weight.grad = torch.full_like(weight, 1.0 + step)
            else:
                weight.grad = torch.full_like(weight, 100.0)
            tied.reduce()
            results.append(weight.grad[0, 0].item())
        return results

    assert on_two_ranks(body) == [[101.0, 101.0 + 102.0]] * 2


def test_a_rank_that_has_computed_no_gradient_has_the_sum_of_the_others() -> None:
    def body(tied: TiedParameters, weight: nn.Parameter) -> Any:
        tied.begin()
        if tied.counted_elsewhere:
            weight.grad = torch.full_like(weight, 5.0)
        tied.reduce()
        return weight.grad.tolist()  # type: ignore[union-attr]

    assert on_two_ranks(body) == [[[5.0, 5.0]] * 2] * 2


def test_copies_of_one_process_need_no_group() -> None:
    modules = {0: linear(1.0), 1: linear(2.0), 2: linear(3.0)}
    tied = TiedParameters(TIE, [0, 0, 0], modules, None)
    assert torch.equal(modules[2].weight, modules[0].weight)
    assert [id(copy) for copy in tied.counted_elsewhere] == [id(modules[2].weight)]
    tied.begin()
    for stage in (0, 2):
        modules[stage].weight.grad = torch.full((2, 2), 1.0 + stage)
    tied.reduce()
    assert modules[0].weight.grad is not modules[2].weight.grad
    for stage in (0, 2):
        assert modules[stage].weight.grad.tolist() == [[4.0, 4.0]] * 2  # type: ignore[union-attr]


def test_copies_of_one_rank_of_several_are_its_own_matter() -> None:
    def one(group: ProcessGroup) -> Any:
        modules = {1: linear(1.0), 2: linear(2.0)} if group.rank == 1 else {0: linear(3.0)}
        tied = TiedParameters((((1, "weight"), (2, "weight")),), OWNER, modules, group)
        tied.begin()
        for module in modules.values():
            module.weight.grad = torch.ones(2, 2)
        tied.reduce()
        return [(module.weight[0, 0].item(), module.weight.grad[0, 0].item()) for module in modules.values()]

    assert on_ranks(2, one) == [[(3.0, 1.0)], [(1.0, 2.0), (1.0, 2.0)]]


def test_frozen_copies_get_no_gradient() -> None:
    modules = {0: linear(1.0), 2: linear(2.0)}
    for module in modules.values():
        module.requires_grad_(False)
    tied = TiedParameters(TIE, [0, 0, 0], modules, None)
    tied.begin()
    tied.reduce()
    assert modules[0].weight.grad is None


def test_a_name_that_a_stage_does_not_have_is_an_error() -> None:
    with pytest.raises(AttributeError):
        TiedParameters((((0, "bias2"), (2, "weight")),), [0, 0, 0], {0: linear(1.0), 2: linear(2.0)}, None)

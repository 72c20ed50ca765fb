"""Gradients on their way that a pipeline's schedule multiplies by a number: the servers do it with the step."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from axon_ps.errors import InvalidRequest, Misuse
from axon_ps.parallel.fsdp.tensors.sent_gradients import Home, SentGradient, SentGradients


def sent() -> tuple[SentGradients, list[SentGradient]]:
    """The gradients of two parameters of a unit."""
    gradients, model, param = SentGradients(), nn.Linear(1, 1), torch.zeros(2, 3)
    gradients.add(0, 2)
    found = [gradients.of(param, Home(weakref.ref(model), name, 0, gradients)) for name in "ab"]
    return gradients, [grad for grad in found if grad is not None]


def test_all_of_them_are_multiplied() -> None:
    gradients, both = sent()
    for grad in both:
        assert grad.div_(4) is grad
    for grad in both:
        grad.mul_(2.0)
    assert gradients.factor == 0.5
    assert gradients.checked_max_norm() == 0.0
    gradients.decided(1.0)
    assert gradients.factor == 1.0


def test_some_of_them_are_refused_at_the_step() -> None:
    gradients, (first, _) = sent()
    first.div_(4)
    with pytest.raises(Misuse, match="1 of the 2 gradients sent were multiplied by a number; multiply all of them"):
        gradients.checked_max_norm()


@pytest.mark.parametrize("factor", [-1.0, 0.0, float("inf"), float("nan")])
def test_other_factors_are_refused(factor: float) -> None:
    _, (first, _) = sent()
    with pytest.raises((InvalidRequest, Misuse), match=r"must be above 0|cannot be done"):
        first.mul_(factor)

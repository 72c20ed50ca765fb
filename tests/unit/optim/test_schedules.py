"""Schedules against torch.optim.lr_scheduler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, SequentialLR

from axon_ps.errors import InvalidRequest
from axon_ps.optim.schedules import constant, cosine_with_warmup, linear


def torchs(make: Callable[[torch.optim.Optimizer], Any], versions: int) -> list[float]:
    """torch's learning rate for a base of 1, at every version."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = make(optimizer)
    factors = []
    for _ in range(versions):
        factors.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return factors


def test_constant() -> None:
    ours = [constant(0.3)(v) for v in range(20)]
    assert ours == pytest.approx(torchs(lambda o: ConstantLR(o, factor=0.3, total_iters=100), 20))
    assert constant()(7) == 1.0


def test_linear() -> None:
    ours = [linear(0.25, 1.0, 10)(v) for v in range(20)]
    assert ours == pytest.approx(torchs(lambda o: LinearLR(o, start_factor=0.25, end_factor=1.0, total_iters=10), 20))
    assert linear(1.0, 0.5, 0)(0) == 0.5


@pytest.mark.parametrize("end", [0.0, 0.1])
def test_cosine_with_warmup(end: float) -> None:
    def make(optimizer: torch.optim.Optimizer) -> SequentialLR:
        warmup = LinearLR(optimizer, start_factor=0.2, total_iters=5)
        return SequentialLR(optimizer, [warmup, CosineAnnealingLR(optimizer, T_max=25, eta_min=end)], milestones=[5])

    schedule = cosine_with_warmup(30, warmup_versions=5, start=0.2, end=end)
    assert [schedule(v) for v in range(31)] == pytest.approx(torchs(make, 31))
    assert schedule(1000) == end


def test_cosine_edges() -> None:
    assert cosine_with_warmup(10)(0) == 1.0
    assert cosine_with_warmup(5, warmup_versions=5, end=0.1)(5) == 0.1
    assert cosine_with_warmup(5, warmup_versions=5)(0) == 0.0


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: linear(0.0, 1.0, -1), "versions is -1"),
        (lambda: cosine_with_warmup(10, warmup_versions=-1), "warmup_versions is -1"),
        (lambda: cosine_with_warmup(4, warmup_versions=5), "versions is 4; needed is a number of versions ≥ 5"),
    ],
)
def test_impossible_lengths_are_refused(make: Callable[[], object], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        make()

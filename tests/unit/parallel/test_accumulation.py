"""Gradients that stay on a worker: when they are pushed, staged and rescaled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from axon_ps.errors import Misuse
from axon_ps.parallel.fsdp.memory import Meter
from axon_ps.parallel.fsdp.steps import StepBatch
from axon_ps.parallel.fsdp.tensors.accumulation import Accumulation
from axon_ps.parallel.fsdp.tensors.sent_gradients import SentGradients
from axon_ps.parallel.fsdp.tensors.unit_gradients import UnitGradients
from axon_ps.sharding.layout import build_unit
from axon_ps.types import DType


class Flat:
    """A unit of one parameter of two numbers, as far as its gradients go."""

    def __init__(self) -> None:
        self.index = 0
        self.params = [nn.Parameter(torch.zeros(2))]
        unit = build_unit("u", [("weight", (2,), DType.F32)])
        self.grads = UnitGradients(unit, self.params, torch.device("cpu"), torch.device("cpu"))


def made(*, stages: bool = False) -> tuple[Any, Accumulation, Meter]:
    flat: Any = Flat()
    meter = Meter()
    return flat, Accumulation([flat], SentGradients(), meter, stages=stages), meter


def batch(weight: float, index: int = 0, count: int = 2) -> StepBatch:
    return StepBatch(generation=1, weight=weight, index=index, count=count, commit={})


def state(accumulation: Accumulation) -> dict[str, bool]:
    """What becomes of gradients now."""
    names = ("goes_on", "sums_batches", "stages")
    return {"pushes": accumulation.pushes(0), **{name: getattr(accumulation, name) for name in names}}


def test_gradients_are_pushed_but_inside_no_sync_and_before_the_last_micro_batch() -> None:
    _, accumulation, _ = made()
    assert state(accumulation) == {"goes_on": False, "sums_batches": False, "pushes": True, "stages": False}
    accumulation.syncing = False
    assert state(accumulation) == {"goes_on": False, "sums_batches": False, "pushes": False, "stages": False}
    accumulation.syncing = True
    accumulation.begin(batch(0.5), adds=False)
    assert state(accumulation) == {"goes_on": True, "sums_batches": True, "pushes": False, "stages": True}
    accumulation.begin(batch(0.5, index=1), adds=True)
    assert state(accumulation) == {"goes_on": False, "sums_batches": True, "pushes": True, "stages": False}


def test_units_may_stay_here_while_others_are_pushed() -> None:
    flat, accumulation, _ = made()
    accumulation.local = frozenset({0})
    assert (accumulation.pushes(0), accumulation.pushes(1)) == (False, True)
    assert not accumulation.has_local
    flat.params[0].grad = torch.ones(2)
    assert accumulation.has_local
    accumulation.local = frozenset()
    assert not accumulation.has_local
    accumulation.syncing = False
    assert accumulation.has_local


def test_with_offload_they_are_always_staged() -> None:
    _, accumulation, _ = made(stages=True)
    assert state(accumulation)["stages"]


def test_staged_memory_is_counted() -> None:
    flat, accumulation, meter = made()
    flat.params[0].grad = torch.ones(2)
    accumulation.stage(flat)
    assert meter.current_bytes == flat.grads.staged_bytes == 8


def test_gradients_of_earlier_batches_are_rescaled_to_the_weight_of_the_next() -> None:
    flat, accumulation, _ = made()
    accumulation.begin(batch(0.25), adds=False)
    flat.params[0].grad = torch.tensor([1.0, 2.0])
    accumulation.stage(flat)
    accumulation.begin(batch(0.5, index=1), adds=True)
    assert flat.grads.pop()[0].tolist() == [0.5, 1.0]


def test_a_batch_that_counts_for_nothing_does_not_follow_one_that_counts() -> None:
    _, accumulation, _ = made()
    accumulation.begin(batch(0.25), adds=False)
    with pytest.raises(Misuse, match="drop_last=True"):
        accumulation.begin(batch(0.0, index=1), adds=True)

"""Gradients of a unit: staged, multiplied, packed into one buffer, dropped."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from axon_ps.errors import InvalidRequest
from axon_ps.parallel.fsdp.tensors.unit_gradients import UnitGradients
from axon_ps.sharding.layout import build_unit
from axon_ps.types import DType

CPU = torch.device("cpu")


def unit_of(dtype: torch.dtype = torch.float32) -> tuple[list[nn.Parameter], UnitGradients]:
    """A unit of a weight of two numbers and a bias of one."""
    params = [nn.Parameter(torch.zeros(2, dtype=dtype)), nn.Parameter(torch.zeros(1, dtype=dtype))]
    unit = build_unit("u", [("weight", (2,), DType.F32), ("bias", (1,), DType.F32)], trainable=True)
    return params, UnitGradients(unit, params, CPU, CPU)


def test_they_are_packed_in_layout_order_scaled_and_taken() -> None:
    params, grads = unit_of()
    params[0].grad = torch.tensor([1.0, 2.0])
    out = torch.full((3,), float("nan"))
    assert (grads.present, grads.pack(out, 0.5)) == (True, [True, False])
    assert out.tolist() == [0.5, 1.0, 0.0], "what has no gradient is 0"
    assert (grads.present, params[0].grad) == (False, None)


def test_staged_ones_are_added_to_those_that_come() -> None:
    params, grads = unit_of(torch.bfloat16)
    for _ in range(2):
        params[0].grad = torch.tensor([1.0, 3.0], dtype=torch.bfloat16)
        grads.stage()
        assert params[0].grad is None
    assert grads.staged_bytes == 2 * 4, "in f32"
    params[0].grad = torch.tensor([1.0, 1.0], dtype=torch.bfloat16)
    params[1].grad = torch.tensor([5.0], dtype=torch.bfloat16)
    weight, bias = grads.pop()
    assert weight is not None
    assert bias is not None
    assert (weight.tolist(), bias.tolist()) == ([3.0, 7.0], [5.0])
    assert (grads.present, grads.staged_bytes) == (False, 0)


def test_they_are_multiplied_wherever_they_are_and_by_0_dropped() -> None:
    params, grads = unit_of()
    params[0].grad = torch.tensor([1.0, 2.0])
    grads.stage()
    params[1].grad = torch.tensor([float("nan")])
    grads.multiply(2.0)
    out = torch.empty(3)
    grads.pack(out, 1.0)
    assert out[:2].tolist() == [2.0, 4.0]
    params[1].grad = torch.tensor([float("nan")])
    grads.multiply(0.0)
    assert grads.pack(out, 1.0) == [False, False]
    assert out.tolist() == [0.0, 0.0, 0.0]


def test_staged_ones_can_be_forgotten() -> None:
    params, grads = unit_of()
    params[0].grad = torch.ones(2)
    grads.stage()
    grads.drop_staged()
    assert not grads.present


@pytest.mark.parametrize("taken", ["stage", "pack"])
def test_a_sparse_one_is_refused_by_name(taken: str) -> None:
    params, grads = unit_of()
    params[0].grad = torch.tensor([1.0, 0.0]).to_sparse()
    with pytest.raises(InvalidRequest, match="weight"):
        grads.stage() if taken == "stage" else grads.pack(torch.empty(3), 1.0)

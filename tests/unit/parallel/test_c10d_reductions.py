"""c10d's reduce operations as ours, and dtypes that no backend reduces.

Tests of `parallel/c10d/reductions.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from axon_ps.errors import InvalidRequest
from axon_ps.parallel.c10d.reductions import TensorReduction
from axon_ps.types import ReduceOp

ALL = [op for op in ReduceOp if op.name in ("SUM", "AVERAGE", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")]
OPS = {ReduceOp.AVERAGE: dist.ReduceOp.AVG} | {
    op: getattr(dist.ReduceOp, op.name) for op in ALL if op is not ReduceOp.AVERAGE
}


@pytest.mark.parametrize("op", OPS)
def test_every_operation_is_the_one_of_that_name(op: ReduceOp) -> None:
    for given in (OPS[op], dist.ReduceOp(OPS[op])):
        assert TensorReduction.of(given, torch.int64).op is op


def test_complex_numbers_have_no_order_and_no_bits() -> None:
    for op, theirs in OPS.items():
        if op in (ReduceOp.SUM, ReduceOp.AVERAGE):
            assert TensorReduction.of(theirs, torch.complex64).direct
        else:
            with pytest.raises(InvalidRequest, match=f"{op.value} of complex numbers is not defined; SUM and AVG are"):
                TensorReduction.of(theirs, torch.complex64)


def test_an_operation_that_is_unknown_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="the reduce operation MEDIAN is unknown"):
        TensorReduction.of("MEDIAN", torch.float32)


def stored(reduction: TensorReduction, values: list[Tensor], reduce: Any) -> Tensor:
    """Return the user's tensor after a reduction of all ranks' buffers by `reduce`."""
    result = torch.empty_like(values[0])
    reduction.store(reduce([reduction.buffer(value) for value in values]), result)
    return result


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.uint16, torch.uint32])
def test_integers_are_widened_and_wrap_around(dtype: torch.dtype) -> None:
    info = torch.iinfo(dtype)
    values = [torch.tensor([info.max, info.min, 5], dtype=dtype) for _ in range(3)]
    reduction = TensorReduction.of(dist.ReduceOp.SUM, dtype)
    assert not reduction.direct
    result = stored(reduction, values, sum)
    modulus = 1 << info.bits
    expected = [(3 * value - info.min) % modulus + info.min for value in (info.max, info.min, 5)]
    assert result.to(torch.int64).tolist() == expected
    assert reduction.numel(7) == 7


def test_unsigned_numbers_of_64_bits_keep_their_order_and_wrap_around() -> None:
    numbers = [3, 1 << 63, (1 << 64) - 1]
    values = [torch.tensor([number], dtype=torch.uint64) for number in numbers]
    for op, oracle, reduce in (
        (dist.ReduceOp.MAX, max(numbers), lambda buffers: torch.stack(buffers).amax(0)),
        (dist.ReduceOp.MIN, min(numbers), lambda buffers: torch.stack(buffers).amin(0)),
        (dist.ReduceOp.SUM, sum(numbers) % (1 << 64), sum),
    ):
        reduction = TensorReduction.of(op, torch.uint64)
        assert reduction.direct == (op == dist.ReduceOp.SUM)
        assert int(stored(reduction, values, reduce).item()) == oracle


def test_bits_of_integers_are_reduced_where_they_are() -> None:
    for dtype in (torch.int8, torch.int16, torch.uint16):
        reduction = TensorReduction.of(dist.ReduceOp.BXOR, dtype)
        tensor = torch.ones(4, dtype=dtype)
        assert reduction.direct
        assert reduction.buffer(tensor).data_ptr() == tensor.data_ptr()
    assert not TensorReduction.of(dist.ReduceOp.BXOR, torch.float8_e5m2).direct


def test_float8_is_rounded_once() -> None:
    dtype = torch.float8_e4m3fn
    values = [torch.tensor([1.0, 0.0625], dtype=dtype) for _ in range(3)]
    result = stored(TensorReduction.of(dist.ReduceOp.SUM, dtype), values, sum)
    assert torch.equal(result.to(torch.float32), torch.tensor([3.0, 0.1875]).to(dtype).to(torch.float32))


@pytest.mark.parametrize("factor", [0.5, torch.tensor(0.5)])
def test_a_factor_multiplies_every_contribution_and_not_the_users_memory(factor: Any) -> None:
    reduction = TensorReduction.of(dist._make_nccl_premul_sum(factor), torch.float32)
    assert (reduction.op, reduction.direct, reduction.results_fit) == (ReduceOp.SUM, False, True)
    tensor = torch.tensor([2.0, 4.0])
    assert reduction.buffer(tensor).tolist() == [1.0, 2.0]
    assert tensor.tolist() == [2.0, 4.0]


def test_complex_numbers_travel_as_pairs() -> None:
    reduction = TensorReduction.of(dist.ReduceOp.SUM, torch.complex64)
    tensor = torch.tensor([1 + 2j, 3 - 4j])
    buffer = reduction.buffer(tensor)
    assert buffer.tolist() == [1.0, 2.0, 3.0, -4.0]
    assert buffer.data_ptr() == tensor.data_ptr()
    assert reduction.numel(5) == 10


def test_dtypes_without_a_sum_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="cannot be reduced; convert them first"):
        TensorReduction.of(dist.ReduceOp.SUM, torch.float8_e8m0fnu).buffer(
            torch.zeros(1, dtype=torch.uint8).view(torch.float8_e8m0fnu)
        )

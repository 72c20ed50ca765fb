"""`CallPlans`: the calls of our group that c10d's operations become, and the memory that they use. Nothing is sent."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from axon_ps.collectives.process_group import ProcessGroup
from axon_ps.errors import InvalidRequest
from axon_ps.parallel.c10d import coalesced
from axon_ps.parallel.c10d.calls import CallPlan
from axon_ps.parallel.c10d.plans import CallPlans
from axon_ps.parallel.c10d.tensors import nothing

SUM = dist.ReduceOp.SUM


def plans(rank: int = 1) -> CallPlans:
    return CallPlans(ProcessGroup.mock(3)[rank])


def given(plan: CallPlan) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of the call of our group."""
    call = cast("partial[Any]", plan.call)
    return call.args, call.keywords


def test_a_contiguous_tensor_is_reduced_where_it_is() -> None:
    tensor = torch.arange(6.0).view(2, 3)
    plan = plans().all_reduce([tensor], SUM)
    assert given(plan)[0][0].data_ptr() == tensor.data_ptr()
    assert plan.finish is nothing
    assert (plan.what, plan.device) == ("all_reduce", torch.device("cpu"))


def test_a_dtype_that_no_backend_reduces_is_widened_and_stored() -> None:
    tensor = torch.ones(4, dtype=torch.int8)
    plan = plans().all_reduce([tensor], SUM)
    buffer = given(plan)[0][0]
    assert buffer.dtype is torch.int32
    buffer.fill_(7)
    plan.finish()
    assert tensor.tolist() == [7] * 4


def test_only_the_root_of_a_reduce_is_written() -> None:
    column = torch.arange(6.0).view(2, 3).t()
    for root in (0, 1):
        plan = plans().reduce(column, root, SUM)
        given(plan)[0][0].fill_(root)
        plan.finish()
    assert column.tolist() == [[1.0, 1.0]] * 3
    assert plans().reduce(column, 0, SUM).finish is nothing


def test_rows_of_several_tensors_are_packed_and_unpacked() -> None:
    outputs, inputs = [torch.zeros(6), torch.zeros(3)], [torch.ones(2), torch.full((1,), 2.0)]
    plan = plans().all_gather_rows(outputs, inputs, 3)
    (data,), keywords = given(plan)
    assert data.tolist() == [1.0, 1.0, 2.0]
    keywords["out"].copy_(torch.arange(9.0))
    plan.finish()
    assert [t.tolist() for t in outputs] == [[0, 1, 3, 4, 6, 7], [2, 5, 8]]


def test_counts_are_those_of_the_dtype_that_travels() -> None:
    parts = [torch.ones(r, dtype=torch.complex64) for r in (2, 1, 0)]
    assert given(plans().all_gather(parts, torch.ones(1, dtype=torch.complex64)))[1]["counts"] == [4, 2, 0]
    splits = given(plans().all_to_all_splits(torch.ones(3, 2), torch.ones(4, 2), [2, 0, 1], [0, 4, 0]))[1]
    assert (splits["output_counts"], splits["input_counts"]) == ([4, 0, 2], [0, 8, 0])


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (lambda p, t: p.all_gather([t, t], t), "a list of 2 tensors; it needs 3"),
        (lambda p, t: p.all_gather([t, t[:1], t], t), "output 1 of all_gather has 1 elements; it needs 4"),
        (lambda p, t: p.reduce_scatter(t[:2], [t, t, t], SUM), "the output of reduce_scatter has 2 elements"),
        (lambda p, t: p.scatter(t, [t, t, t[:3]], 1), r"tensors of \[4, 4, 3\] elements; each must have 4"),
        (lambda p, t: p.all_to_all([t] * 3, [t]), "all_to_all was given a list of 1 tensors"),
        (lambda p, t: p.all_to_all_splits(t, t, None, None), "4 rows do not divide equally among 3 ranks"),
        (lambda p, t: p.all_to_all_splits(t, t, [1, 1, 1], [4, 0, 0]), r"\[1, 1, 1\].*3 numbers with the sum 4"),
        (lambda p, t: p.check_shards("x", t, t), "x has 4 elements; it needs 12"),
        (lambda p, t: p.check_gathered([t, t, t[:1]], t), r"tensors of \[4, 4, 1\] elements"),
        (lambda p, t: p.check_lists("y", [[t], [t], [t, t]], [t]), "y was given 2 outputs and 1 inputs"),
    ],
)
def test_tensors_that_do_not_fit(plan: Callable[[CallPlans, Tensor], object], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        plan(plans(), torch.ones(4))


def test_small_tensors_of_a_kind_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coalesced, "PACKED_BYTES", 16)
    shards = [torch.ones(2), torch.ones(9), torch.ones(3), torch.ones(2, dtype=torch.int64), torch.ones(1)]
    assert coalesced.packed(shards) == [[0, 2, 4], [1], [3]]
    with pytest.raises(InvalidRequest, match="no tensors were given"):
        coalesced.packed([])

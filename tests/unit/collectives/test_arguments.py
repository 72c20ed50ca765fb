"""The arguments of collectives: shapes, counts, and the calls that are made of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from axon_ps.collectives import arguments
from axon_ps.collectives.arguments import rank_names
from axon_ps.collectives.backends.mock import mock_contexts
from axon_ps.collectives.group_members import GroupMembers
from axon_ps.errors import InvalidRequest
from axon_ps.reduction.call import Call, Operation
from axon_ps.types import DType, ReduceOp

SUM = ReduceOp.SUM
ROWS = np.arange(12.0).reshape(6, 2)


def members(rank: int = 1, n: int = 3) -> GroupMembers:
    return GroupMembers(mock_contexts(n)[rank])


def test_a_call_gets_its_number_and_its_arrays() -> None:
    out = np.empty(12)
    prepared = arguments.all_reduce(np.ones(12), SUM, out)
    call = prepared.numbered(7)
    assert call == Call(sequence=7, operation=Operation.ALL_REDUCE, dtype=DType.F64, counts=(12,), op=SUM)
    request = prepared.request(call)
    assert request.data is not None
    assert np.shares_memory(request.data, out)
    assert request.output is None
    assert prepared.result is out
    assert prepared.copied is not None


def test_data_that_is_only_read_may_be_read_only() -> None:
    fixed = np.ones(3)
    fixed.flags.writeable = False
    assert arguments.broadcast(members(), fixed, root=1).counts == (3,)
    assert arguments.reduce(members(), fixed, 0, SUM).root == 0
    for written in (
        lambda: arguments.broadcast(members(), fixed, 0),
        lambda: arguments.reduce(members(), fixed, 1, SUM),
    ):
        with pytest.raises(InvalidRequest, match="read-only"):
            written()


def test_counts_are_rows_and_the_calls_are_elements() -> None:
    assert arguments.all_gather(members(), ROWS, None, None).counts == (12, 12, 12)
    assert arguments.all_gather(members(), ROWS, None, [0, 6, 1]).counts == (0, 12, 2)
    assert arguments.reduce_scatter(members(), ROWS[:4], SUM, None, None).counts == (4, 2, 2)
    assert arguments.gather(members(), ROWS, 0, None, None).output is None
    assert arguments.gather(members(), ROWS, 1, None, None).result.shape == (18, 2)
    assert arguments.scatter(members(), ROWS, 1, None, None).result.shape == (2, 2)
    exchange = arguments.all_to_all(members(), ROWS, None, [1, 2, 0], None)
    assert (exchange.output_counts, exchange.input_counts) == ((2, 4, 0), (4, 4, 4))
    assert exchange.result.shape == (3, 2)


def test_a_scalar_is_one_row() -> None:
    assert arguments.all_gather(members(), np.array(2.0), None, None).result.shape == (3,)
    assert arguments.all_gather(members(n=1, rank=0), np.array(2.0), np.empty(()), None).counts == (1,)


def test_a_barrier_has_no_arrays() -> None:
    prepared = arguments.barrier()
    assert prepared.numbered(0).dtype is DType.U8
    request = prepared.request(prepared.numbered(0))
    assert (request.data, request.output, prepared.result) == (None, None, None)


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (lambda m: arguments.all_reduce(ROWS, ReduceOp.BAND), "bitwise"),
        (lambda m: arguments.all_reduce(ROWS, SUM, np.empty((2, 6))), r"out is f64\[2, 6\]; needed is f64\[6, 2\]"),
        (lambda m: arguments.broadcast(m, ROWS, 3), "src is 3"),
        (lambda m: arguments.all_gather(m, ROWS, None, [6, 6]), "one number from 0 for each of 3 ranks"),
        (lambda m: arguments.all_gather(m, ROWS, None, [6, -1, 6]), "one number from 0 for each of 3 ranks"),
        (lambda m: arguments.all_gather(m, ROWS, None, [6, 5, 6]), "data has 6 rows; the counts say 5"),
        (lambda m: arguments.all_gather(m, ROWS, np.empty((17, 2)), None), r"needed is f64\[18, 2\] in host memory"),
        (lambda m: arguments.reduce_scatter(m, ROWS, SUM, None, [1, 1, 1]), "data has 6 rows; the counts say 3"),
        (lambda m: arguments.scatter(m, None, 1, None, None), "scatter needs data on rank src"),
        (lambda m: arguments.scatter(m, None, 0, None, None), "scatter needs data on rank src"),
        (lambda m: arguments.scatter(m, ROWS[:5], 1, None, None), "5 rows do not divide among 3 ranks; give counts="),
        (lambda m: arguments.scatter(m, ROWS, 1, np.empty((1, 2)), None), "data has 6 rows; the counts say 3"),
        (lambda m: arguments.all_to_all(m, ROWS[:4], None, None, None), "4 rows do not divide .* give input_counts="),
    ],
)
def test_arguments_that_do_not_fit(prepare: Callable[[GroupMembers], Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        prepare(members())


@rank_names("dst", old="to")
def sent(data: str, dst: int, tag: int = 0) -> tuple[str, int, int]:
    """Return what it was given."""
    return data, dst, tag


@rank_names("src")
def from_any(src: int = -1) -> int:
    """Return what it was given."""
    return src


def call(function: Any, *args: Any, **given: Any) -> Any:
    """Call a function as a program without types does."""
    return function(*args, **given)


def test_a_rank_has_torchs_names_and_for_one_release_an_old_one() -> None:
    assert sent("x", 3) == sent("x", dst=3) == call(sent, "x", tag=0, group_dst=3) == ("x", 3, 0)
    with pytest.warns(DeprecationWarning, match=r"^to= of sent is called dst= now$"):
        assert call(sent, "x", to=3, tag=1) == ("x", 3, 1)
    assert [from_any(), call(from_any, group_src=2)] == [-1, 2]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (lambda: call(sent, "x"), r"^sent was not given dst=, a position in the group$"),
        (lambda: call(sent, "x", 1, to=1), "was given dst and to, which are one rank"),
        (lambda: call(sent, "x", dst=1, group_dst=1), "was given dst and group_dst"),
        (lambda: call(sent, "x", to=1, group_dst=1), "was given dst and to"),
        (lambda: call(from_any, 1, group_src=1), "was given src and group_src"),
    ],
)
def test_a_rank_given_twice_or_not_at_all_is_refused(given: Callable[[], object], why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        given()


def test_a_function_keeps_its_name_and_signature() -> None:
    assert sent.__name__ == "sent"
    assert list(inspect.signature(sent).parameters) == ["data", "dst", "tag"]


@pytest.mark.parametrize("op", ["sum", "SUM", "Sum", SUM])
def test_an_operation_has_its_name_in_any_case(op: Any) -> None:
    assert arguments.all_reduce(ROWS.copy(), op).op is SUM
    assert (
        arguments.all_reduce(ROWS.copy(), "avg").op is arguments.all_reduce(ROWS.copy(), "mean").op is ReduceOp.AVERAGE
    )

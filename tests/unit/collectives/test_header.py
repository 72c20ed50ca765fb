"""The headers that ranks exchange before a collective."""

from __future__ import annotations

import numpy as np
import pytest

from axon_ps.collectives.backends import header
from axon_ps.collectives.backends.base import Call, Operation
from axon_ps.collectives.backends.mock import mock_contexts
from axon_ps.collectives.backends.request import Request
from axon_ps.errors import Disagreement
from axon_ps.types import DType, ReduceOp

CONTEXT = mock_contexts(3, ranks=(4, 5, 9))[0]


def all_reduce(numel: int, sequence: int = 0) -> Request:
    call = Call(sequence=sequence, operation=Operation.ALL_REDUCE, dtype=DType.F32, counts=(numel,), op=ReduceOp.SUM)
    return Request(call=call)


def test_a_header_has_one_size_and_shows_when_it_is_complete() -> None:
    sizes = {header.encode(r, 3).size for r in (all_reduce(1), all_reduce(10**12), Request(call=all_reduce(1).call))}
    assert sizes == {header.numel(3)}
    assert header.arrived(header.encode(all_reduce(1), 3))
    assert not header.arrived(np.zeros(header.numel(3), np.uint8))


def test_equal_calls_agree() -> None:
    header.check([header.encode(all_reduce(7), 3)] * 3, all_reduce(7).call, CONTEXT)


def test_different_calls_are_named_with_world_ranks() -> None:
    headers = [header.encode(all_reduce(n), 3) for n in (7, 8, 7)]
    with pytest.raises(Disagreement, match="rank 4, 9: all_reduce.sum. of 7 f32; rank 5: all_reduce.sum. of 8 f32"):
        header.check(headers, all_reduce(7).call, CONTEXT)


def test_calls_that_only_look_alike_differ() -> None:
    counts = [(1, 2) * 4 + (3, n) for n in (4, 5)]  # more than messages show
    calls = [Call(sequence=0, operation=Operation.ALL_GATHER, dtype=DType.F32, counts=c) for c in counts]
    assert str(calls[0]) == str(calls[1])
    headers = [header.encode(Request(call=calls[i]), 3) for i in (0, 0, 1)]
    with pytest.raises(Disagreement, match=r"rank 4, 5: .*19 in all, .*; rank 9: .*20 in all"):
        header.check(headers, calls[0], CONTEXT)
    with pytest.raises(Disagreement):
        header.check([header.encode(all_reduce(7, s), 3) for s in (0, 0, 1)], all_reduce(7).call, CONTEXT)


def test_a_refusal_that_is_cut_within_a_letter_is_told() -> None:
    refused = Call(sequence=0, operation=Operation.REFUSAL, reason="x" + "ä" * 300)
    headers = [header.encode(each, 3) for each in (all_reduce(7), all_reduce(7), Request(call=refused))]
    with pytest.raises(Disagreement, match="rank 9: .*xä"):
        header.check(headers, all_reduce(7).call, CONTEXT)


def exchange(sent: list[list[int]], received: list[list[int]]) -> list[list[int]]:
    call = Call(sequence=0, operation=Operation.ALL_TO_ALL, dtype=DType.F32)
    headers = [
        header.encode(Request(call=call, input_counts=tuple(s), output_counts=tuple(r)), 3)
        for s, r in zip(sent, received, strict=True)
    ]
    return header.check(headers, call, CONTEXT)


def test_an_all_to_all_compares_what_goes_and_comes() -> None:
    sent = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    received = [list(column) for column in zip(*sent, strict=True)]
    assert exchange(sent, received) == sent
    received[2][0] += 1
    with pytest.raises(Disagreement, match=r"rank 9: .*\(7, 8, 9\) to and \(4, 6, 9\) from"):
        exchange(sent, received)

"""Calls on one host, as two ranks of this process make them: agreement, small calls, windows of large ones.

Tests of `collectives/backends/shm/agreement.py`, `collectives/backends/shm/small.py` and
`collectives/backends/shm/exchange.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from axon_ps.collectives.backends.base import Call, Operation, Request
from axon_ps.collectives.backends.mock import mock_contexts
from axon_ps.collectives.backends.shm import small
from axon_ps.collectives.backends.shm.agreement import Agreement
from axon_ps.collectives.backends.shm.control import INLINE_BYTES, Control, ControlLayout
from axon_ps.collectives.backends.shm.exchange import Exchange, PeerMemory
from axon_ps.errors import Disagreement
from axon_ps.host import shared_memory
from axon_ps.types import Array, DType, ReduceOp

LONG_S = 20.0


def peer_memories(world_size: int, slot_bytes: int = 4096) -> list[PeerMemory]:
    layout = ControlLayout(world_size)
    segment, memory = shared_memory.create(layout.size_bytes)
    segment.close()
    controls = [Control(memory, layout, rank, range(world_size), "a group") for rank in range(world_size)]
    return [PeerMemory(control, [None] * world_size, slot_bytes) for control in controls]


def agreements(world_size: int) -> list[Agreement]:
    return [
        Agreement(context, peer_memory.control, peer_memory)
        for context, peer_memory in zip(mock_contexts(world_size), peer_memories(world_size), strict=True)
    ]


def on_ranks(world_size: int, act: Callable[[Agreement], Any]) -> list[Any]:
    """`act(agreement)` of each rank, in threads: the results, and the texts of disagreements."""

    def guarded(agreement: Agreement) -> Any:
        try:
            return act(agreement)
        except Disagreement as error:
            return str(error)

    with ThreadPoolExecutor(world_size) as pool:
        return [f.result(LONG_S) for f in [pool.submit(guarded, agreement) for agreement in agreements(world_size)]]


def call(operation: Operation, counts: tuple[int, ...], *, sequence: int = 0, **options: Any) -> Call:
    options = {"dtype": DType.F32, **options}
    return Call(sequence=sequence, operation=operation, counts=counts, **options)


def deadline() -> float:
    return time.monotonic() + LONG_S


def numbers(rank: int, numel: int) -> Array:
    return np.arange(numel, dtype=np.float32) + 100 * rank


def ran(agreement: Agreement, made: Call, data: Array | None, output: Array | None = None) -> Array | None:
    small.run(agreement, Request(call=made, data=data, output=output), deadline())
    return data if output is None else output


# ------------------------------------------------------------------ agreement


def test_the_data_of_a_call_lies_beside_its_header_until_the_call_after_the_next() -> None:
    def act(agreement: Agreement) -> list[list[float]]:
        seen = []
        for sequence in range(4):
            made = call(Operation.ALL_REDUCE, (3,), sequence=sequence, op=ReduceOp.SUM)
            mine = numbers(agreement.rank, 3) + sequence
            index = agreement.exchange_headers(made, mine, deadline())
            assert index == sequence % 2
            seen.append([float(array[0]) for array in agreement.inputs(index, DType.F32, 2, begin=1)])
        assert (agreement.calls, agreement.bytes_inline) == (4, 4 * 3 * 4)
        return seen

    assert on_ranks(2, act) == [[[1.0 + s, 101.0 + s] for s in range(4)]] * 2


def test_ranks_that_make_different_calls_all_know_which() -> None:
    def act(agreement: Agreement) -> None:
        numel = 3 if agreement.rank else 4
        agreement.exchange_headers(call(Operation.ALL_REDUCE, (numel,), op=ReduceOp.SUM), None, deadline())

    first, second = on_ranks(2, act)
    assert first == second
    assert "call 0 of group 'mock'" in first
    assert "rank 0" in first
    assert "rank 1" in first
    assert "as its call" not in first


def test_ranks_at_different_calls_know_the_numbers() -> None:
    def act(agreement: Agreement) -> None:
        made = call(Operation.BARRIER, (), sequence=5 + agreement.rank)
        agreement.exchange_headers(made, None, deadline())

    (text,) = set(on_ranks(2, act))
    assert "call 5 of group 'mock'" in text
    assert "as its call 5" in text
    assert "as its call 6" in text


def test_counts_of_an_all_to_all_must_match_in_pairs() -> None:
    made = call(Operation.ALL_TO_ALL, ())

    def act(agreement: Agreement) -> Any:
        sent, taken = ((1, 2), (1, 3)) if agreement.rank == 0 else ((3, 0), (2, 0))
        index = agreement.exchange_headers(made, None, deadline(), pairs=(*sent, *taken), large=True)
        pairs = [agreement.pairs(index, rank) for rank in range(2)]
        agreement.check_pairs(made, pairs)
        return pairs

    assert on_ranks(2, act) == [[((1, 2), (1, 3)), ((3, 0), (2, 0))]] * 2


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        ([((0, 2), (0, 0)), ((0, 0), (3, 0))], ["that sends 2 to rank 1", "that expects 3 from rank 0"]),
        ([((1, 0), (4, 0)), ((0, 0), (0, 0))], ["that sends 1 to itself and expects 4"]),
    ],
)
def test_counts_that_do_not_match_are_named(pairs: list[Any], words: list[str]) -> None:
    with pytest.raises(Disagreement) as raised:
        agreements(2)[0].check_pairs(call(Operation.ALL_TO_ALL, ()), pairs)
    assert all(word in str(raised.value) for word in words)


# ------------------------------------------------------------------ small calls


@pytest.mark.parametrize("dtype", [DType.F64, DType.F32, DType.BF16, DType.U8])
def test_a_call_is_small_if_all_of_a_ranks_data_fits_beside_its_header(dtype: DType) -> None:
    most = INLINE_BYTES // dtype.itemsize
    for operation in (Operation.ALL_REDUCE, Operation.BROADCAST, Operation.REDUCE):
        assert small.is_small(call(operation, (most,), dtype=dtype))
        assert not small.is_small(call(operation, (most + 1,), dtype=dtype))
    for operation in (Operation.ALL_GATHER, Operation.GATHER):  # a rank sends its own part
        assert small.is_small(call(operation, (most, most, 0), dtype=dtype))
        assert not small.is_small(call(operation, (0, most + 1), dtype=dtype))
    for operation in (Operation.REDUCE_SCATTER, Operation.SCATTER):  # a rank sends all parts
        assert small.is_small(call(operation, (most - 1, 1), dtype=dtype))
        assert not small.is_small(call(operation, (most, 1), dtype=dtype))
    assert small.is_small(call(Operation.BARRIER, ()))


def test_small_reductions_are_those_of_numpy() -> None:
    every = [numbers(rank, 5) for rank in range(3)]

    def reduce_scatter(agreement: Agreement) -> Any:
        counts = (2, 0, 3)
        made = call(Operation.REDUCE_SCATTER, counts, op=ReduceOp.MAX)
        output = np.empty(counts[agreement.rank], np.float32)
        return ran(agreement, made, every[agreement.rank].copy(), output)

    def reduce(agreement: Agreement) -> Any:
        return ran(agreement, call(Operation.REDUCE, (5,), op=ReduceOp.SUM, root=1), every[agreement.rank].copy())

    reduced = on_ranks(3, reduce)
    np.testing.assert_array_equal(reduced[1], np.sum(every, axis=0))
    for rank in (0, 2):
        np.testing.assert_array_equal(reduced[rank], every[rank])
    parts = on_ranks(3, reduce_scatter)
    assert [part.size for part in parts] == [2, 0, 3]
    np.testing.assert_array_equal(np.concatenate(parts), np.max(every, axis=0))


def test_small_moves_are_those_of_numpy() -> None:
    counts = (1, 3, 0)

    def act(agreement: Agreement) -> Any:
        rank = agreement.rank
        gathered = np.empty(4, np.float32)
        ran(agreement, call(Operation.ALL_GATHER, counts), numbers(rank, counts[rank]), gathered)
        sent = numbers(7, 2) if rank == 2 else np.zeros(2, np.float32)
        broadcast = ran(agreement, call(Operation.BROADCAST, (2,), sequence=1, root=2), sent)
        part = np.empty(counts[rank], np.float32)
        source = numbers(5, 4) if rank == 0 else None
        ran(agreement, call(Operation.SCATTER, counts, sequence=2, root=0), source, part)
        return gathered, broadcast, part

    results = on_ranks(3, act)
    for rank, (gathered, broadcast, part) in enumerate(results):
        np.testing.assert_array_equal(gathered, [0.0, 100.0, 101.0, 102.0])
        np.testing.assert_array_equal(broadcast, numbers(7, 2))
        np.testing.assert_array_equal(part, np.split(numbers(5, 4), np.cumsum(counts)[:-1])[rank])


def test_a_small_all_to_all_is_the_transposed_one() -> None:
    inputs = [[1, 2], [3, 0]]

    def act(agreement: Agreement) -> Any:
        rank = agreement.rank
        taken = [row[rank] for row in inputs]
        data, output = numbers(rank, sum(inputs[rank])), np.empty(sum(taken), np.float32)
        made = call(Operation.ALL_TO_ALL, ())
        request = Request(
            call=made, data=data, output=output, output_counts=tuple(taken), input_counts=tuple(inputs[rank])
        )
        index = agreement.exchange_headers(made, data, deadline(), pairs=(*inputs[rank], *taken), large=True)
        small.all_to_all(agreement, request, index, inputs)
        return output.tolist()

    assert on_ranks(2, act) == [[0.0, 100.0, 101.0, 102.0], [1.0, 2.0]]


# ------------------------------------------------------------------ windows of large calls


def exchanges(starts: list[list[int] | None], longest: int, slot_bytes: int = 1024) -> list[Exchange]:
    """An exchange of f32 through slots that every rank sees."""
    world_size = len(starts)
    slots = [[np.zeros(slot_bytes, np.uint8) for _ in range(world_size)] for _ in range(2)]
    return [
        Exchange(peer_memory, [], DType.F32, starts, longest, slots, None)
        for peer_memory in peer_memories(world_size, slot_bytes)
    ]


@pytest.mark.parametrize("longest", [0, 1, 127, 128, 129, 1000])
def test_windows_cover_every_position_once_and_fit_into_a_slot(longest: int) -> None:
    (exchange, _) = exchanges([[0, longest]] * 2, longest)
    windows = list(exchange.windows())
    assert [i for lo, hi in windows for i in range(lo, hi)] == list(range(longest))
    assert all(2 * 4 * (hi - lo) <= 1024 for lo, hi in windows)


def test_a_rank_pulls_from_slots_what_another_has_published_in_the_window_before_too() -> None:
    longest, counts = 300, (300, 211)
    source = numbers(3, sum(counts))
    starts = [0, counts[0]]
    mine, other = exchanges([starts, starts], longest)
    pulled = np.zeros_like(source)

    def pull(lo: int, hi: int) -> None:
        for partition, (start, count) in enumerate(zip(starts, counts, strict=True)):
            end = min(hi, count)
            if end > lo:
                other.pull(0, partition, lo, end, pulled[start + lo : start + end])

    before: tuple[int, int] | None = None
    for lo, hi in mine.windows():
        for partition, (start, count) in enumerate(zip(starts, counts, strict=True)):
            end = min(hi, count)
            mine.publish(partition, lo, end, source[start + lo : start + end])
        if before is not None:
            pull(*before)  # one window late, as Note: [Two windows] lets a rank be
        before = lo, hi
    assert before is not None
    pull(*before)
    np.testing.assert_array_equal(pulled, source)

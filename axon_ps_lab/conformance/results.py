"""Cases on the results of collectives: every operation, dtype and reduction, odd sizes, aliases, roots.

All ranks of the group run a case together; see `Trial`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np

from axon_ps.collectives.backends.base import Operation
from axon_ps.collectives.backends.request import Request
from axon_ps.types import Array, DType, ReduceOp
from axon_ps_lab.conformance import oracle
from axon_ps_lab.conformance.trial import SEED, Trial

_LARGE = 300_007
_FEW = 3


def _splits(n: int) -> Iterator[tuple[int, ...]]:
    """Yield counts by rank: equal, uneven with a zero at the front, all at the end, all zero."""
    yield (3,) * n
    yield tuple((3 * i) % 5 for i in range(n))
    yield (0,) * (n - 1) + (5,)
    yield (0,) * n


def _roots(n: int, i: int) -> list[int]:
    """Return two of the ranks; eight values of `i` give all of them, unless there are many."""
    return sorted({i % n, (i + 1) % n})


def _some_dtypes(trial: Trial, i: int) -> tuple[DType, ...]:
    """Return about half of the dtypes; two successive values of `i` give all of them."""
    return (trial.dtypes[:5], trial.dtypes[3:])[i % 2]


def _partition(array: Array, counts: tuple[int, ...], rank: int) -> Array:
    begin = sum(counts[:rank])
    return array[begin : begin + counts[rank]]


def _check_all_reduce(trial: Trial, dtype: DType, op: ReduceOp, numel: int) -> None:
    call = trial.call(Operation.ALL_REDUCE, dtype, (numel,), op=op)
    everything = trial.all_values(call)
    got = trial.do(call).data
    assert got is not None
    want = oracle.reduced(dtype, op, everything)
    trial.expect_array(call, got, want, dtype, oracle.tolerance(dtype, op, everything))


def all_reduce_in_every_dtype_and_op(trial: Trial) -> None:
    """Sizes are also around the number of ranks. Groups of many ranks, which are slow, check two ops for each dtype."""
    for i, dtype in enumerate(trial.dtypes):
        ops = oracle.ops_of(dtype)
        for op in ops if trial.n <= _FEW else [ops[i % len(ops)], ops[(i + 2) % len(ops)]]:
            _check_all_reduce(trial, dtype, op, 11)
        _check_all_reduce(trial, dtype, ReduceOp.SUM, (0, 1, trial.n + 1)[i % 3])


def large_arrays(trial: Trial) -> None:
    """Arrays have more elements than fit in one message or chunk."""
    _check_all_reduce(trial, DType.F32, ReduceOp.SUM, _LARGE)
    _check_all_reduce(trial, DType.BF16, ReduceOp.AVERAGE, _LARGE)
    counts = tuple(_LARGE // trial.n + i for i in range(trial.n))
    _check_all_gather(trial, DType.F32, counts)
    _check_reduce_scatter(trial, DType.F16, ReduceOp.SUM, counts)
    call = trial.call(Operation.BROADCAST, DType.U8, (4 * _LARGE,), root=trial.n - 1)
    got = trial.do(call).data
    assert got is not None
    trial.expect_array(call, got, trial.values(call, trial.n - 1), call.dtype)


def non_finite_numbers(trial: Trial) -> None:
    """NaN and infinities go through; the minimum and maximum of a NaN are NaN."""
    for dtype in (DType.F32, DType.F64, DType.F16, DType.BF16):
        for op in (ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX):
            call = trial.call(Operation.ALL_REDUCE, dtype, (6,), op=op)
            everything = []
            for rank in range(trial.n):
                numbers = np.arange(6, dtype=np.float64 if dtype is DType.F64 else np.float32) + rank
                numbers[rank % 3] = (np.nan, np.inf, -np.inf)[rank % 3]
                everything.append(oracle.narrow(numbers, dtype))
            data = everything[trial.rank].copy()
            trial.perform(Request(call=call, data=data))
            want = oracle.reduced(dtype, op, everything)
            trial.expect_array(f"{call} with NaN and inf", data, want, dtype)


def the_same_bits_on_every_rank(trial: Trial) -> None:
    """Results of reductions that round are equal on all ranks, bit by bit."""
    for dtype in (d for d in (DType.F32, DType.BF16, DType.INT8_BLOCK) if d in trial.dtypes):
        for op in (ReduceOp.SUM, ReduceOp.AVERAGE):
            data = trial.do(trial.call(Operation.ALL_REDUCE, dtype, (1003,), op=op)).data
            assert data is not None
            digest = np.frombuffer(hashlib.blake2b(data.tobytes(), digest_size=16).digest(), np.uint8)
            call = trial.call(Operation.ALL_GATHER, DType.U8, (16,) * trial.n)
            digests = trial.blank(16 * trial.n, DType.U8)
            trial.perform(Request(call=call, output=digests, data=digest.copy()))
            same = (digests.reshape(trial.n, 16) == digest).all()
            trial.expect(same, f"all_reduce({op.value}) of {dtype.value} has other bits on other ranks")


def reduce_to_every_root(trial: Trial) -> None:
    """On ranks other than the root, data is only read."""
    for i, dtype in enumerate(trial.dtypes):
        ops = oracle.ops_of(dtype)
        for root in _roots(trial.n, i):
            op = ops[(root + i) % len(ops)]
            call = trial.call(Operation.REDUCE, dtype, (7,), op=op, root=root)
            everything = trial.all_values(call)
            got = trial.do(call).data
            assert got is not None
            if trial.rank == root:
                want = oracle.reduced(dtype, op, everything)
                trial.expect_array(call, got, want, dtype, oracle.tolerance(dtype, op, everything))
            else:
                trial.expect_array(f"data of {call}, only read", got, everything[trial.rank], dtype)


def broadcast_from_every_root(trial: Trial) -> None:
    """Each dtype is sent by one root, with and without elements."""
    for i, dtype in enumerate(trial.dtypes):
        root = i % trial.n
        for numel in (0, 9):
            call = trial.call(Operation.BROADCAST, dtype, (numel,), root=root)
            got = trial.do(call).data
            assert got is not None
            trial.expect_array(call, got, trial.values(call, root), dtype)


def _check_all_gather(trial: Trial, dtype: DType, counts: tuple[int, ...], *, in_place: bool = False) -> None:
    call = trial.call(Operation.ALL_GATHER, dtype, counts)
    request = trial.arrays(call)
    assert request.output is not None
    assert request.data is not None
    if in_place:
        partition = _partition(request.output, counts, trial.rank)
        partition[:] = request.data
        request = Request(call=call, output=request.output, data=partition)
    trial.perform(request)
    want = np.concatenate(trial.all_values(call))
    trial.expect_array(f"{call}{' in place' if in_place else ''}", request.output, want, dtype)  # type: ignore[arg-type]
    if not in_place:
        trial.expect_array(f"data of {call}, only read", request.data, trial.values(call), dtype)  # type: ignore[arg-type]


def all_gather_even_and_uneven(trial: Trial) -> None:
    """Counts are even and uneven, also where `data` is the rank's own partition of `output`."""
    for dtype in trial.dtypes:
        for i, counts in enumerate(_splits(trial.n)):
            if dtype in _some_dtypes(trial, i):
                _check_all_gather(trial, dtype, counts, in_place=bool(i % 2))
    _check_all_gather(trial, DType.F32, (3,) * trial.n, in_place=True)
    _check_all_gather(trial, DType.F32, tuple((3 * i) % 5 for i in range(trial.n)))


def _check_reduce_scatter(
    trial: Trial, dtype: DType, op: ReduceOp, counts: tuple[int, ...], *, in_place: bool = False
) -> None:
    call = trial.call(Operation.REDUCE_SCATTER, dtype, counts, op=op)
    everything = trial.all_values(call)
    request = trial.arrays(call)
    data, output = request.data, request.output
    assert data is not None
    assert output is not None
    if in_place:
        output = _partition(data, counts, trial.rank)
    trial.perform(Request(call=call, output=output, data=data))
    want = _partition(oracle.reduced(dtype, op, everything), counts, trial.rank)
    allowed = oracle.tolerance(dtype, op, everything)
    where = " in place" if in_place else ""
    trial.expect_array(
        f"{call}{where}", output, want, dtype, None if allowed is None else _partition(allowed, counts, trial.rank)
    )
    only_read = everything[trial.rank].copy()
    if in_place:
        _partition(only_read, counts, trial.rank)[:] = output
    trial.expect_array(f"data of {call}{where}, only read", data, only_read, dtype)


def reduce_scatter_even_and_uneven(trial: Trial) -> None:
    """Counts are even and uneven, also where `output` is the rank's own partition of `data`."""
    for dtype in trial.dtypes:
        ops = oracle.ops_of(dtype)
        for i, counts in enumerate(_splits(trial.n)):
            if dtype in _some_dtypes(trial, i):
                _check_reduce_scatter(trial, dtype, ops[i % len(ops)], counts, in_place=bool(i % 2))
    _check_reduce_scatter(trial, DType.F32, ReduceOp.AVERAGE, (3,) * trial.n, in_place=True)


def gather_to_every_root(trial: Trial) -> None:
    """Counts are even and uneven."""
    splits = list(_splits(trial.n))
    for i, dtype in enumerate(trial.dtypes):
        for root in _roots(trial.n, i):
            call = trial.call(Operation.GATHER, dtype, splits[(i + root) % len(splits)], root=root)
            got = trial.do(call).output
            if trial.rank == root:
                assert got is not None
                trial.expect_array(call, got, np.concatenate(trial.all_values(call)), dtype)


def scatter_from_every_root(trial: Trial) -> None:
    """Counts are even and uneven."""
    splits = list(_splits(trial.n))
    for i, dtype in enumerate(trial.dtypes):
        for root in _roots(trial.n, i):
            counts = splits[(i + root) % len(splits)]
            call = trial.call(Operation.SCATTER, dtype, counts, root=root)
            got = trial.do(call).output
            assert got is not None
            trial.expect_array(call, got, _partition(trial.values(call, root), counts, trial.rank), dtype)


def all_to_all_even_and_uneven(trial: Trial) -> None:
    """Each pair of ranks has its own count; many of the counts are zero."""
    pairs = [(i, j) for i in range(trial.n) for j in range(trial.n)]
    equal, uneven = dict.fromkeys(pairs, 2), {(i, j): (3 * i + j) % 4 for i, j in pairs}
    nothing, to_the_next = dict.fromkeys(pairs, 0), {(i, j): 5 * (j == i + 1) for i, j in pairs}
    for k, dtype in enumerate(trial.dtypes):
        for matrix in ((equal, to_the_next, nothing, uneven)[k % 4], *([uneven] if k % 2 else [])):
            sent = [[matrix[i, j] for j in range(trial.n)] for i in range(trial.n)]
            call = trial.call(Operation.ALL_TO_ALL, dtype)
            everything = [trial.values(call, i, sum(sent[i])) for i in range(trial.n)]
            received = [sent[i][trial.rank] for i in range(trial.n)]
            output = trial.blank(sum(received), dtype)
            request = Request(
                call=call,
                output=output,
                data=everything[trial.rank].copy(),
                output_counts=tuple(received),
                input_counts=tuple(sent[trial.rank]),
            )
            trial.perform(request)
            partitions = [_partition(everything[i], tuple(sent[i]), trial.rank) for i in range(trial.n)]
            trial.expect_array(f"{call} {sent}", output, np.concatenate(partitions), dtype)


def back_to_back(trial: Trial) -> None:
    """Many small calls of changing kinds follow each other without a pause."""
    for i in range(12):
        dtype = trial.dtypes[i % len(trial.dtypes)]
        _check_all_reduce(trial, dtype, ReduceOp.SUM, 1 + i)
        call = trial.call(Operation.BROADCAST, dtype, (i,), root=i % trial.n)
        got = trial.do(call).data
        assert got is not None
        trial.expect_array(call, got, oracle.values(dtype, i, SEED, call.sequence, i % trial.n), dtype)
        trial.do(trial.call(Operation.BARRIER))
        _check_all_gather(trial, dtype, (i % 3,) * trial.n)


CASES = (
    all_reduce_in_every_dtype_and_op,
    large_arrays,
    non_finite_numbers,
    the_same_bits_on_every_rank,
    reduce_to_every_root,
    broadcast_from_every_root,
    all_gather_even_and_uneven,
    reduce_scatter_even_and_uneven,
    gather_to_every_root,
    scatter_from_every_root,
    all_to_all_even_and_uneven,
    back_to_back,
)

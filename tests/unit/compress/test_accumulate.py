"""Accumulation of gradient chunks and their sum of squares."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from axon_ps.compress.cast import accumulate, accumulate_last, encode, round_in_place, sum_of_squares
from axon_ps.errors import InvalidRequest
from axon_ps.kernels.rounding import TILE_NUMEL
from axon_ps.types import Array, DType

TORCH = {DType.F32: torch.float32, DType.BF16: torch.bfloat16, DType.F16: torch.float16}


def chunk_of(numel: int, dtype: DType, seed: int) -> Array:
    """chunk: dtype.numpy[numel] of standard normals."""
    out = np.zeros(numel, dtype.numpy)
    encode(np.random.default_rng(seed).standard_normal(numel, dtype=np.float32), out, dtype)
    return out


def digests_for(array: Array) -> Array:
    """u64[2, blocks], zeros, for the shortest blocks."""
    return np.zeros((2, -(-array.size // TILE_NUMEL)), np.uint64)


def as_torch(chunk: Array, dtype: DType) -> torch.Tensor:
    """The chunk as torch sees it, widened to f32."""
    same_size = chunk.view(np.float32 if dtype is DType.F32 else np.int16)
    return torch.from_numpy(same_size).view(TORCH[dtype]).float()


@pytest.mark.parametrize("dtype", list(TORCH))
@pytest.mark.parametrize("numel", [0, 1, 7, 1000, 5003])
def test_accumulate_is_an_f32_sum_in_order(dtype: DType, numel: int) -> None:
    acc = np.full(numel, np.nan, np.float32)  # rubbish that the first chunk overwrites
    total = torch.zeros(numel)
    for replica in range(5):
        chunk = chunk_of(numel, dtype, replica)
        accumulate(acc, chunk, dtype, replica == 0)
        total += as_torch(chunk, dtype)
    assert acc.tobytes() == total.numpy().tobytes()


@pytest.mark.parametrize("dtype", list(TORCH))
@pytest.mark.parametrize("numel", [0, 1, 63, 64, 65, 4095, 4096, 4097, 20011])
@pytest.mark.parametrize("first", [False, True])
def test_accumulate_last_is_both_in_one(dtype: DType, numel: int, first: bool) -> None:
    chunk = chunk_of(numel, dtype, 1)
    one = np.random.default_rng(2).standard_normal(numel, dtype=np.float32)
    two = one.copy()
    accumulate(one, chunk, dtype, first)
    assert accumulate_last(two, chunk, dtype, first, digests_for(two)) == sum_of_squares(one)
    assert one.tobytes() == two.tobytes()


@pytest.mark.parametrize("dtype", list(TORCH))
@pytest.mark.parametrize("numel", [0, 1, 4097, 8192, 20011])
@pytest.mark.parametrize("first", [False, True])
def test_digests_are_of_what_was_read_and_written(dtype: DType, numel: int, first: bool) -> None:
    """By blocks. The bits are the same with and without, and whether it is rounded in the same pass or afterwards."""
    chunk, blocks = chunk_of(numel, dtype, 1), range(0, numel, 8192)

    def words(acc: Array) -> list[int]:
        return [int(acc[b : b + 8192].view(np.uint32).sum(dtype=np.uint64)) for b in blocks]

    for rounds in (False, True):
        one = np.random.default_rng(2).standard_normal(numel, dtype=np.float32)
        two, three, digests = one.copy(), one.copy(), np.zeros((2, 2, len(blocks)), np.uint64)
        read = [0 for _ in blocks] if first else words(one)
        accumulate(one, chunk, dtype, first)
        accumulate(two, chunk, dtype, first, digests[0], 8192)
        assert two.tobytes() == one.tobytes()
        assert digests[0].tolist() == [read, words(one)]
        squares = accumulate_last(three, chunk, dtype, first, digests[1], 8192, rounds=rounds)
        assert squares == sum_of_squares(one)
        if rounds:
            round_in_place(one, dtype)
        assert three.tobytes() == one.tobytes()
        assert digests[1].tolist() == [read, words(one)]


@pytest.mark.parametrize("dtype", list(TORCH))
def test_received_bytes_may_be_read_only_and_unaligned(dtype: DType) -> None:
    chunk = chunk_of(1000, dtype, 3)
    received = np.frombuffer(b"head" + b"x" + chunk.tobytes(), dtype.numpy, offset=5)
    one, two = np.ones(1000, np.float32), np.ones(1000, np.float32)
    accumulate(one, chunk, dtype, False)
    accumulate(two, received, dtype, False)
    assert one.tobytes() == two.tobytes()
    sums = [accumulate_last(a, c, dtype, False, digests_for(a)) for a, c in ((one, chunk), (two, received))]
    assert sums[0] == sums[1]


def test_accumulate_in_pieces_on_threads() -> None:
    chunk, whole = chunk_of(100_003, DType.BF16, 4), np.ones(100_003, np.float32)
    pieces = whole.copy()
    accumulate(whole, chunk, DType.BF16, False)
    with ThreadPoolExecutor(4) as pool:
        cuts = [slice(i, i + 7001) for i in range(0, 100_003, 7001)]
        list(pool.map(lambda c: accumulate(pieces[c], chunk[c], DType.BF16, False), cuts))
    assert whole.tobytes() == pieces.tobytes()


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=200))
def test_sum_of_squares_is_exact_to_f64(values: list[float]) -> None:
    """Squares of f32 are exact in f64 unless they vanish, so only the additions round."""
    acc = np.array(values, np.float32)
    exact = math.fsum(float(v) * float(v) for v in acc)
    assert sum_of_squares(acc) == pytest.approx(exact, rel=1e-14, abs=0.0)


def test_sum_of_squares_has_a_written_order() -> None:
    """The order of the docstring, in plain Python: any machine gives these bits."""
    acc = np.random.default_rng(5).standard_normal(1003, dtype=np.float32)
    lanes = [0.0] * 64
    for i, value in enumerate(acc):
        lanes[i % 64] += float(value) * float(value)
    total = 0.0
    for lane in lanes:
        total += lane
    assert sum_of_squares(acc) == total


def test_sum_of_squares_shows_what_is_not_finite_and_nothing_else() -> None:
    largest = np.full(1000, np.finfo(np.float32).max, np.float32)
    assert math.isfinite(sum_of_squares(largest))
    assert sum_of_squares(np.zeros(0, np.float32)) == 0.0
    for place in (0, 63, 64, 999):
        for value in (math.inf, -math.inf):
            bad = np.ones(1000, np.float32)
            bad[place] = value
            assert sum_of_squares(bad) == math.inf
        bad[place] = math.nan
        assert math.isnan(sum_of_squares(bad))


def test_what_does_not_fit_is_refused() -> None:
    acc = np.zeros(8, np.float32)
    with pytest.raises(InvalidRequest, match=r"chunk is uint16\[7\]"):
        accumulate(acc, np.zeros(7, np.uint16), DType.BF16, True)
    with pytest.raises(InvalidRequest, match=r"acc is float64\[8\]"):
        accumulate_last(acc.astype(np.float64), np.zeros(8, np.uint16), DType.BF16, True, digests_for(acc))
    with pytest.raises(InvalidRequest, match="contiguous"):
        sum_of_squares(np.zeros((2, 2), np.float32))
    digests = np.zeros((2, 1), np.uint64)
    with pytest.raises(InvalidRequest, match="a block has 100 elements; it must be a multiple of 4096"):
        accumulate(acc, acc.copy(), DType.F32, True, digests, 100)
    with pytest.raises(InvalidRequest, match=r"digests is uint64\[2, 1\]"):
        accumulate(np.zeros(5000, np.float32), np.zeros(5000, np.float32), DType.F32, True, digests)

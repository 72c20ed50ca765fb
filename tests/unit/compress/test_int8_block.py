"""Blocks of int8 as elements: what numpy says they are, and sums that are right on average.

Tests of `kernels/int8.py`.
"""

from __future__ import annotations

import numpy as np
import pytest

from axon_ps.compress import int8_block
from axon_ps.compress.registry import compressor
from axon_ps.errors import InvalidRequest
from axon_ps.reduction import ops
from axon_ps.types import INT8_BLOCK_NUMEL, Array, DType, ReduceOp
from axon_ps_lab.conformance import oracle

BLOCK = DType.INT8_BLOCK
SIZES = [0, 1, 255, 256, 257, 10_000]


def numbers(numel: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(numel).astype(np.float32)


def blocks_of(values: Array) -> Array:
    blocks = int8_block.empty(values.size)
    int8_block.encode(values, blocks)
    return blocks


def decoded(blocks: Array, numel: int) -> Array:
    values = np.full(numel, np.nan, np.float32)
    int8_block.decode(blocks, values)
    return values


@pytest.mark.parametrize("numel", SIZES)
def test_a_block_is_what_the_int8_compressor_makes(numel: int) -> None:
    values, int8 = numbers(numel), compressor("int8")
    data, expected = np.empty(int8.compressed_bytes(numel), np.uint8), np.empty(numel, np.float32)
    residuals = [numbers(numel, 1), numbers(numel, 1)]
    blocks = int8_block.empty(numel)
    int8_block.encode(values, blocks, residuals[0])
    int8.compress(values, data, residuals[1])
    int8.decompress(data, expected)
    assert blocks.itemsize == 260
    np.testing.assert_array_equal(decoded(blocks, numel), expected)
    np.testing.assert_array_equal(residuals[0], residuals[1])


@pytest.mark.parametrize("numel", SIZES)
def test_numpy_agrees_on_what_a_block_stands_for(numel: int) -> None:
    blocks = blocks_of(numbers(numel))
    wide = oracle.widen(blocks, BLOCK).reshape(-1)
    np.testing.assert_array_equal(decoded(blocks, numel), wide[:numel])
    assert not wide[numel:].any()


def test_blocks_cut_from_a_message_may_lie_anywhere() -> None:
    values = numbers(1000)
    message = b"x" + blocks_of(values).tobytes()
    cut = np.frombuffer(message, BLOCK.numpy, offset=1)
    np.testing.assert_array_equal(decoded(cut, 1000), decoded(blocks_of(values), 1000))


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVERAGE])
@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_a_sum_is_less_than_a_quantum_away(n: int, op: ReduceOp) -> None:
    data = [blocks_of(numbers(5000, seed)) for seed in range(n)]
    out = np.empty_like(data[0])
    ops.reduce_into(out, data, op, BLOCK)
    exact = np.sum([oracle.widen(d, BLOCK).astype(np.float64) for d in data], axis=0)
    exact /= n if op is ReduceOp.AVERAGE else 1
    quanta = np.abs(exact).max(axis=1, keepdims=True) / 127
    assert (np.abs(oracle.widen(out, BLOCK) - exact) <= 1.001 * quanta).all()


def test_a_sum_is_right_on_average() -> None:
    """Of a million sums, those a fraction f above a quant are rounded up with a frequency of f, within 5 sigma."""
    acc = numbers(1 << 20).reshape(-1, INT8_BLOCK_NUMEL)
    blocks = int8_block.empty(acc.size)
    int8_block.encode_sums(acc, blocks)
    exact = acc.astype(np.float64) / blocks["scale"][:, np.newaxis]
    fraction, up = exact - np.floor(exact), blocks["quants"] > np.floor(exact)
    for low in np.arange(0.0, 1.0, 0.1):
        chosen = (fraction >= low) & (fraction < low + 0.1)
        sigma = 0.5 / np.sqrt(chosen.sum())
        assert abs(up[chosen].mean() - fraction[chosen].mean()) < 5 * sigma


def test_many_small_numbers_beside_a_large_one_are_not_lost() -> None:
    """Rounded to the nearest, a hundredth of a quantum would be zero for ever."""
    acc = np.full((4000, INT8_BLOCK_NUMEL), 0.01, np.float32)
    acc[:, 0] = 127 + np.arange(4000) / 8000  # other sums each time
    blocks = int8_block.empty(acc.size)
    int8_block.encode_sums(acc, blocks)
    assert 0.009 < oracle.widen(blocks, BLOCK)[:, 1:].mean() < 0.011


def test_the_same_sums_give_the_same_blocks_wherever_they_are_cut() -> None:
    acc = numbers(100 * INT8_BLOCK_NUMEL).reshape(-1, INT8_BLOCK_NUMEL)
    whole, parts = int8_block.empty(acc.size), int8_block.empty(acc.size)
    int8_block.encode_sums(acc, whole)
    for begin, end in ((0, 1), (1, 50), (50, 100)):
        int8_block.encode_sums(acc[begin:end], parts[begin:end])
    np.testing.assert_array_equal(whole, parts)


def test_what_is_no_number_spoils_its_block_alone() -> None:
    values = numbers(3 * INT8_BLOCK_NUMEL)
    values[300] = np.inf
    data = [blocks_of(values), blocks_of(numbers(values.size, 1))]
    out = np.empty_like(data[0])
    ops.reduce_into(out, data, ReduceOp.SUM, BLOCK)
    finite = np.isfinite(decoded(out, values.size)).reshape(3, -1)
    assert finite.all(axis=1).tolist() == [True, False, True]
    assert not finite[1].any()


def test_tiny_and_huge_numbers() -> None:
    largest = np.finfo(np.float32).max
    for given, expected in ((1e-38, 0.0), (largest, largest), (-largest, -largest)):
        acc = np.full((1, INT8_BLOCK_NUMEL), given, np.float32)
        blocks = int8_block.empty(acc.size)
        int8_block.encode_sums(acc, blocks)
        np.testing.assert_allclose(decoded(blocks, acc.size), expected, rtol=1e-6)


@pytest.mark.parametrize("op", [op for op in ReduceOp if op not in (ReduceOp.SUM, ReduceOp.AVERAGE)])
def test_blocks_have_sums_only(op: ReduceOp) -> None:
    with pytest.raises(InvalidRequest, match="of int8_block is not defined; use SUM or AVERAGE"):
        ops.check(op, BLOCK)


def test_arrays_that_do_not_fit() -> None:
    values, blocks = numbers(300), int8_block.empty(300)
    for call in (
        lambda: int8_block.encode(values, blocks[:1]),
        lambda: int8_block.encode(values.astype(np.float64), blocks),
        lambda: int8_block.encode(values[::2], int8_block.empty(150)),
        lambda: int8_block.encode(values, blocks, values[:299]),
        lambda: int8_block.decode(blocks.view(np.uint8), values),
        lambda: int8_block.accumulate(values, blocks, first=True),
        lambda: int8_block.encode_sums(np.zeros((2, 255), np.float32), blocks),
        lambda: int8_block.encode_sums(np.zeros((3, 256), np.float32), blocks),
    ):
        with pytest.raises(InvalidRequest, match="needed is a contiguous"):
            call()

"""The expected results of collectives: data that every rank makes from a seed, and its reductions in plain numpy.

Owns: its own arithmetic, without the backends' code. bf16 is computed with bit operations here, so that an error in
axon_ps's casts shows.

    shape legend: m = elements; a bf16 array is uint16 in memory. Blocks of int8 widen to f32[m, 256].
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from axon_ps.types import INT8_BLOCK_NUMEL, Array, DType, ReduceOp

HALVES = (DType.BF16, DType.F16)
_POOL_NUMEL = 1 << 13
"""Elements of the pool. Data of more than an eighth of it is drawn anew for each call."""
_BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
_ROUNDINGS = 2
"""Roundings of a sum of blocks before the last one: inside a node, and when nodes are weighed."""
_EPSILON = {DType.F64: 2.0**-52, DType.F32: 2.0**-23, DType.F16: 2.0**-10, DType.BF16: 2.0**-7}
_UFUNCS: dict[ReduceOp, Any] = {
    ReduceOp.SUM: np.add,
    ReduceOp.AVERAGE: np.add,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.BAND: np.bitwise_and,
    ReduceOp.BOR: np.bitwise_or,
    ReduceOp.BXOR: np.bitwise_xor,
}


def ops_of(dtype: DType) -> list[ReduceOp]:
    """Return the reductions that have a meaning for `dtype`."""
    if dtype is DType.INT8_BLOCK:
        return [ReduceOp.SUM, ReduceOp.AVERAGE]
    if dtype.is_float:
        return [op for op in ReduceOp if op not in _BITWISE]
    return [op for op in ReduceOp if op is not ReduceOp.AVERAGE]


def values(dtype: DType, numel: int, *seed: int) -> Array:
    """Return data of a rank: T[numel], the same for the same seed; integers use the whole range of their type."""
    if numel > _POOL_NUMEL // 8:
        return _drawn(dtype, np.random.default_rng([numel, *seed]), numel)
    pool = _pool(dtype)
    begin = zlib.crc32(np.array([numel, *seed], np.int64).tobytes()) % (_POOL_NUMEL - numel)
    return pool[begin : begin + numel].copy()


@functools.cache
def _pool(dtype: DType) -> Array:
    """Return T[_POOL_NUMEL], from which short data is cut: drawing it anew would take most of a short call's time."""
    return _drawn(dtype, np.random.default_rng(_POOL_NUMEL), _POOL_NUMEL)


def _drawn(dtype: DType, generator: np.random.Generator, numel: int) -> Array:
    if dtype is DType.BOOL:
        return generator.integers(0, 2, numel).astype(np.bool_)
    if dtype is DType.INT8_BLOCK:
        return narrow(generator.uniform(-2.0, 2.0, (numel, INT8_BLOCK_NUMEL)).astype(np.float32), dtype)
    if not dtype.is_float:
        info = np.iinfo(dtype.numpy)
        return generator.integers(info.min, info.max, numel, dtype=dtype.numpy, endpoint=True)
    return narrow(generator.uniform(-2.0, 2.0, numel).astype(np.float64 if dtype is DType.F64 else np.float32), dtype)


def widen(data: Array, dtype: DType) -> Array:
    """Return T[m] as numbers that numpy can calculate with; bf16 and f16 as f32."""
    if dtype is DType.BF16:
        return (data.astype(np.uint32) << 16).view(np.float32)
    if dtype is DType.INT8_BLOCK:
        return np.asarray(data["quants"] * data["scale"][:, np.newaxis])
    return data.astype(np.float32) if dtype is DType.F16 else data


def narrow(numbers: Array, dtype: DType) -> Array:
    """Invert `widen`, rounding to nearest, ties to even."""
    if dtype is DType.BF16:
        bits = numbers.astype(np.float32).view(np.uint32)
        rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
        return np.where(np.isnan(numbers), (bits >> 16) | 0x40, rounded).astype(np.uint16)
    if dtype is DType.INT8_BLOCK:
        blocks = np.empty(len(numbers), dtype.numpy)
        blocks["scale"] = np.abs(numbers).max(axis=1, initial=0.0) / 127
        scales = np.where(blocks["scale"] > 0, blocks["scale"], 1.0)
        blocks["quants"] = np.rint(numbers / scales[:, np.newaxis])
        return blocks
    with np.errstate(over="ignore"):
        return numbers.astype(dtype.numpy)


def reduced(dtype: DType, op: ReduceOp, data: Sequence[Array]) -> Array:
    """Reduce the ranks' data T[m] in the order of ranks; bf16, f16 and blocks are reduced in f32, and rounded once."""
    numbers = [widen(d, dtype) for d in data]
    with np.errstate(over="ignore", invalid="ignore"):
        result = numbers[0]
        for number in numbers[1:]:
            result = _UFUNCS[op](result, number)
        if op is ReduceOp.AVERAGE and len(data) > 1:
            result = result / result.dtype.type(len(data))
    return narrow(result, dtype) if dtype in (*HALVES, DType.INT8_BLOCK) else result


def tolerance(dtype: DType, op: ReduceOp, data: Sequence[Array]) -> Array | None:
    """Return the distance from `reduced` allowed in another order of ranks, by element; None = no distance."""
    if dtype is DType.INT8_BLOCK:
        largest = sum(np.abs(widen(d, dtype)).max(axis=1, initial=0.0) for d in data).astype(np.float64)
        quanta = largest / 127 / (len(data) if op is ReduceOp.AVERAGE else 1)
        return np.asarray(quanta[:, np.newaxis] * (2 + _ROUNDINGS))
    if not dtype.is_float or op in (ReduceOp.MIN, ReduceOp.MAX):
        return None
    magnitudes = [np.abs(widen(d, dtype)).astype(np.float64) for d in data]
    total = magnitudes[0]
    for magnitude in magnitudes[1:]:
        total = _UFUNCS[op](total, magnitude)
    if op is ReduceOp.AVERAGE:
        total = total / len(data)
    allowed: Array = total * _EPSILON[dtype] * (len(data) + 1)
    return allowed


def difference(got: Array, want: Array, dtype: DType, allowed: Array | None = None) -> str:
    """Describe the error of `got`; empty if it has the same bits (any NaN for a NaN) or is within `allowed`."""
    if got.dtype != want.dtype or got.shape != want.shape:
        return f"{got.dtype}{list(got.shape)} instead of {want.dtype}{list(want.shape)}"
    given, wanted = widen(got, dtype), widen(want, dtype)
    rounds = dtype.is_float or dtype is DType.INT8_BLOCK
    equal = (got == want) if not rounds else (_bits(given) == _bits(wanted))
    if rounds:
        equal |= np.isnan(given) & np.isnan(wanted)
        if allowed is not None:
            with np.errstate(invalid="ignore"):
                equal |= np.abs(given.astype(np.float64) - wanted.astype(np.float64)) <= allowed
    wrong = np.flatnonzero(~equal)
    if not wrong.size:
        return ""
    i = int(wrong[0])
    values = f"{given.flat[i]!r} instead of {wanted.flat[i]!r}"
    return f"{wrong.size} of {given.size} numbers differ, the first at {i}: {values}"


def _bits(numbers: Array) -> Array:
    return numbers.view(np.uint64 if numbers.dtype.itemsize == 8 else np.uint32)

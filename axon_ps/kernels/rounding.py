"""Rounding to bf16 and f16, and the compiled loops of casts and sums.

Refuses: to check its arguments. `compress.cast` has done so.

Shapes: every array is [n] and contiguous. Its element type tells a loop how to read it: float32 is f32, uint16 has the
bits of a bf16, int16 has the bits of an f16 (numba has no half precision on CPUs).
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba.extending import overload

from axon_ps.kernels.compiled import compiled
from axon_ps.kernels.digest import WRITTEN, add_digests, digest_of, none_summed, with_value

PARTIAL_SUMS = 64
"""Independent f64 partial sums of `sum_of_squares`: element i is added to sum i mod PARTIAL_SUMS."""
TILE_NUMEL = 4096
"""Elements that are added before they are squared: a multiple of PARTIAL_SUMS that stays in the first-level cache."""

U0, U1, U13, U16 = np.uint32(0), np.uint32(1), np.uint32(13), np.uint32(16)
SIGN16, MAGNITUDE16 = np.uint32(0x8000), np.uint32(0x7FFF)
MAGNITUDE32, INFINITY32 = np.uint32(0x7FFF_FFFF), np.uint32(0x7F80_0000)
HALF, HALF_BITS = np.float32(0.5), np.uint32(0x3F00_0000)


# ---- one element ---------------------------------------------------------------------------------------------------


@compiled
def round_to_bf16(bits: Any) -> Any:
    """Round the bits of an f32 that is not NaN: the upper half of the result is the nearest bf16."""
    return np.uint32(bits + np.uint32(0x7FFF) + np.uint32(np.uint32(bits >> U16) & U1))


@compiled
def bf16_from_f32(value: Any) -> Any:
    """Return the bf16 nearest to an f32, as uint16 bits."""
    bits = np.float32(value).view(np.uint32)
    rounded = round_to_bf16(bits)
    if value != value:  # NaN: rounding could carry it into infinity
        rounded = np.uint32(bits | np.uint32(0x40_0000))
    return np.uint16(np.uint32(rounded >> U16))


@compiled
def f32_from_bf16(bits: Any) -> Any:
    """Convert a bf16, given as uint16 bits, to f32. This is exact."""
    return np.uint32(np.uint32(bits) << U16).view(np.float32)


@compiled
def f16_from_f32(value: Any) -> Any:
    """Return the f16 nearest to an f32, as int16 bits."""
    bits = np.float32(value).view(np.uint32)
    magnitude = min(np.uint32(bits & MAGNITUDE32), np.uint32(0x4780_0000))  # all numbers from 2^16 on become infinity
    odd = np.uint32(np.uint32(magnitude >> U13) & U1)
    half = np.uint32(np.uint32(magnitude + np.uint32(0xC800_0FFF) + odd) >> U13)  # exponent less 112, rounded
    if magnitude < np.uint32(0x3880_0000):  # under 2^-14, subnormal: 0.5 has an ulp of 2^-24, so adding it rounds
        half = np.uint32(np.float32(np.uint32(magnitude).view(np.float32) + HALF).view(np.uint32) - HALF_BITS)
    if value != value:
        half = np.uint32(0x7E00)
    return np.int16(np.uint32(np.uint32(np.uint32(bits >> U16) & SIGN16) | half))


@compiled
def f32_from_f16(bits: Any) -> Any:
    """Convert an f16, given as int16 bits, to f32. This is exact, even if the processor flushes subnormals."""
    half = np.uint32(np.uint16(bits))
    sign = np.uint32(np.uint32(half & SIGN16) << U16)
    magnitude = np.uint32(half & MAGNITUDE16)
    if magnitude < np.uint32(0x400):  # zero or subnormal: as the last bits of a number in [0.5, 1), less 0.5
        out = np.float32(np.uint32(magnitude | HALF_BITS).view(np.float32) - HALF).view(np.uint32)
    elif magnitude < np.uint32(0x7C00):
        out = np.uint32(np.uint32(magnitude << U13) + np.uint32(0x3800_0000))
    elif magnitude == np.uint32(0x7C00):
        out = INFINITY32
    else:
        out = np.uint32(np.uint32(magnitude << U13) | np.uint32(0x7FC0_0000))
    return np.uint32(out | sign).view(np.float32)


def load(array: Any, i: Any) -> Any:
    """Return element i of an array, as f32. It works only inside compiled loops."""
    raise NotImplementedError


def store(array: Any, i: Any, value: Any) -> Any:
    """Write an f32 to element i of an array. It works only inside compiled loops."""
    raise NotImplementedError


def _load_for(array: Any, i: Any) -> Any:
    def bf16(array: Any, i: Any) -> Any:
        return f32_from_bf16(array[i])

    def f16(array: Any, i: Any) -> Any:
        return f32_from_f16(array[i])

    def f32(array: Any, i: Any) -> Any:
        return array[i]

    return {numba.types.uint16: bf16, numba.types.int16: f16}.get(array.dtype, f32)


def _store_for(array: Any, i: Any, value: Any) -> Any:
    def bf16(array: Any, i: Any, value: Any) -> Any:
        array[i] = bf16_from_f32(value)

    def f16(array: Any, i: Any, value: Any) -> Any:
        array[i] = f16_from_f32(value)

    def f32(array: Any, i: Any, value: Any) -> Any:
        array[i] = value

    return {numba.types.uint16: bf16, numba.types.int16: f16}.get(array.dtype, f32)


overload(load)(_load_for)
overload(store)(_store_for)


# ---- casts and sums ------------------------------------------------------------------------------------------------


@compiled
def convert(src: Any, dst: Any) -> None:
    """Set dst = src, rounded or widened."""
    for i in range(src.size):
        store(dst, i, load(src, i))


@compiled
def convert_with_residual(src: Any, dst: Any, residual: Any) -> None:
    """Set dst = src + residual, rounded. The residual becomes the error, and stays where that is not finite."""
    for i in range(src.size):
        value = src[i] + residual[i]
        store(dst, i, value)
        error = np.float32(value - load(dst, i))
        if np.isfinite(error):
            residual[i] = error


@compiled
def _accumulate(acc: Any, chunk: Any, first: bool, digests: Any, block: Any) -> None:
    old = new = none_summed(digests)
    if first:
        for i in range(acc.size):
            value = load(chunk, i)
            acc[i] = value
            new = with_value(new, value)
    else:
        for i in range(acc.size):
            value = acc[i]
            old = with_value(old, value)
            value += load(chunk, i)
            acc[i] = value
            new = with_value(new, value)
    add_digests(digests, block, old, new)


@compiled
def accumulate(acc: Any, chunk: Any, first: bool, digests: Any, block_numel: Any) -> None:
    """Compute acc += chunk, or acc = chunk if `first`; acc: f32.

    The digests of the values of acc that were read and written are added to `digests`, u64[2, blocks] or None. A block
    has `block_numel` elements, a multiple of TILE_NUMEL. If `first`, no value is read.
    """
    if digests is None:
        _accumulate(acc, chunk, first, None, 0)
    else:
        for start in range(0, acc.size, TILE_NUMEL):
            end = start + TILE_NUMEL
            _accumulate(acc[start:end], chunk[start:end], first, digests, start // block_numel)


@compiled
def round_in_place(acc: Any, like: Any, digests: Any, block: Any) -> None:
    """Round acc: f32 to the element type of `like`, an array of one element.

    In `digests` (see `accumulate`) the digest of the values written to a block is updated.
    """
    old = new = none_summed(digests)
    for i in range(acc.size):
        value = acc[i]
        old = with_value(old, value)
        store(like, 0, value)
        value = load(like, 0)
        acc[i] = value
        new = with_value(new, value)
    if digests is not None:
        digests[WRITTEN, block] += digest_of(new) - digest_of(old)


@compiled
def _add_squares(sums: Any, acc: Any) -> None:
    """Add the square of element i to sum i mod PARTIAL_SUMS. The number of sums is constant, so that it vectorises."""
    aligned = acc.size // PARTIAL_SUMS * PARTIAL_SUMS
    for i in range(0, aligned, PARTIAL_SUMS):
        for j in range(PARTIAL_SUMS):
            value = np.float64(acc[i + j])
            sums[j] += value * value
    for i in range(aligned, acc.size):
        value = np.float64(acc[i])
        sums[i - aligned] += value * value


@compiled
def _total(sums: Any) -> Any:
    total = 0.0
    for j in range(PARTIAL_SUMS):
        total += sums[j]
    return total


@compiled
def sum_of_squares(acc: Any) -> Any:
    """Return the sum of squares of acc, f32, in f64: element i in partial sum i mod PARTIAL_SUMS, then the total."""
    sums = np.zeros(PARTIAL_SUMS, np.float64)
    _add_squares(sums, acc)
    return _total(sums)


@compiled
def accumulate_last(acc: Any, chunk: Any, first: bool, like: Any, digests: Any, block_numel: Any) -> Any:
    """Call `accumulate`, then `sum_of_squares(acc)`, then `round_in_place` if `like` is not None.

    It works tile by tile, while a tile is in the first-level cache. It returns the sum of squares.
    """
    sums = np.zeros(PARTIAL_SUMS, np.float64)
    for start in range(0, acc.size, TILE_NUMEL):
        block, end = start // block_numel, start + TILE_NUMEL
        tile = acc[start:end]
        _accumulate(tile, chunk[start:end], first, digests, block)
        _add_squares(sums, tile)
        if like is not None:
            round_in_place(tile, like, digests, block)
    return _total(sums)

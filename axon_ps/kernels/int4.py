"""The compiled loops of `compress.int4`, which checks arguments. These do not.

    shape legend: a tile is 1024 numbers: 32 blocks of 32; the last one is filled up with zeros

Note: [Rotations without shuffles]
    A stage of the Walsh-Hadamard transform in Pease's form (1968, https://doi.org/10.1145/321450.321457) takes sums and
    differences of neighbours. It writes the sums to the first half of its output, the differences to the second: the
    lowest bit of the index is transformed, and becomes the highest one. Five stages over a tile transform all its
    blocks, and transpose it: row r has coefficient r of each block. So every loop is over neighbours, including the
    loops that apply a scale per block. A pass here is one to three stages. On the way back the numbers are integers,
    sums of at most 32 quants, which are exact in 16 bits. The multiplication by the scale rounds once.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from axon_ps.kernels.compiled import compiled
from axon_ps.kernels.int8 import GOLDEN, INFINITY, MAGNITUDE, MIX1, MIX2, ROUND, ROUND_BITS, TINY, U15, U16
from axon_ps.types import Array

F32, I8, I16, U8, U32 = np.float32, np.int8, np.int16, np.uint8, np.uint32
BLOCK_NUMEL, BLOCKS = 32, 32
TILE_NUMEL = BLOCKS * BLOCK_NUMEL
HALF, QUARTER, EIGHTH = TILE_NUMEL // 2, TILE_NUMEL // 4, TILE_NUMEL // 8
PAIRS = BLOCK_NUMEL // 2
"""Bytes of a block. Byte r: quant r in the lower four bits, quant r + 16 in the upper ones."""
LARGEST, LEVELS = np.int32(7), np.float32(7.5)
"""Quants are -7 to 7. A scale is the largest magnitude / 7.5, so every number is at most half a scale from a quant."""
MAX = np.finfo(np.float32).max
SMALLEST_SCALE, LARGEST_SCALE = F32(TINY.view(np.float32) / LEVELS), F32(MAX / LEVELS)
"""Bounds of a tile's scale, unless it is zero."""
ZEROS, TILE_SCALE, NO_NUMBER = np.uint8(0), np.uint8(254), np.uint8(255)
"""Codes of blocks: all zero; with the tile's scale; with a number that is not finite."""
CODE_SHIFT, BELOW = np.int32(19), np.int32((1 << 19) - 1)
SMALLEST = np.int32(0x3F80_0000 - (254 << 19))
"""The code of a scale is the f32 bits of scale / tile's scale minus SMALLEST, without the lowest 19, rounded up."""
LOW_ONES, HIGH_ONES = np.uint8(0x11), np.uint8(0x88)


def _signs() -> Array:
    """Return f32[32, 32]: 1 and -1, by the highest bit of a hash of the index (that of `int8.quantise_at_random`)."""
    bits = np.arange(TILE_NUMEL, dtype=np.uint32) * GOLDEN
    bits = (bits ^ (bits >> U16)) * MIX1
    bits = (bits ^ (bits >> U15)) * MIX2
    return np.where(bits >> np.uint32(31), F32(-1.0), F32(1.0)).reshape(BLOCKS, BLOCK_NUMEL)


SIGNS = _signs()
"""Signs of a tile's numbers, by block. Without them a constant has one coefficient far larger than all others."""
SIGNS_AND_MEAN = (SIGNS * F32(1 / BLOCK_NUMEL)).reshape(-1)
"""f32[1024]: the signs times 1 / 32, so that a coefficient is a mean of ±numbers and cannot overflow."""


@compiled
def _rotate(tile: Any, spare: Any) -> None:
    """Transform all blocks of f32[1024], and transpose; see Note: [Rotations without shuffles]."""
    for i in range(EIGHTH):
        a0, a1, a2, a3 = tile[8 * i], tile[8 * i + 1], tile[8 * i + 2], tile[8 * i + 3]
        a4, a5, a6, a7 = tile[8 * i + 4], tile[8 * i + 5], tile[8 * i + 6], tile[8 * i + 7]
        b0, b1, b2, b3, b4, b5, b6, b7 = a0 + a1, a0 - a1, a2 + a3, a2 - a3, a4 + a5, a4 - a5, a6 + a7, a6 - a7
        a0, a1, a2, a3, a4, a5, a6, a7 = b0 + b2, b1 + b3, b0 - b2, b1 - b3, b4 + b6, b5 + b7, b4 - b6, b5 - b7
        spare[i], spare[EIGHTH + i], spare[2 * EIGHTH + i], spare[3 * EIGHTH + i] = a0 + a4, a1 + a5, a2 + a6, a3 + a7
        spare[HALF + i], spare[5 * EIGHTH + i], spare[6 * EIGHTH + i] = a0 - a4, a1 - a5, a2 - a6
        spare[7 * EIGHTH + i] = a3 - a7
    for i in range(QUARTER):
        a0, a1, a2, a3 = spare[4 * i], spare[4 * i + 1], spare[4 * i + 2], spare[4 * i + 3]
        b0, b1, b2, b3 = a0 + a1, a0 - a1, a2 + a3, a2 - a3
        tile[i], tile[QUARTER + i], tile[HALF + i], tile[3 * QUARTER + i] = b0 + b2, b1 + b3, b0 - b2, b1 - b3


@compiled
def _rotate_back(pairs: Any, quants: Any, spare: Any, sums: Any) -> None:
    """Invert `_rotate`, times 32: bytes u8[512] → sums i16[1024]. `quants` and `spare` are i8[1024]."""
    for i in range(QUARTER):
        a0, a2 = I8(I8(I8(pairs[i]) << I8(4)) >> I8(4)), I8(I8(pairs[i]) >> I8(4))
        a1, a3 = I8(I8(I8(pairs[QUARTER + i]) << I8(4)) >> I8(4)), I8(I8(pairs[QUARTER + i]) >> I8(4))
        b0, b1, b2, b3 = I8(a0 + a2), I8(a1 + a3), I8(a0 - a2), I8(a1 - a3)
        quants[4 * i], quants[4 * i + 1], quants[4 * i + 2], quants[4 * i + 3] = b0 + b1, b0 - b1, b2 + b3, b2 - b3
    for i in range(QUARTER):
        a0, a1, a2, a3 = quants[i], quants[QUARTER + i], quants[HALF + i], quants[3 * QUARTER + i]
        b0, b1, b2, b3 = I8(a0 + a2), I8(a1 + a3), I8(a0 - a2), I8(a1 - a3)
        spare[4 * i], spare[4 * i + 1], spare[4 * i + 2], spare[4 * i + 3] = b0 + b1, b0 - b1, b2 + b3, b2 - b3
    for i in range(HALF):
        sums[2 * i], sums[2 * i + 1] = I16(spare[i]) + I16(spare[HALF + i]), I16(spare[i]) - I16(spare[HALF + i])


@compiled
def scale_of(tile_scale: Any, code: Any) -> Any:
    """Return the scale of a block: NaN, zero, or a fraction of the tile's scale."""
    if code == NO_NUMBER:
        return F32(np.nan)
    if code == ZEROS:
        return F32(0.0)
    return F32(tile_scale * np.int32(SMALLEST + np.int32(np.int32(code) << CODE_SHIFT)).view(np.float32))


@compiled
def _scale(tile: Any, largest: Any, scales: Any, codes: Any) -> Any:
    """Compute scales and codes of blocks from rotated numbers, and return the tile's scale. `largest` is u32[512]."""
    bits = tile.view(np.uint32)
    for i in range(HALF):
        largest[i] = max(U32(bits[i] & MAGNITUDE), U32(bits[HALF + i] & MAGNITUDE))
    for i in range(QUARTER):
        largest[i] = max(largest[i], largest[QUARTER + i])
    for i in range(EIGHTH):
        largest[i] = max(largest[i], largest[EIGHTH + i])
    for i in range(2 * BLOCKS):
        largest[i] = max(largest[i], largest[2 * BLOCKS + i])
    for i in range(BLOCKS):
        largest[i] = max(largest[i], largest[BLOCKS + i])
    tile_scale = F32(0.0)
    for i in range(BLOCKS):
        scales[i] = F32(0.0)
        if TINY <= largest[i] < INFINITY:
            scales[i] = F32(np.uint32(largest[i]).view(np.float32) / LEVELS)
            tile_scale = max(tile_scale, scales[i])
    for i in range(BLOCKS):
        codes[i] = NO_NUMBER if largest[i] >= INFINITY else ZEROS
        if scales[i] > F32(0.0):
            above = np.int32(F32(scales[i] / tile_scale).view(np.int32) - SMALLEST)
            codes[i] = U8(max(np.int32(np.int32(above + BELOW) >> CODE_SHIFT), np.int32(1)))
        scales[i] = scale_of(tile_scale, codes[i])
    return tile_scale


@compiled
def _quantise(tile: Any, scales: Any, inverses: Any, quants: Any, pairs: Any) -> None:
    """Quantise rotated numbers: quants i8[1024] and their bytes u8[512]; zeros if a scale is zero or NaN."""
    for block in range(BLOCKS):
        inverses[block] = F32(F32(1.0) / scales[block]) if scales[block] > F32(0.0) else F32(0.0)
        if not scales[block] > F32(0.0):
            for r in range(BLOCK_NUMEL):
                tile[BLOCKS * r + block] = F32(0.0)
    for r in range(BLOCK_NUMEL):
        for block in range(BLOCKS):
            shifted = F32(F32(tile[BLOCKS * r + block] * inverses[block]) + ROUND)
            quant = np.int32(np.float32(shifted).view(np.int32) - ROUND_BITS)
            quants[BLOCKS * r + block] = I8(min(max(quant, -LARGEST), LARGEST))
    for i in range(HALF):
        pairs[i] = U8(U8(quants[i] & I8(15)) | U8(U8(quants[HALF + i]) << U8(4)))


@compiled
def _widen(sums: Any, scales: Any, numbers: Any, first: bool) -> None:
    """Store sums i16[32, 32] · scales in f32[32, 32], or add them. Numbers that rounding makes infinite are clamped."""
    if first:
        for block in range(BLOCKS):
            scale = scales[block]
            for i in range(BLOCK_NUMEL):
                number = F32(F32(F32(sums[block, i]) * scale) * SIGNS[block, i])
                number = MAX if number > MAX else number
                numbers[block, i] = -MAX if number < -MAX else number
    else:
        for block in range(BLOCKS):
            scale = scales[block]
            for i in range(BLOCK_NUMEL):
                number = F32(F32(F32(sums[block, i]) * scale) * SIGNS[block, i])
                number = MAX if number > MAX else number
                numbers[block, i] += -MAX if number < -MAX else number


@compiled
def _copy_pairs(source: Any, source_blocks: int, target: Any, target_blocks: int) -> None:
    """Copy bytes u8[16, source_blocks] to u8[16, target_blocks], as many blocks as both have."""
    if source_blocks == target_blocks:
        for i in range(PAIRS * source_blocks):
            target[i] = source[i]
        return
    for r in range(PAIRS):
        for block in range(min(source_blocks, target_blocks)):
            target[target_blocks * r + block] = source[source_blocks * r + block]


@compiled
def compress(values: Any, residual: Any, residual_out: Any, tile_scales: Any, codes: Any, pairs: Any) -> None:
    """Compress: values (+ residual) → scales f32[tiles], codes u8[blocks], pairs u8[16 · blocks].

    The error goes to `residual_out`, which may be the residual itself. Both are None or neither is.
    """
    total, tile, spare = np.empty(TILE_NUMEL, np.float32), np.empty(TILE_NUMEL, np.float32), np.empty(TILE_NUMEL, F32)
    quants, spare_quants, sums = np.empty(TILE_NUMEL, np.int8), np.empty(TILE_NUMEL, np.int8), np.empty(TILE_NUMEL, I16)
    largest, scales, inverses = np.empty(HALF, np.uint32), np.empty(BLOCKS, np.float32), np.empty(BLOCKS, np.float32)
    tile_codes, tile_pairs = np.empty(BLOCKS, np.uint8), np.empty(HALF, np.uint8)
    for index in range(tile_scales.size):
        start, first = index * TILE_NUMEL, index * BLOCKS
        numbers = values[start : start + TILE_NUMEL]
        for i in range(numbers.size, TILE_NUMEL):
            total[i] = F32(0.0)
        if residual is not None:
            carried, error = residual[start : start + TILE_NUMEL], residual_out[start : start + TILE_NUMEL]
            for i in range(numbers.size):
                total[i] = numbers[i] + carried[i]
        else:
            for i in range(numbers.size):
                total[i] = numbers[i]
        for i in range(TILE_NUMEL):
            tile[i] = total[i] * SIGNS_AND_MEAN[i]
        _rotate(tile, spare)
        tile_scales[index] = _scale(tile, largest, scales, tile_codes)
        _quantise(tile, scales, inverses, quants, tile_pairs)
        blocks = min(codes.size - first, BLOCKS)
        for block in range(blocks):
            codes[first + block] = tile_codes[block]
        _copy_pairs(tile_pairs, BLOCKS, pairs[PAIRS * first :], blocks)
        if residual is not None:
            _rotate_back(tile_pairs, quants, spare_quants, sums)
            _widen(sums.reshape(BLOCKS, BLOCK_NUMEL), scales, tile.reshape(BLOCKS, BLOCK_NUMEL), True)
            for block in range(blocks):
                if tile_codes[block] == NO_NUMBER:  # the residual stays: nothing is subtracted from it
                    for i in range(BLOCK_NUMEL * block, min(BLOCK_NUMEL * (block + 1), numbers.size)):
                        total[i], tile[i] = carried[i], F32(0.0)
            for i in range(numbers.size):
                error[i] = total[i] - tile[i]


@compiled
def decompress(tile_scales: Any, codes: Any, pairs: Any, acc: Any, first: bool) -> None:
    """Decompress: acc = numbers if `first`, or acc += numbers."""
    numbers, scales, sums = np.empty(TILE_NUMEL, np.float32), np.zeros(BLOCKS, np.float32), np.empty(TILE_NUMEL, I16)
    quants, spare, tile_pairs = np.empty(TILE_NUMEL, np.int8), np.empty(TILE_NUMEL, np.int8), np.zeros(HALF, np.uint8)
    for index in range(tile_scales.size):
        blocks = min(codes.size - index * BLOCKS, BLOCKS)
        for block in range(blocks):
            scales[block] = scale_of(tile_scales[index], codes[index * BLOCKS + block])
        _copy_pairs(pairs[PAIRS * BLOCKS * index :], blocks, tile_pairs, BLOCKS)
        _rotate_back(tile_pairs, quants, spare, sums)
        target = acc[index * TILE_NUMEL : (index + 1) * TILE_NUMEL]
        if target.size == TILE_NUMEL:
            _widen(sums.reshape(BLOCKS, BLOCK_NUMEL), scales, target.reshape(BLOCKS, BLOCK_NUMEL), first)
        else:
            _widen(sums.reshape(BLOCKS, BLOCK_NUMEL), scales, numbers.reshape(BLOCKS, BLOCK_NUMEL), True)
            for i in range(target.size):
                target[i] = numbers[i] if first else target[i] + numbers[i]


@compiled
def is_valid(tile_scales: Any, codes: Any, pairs: Any) -> Any:
    """Return True if `compress` can have written it: no quant is -8 or lacks a scale, and scales fit their codes."""
    wrong = U8(0)
    for i in range(pairs.size):
        both = U8(
            pairs[i] ^ HIGH_ONES
        )  # -8 becomes 0, found as in https://graphics.stanford.edu/~seander/bithacks.html
        wrong = U8(wrong | U8(U8(U8(both - LOW_ONES) & U8(~both)) & HIGH_ONES))
    for index in range(tile_scales.size):
        tile_scale, first, largest = tile_scales[index], index * BLOCKS, U8(0)
        blocks = min(codes.size - first, BLOCKS)
        for block in range(blocks):
            code = codes[first + block]
            if code in (ZEROS, NO_NUMBER):
                for r in range(PAIRS):
                    wrong = U8(wrong | pairs[PAIRS * first + blocks * r + block])
            else:
                largest = max(largest, code)
        if largest == ZEROS:
            wrong = U8(wrong | U8(np.float32(tile_scale).view(np.uint32) != U32(0)))
        elif largest != TILE_SCALE or not SMALLEST_SCALE <= tile_scale <= LARGEST_SCALE:
            return False
    return wrong == U8(0)

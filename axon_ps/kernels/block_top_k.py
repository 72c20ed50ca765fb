"""The compiled loops of `compress.block_top_k`, which checks arguments. These do not.

bytes of a block of m numbers, of which k are sent: f32 low, f32 high; then k codes of 12 + bits bits, packed from the
    lowest bit up: the index in the block, the sign, then the level
"""

from __future__ import annotations

from typing import Any

import numpy as np

from axon_ps.kernels.compiled import compiled
from axon_ps.kernels.top_k import INFINITY, MAGNITUDE, _select

F32, U8, U32, U64 = np.float32, np.uint8, np.uint32, np.uint64
BLOCK_NUMEL, INDEX_BITS, SCALE_BYTES = 4096, 12, 8
_EIGHT, _BYTE = np.uint64(8), np.uint64(0xFF)


@compiled
def _put_scale(out: Any, value: Any) -> None:
    bits = np.float32(value).view(np.uint32)
    for i in range(4):
        out[i] = U8(U32(bits >> U32(8 * i)) & U32(0xFF))


@compiled
def _scale_at(data: Any) -> Any:
    bits = U32(0)
    for i in range(4):
        bits |= U32(U32(data[i]) << U32(8 * i))
    return np.uint32(bits).view(np.float32)


@compiled
def _level(low: Any, high: Any, level: Any, levels: Any) -> Any:
    """Return the magnitude of a level: the middle of one of `levels` equal intervals from `low` to `high`."""
    return F32(low + F32(F32(high - low) * F32(F32(2 * level + 1) / F32(2 * levels))))


@compiled
def compress_block(total: Any, k: int, bits: int, out: Any, error: Any) -> None:
    """Encode the largest `k` of f32[m]. `error`, f32[m], gets their quantisation errors and copies of the others."""
    largest, selected, indices = U32(0), np.empty(k, np.float32), np.empty(k, np.uint32)
    for i in range(total.size):
        largest = max(largest, U32(np.float32(total[i]).view(np.uint32) & MAGNITUDE))
        error[i] = total[i]
    broken = largest >= INFINITY
    low = high = F32(np.nan)
    if broken:
        for j in range(k):
            indices[j], selected[j] = j, F32(0.0)
    else:
        _select(total, indices, selected)
        high = np.uint32(largest).view(np.float32)
        low = high
        for j in range(k):
            low = min(low, abs(selected[j]))
    _put_scale(out, low)
    _put_scale(out[4:], high)
    levels = 1 << (bits - 1)
    step = F32(F32(high - low) / F32(levels))
    pending, filled, position = U64(0), 0, SCALE_BYTES
    for j in range(k):
        level = 0
        if step > F32(0.0):
            level = min(levels - 1, int(F32(abs(selected[j]) - low) / step))
        negative = selected[j] < F32(0.0)
        if not broken:
            magnitude = _level(low, high, level, levels)
            error[indices[j]] = F32(selected[j] + magnitude) if negative else F32(selected[j] - magnitude)
        code = U64(indices[j]) | U64(U64(negative) << U64(INDEX_BITS)) | U64(U64(level) << U64(INDEX_BITS + 1))
        pending |= U64(code << U64(filled))
        filled += INDEX_BITS + bits
        while filled >= 8:
            out[position] = U8(pending & _BYTE)
            pending, filled, position = U64(pending >> _EIGHT), filled - 8, position + 1
    if filled:
        out[position] = U8(pending & _BYTE)


@compiled
def decompress_block(data: Any, numel: int, k: int, bits: int, acc: Any, write: bool) -> Any:
    """Add a block to f32[numel] if `write`; False if `compress_block` cannot have written it."""
    low, high = _scale_at(data), _scale_at(data[4:])
    broken = np.isnan(low) and np.isnan(high)
    if not broken and not F32(0.0) <= low <= high < F32(np.inf):
        return False
    levels = 1 << (bits - 1)
    pending, filled, position, below = U64(0), 0, SCALE_BYTES, np.int64(-1)
    mask = U64(U64(1) << U64(INDEX_BITS + bits)) - U64(1)
    for _ in range(k):
        while filled < INDEX_BITS + bits:
            pending |= U64(U64(data[position]) << U64(filled))
            filled, position = filled + 8, position + 1
        code = pending & mask
        pending, filled = U64(pending >> U64(INDEX_BITS + bits)), filled - INDEX_BITS - bits
        index = np.int64(code & U64(BLOCK_NUMEL - 1))
        if index <= below or index >= numel:
            return False
        below = index
        if write:
            magnitude = _level(low, high, np.int64(code >> U64(INDEX_BITS + 1)), levels)
            negative = U64(code >> U64(INDEX_BITS)) & U64(1)
            acc[index] += -magnitude if negative else magnitude
    return pending == U64(0)

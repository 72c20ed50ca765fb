"""The compiled loops of `compress.int8`. Arguments are checked there; these write where they are told.

See `compress.kernels` for the rules: nothing inlined from another file, one thread, GIL released, no contraction and no
reordering, so every machine computes the same bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from axon_ps.compress.kernels import compiled

F32 = np.float32
MAGNITUDE = np.uint32(0x7FFF_FFFF)
INFINITY = np.uint32(0x7F80_0000)
TINY = np.uint32(0x0D80_0000)
"""Bits of 2^-100; a block under it travels as zeros."""
ROUND, ROUND_BITS = np.float32(12582912.0), np.int32(0x4B40_0000)
"""1.5 · 2^23: numbers from 2^23 to 2^24 have an ulp of 1, so adding it rounds to an integer, ties to even."""
LARGEST, U0, U1 = np.float32(127.0), np.uint32(0), np.uint32(1)


@compiled
def quantise(values: Any, residual: Any, kept: Any, scales: Any, quants: Any, block_numel: int) -> None:
    """values (+ residual) → scales and quants; what was lost goes to `kept`, or where that is None to the residual."""
    for block in range(scales.size):
        start = block * block_numel
        stop = min(start + block_numel, values.size)
        part = values[start:stop]
        target = quants[start:stop]
        largest = U0
        if residual is not None:
            carried = residual[start:stop]
            lost = residual[start:stop] if kept is None else kept[start:stop]
            for i in range(part.size):
                largest = max(largest, np.uint32(np.float32(part[i] + carried[i]).view(np.uint32) & MAGNITUDE))
        else:
            for i in range(part.size):
                largest = max(largest, np.uint32(np.float32(part[i]).view(np.uint32) & MAGNITUDE))
        if largest >= INFINITY:
            scales[block] = np.nan
            target[:] = 0
            if kept is not None:
                lost[:] = carried
            continue
        if largest < TINY:
            scales[block] = F32(0.0)
            target[:] = 0
            if residual is not None:
                for i in range(part.size):
                    lost[i] = part[i] + carried[i]
            continue
        scale = F32(np.uint32(largest).view(np.float32) / LARGEST)
        if not np.isfinite(F32(scale * LARGEST)):  # it was rounded up beside the largest f32
            scale = np.uint32(np.uint32(np.float32(scale).view(np.uint32)) - U1).view(np.float32)
        scales[block] = scale
        inverse = F32(F32(1.0) / scale)
        if residual is not None:
            for i in range(part.size):
                value = F32(part[i] + carried[i])
                shifted = F32(F32(value * inverse) + ROUND)
                target[i] = np.int8(np.float32(shifted).view(np.int32) - ROUND_BITS)
                lost[i] = F32(value - F32(F32(shifted - ROUND) * scale))
        else:
            for i in range(part.size):
                shifted = F32(F32(part[i] * inverse) + ROUND)
                target[i] = np.int8(np.float32(shifted).view(np.int32) - ROUND_BITS)


@compiled
def dequantise(scales: Any, quants: Any, acc: Any, block_numel: int, first: bool) -> None:
    """acc = quants · scales, or acc += quants · scales."""
    for block in range(scales.size):
        start = block * block_numel
        stop = min(start + block_numel, acc.size)
        source = quants[start:stop]
        target = acc[start:stop]
        scale = scales[block]
        if first:
            for i in range(source.size):
                target[i] = F32(source[i]) * scale
        else:
            for i in range(source.size):
                target[i] += F32(F32(source[i]) * scale)

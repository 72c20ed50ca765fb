"""The compiled loops of `compress.int8` and `compress.int8_block`, which check arguments. These do not."""

from __future__ import annotations

from typing import Any

import numpy as np

from axon_ps.kernels.compiled import compiled

F32 = np.float32
MAGNITUDE = np.uint32(0x7FFF_FFFF)
INFINITY = np.uint32(0x7F80_0000)
TINY = np.uint32(0x0D80_0000)
"""Bits of 2^-100. A block below it is sent as zeros."""
ROUND, ROUND_BITS = np.float32(12582912.0), np.int32(0x4B40_0000)
"""1.5 · 2^23: numbers from 2^23 to 2^24 have an ulp of 1, so adding it rounds to an integer, ties to even."""
LARGEST, U0, U1 = np.float32(127.0), np.uint32(0), np.uint32(1)
U8, U15, U16 = np.uint32(8), np.uint32(15), np.uint32(16)
GOLDEN, MIX1, MIX2 = np.uint32(0x9E37_79B9), np.uint32(0x7FEB_352D), np.uint32(0x846C_A68B)
"""2^32 / golden ratio, and Wellons' "lowbias32" (https://nullprogram.com/blog/2018/07/31/): each bit affects all."""
CHANCE, HALF = np.float32(2.0**-24), np.float32(0.5)


@compiled
def scale_of(largest: Any) -> Any:
    """Return the scale of a block whose largest magnitude has these bits: NaN if it is not finite, 0 if it is tiny."""
    if largest >= INFINITY:
        return F32(np.nan)
    if largest < TINY:
        return F32(0.0)
    scale = F32(np.uint32(largest).view(np.float32) / LARGEST)
    if not np.isfinite(F32(scale * LARGEST)):  # it was rounded up near the largest f32
        scale = np.uint32(np.uint32(np.float32(scale).view(np.uint32)) - U1).view(np.float32)
    return scale


@compiled
def _clear(quants: Any) -> None:
    for i in range(quants.size):  # numba takes 2 s more to compile `quants[:] = 0`, with the error that it may raise
        quants[i] = np.int8(0)


@compiled
def quantise(
    values: Any, residual: Any, residual_out: Any, scales: Any, quants: Any, block_numel: int, stride: int
) -> None:
    """Quantise: values (+ residual) → scales and quants. The error goes to `residual_out` (None: to the residual).

    The quants of block b begin at b · stride.
    """
    for block in range(scales.size):
        start = block * block_numel
        stop = min(start + block_numel, values.size)
        block_values = values[start:stop]
        target = quants[block * stride : block * stride + block_values.size]
        largest = U0
        if residual is not None:
            carried = residual[start:stop]
            error = carried if residual_out is None else residual_out[start:stop]
            for i in range(block_values.size):
                largest = max(largest, np.uint32(np.float32(block_values[i] + carried[i]).view(np.uint32) & MAGNITUDE))
        else:
            for i in range(block_values.size):
                largest = max(largest, np.uint32(np.float32(block_values[i]).view(np.uint32) & MAGNITUDE))
        scale = scale_of(largest)
        scales[block] = scale
        if largest >= INFINITY:
            _clear(target)
            if residual_out is not None:
                for i in range(block_values.size):
                    error[i] = carried[i]
            continue
        if largest < TINY:
            _clear(target)
            if residual is not None:
                for i in range(block_values.size):
                    error[i] = block_values[i] + carried[i]
            continue
        inverse = F32(F32(1.0) / scale)
        if residual is not None:
            for i in range(block_values.size):
                value = F32(block_values[i] + carried[i])
                shifted = F32(F32(value * inverse) + ROUND)
                target[i] = np.int8(np.float32(shifted).view(np.int32) - ROUND_BITS)
                error[i] = F32(value - F32(F32(shifted - ROUND) * scale))
        else:
            for i in range(block_values.size):
                shifted = F32(F32(block_values[i] * inverse) + ROUND)
                target[i] = np.int8(np.float32(shifted).view(np.int32) - ROUND_BITS)


@compiled
def quantise_at_random(values: Any, scales: Any, quants: Any, block_numel: int, stride: int) -> None:
    """Quantise with stochastic rounding: values → scales and quants; see `compress.int8_block`."""
    for block in range(scales.size):
        block_values = values[block * block_numel : (block + 1) * block_numel]
        target = quants[block * stride : block * stride + block_values.size]
        largest, seed = U0, U0
        for i in range(block_values.size):
            bits = np.float32(block_values[i]).view(np.uint32)
            largest = max(largest, np.uint32(bits & MAGNITUDE))
            seed = np.uint32(seed + np.uint32(bits * np.uint32(2 * i + 1)))
        scale = scale_of(largest)
        scales[block] = scale
        if largest >= INFINITY or largest < TINY:
            _clear(target)
            continue
        inverse = F32(F32(1.0) / scale)
        for i in range(block_values.size):
            random = np.uint32(seed + np.uint32(np.uint32(i) * GOLDEN))
            random = np.uint32(np.uint32(random ^ np.uint32(random >> U16)) * MIX1)
            random = np.uint32(np.uint32(random ^ np.uint32(random >> U15)) * MIX2)
            random = np.uint32(random ^ np.uint32(random >> U16))
            chance = F32(F32(np.int32(random >> U8)) * CHANCE) - HALF
            value = min(max(F32(F32(block_values[i] * inverse) + chance), -LARGEST), LARGEST)
            target[i] = np.int8(np.float32(F32(value + ROUND)).view(np.int32) - ROUND_BITS)


@compiled
def dequantise(scales: Any, quants: Any, acc: Any, block_numel: int, stride: int, first: bool) -> None:
    """Compute acc = quants · scales, or acc += quants · scales. The quants of block b begin at b · stride."""
    for block in range(scales.size):
        start = block * block_numel
        stop = min(start + block_numel, acc.size)
        target = acc[start:stop]
        source = quants[block * stride : block * stride + target.size]
        scale = scales[block]
        if first:
            for i in range(source.size):
                target[i] = F32(source[i]) * scale
        else:
            for i in range(source.size):
                target[i] += F32(F32(source[i]) * scale)

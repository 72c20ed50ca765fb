"""The compiled loops of `compress.float8`, which checks arguments. These do not.

A code of float8 e4m3 (torch.float8_e4m3fn) has a sign, four bits of exponent with bias 7, and three of mantissa. There
are no infinities, and one NaN of each sign. The largest number is 448, the smallest 2^-9.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from axon_ps.kernels.compiled import compiled

MAGNITUDE, INFINITY = np.uint32(0x7FFF_FFFF), np.uint32(0x7F80_0000)
LARGEST, SMALLEST_NORMAL = np.uint32(0x43E0_0000), np.uint32(0x3C80_0000)
"""Bits of 448 and of 2^-6."""
MAGIC, MAGIC_BITS = np.float32(16384.0), np.uint32(0x4680_0000)
"""2^14 has an ulp of 2^-9, the smallest float8, so adding it rounds to a multiple of that, ties to even."""
BIAS, HALF, U1 = np.uint32(960), np.uint32(0x7_FFFF), np.uint32(1)
"""BIAS: the exponent of an f32 less that of a float8, 120, before three bits of mantissa."""
U20, U24, SIGN, NAN = np.uint32(20), np.uint32(24), np.uint32(0x80), np.uint32(0x7F)


@compiled
def largest(values: Any) -> Any:
    """Return the bits of the largest magnitude of f32[n]: those of a NaN if there is one; 0 for an empty array."""
    found = np.uint32(0)
    for i in range(values.size):
        found = max(found, np.uint32(np.float32(values[i]).view(np.uint32) & MAGNITUDE))
    return found


@compiled
def quantise(values: Any, scale: Any, codes: Any) -> None:
    """Compute the codes, u8[n], nearest to values · scale; ties to even; from 448 on that of 448; NaN stays NaN."""
    for i in range(values.size):
        bits = np.float32(np.float32(values[i]) * scale).view(np.uint32)
        magnitude = min(np.uint32(bits & MAGNITUDE), LARGEST)
        odd = np.uint32(np.uint32(magnitude >> U20) & U1)
        code = np.uint32(np.uint32(np.uint32(magnitude + HALF + odd) >> U20) - BIAS)
        if magnitude < SMALLEST_NORMAL:
            code = np.uint32(np.float32(np.uint32(magnitude).view(np.float32) + MAGIC).view(np.uint32) - MAGIC_BITS)
        if np.uint32(bits & MAGNITUDE) > INFINITY:
            code = NAN
        codes[i] = np.uint8(np.uint32(np.uint32(bits >> U24) & SIGN) | code)


@compiled
def look_up(codes: Any, numbers: Any, out: Any) -> None:
    """Compute out = numbers[codes], of 256 numbers of the type of `out`."""
    for i in range(codes.size):
        out[i] = numbers[codes[i]]

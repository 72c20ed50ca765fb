"""Blocks of int4, for gradients and differences of parameters: 32 numbers are rotated and quantised to 15 levels.

    shape legend: n = numbers, b = ceil(n / 32) blocks, t = ceil(n / 1024) tiles of 32 blocks; zeros fill the last block
    bytes: the tiles' scales f32[t] little-endian, the blocks' scales u8[b], then 16 bytes a block; 4 t + 17 b in all
        (0.535 n). Byte r of all blocks of a tile comes before byte r + 1: quant r in its lower four bits, quant r + 16
        in the upper ones.

A block is multiplied by fixed signs and by a Hadamard matrix of order 32. That spreads a large number over its block.
The coefficients are then of similar size, so few levels represent them well (SDP4Bit, Jia et al., 2024,
https://arxiv.org/abs/2410.15526, does so with gradients; QuaRot, Ashkboos et al., 2024,
https://arxiv.org/abs/2404.00456, with activations). A coefficient c becomes q = c / scale, rounded to the nearest
integer from -7 to 7, ties to even. The scale is the block's largest |c| / 7.5, rounded up to the f32 of the tile times
an unsigned float of 4 bits of exponent and 4 of mantissa (two levels, as in SDP4Bit and NVFP4; ZeRO++, Wang et al.,
2023, https://arxiv.org/abs/2306.10209, has one). So a decompressed coefficient is within half a scale of c. The
transform preserves lengths, so the root mean square error over a block is at most half of 1/7 of the largest
coefficient.

The table has the lost part of the sum of squares, as measured:

    numbers                           with the rotation    without it
    gradients of the main job         0.9 %                0.8 to 0.9 %
    numbers of Laplace's distribution 0.85 %               1.4 %

Half of the numbers lose less than 0.4 % of their neighbours' mean square, and 0.6 % without the rotation. That matters
because AdamW divides each number by its own size. Blocks of 64 lose 1.1 to 1.5 %. With powers of two as scales, 2 % are
lost.

Edges, all tested: a block with a NaN or an infinity decompresses to all NaN; a block whose largest coefficient (a mean
of ±numbers) is under 2^-100 is sent as zeros; a block 2^16 times smaller than the largest of its tile loses more; a
finite block decompresses to finite numbers.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from axon_ps.compress.compressor import Compressor, blocks_of
from axon_ps.compress.registry import register
from axon_ps.errors import InvalidRequest
from axon_ps.types import Array

_BLOCK_NUMEL, _TILE_NUMEL = 32, 1024
_PAIR_BYTES, _TILE_SCALE_BYTES = 16, 4


@register("int4")
class Int4(Compressor):
    """Rotated blocks of int4 with two levels of scales: 0.535 bytes a number. Parameters travel as differences."""

    differences: ClassVar[bool] = True

    def __str__(self) -> str:
        return f"int4 in blocks of {_BLOCK_NUMEL}"

    def compressed_bytes(self, numel: int) -> int:
        """Return seventeen bytes for every 32 numbers and four for every 1024."""
        head, codes = _sizes(numel)
        return head + codes + _PAIR_BYTES * codes

    def _compress(self, values: Array, out: Array, residual: Array | None, residual_out: Array | None) -> None:
        from axon_ps.kernels import int4

        head, codes = _sizes(values.size)
        scales = np.empty(head // _TILE_SCALE_BYTES, np.float32)  # of its own: `out` may be unaligned
        int4.compress(values, residual, residual_out, scales, out[head : head + codes], out[head + codes :])
        out[:head] = scales.view(np.uint8)

    def _decompress(self, data: Array, acc: Array, first: bool) -> None:
        from axon_ps.kernels import int4

        int4.decompress(*self._checked(data, acc.size), acc, first)

    def _check(self, data: Array, numel: int) -> None:
        self._checked(data, numel)

    @staticmethod
    def _checked(data: Array, numel: int) -> tuple[Array, Array, Array]:
        """Return the tiles' scales f32[t], codes of the blocks' scales u8[b], and quants u8[16 b]."""
        from axon_ps.kernels import int4

        head, codes = _sizes(numel)
        arrays = data[:head].copy().view(np.float32), data[head : head + codes], data[head + codes :]
        if not int4.is_valid(*arrays):
            raise InvalidRequest(
                f"scales and quants of {codes} blocks of int4 do not fit together; the data is corrupt"
            )
        return arrays


def _sizes(numel: int) -> tuple[int, int]:
    """Return the bytes of the tiles' scales, and of the blocks'."""
    return _TILE_SCALE_BYTES * blocks_of(numel, _TILE_NUMEL), blocks_of(numel, _BLOCK_NUMEL)

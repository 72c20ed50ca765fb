"""Blocks of int8: every `block_numel` neighbours share one f32 scale, their largest magnitude / 127.

    shape legend: n = numbers, k = ceil(n / block_numel) blocks
    bytes: scales f32[k] little-endian, then quants i8[n]; 4 k + n in all (1.016 n for blocks of 256)

A number x becomes q = x · 127 / max|block|, rounded to the nearest integer, ties to even, and decompresses to
q · scale. The error is at most half a scale. The quantisation is symmetric, without a zero point: zero stays zero. The
blocks are from Dettmers et al., 2022, "8-bit optimizers via block-wise quantization"; ZeRO++ uses them for weights.

Edges, all tested: a block with a NaN or an infinity has the scale NaN and decompresses to all NaN; a block whose
largest magnitude is under 2^-100 is sent as zeros (its scale could be subnormal); a finite block decompresses to finite
numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from axon_ps.compress.compressor import Compressor, blocks_of
from axon_ps.compress.registry import register
from axon_ps.errors import InvalidRequest
from axon_ps.types import Array

_SCALE_BYTES = 4


@register("int8")
@dataclass(frozen=True)
class Int8(Compressor):
    """Blocks of int8 with one f32 scale each: a number's error is at most 1/254 of the largest in its block.

    Attributes:
        block_numel: numbers that share a scale, 16 to 65536.

    Raises:
        InvalidRequest: `block_numel` is out of range.
    """

    block_numel: int = 256

    def __post_init__(self) -> None:
        if not 16 <= self.block_numel <= 1 << 16:
            raise InvalidRequest(f"block_numel is {self.block_numel}; it must be from 16 to 65536")

    def __str__(self) -> str:
        return f"int8 in blocks of {self.block_numel}"

    def compressed_bytes(self, numel: int) -> int:
        """Return one byte a number and four a block."""
        return numel + _SCALE_BYTES * blocks_of(numel, self.block_numel)

    def _compress(self, values: Array, out: Array, residual: Array | None, residual_out: Array | None) -> None:
        from axon_ps.kernels import int8

        head = out.size - values.size
        scales = np.empty(head // _SCALE_BYTES, np.float32)  # of its own: `out` may be unaligned
        residual_out = None if residual_out is residual else residual_out
        int8.quantise(
            values, residual, residual_out, scales, out[head:].view(np.int8), self.block_numel, self.block_numel
        )
        out[:head] = scales.view(np.uint8)

    def _decompress(self, data: Array, acc: Array, first: bool) -> None:
        from axon_ps.kernels import int8

        head = data.size - acc.size
        scales = data[:head].copy().view(np.float32)
        int8.dequantise(scales, data[head:].view(np.int8), acc, self.block_numel, self.block_numel, first)

    def _check(self, data: Array, numel: int) -> None:
        pass  # all bytes are numbers

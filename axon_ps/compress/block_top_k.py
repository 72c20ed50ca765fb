"""The largest magnitudes of every block of 4096 numbers, in 2 to 4 bits each. The other numbers stay in the residual.

    shape legend: a block has m numbers, 4096 but for the last, of which k = ceil(fraction · m) are sent
    bytes of a block: the k-th largest and the largest magnitude, f32 little-endian, then for each number sent, by
        index, 12 bits of index, the sign, and `bits` - 1 bits of level; ceil(k (12 + bits) / 8) bytes
        (0.029 n in all for a fraction of 1/64 and 2 bits: 136 times less than f32)

The range between the k-th largest and the largest magnitude of a block is cut into 2^(bits - 1) equal parts. Each
magnitude sent is replaced by the middle of its part, and the error goes to the residual too. Of equal magnitudes the
first are taken. The compressor is meant for the pseudo-gradients of DiLoCo: with error feedback, 1 to 3 % of them in 2
bits train as well as all of them. The source is SparseLoCo (Sarfi et al., 2025, https://arxiv.org/abs/2508.15706),
which takes 64 of every 4096.

A block with a number that is not finite decompresses to k NaNs, and its residual stays as it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from axon_ps.compress.compressor import Compressor, blocks_of, check_fraction, selected_numel
from axon_ps.compress.registry import register
from axon_ps.errors import InvalidRequest
from axon_ps.types import Array

_BLOCK_NUMEL, _INDEX_BITS, _SCALES_BYTES = 4096, 12, 8


@register("block_top_k")
@dataclass(frozen=True)
class BlockTopK(Compressor):
    """The largest magnitudes of every block, in few bits, and where they are; gradients only.

    Attributes:
        fraction: fraction of the numbers that is sent, above 0 and at most 1. The count is rounded up.
        bits: bits of each magnitude sent, 2 to 4, the sign included.

    Raises:
        InvalidRequest: an option is out of range.
    """

    gradients_only: ClassVar[str] = "leaves elements out"

    fraction: float = 1 / 64
    bits: int = 2

    def __post_init__(self) -> None:
        check_fraction(self.fraction)
        if self.bits not in (2, 3, 4):
            raise InvalidRequest(f"bits is {self.bits}; it must be 2, 3 or 4, the sign included")

    def __str__(self) -> str:
        return f"a top-k of {self.fraction:g} of every block, in {self.bits} bits"

    def compressed_bytes(self, numel: int) -> int:
        """Return two scales a block, and 12 + `bits` bits for each selected number."""
        full, rest = divmod(numel, _BLOCK_NUMEL)
        return full * self._block_bytes(_BLOCK_NUMEL) + (self._block_bytes(rest) if rest else 0)

    def _block_bytes(self, numel: int) -> int:
        return _SCALES_BYTES + -(-selected_numel(numel, self.fraction) * (_INDEX_BITS + self.bits) // 8)

    def _blocks(self, numel: int) -> Iterator[tuple[slice, slice, int]]:
        """Yield, for each block, the range of its numbers, the range of its bytes, and the count of numbers sent."""
        size_bytes = self._block_bytes(_BLOCK_NUMEL)
        for index in range(blocks_of(numel, _BLOCK_NUMEL)):
            begin, first = index * _BLOCK_NUMEL, index * size_bytes
            end = min(begin + _BLOCK_NUMEL, numel)
            bytes_here = slice(first, first + self._block_bytes(end - begin))
            yield slice(begin, end), bytes_here, selected_numel(end - begin, self.fraction)

    def _compress(self, values: Array, out: Array, residual: Array | None, residual_out: Array | None) -> None:
        from axon_ps.kernels import block_top_k

        error = np.empty(min(values.size, _BLOCK_NUMEL), np.float32)
        for numbers, to, k in self._blocks(values.size):
            total = values[numbers] if residual is None else values[numbers] + residual[numbers]
            block_top_k.compress_block(total, k, self.bits, out[to], error[: total.size])
            if residual is not None and residual_out is not None:
                finite = not np.isnan(out[to.start : to.start + 4].copy().view(np.float32)[0])
                residual_out[numbers] = error[: total.size] if finite else residual[numbers]

    def _decompress(self, data: Array, acc: Array, first: bool) -> None:
        from axon_ps.kernels import block_top_k

        self._check(data, acc.size)
        if first:
            acc.fill(0.0)
        for numbers, source, k in self._blocks(acc.size):
            here = acc[numbers]
            block_top_k.decompress_block(data[source], here.size, k, self.bits, here, True)

    def _check(self, data: Array, numel: int) -> None:
        from axon_ps.kernels import block_top_k

        nothing = np.empty(0, np.float32)
        for numbers, source, k in self._blocks(numel):
            size = numbers.stop - numbers.start
            if not block_top_k.decompress_block(data[source], size, k, self.bits, nothing, False):
                raise InvalidRequest(
                    f"the scales or the {k} indices of a block of {size} numbers cannot be; the data is corrupt"
                )

    def warm_up(self) -> None:
        """Compile (or load from disk) the loops, on one number."""
        one, data = np.zeros(1, np.float32), np.empty(self.compressed_bytes(1), np.uint8)
        self.compress(one, data, np.zeros(1, np.float32))
        self.compress(one, data)
        self.decompress(data, one)

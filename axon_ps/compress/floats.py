"""bf16 and fp16 as compressors: half the bytes, rounded to the nearest.

    bytes: n numbers of two bytes, little-endian

A number that is not finite, or is too large for fp16, arrives as NaN or infinity. Its residual stays as it was.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from axon_ps.compress.compressor import Compressor
from axon_ps.compress.registry import register
from axon_ps.types import Array, DType


class _Float(Compressor):
    """A cast to a smaller float.

    Attributes:
        dtype: BF16 or F16.
    """

    dtype: ClassVar[DType]

    def compressed_bytes(self, numel: int) -> int:
        """Return two bytes a number."""
        return 2 * numel

    def _compress(self, values: Array, out: Array, residual: Array | None, residual_out: Array | None) -> None:
        from axon_ps.compress import cast
        from axon_ps.kernels import rounding

        target = out.view(self.dtype.numpy)
        residual = self._in_place(residual, residual_out)
        if residual is None:
            cast.encode(values, target, self.dtype)
        else:
            rounding.convert_with_residual(
                values, target.view(np.int16) if self.dtype is DType.F16 else target, residual
            )

    def _decompress(self, data: Array, acc: Array, first: bool) -> None:
        from axon_ps.compress import cast

        cast.accumulate(acc, data.view(self.dtype.numpy), self.dtype, first)

    def _check(self, data: Array, numel: int) -> None:
        pass  # all bytes are numbers


@register("bf16")
class BF16(_Float):
    """bf16: the range of f32, and 8 bits of each number."""

    dtype: ClassVar[DType] = DType.BF16


@register("fp16")
class FP16(_Float):
    """fp16: numbers up to 65504, and 11 bits of each."""

    dtype: ClassVar[DType] = DType.F16

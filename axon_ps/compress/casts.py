"""bf16 and fp16 as compressors: half the bytes, rounded to the nearest.

    bytes: n numbers of two bytes, little-endian

A number that is not finite, or too large for fp16, arrives as NaN or infinity; the residual beside it stays as it was.
"""

from __future__ import annotations

import numpy as np

from axon_ps.compress.compressor import Compressor
from axon_ps.errors import InvalidRequest
from axon_ps.types import Array, DType

_NAMES = {DType.BF16: "bf16", DType.F16: "fp16"}


class CastCompressor(Compressor):
    """See the module's docstring.

    Args:
        dtype: BF16 or F16.

    Raises:
        InvalidRequest: another dtype.
    """

    def __init__(self, dtype: DType) -> None:
        if dtype not in _NAMES:
            raise InvalidRequest(f"{dtype.value} is no smaller float than f32; use bf16 or f16")
        self.dtype = dtype
        self.name = _NAMES[dtype]

    def compressed_bytes(self, numel: int) -> int:
        """Two bytes a number."""
        return 2 * numel

    def _compress(self, values: Array, out: Array, residual: Array | None, residual_out: Array | None) -> None:
        from axon_ps.compress import cast
        from axon_ps.kernels import casts

        target = out.view(self.dtype.numpy)
        residual = self._in_place(residual, residual_out)
        if residual is None:
            cast.encode(values, target, self.dtype)
        else:
            casts.convert_with_residual(values, target.view(np.int16) if self.dtype is DType.F16 else target, residual)

    def _decompress(self, data: Array, acc: Array, first: bool) -> None:
        from axon_ps.compress import cast

        cast.accumulate(acc, data.view(self.dtype.numpy), self.dtype, first)

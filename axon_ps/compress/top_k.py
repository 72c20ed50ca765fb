"""Top-k: the largest magnitudes of an array and their indices. The other numbers stay in the residual.

    shape legend: n = numbers, k = ceil(fraction · n)
    bytes: indices u32[k] ascending, then values f32[k], little-endian; 8 k in all (0.08 n for a fraction of 0.01)

The k-th largest magnitude is found by counting, digit by digit over the bits of the magnitudes (a radix select). The
number of passes does not depend on k. Of equal magnitudes the first are taken. The selected numbers are sent exactly,
so the residual is zero there and the full number elsewhere (Aji and Heafield, 2017; Stich et al., 2018).

If any number is not finite, the first k values are sent as NaN and the residual stays as it was. One NaN would be
enough for the receiver, but the other numbers are useless then, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from axon_ps.compress.compressor import Compressor, check_fraction, selected_numel
from axon_ps.compress.registry import register
from axon_ps.errors import InvalidRequest
from axon_ps.types import Array

_PAIR_BYTES = 8


@register("top_k")
@dataclass(frozen=True)
class TopK(Compressor):
    """The largest magnitudes of every array and their indices; gradients only, since the rest is sent later.

    Attributes:
        fraction: fraction of the numbers that is sent, above 0 and at most 1. The count is rounded up.

    Raises:
        InvalidRequest: the fraction is out of range.
    """

    gradients_only: ClassVar[str] = "leaves elements out"

    fraction: float = 0.01

    def __post_init__(self) -> None:
        check_fraction(self.fraction)

    def __str__(self) -> str:
        return f"a top-k of {self.fraction:g} of the elements"

    def compressed_bytes(self, numel: int) -> int:
        """Return eight bytes for each selected number."""
        return _PAIR_BYTES * selected_numel(numel, self.fraction)

    def _compress(self, values: Array, out: Array, residual: Array | None, residual_out: Array | None) -> None:
        from axon_ps.kernels import top_k

        if values.size >= 1 << 32:
            raise InvalidRequest(f"top-k of {values.size} numbers; at most {(1 << 32) - 1} have an index of 32 bits")
        count = out.size // _PAIR_BYTES
        indices, sent = np.empty(count, np.uint32), np.empty(count, np.float32)
        top_k.select(values, self._in_place(residual, residual_out), indices, sent)
        out[: 4 * count] = indices.view(np.uint8)
        out[4 * count :] = sent.view(np.uint8)

    def _decompress(self, data: Array, acc: Array, first: bool) -> None:
        from axon_ps.kernels import top_k

        count = data.size // _PAIR_BYTES
        indices = data[: 4 * count].copy().view(np.uint32)
        sent = data[4 * count :].copy().view(np.float32)
        if not top_k.scatter(indices, sent, acc, first):
            raise _corrupt(count, acc.size)

    def _check(self, data: Array, numel: int) -> None:
        indices = data[: data.size // 2].copy().view(np.uint32)
        if indices.size and (indices[-1] >= numel or not (indices[1:] > indices[:-1]).all()):
            raise _corrupt(indices.size, numel)


def _corrupt(count: int, numel: int) -> InvalidRequest:
    return InvalidRequest(f"the {count} indices of a top-k do not ascend below {numel}; the data is corrupt")

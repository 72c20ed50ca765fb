"""float8 e4m3 (torch.float8_e4m3fn): a byte a number, with one scale for a tensor.

    shape legend: n = numbers, k = tensors that travel as float8, r = numbers of the others
    bytes: scales f32[k] little-endian, then the other tensors' numbers (bf16[r] or f32[r]), then codes u8[n - r]

The scale is 448 / the tensor's largest magnitude, and a number x becomes the float8 nearest to x · scale, ties to even.
It decompresses to float8 / scale. This is `torchao`'s dynamic scaling by tensor, to the bit: a linear layer that
computes in float8 and quantises such values gets the same float8 numbers again (Micikevicius et al., 2022, "FP8 formats
for deep learning", https://arxiv.org/abs/2209.05433).

An array of its own, like a chunk of a gradient, is one tensor. Parameters are `Float8Tensors`: a server makes the
frames of a tensor with the scale of all its elements on this server (`shard.core.tensor_scales`), without error
feedback.

Edges, all tested: a tensor with a NaN or an infinity has the scale NaN and decompresses to all NaN. A largest magnitude
under 1e-12 counts as 1e-12. A finite tensor decompresses to finite numbers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

import numpy as np

from axon_ps.compress.compressor import Compressor
from axon_ps.compress.registry import register
from axon_ps.errors import InvalidRequest
from axon_ps.types import Array, DType

_LARGEST, _TINY, _SCALE_BYTES = 448.0, 1e-12, 4
_REST = {16: DType.BF16, 32: DType.F32}


def _numbers() -> Array:
    """Return the numbers of all codes, f32[256]."""
    exponent, mantissa = np.divmod(np.arange(128), 8)
    positive = np.where(exponent, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0), mantissa * 2.0**-9)
    positive[127] = np.nan
    return np.concatenate([positive, -positive]).astype(np.float32)


_NUMBERS = _numbers()


def scale_of(largest: int) -> np.float32:
    """Return the scale of a tensor whose largest magnitude has these bits of an f32."""
    magnitude = np.uint32(largest).view(np.float32)
    return np.float32(_LARGEST / max(float(magnitude), _TINY)) if np.isfinite(magnitude) else np.float32(np.nan)


@register("float8_e4m3")
@dataclass(frozen=True)
class Float8(Compressor):
    """float8 e4m3 with one scale for a tensor: the weights of linear layers; other parameters as bf16 or f32.

    Attributes:
        rest_bits: bits of a number of the parameters that do not travel as float8: 16 (bf16) or 32 (f32).

    Raises:
        InvalidRequest: `rest_bits` is neither.
    """

    by_tensor: ClassVar[bool] = True

    rest_bits: int = 16

    def __post_init__(self) -> None:
        if self.rest_bits not in _REST:
            raise InvalidRequest(f"rest_bits is {self.rest_bits}; it must be 16 (bf16) or 32 (f32)")

    def __str__(self) -> str:
        return f"float8 e4m3, and what is not in linear layers as {_REST[self.rest_bits].value}"

    def of(self, tensors: Sequence[tuple[int, bool]]) -> Float8Tensors:
        """Return the compressor of arrays that consist of these tensors: (elements, whether it travels as float8)."""
        ends = accumulate(numel for numel, _ in tensors)
        ranges = (TensorRange(i, e - t[0], e, t[1]) for i, (e, t) in enumerate(zip(ends, tensors, strict=True)))
        return Float8Tensors(tuple(ranges), _REST[self.rest_bits])

    def compressed_bytes(self, numel: int) -> int:
        """Return one byte a number, and four."""
        return numel + _SCALE_BYTES

    def _compress(self, values: Array, out: Array, residual: Array | None, residual_out: Array | None) -> None:
        self.of([(values.size, True)])._compress(values, out, residual, residual_out)

    def _decompress(self, data: Array, acc: Array, first: bool) -> None:
        self.of([(acc.size, True)])._decompress(data, acc, first)

    def _check(self, data: Array, numel: int) -> None:
        pass  # all bytes are numbers


@dataclass(frozen=True, slots=True)
class TensorRange:
    """Elements [begin, end) of an array that are of one tensor.

    Attributes:
        tensor: number of the tensor.
        begin: first element.
        end: one past the last.
        float8: whether it travels as float8.
    """

    tensor: int
    begin: int
    end: int
    float8: bool

    @property
    def elements(self) -> slice:
        """Its range in the array."""
        return slice(self.begin, self.end)

    @property
    def numel(self) -> int:
        """Its number of elements."""
        return self.end - self.begin


class Float8Tensors(Compressor):
    """`Float8` for arrays that consist of these tensors.

    Args:
        ranges: the tensors, one behind the other.
        rest: the dtype of those that do not travel as float8.

    Attributes:
        ranges: as given.
    """

    name = Float8.name
    by_tensor = True

    def __init__(self, ranges: tuple[TensorRange, ...], rest: DType) -> None:
        self.ranges = ranges
        self._rest = rest
        self._ends = [r.end for r in ranges]
        self._numel = ranges[-1].end if ranges else 0
        self._num_scales = sum(r.float8 for r in ranges)
        rest_numel = sum(r.numel for r in ranges if not r.float8)
        self._codes_begin = _SCALE_BYTES * self._num_scales + rest.itemsize * rest_numel
        self._size_bytes = self._codes_begin + self._numel - rest_numel

    def within(self, begin: int, end: int) -> Float8Tensors:
        """Return the compressor of elements [begin, end) of these arrays."""
        found = []
        for r in self.ranges[bisect_right(self._ends, begin) :]:
            if r.begin >= end:
                break
            first, last = max(r.begin, begin), min(r.end, end)
            found.append(TensorRange(r.tensor, first - begin, last - begin, r.float8))
        return Float8Tensors(tuple(found), self._rest)

    def compressed_bytes(self, numel: int) -> int:
        """Return the bytes of all tensors, which have `numel` elements.

        Raises:
            InvalidRequest: they have another number.
        """
        if numel != self._numel:
            raise InvalidRequest(f"an array of {numel} elements came where tensors of {self._numel} are needed")
        return self._size_bytes

    def scales(self, values: Array) -> list[np.float32]:
        """Return the scale of each tensor that travels as float8."""
        from axon_ps.kernels import float8

        return [scale_of(float8.largest(values[r.elements])) for r in self.ranges if r.float8]

    def pack(self, values: Array, scales: Sequence[np.float32], out: Array) -> None:
        """Compress f32[n] with given scales, one for each tensor that travels as float8, to u8[compressed_bytes(n)]."""
        from axon_ps.compress import cast
        from axon_ps.kernels import float8

        out[: _SCALE_BYTES * self._num_scales] = np.array(scales, np.float32).view(np.uint8)
        scale = iter(scales)
        for r, here in self._in_bytes():
            if r.float8:
                float8.quantise(values[r.elements], next(scale), out[here])
            else:
                out[here] = cast.encoded(values[r.elements], self._rest).view(np.uint8)

    def _compress(self, values: Array, out: Array, residual: Array | None, residual_out: Array | None) -> None:
        total = values if residual is None else values + residual
        self.pack(total, self.scales(total), out)
        if residual is not None and residual_out is not None:
            error = np.empty_like(total)
            self._decompress(out, error, True)
            finite = np.isfinite(error)
            np.copyto(residual_out, residual)
            np.subtract(total, error, out=residual_out, where=finite)

    def _decompress(self, data: Array, acc: Array, first: bool) -> None:
        from axon_ps.compress import cast
        from axon_ps.kernels import float8

        scale = iter(data[: _SCALE_BYTES * self._num_scales].copy().view(np.float32))
        for r, here in self._in_bytes():
            target = acc[r.elements]
            if not r.float8:
                cast.accumulate(target, data[here].copy().view(self._rest.numpy), self._rest, first)
                continue
            with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
                numbers = np.clip(_NUMBERS / next(scale), -np.finfo(np.float32).max, np.finfo(np.float32).max)
            values = target if first else np.empty_like(target)
            float8.look_up(data[here], numbers, values)
            if not first:
                target += values

    def _check(self, data: Array, numel: int) -> None:
        pass  # all bytes are numbers

    def _in_bytes(self) -> Iterator[tuple[TensorRange, slice]]:
        """Yield each range with the range of its bytes, behind the scales."""
        rest, codes = _SCALE_BYTES * self._num_scales, self._codes_begin
        for r in self.ranges:
            if r.float8:
                yield r, slice(codes, codes + r.numel)
                codes += r.numel
            else:
                size_bytes = r.numel * self._rest.itemsize
                yield r, slice(rest, rest + size_bytes)
                rest += size_bytes

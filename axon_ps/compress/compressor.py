"""The interface of compressors. They turn f32 numbers into fewer bytes and store the error in a residual.

Owns: the `Compressor` interface, and the checks of arrays that the compiled loops do not make.
Pure and light: importing this imports no numba. A compressor compiles its loops when it is first used.
Refuses: state. One compressor object serves every array, from any number of threads. Residuals are the caller's (see
`compress.feedback`).

    shape legend: n = numbers in one array, b = compressed_bytes(n), a function of n alone

Invariants:
- The same numbers (and residual) give the same bytes on every machine and from every thread.
- A NaN or an infinity never disappears. It decompresses to NaNs or infinities at positions that each compressor
  documents, so the sum is not finite and the step is skipped.

Note: [Error feedback]
    `compress(values, out, residual)` compresses values + residual and leaves values + residual - decompressed in the
    residual. The error of one call is sent by the next one. Over many calls, the sum of the decompressed values differs
    from the sum of the values by the last residual only, however coarse the compression (Seide et al., 2014;
    Karimireddy et al., 2019). Numbers that are not finite never enter a residual: its elements stay as they were.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import ClassVar

import numpy as np

from axon_ps.errors import InvalidRequest
from axon_ps.kernels.arrays import check_array, readonly
from axon_ps.types import Array

_F32, _U8 = np.dtype(np.float32), np.dtype(np.uint8)


@dataclass(frozen=True)
class Compressor(ABC):
    """A way to make f32 arrays smaller. It is thread-safe. The GIL is released in every loop.

    A subclass is a frozen dataclass whose fields, all numbers, are its options. A subclass without options need not be
    a dataclass. It is registered under a name. Only the name and the options are sent to other processes.

    Attributes:
        name: the name it is registered under ("int8"); set by `registry.register`.
        gradients_only: the reason, in words, why it suits gradients only ("leaves elements out", to send them later);
            empty = it suits parameters, too.
        differences: whether parameters are sent as differences against the receiver's values, because it has too few
            levels for a parameter itself. See `shard.core.differences`.
        by_tensor: whether parameters are compressed by tensor, without error feedback. See `compress.float8`.
    """

    name: ClassVar[str]
    gradients_only: ClassVar[str] = ""
    differences: ClassVar[bool] = False
    by_tensor: ClassVar[bool] = False

    @property
    def options(self) -> dict[str, float]:
        """The options by name."""
        return {field.name: float(getattr(self, field.name)) for field in fields(self)}

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value:g}" for name, value in self.options.items())
        return f"{self.name}({options})" if options else self.name

    def of(self, tensors: Sequence[tuple[int, bool]]) -> Compressor:
        """Return the compressor for an array that consists of these tensors: itself, unless it compresses `by_tensor`.

        Args:
            tensors: of each its number of elements, and whether it travels as float8 if the compressor is of that.
        """
        return self

    def within(self, begin: int, end: int) -> Compressor:
        """Return the compressor for elements [begin, end) of an array; itself, unless it compresses `by_tensor`."""
        return self

    @abstractmethod
    def compressed_bytes(self, numel: int) -> int:
        """Return the exact compressed size of `numel` numbers."""

    def compress(
        self, values: Array, out: Array, residual: Array | None = None, residual_out: Array | None = None
    ) -> None:
        """Compress an array.

        Args:
            values: f32[n]; read only.
            out: u8[compressed_bytes(n)], overwritten; must not overlap the others.
            residual: f32[n]; added to the values first, then set to the compression error. See Note: [Error feedback].
                None = drop the error.
            residual_out: f32[n], used with `residual`; receives the compression error, and `residual` is only read. It
                must not overlap the others. None = `residual` receives it.

        Raises:
            InvalidRequest: an array has another element type, length or layout than stated. Nothing has been changed.
        """
        numel = values.size
        check_array("values", values, _F32, (numel,))
        check_array("out", out, _U8, (self.compressed_bytes(numel),))
        if residual is not None:
            check_array("residual", residual, _F32, (numel,))
            residual_out = residual if residual_out is None else residual_out
            check_array("residual_out", residual_out, _F32, (numel,))
        self._compress(readonly(values), out, residual, residual_out)

    def decompress(self, data: Array, out: Array) -> None:
        """Restore the numbers, up to the compression error.

        Args:
            data: u8[compressed_bytes(n)]; may be read-only and unaligned, as cut from a received message.
            out: f32[n], overwritten.

        Raises:
            InvalidRequest: an array has another element type, length or layout than stated, or `data` is not what
                `compress` writes. `out` has not been changed.
        """
        self._add(data, out, first=True)

    def accumulate(self, data: Array, acc: Array) -> None:
        """Decompress `data` and add it to `acc`.

        Args:
            data: u8[compressed_bytes(n)]; may be read-only and unaligned, as cut from a received message.
            acc: f32[n], updated in place.

        Raises:
            InvalidRequest: an array has another element type, length or layout than stated, or `data` is not what
                `compress` writes. `acc` has not been changed.
        """
        self._add(data, acc, first=False)

    def check(self, data: Array, numel: int) -> None:
        """Check data that will be decompressed or accumulated later.

        Args:
            data: u8[compressed_bytes(n)]; as for `decompress`.
            numel: n.

        Raises:
            InvalidRequest: `data` is not a compressed form of `numel` numbers.
        """
        check_array("data", data, _U8, (self.compressed_bytes(numel),))
        self._check(readonly(data), numel)

    def warm_up(self) -> None:
        """Compile (or load from disk) the loops, on empty arrays."""
        nothing = np.empty(0, np.float32)
        data = np.empty(self.compressed_bytes(0), np.uint8)
        self.compress(nothing, data)
        self.compress(nothing, data, np.empty(0, np.float32))
        self.compress(nothing, data, np.empty(0, np.float32), np.empty(0, np.float32))
        self.decompress(data, nothing)
        self.accumulate(data, nothing)

    def _add(self, data: Array, acc: Array, *, first: bool) -> None:
        check_array("the array to decompress into", acc, _F32, (acc.size,))
        check_array("data", data, _U8, (self.compressed_bytes(acc.size),))
        self._decompress(readonly(data), acc, first)

    @staticmethod
    def _in_place(residual: Array | None, residual_out: Array | None) -> Array | None:
        """Return the array to update in place: the residual, or its copy in `residual_out` if that is another array."""
        if residual is None or residual_out is None or residual_out is residual:
            return residual
        np.copyto(residual_out, residual)
        return residual_out

    @abstractmethod
    def _compress(self, values: Array, out: Array, residual: Array | None, residual_out: Array | None) -> None:
        """Compress after the checks. `values` is read-only, `residual_out` is the residual itself or another array."""

    @abstractmethod
    def _decompress(self, data: Array, acc: Array, first: bool) -> None:
        """Set acc = data if `first`, else acc += data, after the checks. `data` is read-only."""

    def _check(self, data: Array, numel: int) -> None:
        """Check the content after the size. Compressors that accept any bytes override this to skip decompressing."""
        self._decompress(data, np.empty(numel, np.float32), True)


def blocks_of(numel: int, block_numel: int) -> int:
    """Return the number of blocks that `numel` elements are cut into. The last may be shorter."""
    return -(-numel // block_numel)


def check_fraction(fraction: float) -> None:
    """Check the fraction of a top-k.

    Raises:
        InvalidRequest: it is not above 0, or it is above 1.
    """
    if not 0.0 < fraction <= 1.0:
        raise InvalidRequest(f"fraction is {fraction}; it must be above 0 and at most 1")


def selected_numel(numel: int, fraction: float) -> int:
    """Return the number of elements, of `numel`, that a top-k of `fraction` selects: the fraction, rounded up."""
    return min(numel, math.ceil(numel * fraction))

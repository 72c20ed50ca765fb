"""c10d's reduce operations as ours, and the reduction of dtypes that backends do not reduce.

Most dtypes that no backend reduces are widened first, and the result is narrowed. So integers wrap around as they would
by themselves, and float8 is rounded once. uint64 is reduced as int64. Bitwise operations need no conversion. Complex
numbers are pairs for sums and averages, and have no other reductions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from axon_ps.errors import InvalidRequest
from axon_ps.parallel.c10d.tensors import NATIVE, native, native_numel
from axon_ps.types import ReduceOp

_OPS = (
    (dist.ReduceOp.SUM, ReduceOp.SUM),
    (dist.ReduceOp.AVG, ReduceOp.AVERAGE),
    (dist.ReduceOp.PRODUCT, ReduceOp.PRODUCT),
    (dist.ReduceOp.MIN, ReduceOp.MIN),
    (dist.ReduceOp.MAX, ReduceOp.MAX),
    (dist.ReduceOp.BAND, ReduceOp.BAND),
    (dist.ReduceOp.BOR, ReduceOp.BOR),
    (dist.ReduceOp.BXOR, ReduceOp.BXOR),
)
_BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
_LINEAR = (ReduceOp.SUM, ReduceOp.AVERAGE)
_ORDERED = (ReduceOp.MIN, ReduceOp.MAX)
_WIDER = {
    torch.int8: torch.int32,
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e5m2: torch.float32,
    torch.float8_e4m3fnuz: torch.float32,
    torch.float8_e5m2fnuz: torch.float32,
}
_SIGN_BIT = -(1 << 63)


@dataclass(frozen=True)
class TensorReduction:
    """The reduction of tensors of one dtype by one operation.

    Attributes:
        op: the group's operation on the buffers.
        dtype: the user's dtype.
        factor: multiplies every contribution first (PREMUL_SUM); None = no factor.
    """

    op: ReduceOp
    dtype: torch.dtype
    factor: float | Tensor | None = None

    @classmethod
    def of(cls, given: Any, dtype: torch.dtype) -> TensorReduction:
        """Return the reduction that c10d's `given` (a `ReduceOp` or one of its constants) means for `dtype`.

        Raises:
            InvalidRequest: it is unknown, or has no meaning for the dtype.
        """
        if given == dist.ReduceOp.PREMUL_SUM:
            return cls(ReduceOp.SUM, dtype, _factor(given))
        op = next((ours for theirs, ours in _OPS if given == theirs), None)
        if op is None:
            raise InvalidRequest(f"the reduce operation {given} is unknown")
        if dtype.is_complex and op not in _LINEAR:
            raise InvalidRequest(f"{op.value} of complex numbers is not defined; SUM and AVG are")
        return cls(op, dtype)

    @property
    def direct(self) -> bool:
        """True if the user's memory itself is reduced."""
        return self.factor is None and self.results_fit

    @property
    def results_fit(self) -> bool:
        """True if results can be written to the user's memory as they are."""
        integer = not (self.dtype.is_floating_point or self.dtype.is_complex)
        if self.dtype in NATIVE or self.dtype.is_complex or (integer and self.op in _BITWISE):
            return True
        return self.dtype is torch.uint64 and self.op not in _ORDERED

    def view(self, flat: Tensor) -> Tensor:
        """Return flat: T[m] as the destination of results, if `results_fit`."""
        return flat.view(torch.int64) if self.dtype is torch.uint64 else native(flat)

    def buffer(self, flat: Tensor) -> Tensor:
        """Return flat: T[m] as the input of the reduction: a view if `direct`, else a copy.

        Raises:
            InvalidRequest: the dtype cannot be reduced.
        """
        if self.factor is not None:
            flat = (flat * self.factor).to(flat.dtype)
        if self.results_fit:
            return self.view(flat)
        if self.dtype is torch.uint64:
            return flat.view(torch.int64) ^ _SIGN_BIT  # the order of signed numbers is now that of unsigned ones
        wider = _WIDER.get(self.dtype)
        if wider is None:
            raise InvalidRequest(f"tensors of {self.dtype} cannot be reduced; convert them first")
        return flat.to(wider)

    def store(self, reduced: Tensor, flat: Tensor) -> None:
        """Store a buffer's result in flat: T[m]. This is not needed if `direct`."""
        if self.results_fit:
            self.view(flat).copy_(reduced)
        elif self.dtype is torch.uint64:
            flat.view(torch.int64).copy_(reduced ^ _SIGN_BIT)
        else:
            flat.copy_(reduced)

    def numel(self, numel: int) -> int:
        """Return the number of elements of a buffer for `numel` of the user's."""
        if not self.results_fit or self.dtype is torch.uint64:
            return numel
        return native_numel(numel, self.dtype)


def _factor(given: Any) -> float | Tensor:
    factor: float | Tensor = given.factor if hasattr(given, "factor") else given.__getstate__()[1]
    return factor

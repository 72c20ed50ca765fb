"""NCCL's numbers and names: dtypes, reductions, unique ids, versions. It is pure and needs no GPU."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from axon_ps.errors import InvalidRequest
from axon_ps.types import DType, ReduceOp

UNIQUE_ID_BYTES = 128

# The numbers of nccl.h, which are its binary interface; cupy names only some of them.
NCCL_DTYPES: dict[DType, int] = {
    DType.U8: 1,
    DType.BOOL: 1,
    DType.I32: 2,
    DType.I64: 4,
    DType.F16: 6,
    DType.F32: 7,
    DType.F64: 8,
    DType.BF16: 9,
}
SUM, PRODUCT, MAX, MIN, AVERAGE = range(5)
_OPS = {
    ReduceOp.SUM: SUM,
    ReduceOp.PRODUCT: PRODUCT,
    ReduceOp.MAX: MAX,
    ReduceOp.MIN: MIN,
    ReduceOp.AVERAGE: AVERAGE,
}
_OPS_OF_BOOL = {
    ReduceOp.SUM: MAX,
    ReduceOp.BOR: MAX,
    ReduceOp.MAX: MAX,
    ReduceOp.PRODUCT: MIN,
    ReduceOp.BAND: MIN,
    ReduceOp.MIN: MIN,
}


@dataclass(frozen=True)
class NcclUniqueId:
    """Identifies a communicator, so that its ranks find each other; made on one rank and sent to the others.

    Attributes:
        value: the 128 bytes of NCCL's `ncclUniqueId`.
    """

    value: bytes

    def __post_init__(self) -> None:
        if len(self.value) != UNIQUE_ID_BYTES:
            raise InvalidRequest(f"a unique id of NCCL has {UNIQUE_ID_BYTES} bytes; given were {len(self.value)}")

    def as_of(self, cupy: str) -> bytes | tuple[int, ...]:
        """Return the unique id for that version of cupy: bytes since 14.0, before that C's signed characters."""
        if int(cupy.split(".")[0]) >= 14:
            return self.value
        return tuple(int(c) for c in np.frombuffer(self.value, np.int8))

    @classmethod
    def of(cls, given: bytes | tuple[int, ...]) -> NcclUniqueId:
        """Return the unique id that cupy gave, in any version."""
        return cls(given if isinstance(given, bytes) else np.array(given, np.int16).astype(np.int8).tobytes())


def nccl_op(op: ReduceOp, dtype: DType) -> int | None:
    """Return NCCL's number of the reduction; None when NCCL has none, and we gather and reduce ourselves."""
    return (_OPS_OF_BOOL if dtype is DType.BOOL else _OPS).get(op)


def version_of(code: int) -> tuple[int, int, int]:
    """Return NCCL's version number as (major, minor, patch): 22304 is (2, 23, 4), 2708 is (2, 7, 8)."""
    scale = 10_000 if code >= 10_000 else 1_000
    return code // scale, code % scale // 100, code % 100

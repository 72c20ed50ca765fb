"""Reductions of flat arrays in any dtype, for every backend and the servers' collectives.

Owns: the meaning of a `ReduceOp` for a dtype. Refuses: the order of contributions, which is the caller's.

Invariants:
- Contributions are combined in the order given, ((x0 + x1) + x2) + ..., so the result is the same in every process.
- bf16 and f16 are combined in f32 and rounded once, at the end. Everything else is combined in its own type: integers
  wrap around, a bool's sum is "or" and its product "and".
- Blocks of int8 have a sum and an average, in f32; see `compress.int8_block` for how those become blocks again.
- AVERAGE is the sum divided by the number of contributions. It needs a floating-point type.
- MIN and MAX of a NaN are NaN.
- The GIL is released in all of these operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from axon_ps.errors import InvalidRequest
from axon_ps.types import INT8_BLOCK_NUMEL, Array, DType, ReduceOp

BLOCK_BYTES = 256 << 10
"""Bytes of each array that `reduce_into` works on at a time, so that sums stay in a core's cache."""

_Ufunc = Callable[..., Any]
_UFUNCS: dict[ReduceOp, _Ufunc] = {
    ReduceOp.SUM: np.add,
    ReduceOp.AVERAGE: np.add,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.BAND: np.bitwise_and,
    ReduceOp.BOR: np.bitwise_or,
    ReduceOp.BXOR: np.bitwise_xor,
}
_BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
_HALVES = (DType.BF16, DType.F16)
CODED = (*_HALVES, DType.INT8_BLOCK)
"""Dtypes that compiled loops decode to be combined; see `warm_up`."""
_ADDING = (ReduceOp.SUM, ReduceOp.AVERAGE)
_F32 = np.dtype(np.float32)
_BLOCK_OF_F32 = np.dtype((np.float32, (INT8_BLOCK_NUMEL,)))


def check(op: ReduceOp, dtype: DType) -> None:
    """Check that `op` is defined for `dtype`.

    Raises:
        InvalidRequest: it is not.
    """
    if dtype is DType.INT8_BLOCK:
        if op not in _ADDING:
            raise InvalidRequest(f"{op.value} of {dtype.value} is not defined; use SUM or AVERAGE, or send f32")
        return
    if op is ReduceOp.AVERAGE and not dtype.is_float:
        raise InvalidRequest(f"the average of {dtype.value} is not defined; use SUM, or convert to a float type first")
    if op in _BITWISE and dtype.is_float:
        raise InvalidRequest(f"{op.value} of {dtype.value} is not defined; bitwise operations need integers or bool")


def accumulator_dtype(dtype: DType) -> np.dtype[Any]:
    """Return the numpy dtype in which `dtype` is combined: f32 for bf16 and f16, f32[256] for blocks, else its own."""
    if dtype is DType.INT8_BLOCK:
        return _BLOCK_OF_F32
    return _F32 if dtype in _HALVES else dtype.numpy


def warm_up(dtype: DType) -> None:
    """Compile (or load from disk) the loops that reductions of `dtype` need."""
    if dtype in _HALVES:
        _cast().warm_up(dtype)
    elif dtype is DType.INT8_BLOCK:
        _int8_block().warm_up()


def start(acc: Array, data: Array, dtype: DType) -> None:
    """Set acc: A[m] to the first contribution data: T[m]; A = `accumulator_dtype(dtype)`."""
    if dtype in _HALVES:
        _cast().decode(data, acc, dtype)
    elif dtype is DType.INT8_BLOCK:
        _int8_block().accumulate(acc, data, first=True)
    else:
        np.copyto(acc, data)


def accumulate(acc: Array, data: Array, op: ReduceOp, dtype: DType) -> None:
    """Combine acc: A[m] with the next contribution data: T[m]."""
    if dtype in _HALVES:
        if op in _ADDING:
            _cast().accumulate(acc, data, dtype, False)
            return
        widened = np.empty_like(acc)
        _cast().decode(data, widened, dtype)
        data = widened
    elif dtype is DType.INT8_BLOCK:
        _int8_block().accumulate(acc, data, first=False)
        return
    _UFUNCS[op](acc, data, out=acc)


def finish(out: Array, acc: Array, op: ReduceOp, dtype: DType, contributions: int) -> None:
    """Set out: T[m] to the result of `contributions` contributions combined in acc: A[m]. `out` may be `acc`."""
    if op is ReduceOp.AVERAGE:
        np.divide(acc, contributions, out=acc)
    if dtype in _HALVES:
        _cast().encode(acc, out, dtype)
    elif dtype is DType.INT8_BLOCK:
        _int8_block().encode_sums(acc, out)
    elif out is not acc:
        np.copyto(out, acc)


def reduce_into(out: Array, sources: Sequence[Array], op: ReduceOp, dtype: DType) -> None:
    """Set out: T[m] to the reduction of the sources, T[m] each, in their order. `out` may be one of them.

    All but the reduction of two uncoded arrays is done in blocks of `BLOCK_BYTES`, so each array is read from memory
    once.
    """
    if len(sources) == 1:
        if out is not sources[0]:
            np.copyto(out, sources[0])
        return
    if len(sources) == 2 and dtype not in CODED:  # no intermediate sum to keep in a cache
        _reduce_block(out, sources, op, dtype, out)
        return
    block = max(1, BLOCK_BYTES // dtype.itemsize)
    acc = np.empty(min(block, out.size), accumulator_dtype(dtype))
    for begin in range(0, out.size, block):
        end = min(begin + block, out.size)
        _reduce_block(out[begin:end], [s[begin:end] for s in sources], op, dtype, acc[: end - begin])


def _reduce_block(out: Array, sources: Sequence[Array], op: ReduceOp, dtype: DType, acc: Array) -> None:
    if dtype in CODED:
        start(acc, sources[0], dtype)
        for source in sources[1:]:
            accumulate(acc, source, op, dtype)
        finish(out, acc, op, dtype, len(sources))
        return
    combine = _UFUNCS[op]
    combined = sources[0]
    for source in sources[1:-1]:
        combined = combine(combined, source, out=acc)
    combine(combined, sources[-1], out=out)
    if op is ReduceOp.AVERAGE:
        np.divide(out, len(sources), out=out)


def _int8_block() -> Any:
    """Return the compiled loops for blocks of int8, imported late as in `_cast`."""
    from axon_ps.compress import int8_block

    return int8_block


def _cast() -> Any:
    """Return the compiled casts. Loading numba takes a while, and only bf16 and f16 need it."""
    from axon_ps.compress import cast

    return cast

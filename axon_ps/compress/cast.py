"""Casts between f32 and the wire dtypes, and the sum of gradient chunks in f32.

Owns: f32 → bf16, f16 and back, the accumulation of wire chunks into an f32 gradient, and its sum of squares. Shapes:
`n` is the numel of one chunk, or of any range of one. Every array is 1-D and C-contiguous.
Refuses: dtypes other than `WIRE_DTYPES`, in which gradients and parameters travel, and arrays that differ in length,
because a compiled loop does not check its bounds. Importing this imports numba.

Invariants:
- Rounding is to nearest, ties to even, also for subnormals and for overflow to infinity. A NaN becomes a quiet NaN.
  Everything else has the same bits as torch's `.to(torch.bfloat16)` and `.to(torch.float16)`.
- A result depends neither on the machine's vector width nor on how a slice was cut into ranges. Only
  `sum_of_squares` depends on where its array begins.
- Every loop runs on one thread with the GIL released. For two cores, cut the slice in two.
"""

from __future__ import annotations

import numpy as np

from axon_ps.errors import InvalidRequest
from axon_ps.kernels import rounding
from axon_ps.kernels.arrays import check_array, readonly
from axon_ps.types import Array, DType, parse_dtype


def encode(src: Array, dst: Array, dtype: DType) -> None:
    """Round f32 to a wire dtype.

    Args:
        src: f32[n].
        dst: dtype.numpy[n], overwritten; must not overlap `src`.
        dtype: a wire dtype.

    Raises:
        InvalidRequest: `dtype` is not a wire dtype, or an array has another element type, shape or layout than stated.
    """
    rounding.convert(readonly(_checked("src", src, DType.F32, src.size)), _checked("dst", dst, dtype, src.size))


def encoded(values: Array, dtype: DType) -> Array:
    """Return f32[n] rounded to a wire dtype, in a new array; f32 itself for F32. Raises as `encode` does."""
    if dtype is DType.F32:
        return values
    out = np.empty(values.size, dtype.numpy)
    encode(values, out, dtype)
    return out


def decoded(values: Array, dtype: DType) -> Array:
    """Return dtype.numpy[n] widened to f32, in a new array; the same for F32. Raises as `decode` does."""
    if dtype is DType.F32:
        return values
    out = np.empty(values.size, np.float32)
    decode(values, out, dtype)
    return out


def decode(src: Array, dst: Array, dtype: DType) -> None:
    """Widen a wire dtype to f32; exact.

    Args:
        src: dtype.numpy[n]; may be read-only and unaligned, as cut from a received message.
        dst: f32[n], overwritten; must not overlap `src`.
        dtype: a wire dtype.

    Raises:
        InvalidRequest: `dtype` is not a wire dtype, or an array has another element type, shape or layout than stated.
    """
    rounding.convert(readonly(_checked("src", src, dtype, src.size)), _checked("dst", dst, DType.F32, src.size))


def accumulate(
    acc: Array,
    chunk: Array,
    dtype: DType,
    first: bool,
    digests: Array | None = None,
    block_numel: int = rounding.TILE_NUMEL,
) -> None:
    """Add one replica's gradient chunk to the running sum, in f32.

    Args:
        acc: f32[n], updated in place.
        chunk: dtype.numpy[n]; may be read-only and unaligned, as cut from a received message.
        dtype: element type of `chunk`, a wire dtype.
        first: whether this is the first replica. If so, `acc` is overwritten.
        digests: u64[2, blocks of acc]: the digests of what was read of `acc` are added to the first row, those of what
            was written to the second. Nothing is read for the first replica. See `kernels.digest`. None = no digests.
        block_numel: elements of a block, a multiple of TILE_NUMEL. The last one may have fewer.

    Raises:
        InvalidRequest: `dtype` is not a wire dtype, or an array has another element type, shape or layout than stated.
    """
    acc, chunk = _checked("acc", acc, DType.F32, acc.size), readonly(_checked("chunk", chunk, dtype, acc.size))
    _check_digests(digests, acc.size, block_numel)
    rounding.accumulate(acc, chunk, first, digests, block_numel)


def accumulate_last(
    acc: Array,
    chunk: Array,
    dtype: DType,
    first: bool,
    digests: Array,
    block_numel: int = rounding.TILE_NUMEL,
    *,
    rounds: bool = False,
) -> float:
    """Accumulate the last replica, and return `sum_of_squares(acc)` from the same pass, to the same bits.

    Args:
        acc: f32[n], updated in place.
        chunk: dtype.numpy[n]; may be read-only and unaligned, as cut from a received message.
        dtype: element type of `chunk`, a wire dtype.
        first: whether this is the first replica too, that is, the only one.
        digests: u64[2, blocks of acc], as for `accumulate`.
        block_numel: as for `accumulate`.
        rounds: whether `round_in_place(acc, dtype)` follows, in the same pass.

    Returns:
        The sum of the squares of `acc` after the addition, before the rounding, in f64.

    Raises:
        InvalidRequest: `dtype` is not a wire dtype, or an array has another element type, shape or layout than stated.
    """
    acc, chunk = _checked("acc", acc, DType.F32, acc.size), readonly(_checked("chunk", chunk, dtype, acc.size))
    _check_digests(digests, acc.size, block_numel)
    like = _like(dtype) if rounds else None
    return float(rounding.accumulate_last(acc, chunk, first, like, digests, block_numel))


def sum_of_squares(acc: Array) -> float:
    """Return the sum of the squares of an f32 array, in f64.

    The order of the additions is fixed: PARTIAL_SUMS running sums, element i in sum i mod PARTIAL_SUMS, the sums added
    in order. Each square is exact (48 bits), and finite values cannot overflow f64 (2^256 · n), so the result is inf or
    NaN if and only if some element is.

    Args:
        acc: f32[n].

    Returns:
        The sum; 0.0 for an empty array.

    Raises:
        InvalidRequest: `acc` is not a contiguous 1-D f32 array.
    """
    return float(rounding.sum_of_squares(_checked("acc", acc, DType.F32, acc.size)))


def round_in_place(acc: Array, dtype: DType) -> None:
    """Round f32 to the values that a wire dtype has, and leave them f32.

    Args:
        acc: f32[n], overwritten.
        dtype: a wire dtype; F32 changes nothing.

    Raises:
        InvalidRequest: `dtype` is not a wire dtype, or `acc` is not a contiguous 1-D f32 array.
    """
    like = _like(dtype)
    if like is not None:
        rounding.round_in_place(_checked("acc", acc, DType.F32, acc.size), like, None, 0)


def warm_up(dtype: DType) -> None:
    """Compile (or load from disk) the loops for gradients and parameters in `dtype`, on empty arrays.

    Raises:
        InvalidRequest: `dtype` is not a wire dtype.
    """
    acc = np.empty(0, np.float32)
    wire = np.empty(0, dtype.numpy)
    encode(acc, wire, dtype)
    decode(wire, acc, dtype)
    round_in_place(acc, dtype)
    for chunk in examples(dtype):
        digests = np.zeros((2, 0), np.uint64)
        accumulate(acc, chunk, dtype, True)
        accumulate(acc, chunk, dtype, True, digests)
        accumulate_last(acc, chunk, dtype, True, digests)
        accumulate_last(acc, chunk, dtype, True, digests, rounds=True)
    sum_of_squares(acc)


def examples(dtype: DType) -> tuple[Array, ...]:
    """Return empty chunks of every kind that loops are compiled for: our own, and received ones, aligned and not."""
    return np.empty(0, dtype.numpy), _received(dtype, offset=0), _received(dtype, offset=1)


def _received(dtype: DType, offset: int) -> Array:
    """Return an empty array like one cut from a message: read-only, maybe aligned. Loops are compiled for each kind."""
    return np.frombuffer(bytes(offset + dtype.itemsize), dtype.numpy, count=1, offset=offset)[:0]


def _like(dtype: DType) -> Array | None:
    """Return the target of a loop's rounding: an array of one element; None if nothing is rounded."""
    return _checked("like", np.empty(1, dtype.numpy), dtype, 1) if dtype is not DType.F32 else None


def _check_digests(digests: Array | None, numel: int, block_numel: int) -> None:
    if digests is not None:
        if block_numel <= 0 or block_numel % rounding.TILE_NUMEL:
            raise InvalidRequest(f"a block has {block_numel} elements; it must be a multiple of {rounding.TILE_NUMEL}")
        check_array("digests", digests, np.dtype(np.uint64), (2, -(-numel // block_numel)))


def _checked(name: str, array: Array, dtype: DType, numel: int) -> Array:
    """Return the array as the loops take it (f16 as int16 bits), once its type and shape are checked."""
    parse_dtype(dtype, "the wire dtype of arrays")
    if array.dtype != dtype.numpy or array.shape != (numel,) or not array.flags.c_contiguous:
        raise InvalidRequest(
            f"{name} is {array.dtype}{list(array.shape)} with strides {array.strides}; "
            f"needed is a contiguous {dtype.numpy}[{numel}] for {dtype.name}; pass a 1-D contiguous array of that type"
        )
    return array.view(np.int16) if dtype is DType.F16 else array

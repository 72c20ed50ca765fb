"""The values of raw parameters in arrays of their units, and their conversion to numbers and back. Pure.

See `sharding.layout`, Note: [Raw parameters]. A conversion is needed if a checkpoint has a parameter as numbers and the
model has it raw, or the other way round: it was frozen or unfrozen in between. Only floating-point dtypes are
converted.

    shape legend: n = elements of a tensor, w = words of a raw parameter
"""

from __future__ import annotations

import numpy as np

from axon_ps.sharding.layout import ELEMENT_BYTES, Parameter
from axon_ps.types import WIRE_DTYPES, Array, DType


def tensor_of(values: Array, parameter: Parameter) -> Array:
    """Return the view of one parameter in the array of its unit, in its shape; of a raw one in its own dtype."""
    own = values[parameter.offset : parameter.end]
    if parameter.raw:
        own = own.view(np.uint8)[: parameter.nbytes].view(parameter.dtype.numpy)
    return own.reshape(parameter.shape)


def elements_in(parameter: Parameter, begin: int, end: int) -> tuple[int, int]:
    """Return the range of the tensor's elements that lie, wholly or in part, in elements [begin, end) of its unit.

    Args:
        parameter: the parameter.
        begin: first element of the unit, counted from the parameter's first one.
        end: one past the last.
    """
    if not parameter.raw:
        return begin, end
    itemsize = parameter.dtype.itemsize
    last = min(-(-end * ELEMENT_BYTES // itemsize), parameter.count)
    return min(begin * ELEMENT_BYTES // itemsize, last), last


def range_with(parameter: Parameter, first: int, last: int) -> tuple[int, int]:
    """Return the range of the unit, counted from the parameter's first element, that has elements [first, last)."""
    if not parameter.raw:
        return first, last
    itemsize = parameter.dtype.itemsize
    return first * itemsize // ELEMENT_BYTES, -(-last * itemsize // ELEMENT_BYTES)


def numbers_of(values: Array, parameter: Parameter, begin: int, first: int, last: int) -> Array:
    """Return elements [first, last) of a tensor as f32[last - first].

    Args:
        values: f32[m], a part of what the unit has of the parameter.
        parameter: the parameter.
        begin: its first element in the unit that is in `values`, counted from the parameter's first one.
        first: first element of the tensor.
        last: one past the last.
    """
    if not parameter.raw:
        return values[first - begin : last - begin]
    itemsize, skipped = parameter.dtype.itemsize, begin * ELEMENT_BYTES
    own = values.view(np.uint8)[first * itemsize - skipped : last * itemsize - skipped]
    return _decoded(own.view(parameter.dtype.numpy), parameter.dtype)


def stored(values: Array, source: Parameter, begin: int, first: int, last: int, target: Parameter) -> Array:
    """Return elements [first, last) of a tensor as another parameter has them in its unit, u8[bytes].

    Args:
        values, source, begin, first, last: as of `numbers_of`.
        target: the parameter that they are to be elements of. Either both have one dtype, or floating-point ones.
    """
    if source.raw and target.raw and source.dtype is target.dtype:
        itemsize, skipped = source.dtype.itemsize, begin * ELEMENT_BYTES
        return values.view(np.uint8)[first * itemsize - skipped : last * itemsize - skipped]
    numbers = numbers_of(values, source, begin, first, last)
    encoded: Array = encoded_as(numbers, target.dtype) if target.raw else numbers
    return np.ascontiguousarray(encoded).view(np.uint8)


def put(found: Array, parameter: Parameter, first: int, out: Array, begin: int) -> None:
    """Put what `stored` returned to where it belongs in a part of a unit; bytes outside of it are left out.

    Args:
        found: the bytes.
        parameter: the parameter.
        first: the first of its elements that they are.
        out: f32[m], a part of its unit.
        begin: the element of the unit with which `out` begins.
    """
    itemsize = parameter.dtype.itemsize if parameter.raw else ELEMENT_BYTES
    data, at = out.view(np.uint8), (parameter.offset - begin) * ELEMENT_BYTES + first * itemsize
    skipped = max(0, -at)
    taken = found[skipped : skipped + max(0, data.size - at - skipped)]
    data[at + skipped : at + skipped + taken.size] = taken


def encoded_as(numbers: Array, dtype: DType) -> Array:
    """Convert f32 values to another dtype, rounded to nearest."""
    if dtype in WIRE_DTYPES:
        from axon_ps.compress import cast  # numba: only where it is needed

        return cast.encoded(numbers, dtype)
    return numbers.astype(dtype.numpy) if dtype.is_float else np.rint(numbers).astype(dtype.numpy)


def _decoded(values: Array, dtype: DType) -> Array:
    if dtype in WIRE_DTYPES:
        from axon_ps.compress import cast

        return cast.decoded(np.ascontiguousarray(values), dtype)
    return values.astype(np.float32)

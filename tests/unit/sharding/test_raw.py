"""Raw parameters in arrays of their units: views, bounds of elements and words, conversions by moves."""

from __future__ import annotations

import numpy as np
import pytest

from axon_ps.errors import InvalidRequest
from axon_ps.sharding.layout import Layout, Unit, build_unit, first_difference
from axon_ps.sharding.moves import TensorSources
from axon_ps.sharding.plan import Slice
from axon_ps.sharding.raw import encoded_as, tensor_of
from axon_ps.types import ELEMENTS, Array, DType
from axon_ps.wire import codec
from moved_arrays import carry_out

F32, BF16, F64, U8 = DType.F32, DType.BF16, DType.F64, DType.U8


def raw(*dtypes: DType, shape: tuple[int, ...] = (5,)) -> Unit:
    return build_unit("u", [(f"p{i}", shape, dtype) for i, dtype in enumerate(dtypes)], trainable=False, raw=True)


@pytest.mark.parametrize("dtype", ELEMENTS)
@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 7), (16,)])
def test_every_dtype_and_shape_is_viewed_where_it_was_written(dtype: DType, shape: tuple[int, ...]) -> None:
    unit = raw(U8, dtype, U8, shape=shape)
    values = np.zeros(unit.numel, np.float32)
    written = np.random.default_rng(0).integers(0, 256, unit.parameters[1].nbytes, np.uint8)
    tensor_of(values, unit.parameters[1]).reshape(-1).view(np.uint8)[:] = written
    found = tensor_of(values, unit.parameters[1])
    assert (found.shape, found.dtype) == (shape, dtype.numpy)
    assert found.tobytes() == written.tobytes()
    for other in (unit.parameters[0], unit.parameters[2]):
        assert not tensor_of(values, other).any()


def test_raw_parameters_take_their_bytes_rounded_up_to_16() -> None:
    unit = raw(U8, BF16, F64, shape=(33,))
    assert [(p.offset, p.numel) for p in unit.parameters] == [(0, 12), (12, 20), (32, 68)]
    assert [p.nbytes for p in unit.parameters] == [33, 66, 264]
    layout = Layout(units=(unit, build_unit("v", [("v", (10,), F32)])))
    assert (layout.count, layout.numel) == (3 * 33 + 10, 100 + 10)
    assert codec.layout_from_proto(codec.layout_to_proto(layout)) == layout


def test_a_unit_is_raw_and_frozen_or_neither() -> None:
    mixed = Unit(name="u", parameters=(raw(U8).parameters[0], build_unit("", [("q", (4,), F32)]).parameters[0]))
    for unit in (mixed, build_unit("u", [("p", (4,), U8)], raw=True)):
        with pytest.raises(InvalidRequest, match=r"offset|raw parameters; all of them must be raw, and frozen"):
            Layout(units=(unit,))
    one, other = (Layout(units=(build_unit("u", [("p", (4,), BF16)], trainable=False, raw=r),)) for r in (True, False))
    assert first_difference(one, other) == "parameter 'p' is sent as its bits here and as numbers in the job"
    assert one.digest != other.digest


def restored(target: Unit, source: Unit, values: Array, cuts: tuple[int, ...]) -> Array:
    """Return the values of a unit that is filled slice by slice from another layout's."""
    found = np.full(target.numel, 0.0 if target.raw else np.nan, np.float32)
    for begin, end in zip((0, *cuts), (*cuts, target.numel), strict=True):
        s = Slice(unit=0, server=0, begin=begin, end=end)
        for move in TensorSources(Layout(units=(source,))).moves_into(s, Layout(units=(target,))):
            carry_out(move, values, found[begin:end], begin)
    return found


@pytest.mark.parametrize("dtype", [BF16, DType.F16, F64])
@pytest.mark.parametrize("cuts", [(), (4,), (3, 8), (1, 2, 5, 11)])
def test_numbers_become_raw_and_raw_ones_numbers(dtype: DType, cuts: tuple[int, ...]) -> None:
    numbers = np.arange(26, dtype=np.float32) / 4 - 3
    names = [("a", (13,), dtype), ("b", (13,), dtype)]
    as_numbers, as_words = build_unit("u", names), build_unit("u", names, trainable=False, raw=True)
    words = restored(as_words, as_numbers, numbers, cuts)
    for p, part in zip(as_words.parameters, (numbers[:13], numbers[13:]), strict=True):
        assert tensor_of(words, p).tobytes() == encoded_as(part, dtype).tobytes()
        unused = words[p.offset : p.end].view(np.uint8)[p.nbytes :]
        assert not unused.any(), "every holder of a slice has the same bits"
    np.testing.assert_array_equal(restored(as_numbers, as_words, words, cuts), numbers)


def test_bits_are_moved_and_other_dtypes_are_refused() -> None:
    words = np.random.default_rng(1).integers(0, 2**32, 8, np.uint32).view(np.float32)
    assert restored(raw(U8, U8), raw(U8, U8), words, (4,)).tobytes() == words.tobytes()
    with pytest.raises(InvalidRequest, match=r"uint8 in the checkpoint and int8 in the model; only floating-point"):
        restored(raw(DType.I8), raw(U8), words, ())

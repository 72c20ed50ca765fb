"""Moves: whatever units and boxes a layout has, each element finds its place in another one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from axon_ps.errors import InvalidRequest
from axon_ps.sharding.layout import FullTensor, Layout, Parameter, Unit, build_unit
from axon_ps.sharding.moves import Move, TensorSources
from axon_ps.sharding.plan import Plan, PlanOptions, Slice, make_plan
from axon_ps.sharding.raw import encoded_as, tensor_of
from axon_ps.types import ELEMENTS, Array, DType
from moved_arrays import carry_out

F32 = DType.F32
Shape = tuple[int, ...]

SHAPES = st.lists(st.integers(1, 7), max_size=4).map(tuple)


def boxes_of(shape: Shape, cuts: Sequence[Sequence[int]]) -> list[tuple[Shape, Shape]]:
    """(begin, shape) of the boxes of a tensor that is cut before these indices of each dimension."""
    bounds = [sorted({0, *(c for c in cut if c < size)}) for cut, size in zip(cuts, shape, strict=True)]
    ends = [dict(zip(b, [*b[1:], size], strict=True)) for b, size in zip(bounds, shape, strict=True)]
    return [
        (begin, tuple(end[b] - b for b, end in zip(begin, ends, strict=True))) for begin in itertools.product(*bounds)
    ]


@st.composite
def layouts(draw: st.DrawFn, shapes: Sequence[Shape], dtype: DType = F32, *, raw: bool = False) -> Layout:
    """The tensors "t0", "t1", ..., each whole or in a grid of boxes, in any order and any units."""
    pieces: list[tuple[str, Shape, FullTensor | None]] = []
    for t, shape in enumerate(shapes):
        name, cuts = f"t{t}", [draw(st.lists(st.integers(1, 6), max_size=2)) for _ in shape]
        found = boxes_of(shape, cuts)
        if len(found) == 1 and draw(st.booleans()):
            pieces.append((name, shape, None))
            continue
        for i, (begin, size) in enumerate(found):
            pieces.append((f"part{i}/{name}", size, FullTensor(name=name, shape=shape, begin=begin)))
    units: list[list[Parameter]] = [[]]
    for name, size, whole in draw(st.permutations(pieces)):
        apart: bool = draw(st.booleans())
        if units[-1] and apart:
            units.append([])
        offset = units[-1][-1].end if units[-1] else 0
        units[-1].append(Parameter(name=name, shape=size, offset=offset, full=whole, dtype=dtype, raw=raw))
    return Layout(
        units=tuple(Unit(name=f"u{i}", parameters=tuple(unit), trainable=not raw) for i, unit in enumerate(units))
    )


@st.composite
def pairs(draw: st.DrawFn) -> tuple[dict[str, Array], Layout, Layout]:
    shapes = draw(st.lists(SHAPES, min_size=1, max_size=3))
    numbers = itertools.count(1)
    tensors = {
        f"t{t}": np.array([next(numbers) for _ in range(int(np.prod(shape)))], np.float32).reshape(shape)
        for t, shape in enumerate(shapes)
    }
    return tensors, draw(layouts(shapes)), draw(layouts(shapes))


def flats(layout: Layout, tensors: dict[str, Array]) -> list[Array]:
    """The units' values."""
    return [
        np.concatenate(
            [
                tensors[p.tensor.name][
                    tuple(slice(b, b + n) for b, n in zip(p.tensor.begin, p.shape, strict=True))
                ].reshape(-1)
                for p in unit.parameters
            ]
        )
        for unit in layout.units
    ]


@given(st.data(), st.sampled_from([*ELEMENTS]), st.integers(1, 4), st.integers(1, 9))
def test_bits_of_raw_boxes_find_their_places(data: st.DataObject, dtype: DType, servers: int, min_numel: int) -> None:
    shapes = data.draw(st.lists(SHAPES, min_size=1, max_size=2))
    rng = np.random.default_rng(0)
    tensors = {
        f"t{t}": rng.integers(0, 256, math.prod(shape) * dtype.itemsize, np.uint8).view(dtype.numpy).reshape(shape)
        for t, shape in enumerate(shapes)
    }
    old, new = data.draw(layouts(shapes, dtype, raw=True)), data.draw(layouts(shapes, dtype, raw=True))
    found = filled(new, old, words_of(old, tensors), make_plan(new, servers, PlanOptions(min_slice_numel=min_numel)))
    for flat, wanted in zip(found, words_of(new, tensors), strict=True):
        assert flat.tobytes() == wanted.tobytes()


@given(st.data(), st.sampled_from([DType.BF16, DType.F16, DType.F64]), st.booleans(), st.integers(1, 9))
def test_boxes_of_numbers_become_raw_ones_and_back(
    data: st.DataObject, dtype: DType, to_raw: bool, min_numel: int
) -> None:
    shapes = data.draw(st.lists(SHAPES, min_size=1, max_size=2))
    numbers = {f"t{t}": np.arange(math.prod(s), dtype=np.float32).reshape(s) % 64 for t, s in enumerate(shapes)}
    encoded = {name: encoded_as(t.reshape(-1), dtype).reshape(t.shape) for name, t in numbers.items()}
    as_numbers, as_raw = data.draw(layouts(shapes, dtype)), data.draw(layouts(shapes, dtype, raw=True))
    sides = [(as_numbers, flats(as_numbers, numbers)), (as_raw, words_of(as_raw, encoded))]
    (old, sources), (new, wanted) = sides if to_raw else reversed(sides)
    found = filled(new, old, sources, make_plan(new, 3, PlanOptions(min_slice_numel=min_numel)))
    for flat, values in zip(found, wanted, strict=True):
        assert flat.tobytes() == values.tobytes()


def words_of(layout: Layout, tensors: dict[str, Array]) -> list[Array]:
    """The units' values, of raw parameters."""
    units = [np.zeros(unit.numel, np.float32) for unit in layout.units]
    for u, p in layout.parameters():
        tensor_of(units[u], p)[...] = tensors[p.tensor.name][p.box]
    return units


def filled(new: Layout, old: Layout, sources: list[Array], plan: Plan) -> list[Array]:
    """The units of a layout, slice by slice from those of another one."""
    origin, units = TensorSources(old), [np.zeros(unit.numel, np.float32) for unit in new.units]
    for s in plan.numbered:
        for move in origin.moves_into(s, new):
            carry_out(move, sources[move.source_unit], units[s.unit][s.begin : s.end], s.begin)
    return units


def moved(move: Move, source: Array, out: Array) -> None:
    for row in range(move.rows):
        begin, first = move.begin + row * move.step, move.source_begin + row * move.source_step
        assert np.isnan(out[begin : begin + move.numel]).all(), "each element is moved once"
        out[begin : begin + move.numel] = source[first : first + move.numel]


@given(pairs(), st.integers(1, 5), st.integers(1, 9))
def test_moves_bring_every_element_home(
    given: tuple[dict[str, Array], Layout, Layout], servers: int, min_slice_numel: int
) -> None:
    tensors, old, new = given
    origin, sources = TensorSources(old), flats(old, tensors)
    options = PlanOptions(min_slice_numel=min_slice_numel)
    found = [np.full(unit.numel, np.nan, np.float32) for unit in new.units]
    for s in make_plan(new, servers, options).numbered:
        for move in origin.moves_into(s, new):
            assert s.begin <= move.begin
            assert move.begin + (move.rows - 1) * move.step + move.numel <= s.end
            moved(move, sources[move.source_unit], found[move.unit])
    for flat, wanted in zip(found, flats(new, tensors), strict=True):
        np.testing.assert_array_equal(flat, wanted)


@given(pairs(), st.integers(1, 5))
def test_the_parts_that_slices_have_are_the_move(given: tuple[dict[str, Array], Layout, Layout], servers: int) -> None:
    tensors, old, new = given
    origin, sources = TensorSources(old), flats(old, tensors)
    plan = make_plan(old, servers, PlanOptions(min_slice_numel=3))
    for unit, wanted in enumerate(flats(new, tensors)):
        found = np.full(wanted.size, np.nan, np.float32)
        for move in origin.moves_into(Slice(unit=unit, server=0, begin=0, end=wanted.size), new):
            for s in plan.slices[move.source_unit]:
                parts = list(move.read_from(s.begin, s.end))
                assert len(parts) <= 3
                for part in parts:
                    assert s.begin <= part.source_begin
                    assert part.source_range[1] <= s.end
                    moved(part, sources[move.source_unit], found)
        np.testing.assert_array_equal(found, wanted)


def test_moves_of_an_unchanged_unit_are_one() -> None:
    layout = Layout(units=(build_unit("u", [(f"w{i}", (10,), F32) for i in range(5)]),))
    (move,) = TensorSources(layout).moves_into(Slice(unit=0, server=0, begin=5, end=45), layout)
    assert (move.source_begin, move.begin, move.numel, move.rows) == (5, 5, 40, 1)


def test_the_rows_of_a_box_are_one_move() -> None:
    whole = Layout(units=(build_unit("u", [("w", (1000, 8), F32)]),))
    half = Parameter(name="w@1", shape=(1000, 4), offset=0, full=FullTensor(name="w", shape=(1000, 8), begin=(0, 4)))
    (move,) = TensorSources(whole).moves_of(0, half, 0, half.numel)
    assert move == Move(source_unit=0, source_begin=4, unit=0, begin=0, numel=4, rows=1000, source_step=8, step=4)
    assert move.source_range == (4, 8000)


def test_a_name_of_a_tied_tensor_is_as_good_as_another() -> None:
    whole = FullTensor(name="w", shape=(4,), begin=(0,), aliases=("head",))
    old = Layout(units=(Unit(name="u", parameters=(Parameter(name="p", shape=(4,), offset=0, full=whole),)),))
    new = Layout(units=(build_unit("u", [("head", (4,), F32)]),))
    (move,) = TensorSources(old).moves_into(Slice(unit=0, server=0, begin=0, end=4), new)
    assert move.numel == 4


def test_a_checkpoint_of_another_model_is_refused_by_name() -> None:
    new = Layout(units=(build_unit("u", [("w", (4,), F32)]),))
    whole = Slice(unit=0, server=0, begin=0, end=4)

    def from_one(name: str, shape: Shape, dtype: DType) -> None:
        TensorSources(Layout(units=(build_unit("u", [(name, shape, dtype)]),))).moves_into(whole, new)

    with pytest.raises(InvalidRequest, match="no parameter 'w'"):
        from_one("v", (4,), F32)
    with pytest.raises(InvalidRequest, match=r"\(2, 2\) in the checkpoint"):
        from_one("w", (2, 2), F32)
    with pytest.raises(InvalidRequest, match="has dtype int64 in the checkpoint and float32 in the model"):
        from_one("w", (4,), DType.I64)
    from_one("w", (4,), DType.BF16)  # masters are f32

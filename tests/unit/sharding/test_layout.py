"""Layouts: packing, names, invariants, differences in words, the digest."""

from __future__ import annotations

import re
from typing import Any

import pytest

from axon_ps.errors import InvalidRequest
from axon_ps.sharding.layout import (
    FullTensor,
    Layout,
    Parameter,
    Unit,
    build_unit,
    first_difference,
)
from axon_ps.types import DType
from axon_ps.wire import codec

F32 = DType.F32


def box(called: str, size: tuple[int, ...], begin: tuple[int, ...], **whole: Any) -> Unit:
    """A unit of one box, of the tensor "w" of shape 4 x 6."""
    of = FullTensor(**{"name": "w", "shape": (4, 6), "begin": begin, **whole})
    return Unit(name=called, parameters=(Parameter(name=called, shape=size, offset=0, full=of),))


def layout(*units: Unit) -> Layout:
    return Layout(units=units)


def two() -> Layout:
    return layout(
        build_unit("a", [("a.w", (3, 4), F32), ("a.b", (), F32)]),
        build_unit("b", [("b.w", (5,), DType.BF16)], trainable=False),
    )


def test_parameters_lie_one_behind_the_other() -> None:
    unit = two().units[0]
    assert [(p.offset, p.end) for p in unit.parameters] == [(0, 12), (12, 13)]
    assert unit.numel == 13
    assert (two().numel, two().trainable_numel) == (18, 13)
    assert [(i, p.name) for i, p in two().parameters()] == [(0, "a.w"), (0, "a.b"), (1, "b.w")]


@pytest.mark.parametrize(
    ("units", "words"),
    [
        ((build_unit("a", [("w", (1,), F32)]), build_unit("a", [("v", (1,), F32)])), "unit names"),
        ((build_unit("a", [("w", (1,), F32), ("w", (1,), F32)]),), "'w' appears twice"),
        ((build_unit("a", [("w", (2, 0), F32)]),), "must be at least 1"),
        ((Unit(name="a", parameters=(Parameter(name="w", shape=(2,), offset=1),)),), "must be at 0"),
        ((Unit(name="a", parameters=()),), "no parameters"),
        (
            (Unit(name="a", parameters=(Parameter(name="w", shape=(2,), offset=0, aliases=("w",)),)),),
            "'w' appears twice",
        ),
    ],
)
def test_broken_layouts_are_refused(units: tuple[Unit, ...], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        Layout(units=units)


def test_the_boxes_of_a_tensor_are_a_grid_that_covers_it() -> None:
    uneven = layout(
        box("a", (3, 2), (0, 0)), box("b", (3, 4), (0, 2)), box("c", (1, 2), (3, 0)), box("d", (1, 4), (3, 2))
    )
    assert [p.tensor.begin for _, p in uneven.parameters()] == [(0, 0), (0, 2), (3, 0), (3, 2)]
    assert codec.layout_from_proto(codec.layout_to_proto(uneven)) == uneven
    whole = two().units[0].parameters[0]
    assert whole.tensor == FullTensor(name="a.w", shape=(3, 4), begin=(0, 0))
    assert layout(box("a", (4, 6), (0, 0))).numel == 24, "one box may be all of it"


@pytest.mark.parametrize(
    ("units", "words"),
    [
        ((box("a", (2, 6), (0, 0)),), "'a' is the box of shape .* without gaps and overlaps"),
        ((box("a", (4, 6), (0, 0)), box("b", (4, 6), (0, 0))), "2 boxes, which begin at 1 places"),
        ((box("a", (2, 6), (0, 0)), box("b", (3, 6), (1, 0))), "without gaps and overlaps"),
        ((box("a", (2, 6), (0, 0)), box("b", (3, 6), (2, 0))), "'b' is the box of shape .* inside it"),
        ((box("a", (2, 6), (2, 0)),), "must be a grid of 1 x 1 boxes that covers it"),
        ((box("a", (4, 6), (5, 0)),), "inside it"),
        ((box("a", (4, 6), (0,)),), "all three must have as many dimensions"),
        ((box("a", (24,), (0, 0)),), "all three must have as many dimensions"),
        ((box("a", (2, 3), (0, 0)), box("b", (2, 3), (0, 3)), box("c", (2, 3), (2, 3))), "3 boxes"),
        ((box("a", (2, 6), (0, 0)), box("b", (2, 6), (2, 0), shape=(4, 7))), "they must agree"),
        ((box("a", (2, 6), (0, 0)), box("b", (2, 6), (2, 0), aliases=("v",))), "they must agree"),
        ((box("a", (4, 6), (0, 0)), build_unit("u", [("w", (1,), F32)])), "tensor name 'w' appears twice"),
        ((box("a", (4, 6), (0, 0), aliases=("w",)),), "tensor name 'w' appears twice"),
    ],
)
def test_boxes_that_do_not_cover_a_tensor_once_are_refused(units: tuple[Unit, ...], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        Layout(units=units)


def test_units_with_boxes_of_a_tensor_belong_together() -> None:
    def half(unit: str, *names: str, row: int) -> Unit:
        boxes = [FullTensor(name=name, shape=(2,), begin=(row,)) for name in names]
        return Unit(
            name=unit,
            parameters=tuple(
                Parameter(name=f"{unit}.{i}", shape=(1,), offset=i, full=box) for i, box in enumerate(boxes)
            ),
        )

    units = (
        build_unit("first", [("a", (1,), F32)]),
        half("x0", "v", "w", row=0),
        half("y0", "u", row=0),
        half("y1", "u", row=1),
        half("x1", "w", row=1),
        half("x2", "v", row=1),
    )
    made = layout(*units)
    assert [(s.units, [t.name for t in s.tensors]) for s in made.unit_sets] == [
        ((0,), ["a"]), ((1, 4, 5), ["v", "w"]), ((2, 3), ["u"]),
    ]  # fmt: skip
    assert [(t.name, t.shape, t.offset) for t in made.tensors] == [
        ("a", (1,), 0), ("v", (2,), 0), ("w", (2,), 0), ("u", (2,), 0),
    ]  # fmt: skip
    assert units[4].parameters[0].box == (slice(1, 2),)


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        (box("a", (4, 6), (0, 0)), box("a", (4, 6), (0, 0), name="v"), "is the box at .* of 'w' .* here and .* of 'v'"),
        (box("a", (4, 6), (0, 0), aliases=("v",)), box("a", (4, 6), (0, 0)), "tied to .'v'., of shape"),
        (box("a", (4, 6), (0, 0)), build_unit("a", [("a", (4, 6), F32)]), "here and a whole tensor in the job"),
    ],
)
def test_another_box_is_a_difference(ours: Unit, theirs: Unit, words: str) -> None:
    assert re.search(words, first_difference(layout(ours), layout(theirs)))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (two(), ""),
        (layout(two().units[0]), "2 units here and 1 in the job"),
        (layout(two().units[1], two().units[0]), "called 'a' here and 'b' in the job"),
        (layout(build_unit("a", [("a.w", (4, 3), F32), ("a.b", (), F32)]), two().units[1]), r"shape \(3, 4\) here"),
        (layout(build_unit("a", [("a.x", (3, 4), F32), ("a.b", (), F32)]), two().units[1]), "the job has 'a.x'"),
        (layout(build_unit("a", [("a.w", (3, 4), F32)]), two().units[1]), "2 parameters here and 1 in the job"),
        (layout(build_unit("a", [("a.w", (3, 4), DType.F16), ("a.b", (), F32)]), two().units[1]), "f32 here and f16"),
        (layout(two().units[0], build_unit("b", [("b.w", (5,), DType.BF16)])), "frozen here and trainable"),
    ],
)
def test_the_first_difference_is_named(other: Layout, words: str) -> None:
    difference = first_difference(two(), other)
    assert bool(difference) == bool(words)
    if words:
        with pytest.raises(AssertionError, match=words):
            raise AssertionError(difference)


def test_round_trip_and_digest() -> None:
    again = codec.layout_from_proto(codec.layout_to_proto(two()))
    assert again == two()
    assert again.digest == two().digest
    assert layout(two().units[0]).digest != two().digest

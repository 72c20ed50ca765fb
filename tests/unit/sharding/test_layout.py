"""Layouts: packing, names, invariants, differences in words, the digest."""

from __future__ import annotations

import pytest

from axon_ps.errors import InvalidRequest
from axon_ps.sharding.layout import (
    Layout,
    Parameter,
    Unit,
    build_unit,
    first_difference,
)
from axon_ps.types import DType
from axon_ps.wire import codec

F32 = DType.F32


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

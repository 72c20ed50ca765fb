"""The union of the units of a mesh's lines, and the boxes of their parameters."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from axon_ps.errors import InvalidRequest, LayoutMismatch
from axon_ps.parallel.fsdp.mesh.union import Box, Line, LineUnit, OwnUnit, union
from axon_ps.types import DType


def box(name: str, shape: tuple[int, ...], lines: tuple[int, ...], **others: Any) -> Box:
    """A box that covers its tensor, unless it is said otherwise."""
    given = {
        "names": (name,),
        "dtype": DType.F32,
        "raw": False,
        "tensor_shape": shape,
        "begin": (0,) * len(shape),
        **others,
    }
    return Box(shape=shape, lines=lines, **given)


def tensor_parallel(line: int) -> Line:
    """A line of two with tensor parallelism: a divided weight and a replicated norm in one unit, and an embedding."""
    return Line(
        model="Llama",
        units=(
            LineUnit(
                name="(root)",
                trainable=True,
                boxes=(box("emb.weight", (4, 2), (0, 1), tensor_shape=(4, 4), begin=(0, 2 * line)),),
            ),
            LineUnit(
                name="layers.0",
                trainable=True,
                boxes=(
                    box("layers.0.norm", (4,), (0, 1)),
                    box("layers.0.w", (2, 4), (0, 1), tensor_shape=(4, 4), begin=(2 * line, 0)),
                ),
            ),
        ),
    )


def test_boxes_are_in_units_of_their_line_and_replicated_ones_in_one_of_all() -> None:
    found = union([tensor_parallel(0), tensor_parallel(1)])
    assert [(u.name, [p.name for p in u.parameters]) for u in found.layout.units] == [
        ("(root)@0", ["emb.weight@0"]),
        ("layers.0@0", ["layers.0.w@0"]),
        ("layers.0@1", ["layers.0.norm"]),
        ("(root)@1", ["emb.weight@1"]),
        ("layers.0@2", ["layers.0.w@1"]),
    ]
    assert found.own[0] == (
        OwnUnit(index=0, of=0, boxes=(0,), pushes=True),
        OwnUnit(index=1, of=1, boxes=(1,), pushes=True),
        OwnUnit(index=2, of=1, boxes=(0,), pushes=True),
    )
    assert found.own[1] == (
        OwnUnit(index=3, of=0, boxes=(0,), pushes=True),
        OwnUnit(index=4, of=1, boxes=(1,), pushes=True),
        OwnUnit(index=2, of=1, boxes=(0,), pushes=False),
    )


def test_the_layout_has_each_tensor_once() -> None:
    layout = union([tensor_parallel(0), tensor_parallel(1)]).layout
    assert {(t.name, t.shape) for t in layout.tensors} == {
        ("emb.weight", (4, 4)),
        ("layers.0.norm", (4,)),
        ("layers.0.w", (4, 4)),
    }
    assert layout.numel == 16 + 4 + 16


def test_stages_have_tensors_of_their_own_also_of_equal_names() -> None:
    stages = [
        Line(
            model="Stage",
            units=(LineUnit(name="(root)", trainable=True, boxes=(box("0.weight", (2,), (n,)), box(own, (3,), (n,)))),),
        )
        for n, own in enumerate(("a", "b"))
    ]
    found = union(stages)
    assert [[p.name for p in unit.parameters] for unit in found.layout.units] == [
        ["0.weight@0", "a"],
        ["0.weight@1", "b"],
    ]
    assert [[own.index for own in of_line] for of_line in found.own] == [[0], [1]]
    assert all(own.pushes for of_line in found.own for own in of_line)


def test_pipeline_and_tensor_parallelism_together() -> None:
    lines = []
    for stage in (0, 1):
        for n in (0, 1):
            own = (2 * stage, 2 * stage + 1)
            boxes = (
                box("w", (2,), own, tensor_shape=(4,), begin=(2 * n,), names=("w", "tied")),
                box("norm", (3,), own),
            )
            lines.append(Line(model="Stage", units=(LineUnit(name="(root)", trainable=True, boxes=boxes),)))
    layout = union(lines).layout
    assert [[p.name for p in unit.parameters] for unit in layout.units] == [
        ["w@0@0"],
        ["norm@0"],
        ["w@0@1"],
        ["w@1@0"],
        ["norm@1"],
        ["w@1@1"],
    ]
    assert [t.name for t in layout.tensors] == ["w@0", "norm@0", "w@1", "norm@1"]
    assert layout.tensors[0].aliases == ("tied@0",)


def test_a_line_is_sent_as_json() -> None:
    line = tensor_parallel(1)
    assert Line.from_json(json.loads(json.dumps(line.to_json()))) == line


def changed(line: Line, **changes: Any) -> Line:
    """A line whose replicated norm is another."""
    first, last = line.units
    norm, weight = last.boxes
    return replace(line, units=(first, replace(last, boxes=(replace(norm, **changes), weight))))


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"dtype": DType.BF16}, r"trainable, of f32\[4\] in line 0, and trainable, of bf16\[4\] in line 1"),
        ({"names": ("layers.0.norm", "tied")}, r"of f32\[4\], tied to \['tied'\] in line 1"),
    ],
)
def test_lines_that_contradict_each_other_are_refused(changes: dict[str, Any], wanted: str) -> None:
    with pytest.raises(LayoutMismatch, match=wanted):
        union([tensor_parallel(0), changed(tensor_parallel(1), **changes)])


def test_lines_that_wrap_otherwise_are_refused() -> None:
    norms = [box(name, (4,), (0, 1)) for name in "ab"]
    together = Line(model="M", units=(LineUnit(name="(root)", trainable=True, boxes=tuple(norms)),))
    apart = tuple(LineUnit(name=norm.names[0], trainable=True, boxes=(norm,)) for norm in norms)
    with pytest.raises(LayoutMismatch, match=r"unit 'a' of line 1 has \['a'\] together, and line 0 not; call"):
        union([together, replace(together, units=apart)])


def test_a_tensor_of_which_a_box_is_missing_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="grid"):
        union([tensor_parallel(0), replace(tensor_parallel(1), units=tensor_parallel(1).units[1:])])


def test_frozen_boxes_travel_as_their_bits() -> None:
    lines = [
        Line(
            model="m",
            units=(
                LineUnit(
                    name="u (frozen)",
                    trainable=False,
                    boxes=(
                        box("w", (3, 2), (0, 1), tensor_shape=(3, 4), begin=(0, 2 * line), dtype=DType.U8, raw=True),
                        box("scale", (3,), (0, 1), dtype=DType.BF16, raw=True),
                    ),
                ),
            ),
        )
        for line in range(2)
    ]
    found = union([Line.from_json(json.loads(json.dumps(line.to_json()))) for line in lines])
    assert all(p.raw for _, p in found.layout.parameters())
    assert [(t.name, t.shape, t.raw, t.nbytes) for t in found.layout.tensors] == [
        ("w", (3, 4), True, 12), ("scale", (3,), True, 6),
    ]  # fmt: skip

"""The layout of a model whose replicas are the workers of several *lines* of a mesh. Pure.

A line is the workers with the same coordinates on all axes of a mesh but dp. They compute with the same parameters on
different data. A replica has a worker of each line. With tensor parallelism (tp) lines have boxes of the same tensors;
with pipeline parallelism (pp) they have other tensors.

The layout of the model is the union of all lines' units, so a step, a norm or a version is one of all lines. Each
worker gathers and pushes units of its own line. A box that several lines have (a replicated tensor) is in the layout
once. Boxes with the same lines are in units of their own. All of those lines gather them. The lowest line pushes them.

Note: [Names]
    A tensor has the name of the user's module. If pipeline stages have different tensors of one name, `@` and a number
    follow, in the order of their lines. The parameter of a box has `@` and the number of the box behind that.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

from axon_ps.errors import LayoutMismatch
from axon_ps.sharding.layout import FullTensor, Layout, Parameter, Unit
from axon_ps.types import DType


@dataclass(frozen=True, kw_only=True)
class Box:
    """A parameter as a line has it.

    Attributes:
        names: in the user's module, with those of tied parameters.
        shape: its shape on a worker.
        dtype: its dtype.
        lines: those among which its tensor is divided or replicated, ascending.
        tensor_shape: the shape of the tensor.
        begin: index in the tensor of the box's first element, in every dimension.
        raw: whether it travels as its bits.
        float8: whether it travels as float8.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: DType
    lines: tuple[int, ...]
    tensor_shape: tuple[int, ...]
    begin: tuple[int, ...]
    raw: bool = False
    float8: bool = False

    @property
    def tensor(self) -> _Tensor:
        """The identity of its tensor."""
        return self.names[0], self.lines


@dataclass(frozen=True, kw_only=True)
class LineUnit:
    """The parameters of a line that are gathered together, in the order of the user's module."""

    name: str
    trainable: bool
    boxes: tuple[Box, ...]


@dataclass(frozen=True, kw_only=True)
class Line:
    """The units of a line, and the class of its module.

    Attributes:
        model: the class.
        units: the units, the root's first.
    """

    model: str
    units: tuple[LineUnit, ...]

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return dataclasses.asdict(self, dict_factory=lambda items: {k: _plain(v) for k, v in items})

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Return the line that `to_json` was called on."""
        units = tuple(
            LineUnit(name=u["name"], trainable=u["trainable"], boxes=tuple(_box(box) for box in u["boxes"]))
            for u in value["units"]
        )
        return cls(model=value["model"], units=units)


@dataclass(frozen=True, kw_only=True)
class OwnUnit:
    """A unit of the union as one line has it.

    Attributes:
        index: number of the unit in the union.
        of: number of the line's unit that it was made of.
        boxes: numbers of the boxes in that unit, in the order of the union's unit.
        pushes: True if workers of this line push its gradient.
    """

    index: int
    of: int
    boxes: tuple[int, ...]
    pushes: bool


@dataclass(frozen=True, kw_only=True)
class Union:
    """The layout of all lines, and the units of each.

    Attributes:
        layout: the layout.
        own: by line, its units in the order of its module.
    """

    layout: Layout
    own: tuple[tuple[OwnUnit, ...], ...]


_Tensor: TypeAlias = tuple[str, tuple[int, ...]]
_Key: TypeAlias = tuple[str, tuple[int, ...], tuple[int, ...]]
"""A box: name and lines of its tensor, and its first element there."""


@dataclass(frozen=True, kw_only=True)
class _Common:
    """Boxes of one unit that the same lines have.

    Attributes:
        line, of: the first line that has them, and its unit.
        having: the lines that have them.
        boxes: their numbers in the unit.
    """

    line: int
    of: int
    having: tuple[int, ...]
    boxes: tuple[int, ...]


def union(lines: Sequence[Line]) -> Union:
    """Return the union of lines.

    Raises:
        LayoutMismatch: two lines describe the same parameter differently, or wrap it differently.
        InvalidRequest: the boxes of a tensor do not cover it, or names are not unique.
    """
    having: dict[_Key, list[int]] = {}
    first: dict[_Key, tuple[Box, bool]] = {}
    for number, line in enumerate(lines):
        for unit in line.units:
            for box in unit.boxes:
                having.setdefault(_key(box), []).append(number)
                other, trainable = first.setdefault(_key(box), (box, unit.trainable))
                if (other, trainable) != (box, unit.trainable):
                    raise LayoutMismatch(
                        f"parameter {box.names[0]!r} is {_described(other, trainable)} in line "
                        f"{having[_key(box)][0]}, and {_described(box, unit.trainable)} in line {number}; all "
                        "workers that have it must build the same"
                    )
    named = _named(first)
    units: list[Unit] = []
    numbers: dict[tuple[str, ...], int] = {}
    own: list[list[OwnUnit]] = [[] for _ in lines]
    unit_names = _unit_names(lines, having)
    for number, line in enumerate(lines):
        for common in _divided(number, line, having):
            of = line.units[common.of]
            parameters = [named[_key(of.boxes[i])] for i in common.boxes]
            key = tuple(p.name for p in parameters)
            if key not in numbers:
                if common.having[0] != number:
                    raise LayoutMismatch(
                        f"unit {of.name!r} of line {number} has {list(key)} together, and line {common.having[0]} "
                        "not; call fully_shard on the same modules on every worker"
                    )
                numbers[key] = len(units)
                units.append(_unit(next(unit_names[of.name]), parameters, trainable=of.trainable))
            own[number].append(
                OwnUnit(index=numbers[key], of=common.of, boxes=common.boxes, pushes=common.having[0] == number)
            )
    return Union(layout=Layout(units=tuple(units)), own=tuple(map(tuple, own)))


def _divided(number: int, line: Line, having: Mapping[_Key, Sequence[int]]) -> Iterator[_Common]:
    """Yield the units of a line, divided by the lines that have their boxes, those of fewest lines first."""
    for of, unit in enumerate(line.units):
        found: dict[tuple[int, ...], list[int]] = {}
        for i, box in enumerate(unit.boxes):
            found.setdefault(tuple(having[_key(box)]), []).append(i)
        for lines in sorted(found, key=lambda lines: (len(lines), lines)):
            yield _Common(line=number, of=of, having=lines, boxes=tuple(found[lines]))


def _unit_names(lines: Sequence[Line], having: Mapping[_Key, Sequence[int]]) -> dict[str, Iterator[str]]:
    """Return the names of the units that are made of those of one name: with a number if they are several."""
    count: Counter[str] = Counter()
    for number, line in enumerate(lines):
        for common in _divided(number, line, having):
            count[line.units[common.of].name] += common.having[0] == number
    return {name: iter([name] if n == 1 else [f"{name}@{i}" for i in range(n)]) for name, n in count.items()}


def _named(boxes: Mapping[_Key, tuple[Box, bool]]) -> dict[_Key, Parameter]:
    """Return each box as a parameter at offset 0. See Note: [Names]."""
    groups: dict[str, set[tuple[int, ...]]] = {}
    begins: dict[_Tensor, list[tuple[int, ...]]] = {}
    for box, _ in boxes.values():
        groups.setdefault(box.names[0], set()).add(box.lines)
        begins.setdefault(box.tensor, []).append(box.begin)
    found: dict[_Key, Parameter] = {}
    for key, (box, _) in boxes.items():
        tensors = sorted(groups[box.names[0]])
        of_tensor = "" if len(tensors) == 1 else f"@{tensors.index(box.lines)}"
        name, *aliases = [name + of_tensor for name in box.names]
        full = Parameter(
            name=name,
            shape=box.shape,
            offset=0,
            dtype=box.dtype,
            aliases=tuple(aliases),
            raw=box.raw,
            float8=box.float8,
        )
        if box.shape == box.tensor_shape:
            found[key] = full
            continue
        found[key] = dataclasses.replace(
            full,
            name=f"{name}@{sorted(begins[box.tensor]).index(box.begin)}",
            aliases=(),
            full=FullTensor(name=name, shape=box.tensor_shape, begin=box.begin, aliases=tuple(aliases)),
        )
    return found


def _unit(name: str, parameters: Sequence[Parameter], *, trainable: bool) -> Unit:
    packed: list[Parameter] = []
    offset = 0
    for parameter in parameters:
        packed.append(dataclasses.replace(parameter, offset=offset))
        offset = packed[-1].end
    return Unit(name=name, parameters=tuple(packed), trainable=trainable)


def _key(box: Box) -> _Key:
    return *box.tensor, box.begin


def _described(box: Box, trainable: bool) -> str:
    tied = f", tied to {list(box.names[1:])}" if box.names[1:] else ""
    return f"{'trainable' if trainable else 'frozen'}, of {box.dtype.value}{list(box.shape)}{tied}"


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, DType) else value


def _box(value: Mapping[str, Any]) -> Box:
    numbers = {key: tuple(value[key]) for key in ("shape", "lines", "tensor_shape", "begin")}
    return Box(
        names=tuple(value["names"]),
        dtype=DType(value["dtype"]),
        raw=value["raw"],
        float8=value["float8"],
        **numbers,
    )


__all__ = ["Box", "Line", "LineUnit", "OwnUnit", "Union", "union"]

"""The layout of a job: its parameters, the unit of each, and the flat offset of each in its unit.

The parameters of a *unit* are gathered together. They lie one behind the other in one 1-D array, without gaps, in the
order given. A unit is all trainable or all frozen, so gradients, moments and traffic are decided per unit. Tied
parameters appear once, under their first name, with the other names as aliases. Units of numbers are never padded, so
nothing has to be stripped when a checkpoint is written.

Note: [Raw parameters]
    A frozen parameter may be *raw*: it is stored and sent as its bits, in its own dtype, and never as numbers. Its unit
    consists of raw parameters only. The array of such a unit has the type f32 as any other, and each element is a word:
    four bytes of some parameter. Words are copied, and never computed with, cast or compressed. So servers, replicas,
    digests and checkpoints treat them as other frozen values, and the bits stay. A raw parameter begins at a multiple
    of 16 bytes, so that it can be viewed in any dtype. Its `numel` counts words, up to three of them unused.

A parameter may be a *box* of a larger tensor: a part of the model that tensor parallelism cuts. Then the layout has all
boxes of that tensor. They are a grid, so each element is in exactly one box.

Invariants of a `Layout`: unit and parameter names are unique (aliases included), offsets are the running sum of the
numels, every parameter has at least one element, the parameters of a unit are all raw or none, and a unit of raw ones
is frozen. Names of tensors with boxes and of parameters that are not boxes are unique.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from axon_ps.errors import InvalidRequest
from axon_ps.types import DType

ELEMENT_BYTES: Final = 4
"""Bytes of an element of a unit of raw parameters."""

_ALIGN_BYTES: Final = 16
"""Raw parameters begin at multiples of this: the largest element of any dtype, and a multiple of a word."""


@dataclass(frozen=True, kw_only=True)
class FullTensor:
    """The tensor that a parameter is a box of.

    Attributes:
        name: its fully qualified name in the user's module.
        shape: its shape.
        begin: index in it of the box's first element, in every dimension.
        aliases: further names of the same tensor (tied weights).
    """

    name: str
    shape: tuple[int, ...]
    begin: tuple[int, ...]
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter tensor.

    Attributes:
        name: its fully qualified name in the user's module; of a box, unique among all boxes of all parts.
        shape: its shape; () for a scalar.
        offset: index of its first element in its unit.
        dtype: its dtype in the user's model. Masters are always f32, except of raw parameters.
        aliases: further names of the same tensor (tied weights).
        raw: whether it is stored and sent as its bits. See Note: [Raw parameters].
        full: the tensor that it is a box of; None = it is a whole tensor.
        float8: whether it travels as float8 with one scale (`compress.float8`). Then it is on one server.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    dtype: DType = DType.F32
    aliases: tuple[str, ...] = ()
    raw: bool = False
    full: FullTensor | None = None
    float8: bool = False

    @cached_property
    def count(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor in its own dtype."""
        return self.count * self.dtype.itemsize

    @cached_property
    def numel(self) -> int:
        """Elements of its unit: those of the tensor; of a raw one, the words that it takes."""
        return -(-self.nbytes // _ALIGN_BYTES) * (_ALIGN_BYTES // ELEMENT_BYTES) if self.raw else self.count

    @property
    def end(self) -> int:
        """One past its last element in its unit."""
        return self.offset + self.numel

    @cached_property
    def tensor(self) -> FullTensor:
        """The tensor that it is a box of. A whole tensor is the box that covers it."""
        return self.full or FullTensor(
            name=self.name, shape=self.shape, begin=(0,) * len(self.shape), aliases=self.aliases
        )

    @property
    def box(self) -> tuple[slice, ...]:
        """Its place in its tensor, as an index."""
        return tuple(slice(begin, begin + size) for begin, size in zip(self.tensor.begin, self.shape, strict=True))


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Parameters that are gathered together, flattened into one array of `numel` elements."""

    name: str
    parameters: tuple[Parameter, ...]
    trainable: bool = True

    @cached_property
    def numel(self) -> int:
        """Elements of the unit."""
        return sum(p.numel for p in self.parameters)

    @property
    def raw(self) -> bool:
        """True if its elements are words of raw parameters."""
        return self.parameters[0].raw

    @cached_property
    def has_float8(self) -> bool:
        """True if a parameter travels as float8."""
        return any(p.float8 for p in self.parameters)


@dataclass(frozen=True, kw_only=True)
class UnitSet:
    """Units that have all boxes of their tensors, as few as possible. Without boxes that is one unit.

    Attributes:
        units: their numbers.
        tensors: the whole tensors in the order of their first boxes, each as if it were the only parameter of a unit.
    """

    units: tuple[int, ...]
    tensors: tuple[Parameter, ...]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """All units of a job, in forward order.

    Raises:
        InvalidRequest: an invariant of the module's docstring does not hold, or a unit has no parameters.
    """

    units: tuple[Unit, ...]

    def __post_init__(self) -> None:
        names: set[str] = set()
        if len({u.name for u in self.units}) != len(self.units):
            raise InvalidRequest("a layout needs unique unit names; two units share one")
        for unit in self.units:
            offset = 0
            for p in unit.parameters:
                for name in (p.name, *p.aliases):
                    if name in names:
                        raise InvalidRequest(
                            f"parameter name {name!r} appears twice in the layout; names must be unique"
                        )
                    names.add(name)
                if any(d < 1 for d in p.shape):
                    raise InvalidRequest(
                        f"parameter {p.name!r} has shape {p.shape}; every dimension must be at least 1"
                    )
                if p.offset != offset:
                    raise InvalidRequest(
                        f"parameter {p.name!r} is at offset {p.offset} of unit {unit.name!r}; it must be at {offset}, "
                        "since the parameters of a unit lie one behind the other"
                    )
                offset = p.end
            if not unit.parameters:
                raise InvalidRequest(f"unit {unit.name!r} has no parameters; leave it out of the layout")
            if any(p.raw != unit.raw for p in unit.parameters) or (unit.raw and unit.trainable):
                raise InvalidRequest(f"unit {unit.name!r} has raw parameters; all of them must be raw, and frozen")
        _check_boxes([p for _, p in self.parameters()])

    def name_of(self, unit: int) -> str:
        """Return the unit's name for messages, or its number if it has no name, as the root."""
        known = 0 <= unit < len(self.units)
        return (self.units[unit].name if known else "") or f"unit {unit}"

    @cached_property
    def numel(self) -> int:
        """Elements of all units."""
        return sum(u.numel for u in self.units)

    @cached_property
    def count(self) -> int:
        """Elements of all parameters."""
        return sum(p.count for _, p in self.parameters())

    @cached_property
    def trainable_numel(self) -> int:
        """Elements of the trainable units."""
        return sum(u.numel for u in self.units if u.trainable)

    def parameters(self) -> Iterator[tuple[int, Parameter]]:
        """Yield every parameter with its unit's index, in layout order. `OptimizerSpec.group_of` follows this order."""
        for i, unit in enumerate(self.units):
            for p in unit.parameters:
                yield i, p

    @cached_property
    def unit_sets(self) -> tuple[UnitSet, ...]:
        """The units, those with boxes of the same tensor together, in the order of each set's first unit."""
        first = list(range(len(self.units)))  # of each unit, an earlier one of its set; of the first one, itself

        def first_of(unit: int) -> int:
            while first[unit] != unit:
                unit = first[unit] = first[first[unit]]
            return unit

        tensors: dict[str, Parameter] = {}
        home: dict[str, int] = {}
        for unit, p in self.parameters():
            tensor = p.tensor
            if tensor.name not in home:
                tensors[tensor.name] = Parameter(
                    name=tensor.name, shape=tensor.shape, offset=0, dtype=p.dtype, aliases=tensor.aliases, raw=p.raw
                )
            a, b = sorted((first_of(home.setdefault(tensor.name, unit)), first_of(unit)))
            first[b] = a
        units: dict[int, list[int]] = {}
        for unit in range(len(self.units)):
            units.setdefault(first_of(unit), []).append(unit)
        names: dict[int, list[str]] = {}
        for name, unit in home.items():
            names.setdefault(first_of(unit), []).append(name)
        return tuple(
            UnitSet(units=tuple(units[key]), tensors=tuple(tensors[name] for name in names[key])) for key in units
        )

    @cached_property
    def tensors(self) -> tuple[Parameter, ...]:
        """The whole tensors of all sets of units."""
        return tuple(tensor for found in self.unit_sets for tensor in found.tensors)

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) over everything in the layout. Equal digests mean equal layouts."""
        return hashlib.sha256(repr(self).encode()).hexdigest()


def _check_boxes(parameters: Sequence[Parameter]) -> None:
    """Check that the boxes of each tensor are a grid that covers it, and that tensors have unique names.

    Raises:
        InvalidRequest: they are not, or have not.
    """
    boxes: dict[str, list[Parameter]] = {}
    for p in parameters:
        if p.full is not None:
            boxes.setdefault(p.full.name, []).append(p)
    if not boxes:
        return
    names = {name for p in parameters if p.full is None for name in (p.name, *p.aliases)}
    for of_tensor in boxes.values():
        first = of_tensor[0].tensor
        for name in (first.name, *first.aliases):
            if name in names:
                raise InvalidRequest(f"tensor name {name!r} appears twice in the layout; names must be unique")
            names.add(name)
        _check_grid(of_tensor)


def _check_grid(boxes: Sequence[Parameter]) -> None:
    first, tensor = boxes[0], boxes[0].tensor
    for p in boxes:
        a, b = ((q.tensor.shape, q.tensor.aliases, q.dtype, q.raw) for q in (first, p))
        if a != b:
            raise InvalidRequest(
                f"parameters {first.name!r} and {p.name!r} are boxes of {tensor.name!r}, by one of shape "
                f"{tensor.shape}, dtype {first.dtype.value} and aliases {list(tensor.aliases)}, and by the other of "
                f"{p.tensor.shape}, {p.dtype.value} and {list(p.tensor.aliases)}; they must agree"
            )
        if not len(p.shape) == len(p.tensor.begin) == len(tensor.shape):
            raise InvalidRequest(
                f"parameter {p.name!r} of shape {p.shape} begins at {p.tensor.begin} of {tensor.name!r}, whose shape "
                f"is {tensor.shape}; all three must have as many dimensions"
            )
    cuts = [sorted({p.tensor.begin[d] for p in boxes}) for d in range(len(tensor.shape))]
    ends = [dict(zip(cut, [*cut[1:], size], strict=True)) for cut, size in zip(cuts, tensor.shape, strict=True)]
    for p in boxes:
        box = list(zip(p.tensor.begin, p.shape, ends, strict=True))
        if any(begin + size != end[begin] for begin, size, end in box):
            raise InvalidRequest(
                f"parameter {p.name!r} is the box of shape {p.shape} at {p.tensor.begin} of {tensor.name!r}, whose "
                f"shape is {tensor.shape}; the boxes of a tensor must be a grid, inside it, without gaps and overlaps"
            )
    wanted, found = math.prod(map(len, cuts)), len({p.tensor.begin for p in boxes})
    if not found == len(boxes) == wanted or any(cut[0] != 0 for cut in cuts):
        raise InvalidRequest(
            f"tensor {tensor.name!r} of shape {tensor.shape} has {len(boxes)} boxes, which begin at {found} places; "
            f"they must be a grid of {' x '.join(str(len(cut)) for cut in cuts)} boxes that covers it, each element "
            "once"
        )


def build_unit(
    name: str, parameters: Sequence[tuple[str, tuple[int, ...], DType]], *, trainable: bool = True, raw: bool = False
) -> Unit:
    """Return a unit with its parameters packed in the order given.

    Args:
        name: the unit's name.
        parameters: (name, shape, dtype) of each.
        trainable: whether the optimizer changes them.
        raw: whether they are stored and sent as their bits.
    """
    packed: list[Parameter] = []
    offset = 0
    for parameter_name, shape, dtype in parameters:
        packed.append(Parameter(name=parameter_name, shape=tuple(shape), offset=offset, dtype=dtype, raw=raw))
        offset = packed[-1].end
    return Unit(name=name, parameters=tuple(packed), trainable=trainable)


def first_difference(ours: Layout, theirs: Layout) -> str:
    """Return the first difference of two layouts, in words; empty when they are equal."""
    for i, (a, b) in enumerate(zip(ours.units, theirs.units, strict=False)):
        if a.name != b.name:
            return f"unit {i} is called {a.name!r} here and {b.name!r} in the job"
        if a.trainable != b.trainable:
            kinds = {True: "trainable", False: "frozen"}
            return f"unit {a.name!r} is {kinds[a.trainable]} here and {kinds[b.trainable]} in the job"
        for p, q in zip(a.parameters, b.parameters, strict=False):
            if p.name != q.name:
                return f"unit {a.name!r} holds parameter {p.name!r} here where the job has {q.name!r}"
            if p.shape != q.shape:
                return f"parameter {p.name!r} has shape {p.shape} here and {q.shape} in the job"
            if p.dtype != q.dtype:
                return f"parameter {p.name!r} has dtype {p.dtype.value} here and {q.dtype.value} in the job"
            if p.raw != q.raw:
                sent = {True: "as its bits", False: "as numbers"}
                return f"parameter {p.name!r} is sent {sent[p.raw]} here and {sent[q.raw]} in the job"
            if p.aliases != q.aliases:
                return f"parameter {p.name!r} is tied to {list(p.aliases)} here and to {list(q.aliases)} in the job"
            if p.full != q.full:
                return f"parameter {p.name!r} is {_position(p)} here and {_position(q)} in the job"
            if p.float8 != q.float8:
                ours_, theirs_ = ("float8" if travels else "other numbers" for travels in (p.float8, q.float8))
                return f"parameter {p.name!r} travels as {ours_} here and as {theirs_} in the job"
        if len(a.parameters) != len(b.parameters):
            return f"unit {a.name!r} has {len(a.parameters)} parameters here and {len(b.parameters)} in the job"
    if len(ours.units) != len(theirs.units):
        return f"there are {len(ours.units)} units here and {len(theirs.units)} in the job"
    return ""


def _position(p: Parameter) -> str:
    """Return in words the position of a parameter in its tensor."""
    if p.full is None:
        return "a whole tensor"
    tied = f", tied to {list(p.full.aliases)}," if p.full.aliases else ""
    return f"the box at {p.full.begin} of {p.full.name!r}{tied} of shape {p.full.shape}"

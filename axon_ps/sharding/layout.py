"""The layout of a job: its parameters, the unit of each, and the flat offset of each in its unit.

The parameters of a *unit* are gathered together. They lie one behind the other in one 1-D array, without gaps, in the
order given. A unit is all trainable or all frozen, so gradients, moments and traffic are decided per unit. Tied
parameters appear once, under their first name, with the other names as aliases. Units are never padded, so nothing has
to be stripped when a checkpoint is written.

Invariants of a `Layout`: unit and parameter names are unique (aliases included), offsets are the running sum of the
numels, every parameter has at least one element.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from axon_ps.errors import InvalidRequest
from axon_ps.types import DType


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter tensor.

    Attributes:
        name: its fully qualified name in the user's module.
        shape: its shape; () for a scalar.
        offset: index of its first element in its unit.
        dtype: its dtype in the user's model. Masters are always f32.
        aliases: further names of the same tensor (tied weights).
        float8: whether it travels as float8 with one scale (`compress.float8`). Then it is on one server.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    dtype: DType = DType.F32
    aliases: tuple[str, ...] = ()
    float8: bool = False

    @cached_property
    def numel(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        """One past its last element in its unit."""
        return self.offset + self.numel


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

    @cached_property
    def has_float8(self) -> bool:
        """True if a parameter travels as float8."""
        return any(p.float8 for p in self.parameters)


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

    def name_of(self, unit: int) -> str:
        """Return the unit's name for messages, or its number if it has no name, as the root."""
        known = 0 <= unit < len(self.units)
        return (self.units[unit].name if known else "") or f"unit {unit}"

    @cached_property
    def numel(self) -> int:
        """Elements of all units."""
        return sum(u.numel for u in self.units)

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
    def digest(self) -> str:
        """SHA-256 (hex) over everything in the layout. Equal digests mean equal layouts."""
        return hashlib.sha256(repr(self).encode()).hexdigest()


def build_unit(name: str, parameters: Sequence[tuple[str, tuple[int, ...], DType]], *, trainable: bool = True) -> Unit:
    """Return a unit with its parameters packed in the order given.

    Args:
        name: the unit's name.
        parameters: (name, shape, dtype) of each.
        trainable: whether the optimizer changes them.
    """
    packed: list[Parameter] = []
    offset = 0
    for parameter_name, shape, dtype in parameters:
        packed.append(Parameter(name=parameter_name, shape=tuple(shape), offset=offset, dtype=dtype))
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
            if p.aliases != q.aliases:
                return f"parameter {p.name!r} is tied to {list(p.aliases)} here and to {list(q.aliases)} in the job"
            if p.float8 != q.float8:
                ours_, theirs_ = ("float8" if travels else "other numbers" for travels in (p.float8, q.float8))
                return f"parameter {p.name!r} travels as {ours_} here and as {theirs_} in the job"
        if len(a.parameters) != len(b.parameters):
            return f"unit {a.name!r} has {len(a.parameters)} parameters here and {len(b.parameters)} in the job"
    if len(ours.units) != len(theirs.units):
        return f"there are {len(ours.units)} units here and {len(theirs.units)} in the job"
    return ""

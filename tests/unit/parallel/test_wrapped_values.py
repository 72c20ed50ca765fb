"""The full parameters of a model: whole tensors, whatever boxes the servers have, and few of them at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch
from torch import nn

from axon_ps.parallel.fsdp.masters import Masters
from axon_ps.parallel.fsdp.runtime import Runtime
from axon_ps.parallel.fsdp.values import WrappedValues
from axon_ps.parallel.fsdp.wrap import Wrapping
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.layout import FullTensor, Layout, Parameter, Unit

Box = tuple[tuple[int, ...], tuple[int, ...]]

# of each tensor that is cut, the beginning and the shape of each part's box
TP: dict[str, list[Box]] = {
    "up.weight": [((0, 0), (2, 3)), ((2, 0), (2, 3))],
    "down.weight": [((0, 0), (3, 2)), ((0, 2), (3, 2))],
}


def module() -> nn.Module:
    return nn.ModuleDict({"up": nn.Linear(3, 4), "down": nn.Linear(4, 3, bias=False)})


def layout(boxes: dict[str, list[Box]]) -> Layout:
    """A unit of each part, with what is not cut in the first one."""
    units: dict[str, list[Parameter]] = {}
    for name, value in module().named_parameters():
        shape = tuple(value.shape)
        for part, (begin, size) in enumerate(boxes.get(name, [((0,) * len(shape), shape)])):
            of_unit = units.setdefault(f"part{part}", [])
            whole = FullTensor(name=name, shape=shape, begin=begin) if name in boxes else None
            own = f"part{part}/{name}" if whole else name
            offset = of_unit[-1].end if of_unit else 0
            of_unit.append(Parameter(name=own, shape=size, offset=offset, full=whole))
    return Layout(units=tuple(Unit(name=name, parameters=tuple(of)) for name, of in units.items()))


@dataclass
class Held(Masters):
    """Servers: the values of every unit."""

    values: list[torch.Tensor]
    read: list[int] = field(default_factory=list)

    def units(self, numbers: Iterable[int]) -> Iterator[torch.Tensor]:
        for number in numbers:
            self.read.append(number)
            yield self.values[number]

    def replace(self, values: Iterator[torch.Tensor]) -> None:
        self.values = list(values)

    def gather(self, value: Any) -> list[Any]:
        return [value]


class Part:
    """The part of a runtime by which `WrappedValues` reads full parameters."""

    def __init__(self, spec: JobSpec) -> None:
        self.masters = Held([torch.randn(unit.numel) for unit in spec.layout.units])


@dataclass
class Wrapped:
    """The options that it reads."""

    spec: JobSpec
    replicated: bool = False
    lines: None = None


def made(of: Layout) -> tuple[WrappedValues, Held]:
    spec = JobSpec(layout=of)
    part = Part(spec)
    return WrappedValues(module(), cast(Wrapping, Wrapped(spec)), cast(Runtime, part), {}, None), part.masters


@pytest.mark.parametrize("cut", [True, False])
def test_they_are_whole_and_in_the_order_of_the_tensors(cut: bool) -> None:
    of = layout(TP if cut else {})
    values, held = made(of)
    found = dict(values.full())
    assert list(found) == [tensor.name for tensor in of.tensors]
    assert {name: tuple(t.shape) for name, t in found.items()} == {
        name: tuple(p.shape) for name, p in module().named_parameters()
    }
    for u, p in of.parameters():
        assert torch.equal(found[p.tensor.name][p.box], held.values[u][p.offset : p.end].view(p.shape))


def test_units_are_read_when_the_tensors_before_have_been_taken() -> None:
    boxes = [FullTensor(name=f"w{i}", shape=(2,), begin=(part,)) for part in range(2) for i in range(2)]
    of = Layout(
        units=tuple(
            Unit(name=f"u{n}", parameters=(Parameter(name=f"p{n}", shape=(1,), offset=0, full=box),))
            for n, box in enumerate(boxes)
        )
    )
    values, held = made(of)
    found = values.full()
    assert next(found)[0] == "w0"
    assert held.read == [0, 2], "those of both parts that have the tensor"
    assert [name for name, _ in found] == ["w1"]
    assert held.read == [0, 2, 1, 3]

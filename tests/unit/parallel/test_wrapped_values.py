"""The values of a model that a mesh cuts: whole tensors go out and come in, whatever boxes the servers have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch
from torch import nn

from axon_ps.errors import Misuse
from axon_ps.parallel.fsdp.masters import Masters
from axon_ps.parallel.fsdp.runtime import Runtime
from axon_ps.parallel.fsdp.values import WrappedValues
from axon_ps.parallel.fsdp.wrap import Wrapping
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.layout import Layout, Parameter, Unit, Whole

Box = tuple[tuple[int, ...], tuple[int, ...]]

# of each tensor that is cut, the beginning and the shape of each part's box
TP: dict[str, list[Box]] = {
    "up.weight": [((0, 0), (2, 3)), ((2, 0), (2, 3))],
    "down.weight": [((0, 0), (3, 2)), ((0, 2), (3, 2))],
}


def module() -> nn.Module:
    return nn.ModuleDict({"up": nn.Linear(3, 4), "down": nn.Linear(4, 3, bias=False)})


def layout(boxes: dict[str, list[Box]] = TP, *stages: str) -> Layout:
    """A unit of each part, with what is not cut in the first one; with stages, a unit of each layer."""
    units: dict[str, list[Parameter]] = {}
    for name, value in module().named_parameters():
        shape = tuple(value.shape)
        for part, (begin, size) in enumerate(boxes.get(name, [((0,) * len(shape), shape)])):
            of_unit = units.setdefault(name.partition(".")[0] if stages else f"part{part}", [])
            whole = Whole(name=name, shape=shape, begin=begin) if name in boxes else None
            own = f"part{part}/{name}" if whole else name
            offset = of_unit[-1].end if of_unit else 0
            of_unit.append(Parameter(name=own, shape=size, offset=offset, whole=whole))
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


@dataclass
class Flat:
    """The unit of a worker's own part."""

    unit: Unit
    params: Sequence[nn.Parameter] = ()


class Root:
    """The root unit."""

    depth = 0
    flats = ()

    def check_replaced(self) -> None:
        """Nothing was replaced."""


class Part:
    """What `WrappedValues` needs of a runtime of one worker of the mesh."""

    def __init__(self, spec: JobSpec, own: Sequence[int]) -> None:
        self.units = (Root(),)
        self.masters = Held([torch.zeros(u.numel) for u in spec.layout.units])
        self.flats = [Flat(spec.layout.units[number]) for number in own]

    def reset(self) -> None:
        """Nothing is gathered."""


@dataclass
class Wrapped:
    spec: JobSpec
    replicated: bool = False


def made(of: Layout, own: Sequence[int], model: nn.Module) -> tuple[WrappedValues, Part]:
    spec = JobSpec(layout=of)
    part = Part(spec, own)
    wrapping = cast(Wrapping, Wrapped(spec))
    return WrappedValues(model, wrapping, cast(Runtime, part), {}, None), part


def filled(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: torch.randn(value.shape) for name, value in model.named_parameters()}


def test_a_state_dict_goes_in_as_boxes_and_comes_out_whole() -> None:
    model = module()
    values, part = made(layout(), [0], model)
    given = filled(model)
    values.load(given, strict=True, assign=False)
    by_name = {p.name: part.masters.values[u][p.offset : p.end].view(p.shape) for u, p in layout().parameters()}
    assert torch.equal(by_name["part1/up.weight"], given["up.weight"][2:])
    assert torch.equal(by_name["part0/down.weight"], given["down.weight"][:, :2])
    for found in (dict(values.full()), model.state_dict()):
        assert sorted(found) == sorted(given)
        assert all(torch.equal(found[name], given[name]) for name in given)


def test_what_a_state_dict_lacks_stays() -> None:
    model = module()
    values, _ = made(layout(), [0], model)
    given, other = filled(model), torch.randn(4, 3)
    values.load(given, strict=True, assign=False)
    values.load({"up.weight": other}, strict=False, assign=False)
    found = dict(values.full())
    assert torch.equal(found["up.weight"], other)
    assert torch.equal(found["down.weight"], given["down.weight"])


def test_a_flat_tensor_has_the_order_of_the_full_parameters() -> None:
    values, _ = made(layout(), [0], module())
    flat = torch.arange(4 * 3 + 4 + 3 * 4, dtype=torch.float32)
    values.update(flat)
    assert torch.equal(torch.cat([value.reshape(-1) for _, value in values.full()]), flat)


def test_a_stage_reads_only_its_own_units_and_refuses_values_of_the_whole_model() -> None:
    stage = nn.ModuleDict({"down": nn.Linear(4, 3, bias=False)})
    values, part = made(layout({}, "up", "down"), [1], stage)
    assert list(stage.state_dict()) == ["down.weight"]
    assert part.masters.read == [1]
    assert sorted(dict(values.full())) == ["down.weight", "up.bias", "up.weight"]
    with pytest.raises(Misuse, match=r"'up.weight' is not in this stage of it; load a checkpoint"):
        values.load(stage.state_dict(), strict=True, assign=False)


@pytest.mark.parametrize("boxes", [TP, {}])
def test_a_part_of_the_parameters_is_not_written_back(boxes: Any) -> None:
    of = layout(boxes) if boxes else layout(boxes, "up", "down")
    values, _ = made(of, [0], module())
    summoned: Callable[..., Any] = values.summoned
    with pytest.raises(Misuse, match="cannot be at a mesh"), summoned(writeback=True):
        pass

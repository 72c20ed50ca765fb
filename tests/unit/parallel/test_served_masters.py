"""The values of a model on the servers are read unit by unit, with the memory of one unit."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from axon_ps.parallel.fsdp import materialize, wrap
from axon_ps.parallel.fsdp.on_servers.served_masters import ServedMasters
from axon_ps.parallel.fsdp.values import WrappedValues


class Client:
    """A step client that counts how many of the watched tensors live when memory for the next unit is made."""

    def __init__(self) -> None:
        self.parameters = self
        self.view = SimpleNamespace(epoch=1, latest_version=3)
        self.watched: list[weakref.ref[torch.Tensor]] = []
        self.living: list[int] = []

    def gather(self, unit: int, out: Any, *, exact: bool) -> Any:
        out[:] = unit
        return SimpleNamespace(wait=lambda: 3)

    def upload(self, unit: int, values: Any, *, epoch: int) -> None:
        self.watched.append(weakref.ref(values.base))

    def made_by(self, make: Callable[..., Any], *given: Any, **options: Any) -> Any:
        self.living.append(sum(ref() is not None for ref in self.watched))
        return make(*given, **options)


def parts() -> tuple[Client, nn.Module, tuple[wrap.WrappedUnit, ...], ServedMasters]:
    client, module = Client(), nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4), nn.Linear(4, 5))
    units = wrap.partition(module, lambda child: isinstance(child, nn.Linear))
    wrapping: Any = SimpleNamespace(spec=SimpleNamespace(layout=wrap.layout_of(units), policy=None))
    steps: Any = client
    return client, module, units, ServedMasters(wrapping, steps, [])


def test_one_unit_is_in_memory_while_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    client, _, units, masters = parts()
    monkeypatch.setattr(torch, "empty", partial(client.made_by, torch.empty))
    for values in masters.units(range(len(units))):
        client.watched.append(weakref.ref(values))
        del values
    assert client.living == [0, 0, 0]


def test_one_unit_is_in_memory_while_parameters_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    client, module, units, masters = parts()
    monkeypatch.setattr(torch, "empty", partial(client.made_by, torch.empty))
    values: Any = object.__new__(WrappedValues)
    values._layout, values._runtime = wrap.layout_of(units), SimpleNamespace(masters=masters)
    full: Iterator[tuple[str, torch.Tensor]] = values.full()
    names = []
    for name, value in full:
        assert value._base is not None
        client.watched.append(weakref.ref(value._base))
        names.append(name)
        del value
    assert names == [name for name, _ in module.named_parameters()]
    assert client.living == [0, 0, 0]


def test_one_unit_is_in_memory_while_first_values_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    client, module, units, _ = parts()
    monkeypatch.setattr(materialize, "values_of", partial(client.made_by, materialize.values_of))
    steps: Any = client
    materialize.upload(module, units, steps, None)
    assert client.living == [0, 0, 0]

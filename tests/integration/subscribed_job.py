"""A job whose parameters show their version: every step adds 1 to each, so a torn version is seen."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import axon_ps
from axon_ps import parallel

FROZEN = 7.0


class Rows(nn.Module):
    """One unit: rows that all have the same value."""

    def __init__(self, rows: int, width: int, value: float = 0.0, *, trainable: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((rows, width), value), requires_grad=trainable)

    def forward(self) -> torch.Tensor:
        return self.weight.sum()


class Model(nn.Module):
    """Trainable units and a frozen one."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.units = nn.ModuleList(Rows(rows, width) for rows in (300, 200, 7))
        self.frozen = Rows(100, width, FROZEN, trainable=False)

    def forward(self) -> torch.Tensor:
        return sum((unit() for unit in self.units), 0.0 * self.frozen())


def train(directory: Path, name: str = "", options: Mapping[str, Any] | None = None) -> int:
    """Train until the file `stop` is there; returns the last version."""
    torch.set_num_threads(1)
    with axon_ps.World.init(timeout_s=120.0) as world:
        given = {"name": name} if name else {}
        model = parallel.FSDP(Model(), world.default_group, unit_types={Rows}, **given, **(options or {}))
        optimizer = parallel.SGD(model, lr=1.0)
        while not (directory / "stop").exists():
            (-model()).backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.005)
        return int(world.version)


def check(version: int, parameters: Mapping[str, Any], decode: Any = None) -> None:
    """That all parameters are of this version."""
    for name, values in parameters.items():
        values = values if decode is None else decode(values)
        wanted = FROZEN if name.startswith("frozen") else float(version)
        if not (values == wanted).all():
            raise AssertionError(f"{name} of version {version} has {sorted(set(values.ravel().tolist()))[:5]}")

"""The common parts of the scripts of framework features: a model, data, schedulers, and how each script is run."""

from __future__ import annotations

import functools
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR

WORKERS: Final = int(os.environ.get("WORLD_SIZE", "1"))
RANK: Final = int(os.environ.get("RANK", "0"))
BATCH: Final = 8 // WORKERS
"""Samples of a worker in a micro-batch: all workers together have 8, of 40 in an epoch."""

Found: TypeAlias = Mapping[str, Any]
Feature: TypeAlias = Callable[[Path], Found]
"""Gets a directory of its own; gives numbers by name, which do not depend on where the model is."""

SCHEDULERS: Final[Mapping[str, Callable[[Optimizer], Any]]] = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda step: 0.8**step),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.1, total_iters=3), schedulers.CosineAnnealingLR(o, 8)], [3]
    ),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(o, 0.5, 2), schedulers.ExponentialLR(o, 0.8)]
    ),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, max_lr=0.05, total_steps=60),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.01, 0.05, step_size_up=3, cycle_momentum=False),
    "SWALR": lambda o: SWALR(o, swa_lr=0.05, anneal_epochs=4),
}


def inputs(number: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples and what is to be learned of them."""
    x = torch.randn(number, 8, generator=torch.Generator().manual_seed(1))
    return x, x.square().mean(1, keepdim=True)


def backbone(norm: bool = False) -> nn.Sequential:
    """The larger part of the model."""
    return nn.Sequential(
        nn.Linear(8, 8, bias=not norm), *([nn.BatchNorm1d(8)] if norm else []), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()
    )


class Net(nn.Module):
    """A backbone and a head.

    Args:
        norm: whether with a batch norm.
    """

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.backbone = backbone(norm)
        self.head = nn.Sequential(nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A value of each sample."""
        y: torch.Tensor = self.head(self.backbone(x))
        return y


def numbers(state: Mapping[str, torch.Tensor]) -> dict[str, list[float]]:
    """A state dict, as numbers by name."""
    return {name: tensor.double().flatten().tolist() for name, tensor in state.items()}


def run(
    features: Mapping[str, Feature], resumed: Mapping[str, Callable[[Path, int], Found]], between: Callable[[], object]
) -> None:
    """Try each feature, and write what came of it; argv: a directory, and which part: "first", "second" or "both".

    Args:
        features: by name.
        resumed: those of two runs, 0 and 1; the second begins from what the first has saved, in new processes where the
            part is given.
        between: called after each.
    """
    torch.set_num_threads(1)
    directory, part, chosen = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    todo: list[tuple[str, Feature]] = []
    if part != "second":
        todo += [(f"{name}, first", functools.partial(feature, part=0)) for name, feature in resumed.items()]
        todo += features.items()
    if part != "first":
        todo += [(name, functools.partial(feature, part=1)) for name, feature in resumed.items()]
    found = {}
    for name, feature in todo:
        if chosen and name.removesuffix(", first") not in chosen:
            continue
        own = directory / name.removesuffix(", first").replace(" ", "_")
        own.mkdir(parents=True, exist_ok=True)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of libraries about their own inner life
                found[name] = {"values": dict(feature(own))}
        except Exception as error:
            found[name] = {"error": f"{type(error).__module__}.{type(error).__name__}: {error}"}
            if "TRACE" in os.environ:
                traceback.print_exc()
        if RANK == 0:
            print("feature", name, found[name].get("error", "ran"), flush=True)
        between()
    if RANK == 0:
        (directory / f"{part}.json").write_text(json.dumps(found))

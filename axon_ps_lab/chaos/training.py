"""The workers of a campaign's own job: they train a small model, and write down the samples of each step.

A worker writes each attempt to a file before it computes, and each commit after it. So the samples of a committed
attempt are known even if the worker dies.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from axon_ps.parallel import FSDP, SGD, ElasticLoader
from axon_ps.sharding.plan import PlanOptions
from axon_ps.worker.world import World
from axon_ps_lab.chaos.campaign import Embedded

LAST = "last"
"""The name of the file with the version after which workers end."""

NOTES, WAITING = "notes-", "waiting-"
"""The first parts of the names of a worker's files; the worker's number follows."""

INPUTS = 16
LAYERS = 3
SEED = 7

Values = dict[str, np.ndarray[Any, np.dtype[np.float32]]]

_SEEDED = threading.Lock()
"""The lock of torch's random generator, which workers that are threads share."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The model that is trained.

    Attributes:
        width: width of the model's layers.
        samples: samples of the data set.
        batch: samples of a step.
        pause_s: seconds that a worker waits between steps.
    """

    width: int
    samples: int
    batch: int
    pause_s: float

    @classmethod
    def of(cls, embedded: Embedded) -> Recipe:
        """Return the recipe of a campaign's job."""
        width = max(4, round((embedded.parameters / LAYERS) ** 0.5))
        return cls(width=width, samples=embedded.samples, batch=embedded.batch, pause_s=embedded.pause_s)


def build(recipe: Recipe) -> nn.Module:
    """Make the model, which is the same in every process."""
    with _SEEDED:
        torch.manual_seed(SEED)
        width = recipe.width
        middle = [layer for _ in range(LAYERS) for layer in (nn.Linear(width, width), nn.Tanh())]
        return nn.Sequential(nn.Linear(INPUTS, width), nn.Tanh(), *middle, nn.Linear(width, 1))


def data_of(recipe: Recipe) -> TensorDataset:
    """Make the data set, which is the same in every process."""
    generator = torch.Generator().manual_seed(SEED)
    inputs = torch.randn(recipe.samples, INPUTS, generator=generator)
    return TensorDataset(inputs, torch.randn(recipe.samples, 1, generator=generator))


def worker(directory: str, number: int, recipe: Recipe) -> Values:
    """Run a worker process: join the job, perhaps in place of a lost worker, and train until the last version."""
    folder = Path(directory)
    (folder / f"{WAITING}{number}").touch()
    with World.init(timeout_s=60.0) as world, open(folder / f"{NOTES}{number}", "w", encoding="utf-8") as file:

        def note(**content: Any) -> None:
            file.write(json.dumps(content) + "\n")
            file.flush()

        note(rank=world.rank)
        return train(world, recipe, lambda: last_version(folder), note)


def last_version(directory: Path) -> int:
    """Return the version after which to end; 0 = none yet."""
    try:
        return int((directory / LAST).read_text(encoding="ascii"))
    except (FileNotFoundError, ValueError):
        return 0


def undisturbed(world: World, recipe: Recipe, last: int) -> Values:
    """Run one worker, a thread, of the same job without faults."""
    return train(world, recipe, lambda: last, lambda **_: None)


def train(world: World, recipe: Recipe, last: Callable[[], int], note: Callable[..., None]) -> Values:
    """Train until a version; returns the values then.

    Args:
        world: the job.
        recipe: the model and its data.
        last: returns the version to end at; 0 = go on.
        note: writes its arguments to the worker's notes.
    """
    torch.set_num_threads(1)
    model = FSDP(
        build(recipe),
        world.default_group,
        unit_types={nn.Linear},
        plan_options=PlanOptions(chunk_numel=8192, min_slice_numel=1024),
    )
    optimizer = SGD(model.parameters(), lr=0.01, momentum=0.9)
    loader = ElasticLoader(data_of(recipe), model, batch_size=recipe.batch, seed=SEED)
    for _ in loader.epochs(1 << 40):
        for x, y in loader:
            attempt = [model.version, batch.generation if (batch := model.runtime.accumulation.batch) else -1]
            note(attempt=attempt, samples=loader.samples, epoch=loader.epoch)
            nn.functional.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
            result = optimizer.step()
            optimizer.zero_grad()
            if result.committed:
                note(committed=attempt, at=time.monotonic())
            else:
                note(aborted=attempt, reason=result.reason[:200])
            if 0 < last() <= model.version:
                return {name: value.numpy().copy() for name, value in model.state_dict().items()}
            if recipe.pause_s:
                time.sleep(recipe.pause_s)
    raise AssertionError("the epochs do not end")

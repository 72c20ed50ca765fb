"""A job that trains until it is told to end, for benchmarks that disturb it meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import axon_ps
from axon_ps import parallel
from axon_ps.testing import LocalCluster
from axon_ps.testing.workers import WorkerProcess

STOP = "stop"


def train(
    directory: Path, build: Callable[[], nn.Module], unit: type[nn.Module], batch: tuple[int, int]
) -> dict[str, Any]:
    """Run one worker, under FULL_SHARD; returns the times of commits (monotonic clock), and the count of aborted steps.

    Args:
        directory: directory of the file `STOP`, which will contain the version after which to end.
        build: makes the model.
        unit: the model's modules of this class are the units.
        batch: rows and columns of a batch.
    """
    torch.set_num_threads(1)
    commits: list[float] = []
    aborted = 0
    with axon_ps.World.init(timeout_s=120.0) as world:
        torch.manual_seed(0)
        model = parallel.FSDP(build(), world.default_group, unit_types={unit})
        optimizer = parallel.AdamW(model, lr=1e-3)
        last = 0
        while not last or world.version < last:
            model(torch.randn(*batch)).square().mean().backward()
            if optimizer.step().committed:
                commits.append(time.monotonic())
            else:
                aborted += 1
            optimizer.zero_grad()
            stop = directory / STOP
            if not last and stop.exists():
                last = int(stop.read_text() or 0)
    return {"commits": commits, "aborted": aborted}


def finish(cluster: LocalCluster, workers: Sequence[WorkerProcess], directory: Path) -> list[dict[str, Any]]:
    """Let the workers end some steps later; returns the result of each.

    Raises:
        RuntimeError: a worker failed.
    """
    (directory / "new").write_text(str(cluster.status().version + 10))
    (directory / "new").rename(directory / STOP)
    results: list[Any] = [worker.result() for worker in workers]
    if errors := [result.error for result in results if result.error]:
        raise RuntimeError(errors[0])
    return [result.value for result in results]

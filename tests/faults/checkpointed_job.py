"""A small training job that tests of checkpoints disturb, and what they wait for."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import axon_ps
from axon_ps import parallel
from axon_ps.storage.manifest import list_checkpoints
from axon_ps.testing.workers import WorkerProcess
from deadlines import HANG_S
from parity_model import Values, batch, wrapped
from pausing import pause

STEPS, FATAL = 12, 7
SOON_S = HANG_S


def train(pipes: Path | None, follow: Path | str | None = None, ahead: int = 1) -> tuple[int, Values]:
    """Train to version STEPS; the version with which it began, and the values.

    Args:
        pipes: pause once, at version FATAL.
        follow: never be more than `ahead` steps ahead of the checkpoints in this directory.
        ahead: 1 where they are of even versions, 0 where they are of all.
    """
    torch.set_num_threads(1)
    with axon_ps.World.init(timeout_s=HANG_S) as world:
        model = wrapped(world)
        optimizer = parallel.SGD(model, lr=0.1, momentum=0.9)
        began, to_pause = world.version, True
        while world.version < STEPS:
            step = world.version
            if step == FATAL and to_pause and pipes is not None:
                pause(pipes)
                to_pause = False
            model(batch(step, world.replica)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if follow is not None and world.version > 1:
                until(lambda: max(versions(follow), default=0) >= world.version - ahead)
        return began, {name: value.numpy().copy() for name, value in model.state_dict().items()}


def until(true: Callable[[], bool]) -> None:
    """Wait for what other processes do."""
    deadline = time.monotonic() + SOON_S
    while not true():
        assert time.monotonic() < deadline, "it has not happened"
        time.sleep(0.01)


def versions(directory: Path | str) -> list[int]:
    return [manifest.version for manifest in list_checkpoints(str(directory))]


def value_of(worker: WorkerProcess) -> Any:
    result: Any = worker.result()
    assert not result.error, result.error
    return result.value

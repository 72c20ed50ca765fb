"""Damage to the coordinator's state file: it cannot be written, is an older copy, or has lost its end.

The oracle is plain torch, over as many replicas in every step.
"""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import axon_ps
from axon_ps import parallel
from axon_ps.testing import LocalCluster
from deadlines import HANG_S
from parity_model import Values, assert_close, batch, plain, wrapped
from pausing import make_pipes, pause, paused

STEPS, FIRST, SECOND = 12, 4, 8


def train(first: Path, second: Path) -> tuple[Values, int, list[int]]:
    """Train to version STEPS, and stop at two of them; values, attempts that did not commit, and what committed."""
    torch.set_num_threads(1)
    with axon_ps.World.init(timeout_s=HANG_S) as world:
        model = wrapped(world)
        optimizer = parallel.SGD(model, lr=0.1, momentum=0.9)
        committed: list[int] = []
        aborted, stops = 0, {FIRST: first, SECOND: second}
        while world.version < STEPS:
            if (pipes := stops.pop(world.version, None)) is not None and world.rank == 0:
                pause(pipes)
            model(batch(world.version, world.replica)).backward()
            result = optimizer.step()
            optimizer.zero_grad()
            if result.committed:
                committed.append(result.version)
            aborted += not result.committed
        return {name: value.numpy().copy() for name, value in model.state_dict().items()}, aborted, committed


def files(cluster: LocalCluster) -> list[Path]:
    """The state file, and its journal."""
    return [cluster.directory / f"coordinator.sqlite{end}" for end in ("", "-wal")]


def cannot_write(cluster: LocalCluster, before: Path) -> None:
    """Nothing can be written any more by the process that runs, and it ends; see the test."""
    resource.prlimit(cluster.process("coordinator").pid, resource.RLIMIT_FSIZE, (0, 0))


def older_copy(cluster: LocalCluster, before: Path) -> None:
    """Somebody has restored a copy of an earlier time."""
    cluster.kill("coordinator")
    for file in files(cluster):
        shutil.copy(before / file.name, file)
    cluster.restart("coordinator")


def lost_end(cluster: LocalCluster, before: Path) -> None:
    """The journal has lost its end."""
    cluster.kill("coordinator")
    journal = files(cluster)[1]
    os.truncate(journal, (before / journal.name).stat().st_size + 4096)
    cluster.restart("coordinator")


@pytest.mark.parametrize("fault", [cannot_write, older_copy, lost_end])
def test_no_committed_step_is_lost_whatever_becomes_of_the_state(
    fault: Callable[[LocalCluster, Path], None], tmp_path: Path
) -> None:
    first, second, before = tmp_path / "first", tmp_path / "second", tmp_path / "before"
    for directory in (first, second, before):
        directory.mkdir()
    make_pipes(first)
    make_pipes(second)
    with LocalCluster(shards=2, world_size=2, durable=True) as cluster:
        workers = cluster.start_workers(train, args=(first, second))
        with paused(first):
            for file in files(cluster):
                shutil.copy(file, before)
        with paused(second):
            fault(cluster, before)
        if fault is cannot_write:
            assert cluster.process("coordinator").wait(HANG_S), "it has not ended, or as if nothing had been wrong"
            cluster.restart("coordinator")
        for result in [worker.result() for worker in workers]:
            assert not result.error, result.error
            values, aborted, committed = result.value
            assert committed == list(range(1, STEPS + 1)), "each once"
            assert aborted <= 2
            assert_close(values, plain([2] * STEPS))
        log = cluster.log("coordinator")
    assert ("older than what a shard server knows" in log) == (fault is not cannot_write), log

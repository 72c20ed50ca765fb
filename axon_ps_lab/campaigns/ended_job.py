"""A job that trains to a version given later, and the comparison of its values with those of an undisturbed one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from axon_ps.testing import LocalCluster
from axon_ps.testing.workers import WorkerProcess
from axon_ps_lab.campaigns.exact_model import Values

SOON_S = 120.0
"""Seconds after which a wait that should take a moment counts as hanging."""

MORE = 10
"""Steps that are made after everything that a test does."""


@dataclass
class Trained:
    """The result of a worker.

    Attributes:
        aborted: the reasons of its aborted steps.
        version: the last version.
        values: the values of all parameters.
    """

    aborted: list[str] = field(default_factory=list)
    version: int = 0
    values: Values = field(default_factory=dict)


def until(true: Callable[[], bool], what: str) -> None:
    """Wait for a condition that other processes make true."""
    deadline = time.monotonic() + SOON_S
    while not true():
        assert time.monotonic() < deadline, f"it has not happened: {what}"
        time.sleep(0.01)


class EndedJob:
    """A cluster on which two workers train until the version in a file.

    Args:
        cluster: the cluster.
        target: the function of a worker; its arguments are `kind` and `end`.
        kind: the kind of training.
        end: the file, which `finish` writes.
    """

    def __init__(self, cluster: LocalCluster, target: Callable[[str, Path], Trained], kind: str, end: Path) -> None:
        self.cluster, self._end = cluster, end
        self._workers: Sequence[WorkerProcess] = cluster.start_workers(target, args=(kind, end))
        self.go_on()

    @property
    def version(self) -> int:
        """The newest committed version."""
        return self.cluster.status().version

    @property
    def servers(self) -> list[int]:
        """The ranks of the shard servers."""
        return [m.rank for m in self.cluster.status().membership.shards]

    def go_on(self) -> None:
        """Wait for some steps."""
        version = self.version
        until(lambda: self.version > version + 3, "the job goes on")

    def settle(self, servers: int) -> None:
        """Wait until there are so many shard servers, and every slice has its copies."""

        def settled() -> bool:
            status = self.cluster.status()
            lacking = sum(model.lacking for model in status.models)
            return len(status.membership.shards) == servers and status.membership.complete and not lacking

        until(settled, "every slice has its copies")

    def finish(self) -> list[Trained]:
        """Have the workers end some steps later, and return their results."""
        aside = self._end.with_suffix(".new")
        aside.write_text(str(self.version + MORE))
        aside.rename(self._end)
        results = []
        for worker in self._workers:
            result: Any = worker.result()
            assert not result.error, result.error
            results.append(result.value)
        return results


def assert_same_bits(
    found: list[Trained],
    target: Callable[[str, Path], Trained],
    kind: str,
    directory: Path,
    *,
    replication: int = 1,
    timeout_s: float = 60.0,
) -> None:
    """Compare the values of workers with those of the same job, undisturbed."""
    end = directory / "undisturbed"
    end.write_text(str(found[0].version))
    with LocalCluster(shards=2, world_size=2, replication=replication) as cluster:
        right: Any = cluster.run_workers(target, args=(kind, end), timeout_s=timeout_s)[0].value
    assert not right.aborted
    for trained in found:
        assert trained.version == right.version
        for name, values in right.values.items():
            differ = int(np.count_nonzero(trained.values[name].view(np.uint32) != values.view(np.uint32)))
            assert not differ, f"{differ} of {values.size} values of {name} differ after {right.version} steps"

"""A job that makes steps while its coordinators die, and the check of its steps and values.

Workers append a line to a file after each step. All numbers are exact (integers, halves, a learning rate that is a
power of two), so the values at the end are bit by bit those of plain torch.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import axon_ps
from axon_ps import parallel
from axon_ps.sharding.plan import PlanOptions
from axon_ps.testing.processes import COORDINATOR
from axon_ps_lab.campaigns.exact_model import Linear, integers
from axon_ps_lab.faults.failover import FailoverCluster

NUMEL, RATE = 1000, 2.0**-12
PAUSE_S = 0.02
"""Seconds between steps; the time without a commit is measured."""

SOON_S = 30.0
SLOW_S = 0.1
"""The additional time that a slow disk of etcd takes for each write."""

ETCD_S = 5.0
"""Seconds for which a job is watched after a member of etcd was killed: longer than a lease."""


def train(directory: Path, pause_s: float = PAUSE_S) -> Any:
    """Make steps, with a pause after each, up to the version in the file `stop`; returns the values at the end."""
    torch.set_num_threads(1)
    with axon_ps.World.init(timeout_s=60.0) as world:
        model = parallel.FSDP(
            Linear(NUMEL), world.default_group, plan_options=PlanOptions(chunk_numel=100, min_slice_numel=64)
        )
        optimizer = parallel.SGD(model, lr=RATE)
        with open(directory / f"rank-{world.rank}", "a", encoding="utf-8") as log:
            while world.version < last_version(directory):
                model(integers(world.version, world.replica)).backward()
                result = optimizer.step()
                optimizer.zero_grad()
                entry = [time.monotonic(), result.version, result.committed, world.num_replicas]
                log.write(json.dumps(entry) + "\n")
                log.flush()
                time.sleep(pause_s)
        return model.state_dict()["weight"].numpy().copy()


def last_version(directory: Path) -> float:
    """Return the version at which workers stop; inf while that is not known."""
    try:
        return float((directory / "stop").read_text())
    except FileNotFoundError:
        return float("inf")


def plain(replicas: list[int]) -> np.ndarray[Any, Any]:
    """Return the weight that plain torch computes, by the number of replicas of each step."""
    model = Linear(NUMEL)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step, count in enumerate(replicas):
        optimizer.zero_grad()
        sum(model(integers(step, r)) / count for r in range(count)).backward()
        optimizer.step()
    return model.weight.detach().numpy().copy()


@dataclass(frozen=True)
class TimedStep:
    """One call of `optimizer.step()`."""

    at_s: float
    version: int
    committed: bool
    replicas: int


def steps_of(directory: Path, rank: int) -> list[tuple[float, int, bool, int]]:
    """Return the notes of a worker so far: time, version, committed, replicas."""
    path = directory / f"rank-{rank}"
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    return [tuple(json.loads(line)) for line in lines]


def until(condition: Callable[[], Any], within_s: float = 40.0) -> Any:
    """Wait for a condition; returns its value."""
    deadline = time.monotonic() + within_s
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)
    return found


class FailoverJob:
    """The workers of a `FailoverCluster`.

    Args:
        cluster: the cluster.
        directory: directory for their files.
        proxied: whether they reach the coordinators through a proxy of their host.
    """

    def __init__(self, cluster: FailoverCluster, directory: Path, *, proxied: bool = False) -> None:
        self.cluster = cluster
        self._directory = directory
        env = {"AXON_PS_COORDINATOR": cluster.add_proxy()} if proxied else {}
        self._workers = cluster.start_workers(train, args=(directory,), env=env)
        self.until(lambda: len(self.steps()) > 5)

    def steps(self, rank: int = 0) -> list[TimedStep]:
        """Return the steps of a worker so far."""
        return [TimedStep(*step) for step in steps_of(self._directory, rank)]

    def until(self, true: Callable[[], bool]) -> None:
        """Wait for a condition that other processes make true; a worker that ends fails the test."""
        deadline = time.monotonic() + SOON_S
        while not true():
            ended = [w.process.name for w in self._workers if w.process.exit_code is not None]
            assert not ended, f"{ended} ended: {self._workers[0].process.output}"
            assert time.monotonic() < deadline, "it has not happened"
            time.sleep(0.01)

    def gap_s(self, since_s: float) -> float:
        """Return the longest time without a commit from `since_s` to the newest step."""
        times = [step.at_s for step in self.steps() if step.committed]
        before = max(at_s for at_s in times if at_s <= since_s)
        return max(b - a for a, b in zip([before, *times], times, strict=False) if b > since_s)

    def goes_on(self, since_s: float, for_s: float = 1.0) -> float:
        """Wait until steps have committed again for a while after `since_s`; returns the longest time without one."""
        self.until(lambda: time.monotonic() > since_s + for_s)
        seen = len(self.steps())
        self.until(lambda: len(self.steps()) > seen + 5)
        return self.gap_s(since_s)

    def finish(self) -> tuple[list[list[TimedStep]], list[Any]]:
        """Have all workers stop at one version; returns the steps and the values of each."""
        beside = self._directory / "stop.new"
        beside.write_text(str(self.steps()[-1].version + 30))
        os.replace(beside, self._directory / "stop")
        results: list[Any] = [worker.result(SOON_S) for worker in self._workers]
        assert not any(r.error for r in results), [r.error for r in results]
        return [self.steps(rank) for rank in range(len(results))], [r.value for r in results]


# ---------------------------------------------------------------------- faults of the leader and of etcd


def _another_leads(job: FailoverJob, old: int, since_s: float) -> float:
    """Wait until another coordinator leads and steps commit again; returns the longest time without a commit."""
    job.until(lambda: job.cluster.leader() not in (-1, old))
    return job.goes_on(since_s)


def killed(job: FailoverJob, seconds: float) -> float:
    """The leader is killed, and started again later. Returns the longest time without a commit, as most of these do."""
    old, since_s = job.cluster.leader(), time.monotonic()
    job.cluster.kill(COORDINATOR, old)
    gap_s = _another_leads(job, old, since_s)
    job.cluster.restart(COORDINATOR, old)
    return gap_s


def frozen(job: FailoverJob, seconds: float) -> float:
    """The leader is frozen for a while and woken; it finds out that it leads no more."""
    old, since_s = job.cluster.leader(), time.monotonic()
    known = job.cluster.log(COORDINATOR, old).count("standing by: ")
    job.cluster.kill(COORDINATOR, old, signal.SIGSTOP)
    gap_s = _another_leads(job, old, since_s)
    job.until(lambda: time.monotonic() > since_s + seconds)
    job.cluster.kill(COORDINATOR, old, signal.SIGCONT)
    job.until(lambda: job.cluster.log(COORDINATOR, old).count("standing by: ") > known)
    return max(gap_s, job.goes_on(since_s))


def cut_from_etcd(job: FailoverJob, seconds: float) -> float:
    """The leader is cut off from etcd for a while; messages that it had sent arrive late."""
    old, since_s = job.cluster.leader(), time.monotonic()
    job.cluster.cut_from_etcd(old, seconds)
    _another_leads(job, old, since_s)
    return job.goes_on(since_s, seconds + 2.0)


def cut_from_workers(job: FailoverJob, seconds: float) -> float:
    """No member of the job reaches the leader, which lives and reaches etcd."""
    old, since_s = job.cluster.leader(), time.monotonic()
    job.cluster.cut_from_members(old, seconds)
    _another_leads(job, old, since_s)
    return job.goes_on(since_s, seconds + 1.0)


def etcd_follower_killed(job: FailoverJob, seconds: float) -> float:
    """A member of etcd that does not lead the others is killed."""
    leader = job.cluster.etcd.leader()
    return _etcd_killed(job, (leader + 1) % len(job.cluster.etcd.endpoints))


def etcd_leader_killed(job: FailoverJob, seconds: float) -> float:
    """The member of etcd that leads the others is killed."""
    return _etcd_killed(job, job.cluster.etcd.leader())


def _etcd_killed(job: FailoverJob, member: int) -> float:
    old, since_s = job.cluster.leader(), time.monotonic()
    job.cluster.etcd.kill(member)
    gap_s = job.goes_on(since_s, ETCD_S)
    assert job.cluster.leader() == old, "the coordinator leads on"
    return gap_s


def etcd_slow_disks(job: FailoverJob, seconds: float) -> float:
    """The disks of all members of etcd are slow for a while."""
    old, since_s = job.cluster.leader(), time.monotonic()
    with job.cluster.etcd.slow_disks(SLOW_S):
        gap_s = job.goes_on(since_s, seconds)
    assert job.cluster.leader() == old, "the coordinator leads on"
    return max(gap_s, job.goes_on(time.monotonic()))


def etcd_compacted(job: FailoverJob, seconds: float) -> float:
    """All of etcd's history is removed, and its files are made anew."""
    old, since_s = job.cluster.leader(), time.monotonic()
    job.cluster.etcd.compact()
    gap_s = job.goes_on(since_s)
    assert job.cluster.leader() == old, "the coordinator leads on"
    return gap_s


def etcd_full(job: FailoverJob, seconds: float) -> float:
    """The quota of etcd is used up for a while. Returns the time to the first commit after there is space again."""
    old = job.cluster.leader()
    job.cluster.etcd.fill()
    full_s = time.monotonic()
    job.until(lambda: "quota is used up" in job.cluster.log(COORDINATOR, old))
    job.until(lambda: time.monotonic() > full_s + seconds)
    job.cluster.etcd.empty()
    empty_s = time.monotonic()
    job.goes_on(empty_s)
    assert job.cluster.leader() == old, "the coordinator leads on"
    return next(step.at_s for step in job.steps() if step.committed and step.at_s > empty_s) - empty_s


FAULTS = (killed, frozen, cut_from_etcd, cut_from_workers)
ETCD_FAULTS = (etcd_slow_disks, etcd_compacted, etcd_full)


def check(job: FailoverJob) -> int:
    """Check that nothing was lost, and only leaders wrote; returns the number of attempts that did not commit."""
    steps, values = job.finish()
    for each in steps:
        assert [step.version for step in each if step.committed] == list(range(1, each[-1].version + 1))
    expected = plain([step.replicas for step in steps[0] if step.committed])
    for value in values:
        np.testing.assert_array_equal(value, expected)
    writers = job.cluster.writers()
    ids = [writer for _, writer in writers]
    terms = list(dict.fromkeys(ids))
    assert ids == [term for term in terms for _ in range(ids.count(term))], "one writes after another began to"
    assert job.cluster.written() <= {revision for revision, _ in writers}
    return sum(not step.committed for step in steps[0])

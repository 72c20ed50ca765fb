"""Real services under attack, in periods: quiet ones, attacks, and attacks on another cluster of the same machine.

The last kind shows the cost of the attacker itself, which shares this machine with the job.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from axon_ps.testing import LocalCluster
from axon_ps.testing.workers import WorkerProcess, results_of
from axon_ps_lab.fuzz import beside
from axon_ps_lab.fuzz.attackers import Orders, attack
from axon_ps_lab.fuzz.beside import AttackedServices, JobStep, steps_of
from axon_ps_lab.fuzz.findings import Case, Findings
from axon_ps_lab.fuzz.priorities import LOW

JOB: Final = "fuzz"
SETTLED_S: Final = 20.0
"""Seconds that services may take to close the connections that attackers have left."""

MORE_FILES: Final = 12
"""The most descriptors that a service may have beyond its first count: connections of the job that were made anew."""

COMPARED: Final = 4_000
"""The most steps whose losses are compared. They are made again without an attack, which takes as long."""

QUIET, ELSEWHERE, ATTACK = "quiet", "elsewhere", "attack"
PERIODS: Final = (QUIET, ELSEWHERE, ATTACK)


WINDOW_S: Final = 2.5
"""Seconds of a window, over which the job's median step is taken."""


@dataclass(frozen=True)
class Amount:
    """The amount of attacks in a period.

    Attributes:
        messages: number of messages sent in calls.
        connections: number of hostile connections to services.
        servers: number of the SDK's connections to hostile servers.
    """

    messages: int = 400
    connections: int = 300
    servers: int = 40


@dataclass
class Period:
    """The measures of a period.

    Attributes:
        kind: quiet, elsewhere or attack.
        began_s: time of its begin.
        seconds: its length.
        steps: the job's steps.
    """

    kind: str
    began_s: float
    seconds: float
    steps: list[JobStep] = field(default_factory=list)

    def windows_ms(self) -> list[float]:
        """Return the median step of each window."""
        windows: dict[int, list[float]] = {}
        for step in self.steps:
            windows.setdefault(int((step.at_s - self.began_s) / WINDOW_S), []).append(1000 * step.took_s)
        return [statistics.median(steps) for steps in windows.values()]


class Outside:
    """See the module.

    Args:
        findings: gets the findings.
        cluster: the cluster, with a worker that trains.
        other: an unused cluster; None = there are no attacks on another cluster.
        path: the file of the worker's steps.
        level: niceness of the attackers.
    """

    def __init__(
        self, findings: Findings, cluster: LocalCluster, other: LocalCluster | None, path: Path, level: int
    ) -> None:
        self._level = level
        self.services = AttackedServices(cluster)
        self.periods: list[Period] = []
        self.health_s: list[float] = []
        self.memory_mib: list[dict[str, float]] = []
        self.messages = 0
        self.connections: Counter[str] = Counter()
        self.elsewhere = 0
        self.statuses: Counter[str] = Counter()
        self.met = self.late = 0
        self.held_up_s = 0.0
        self.steps = self.uncommitted = 0
        self._findings = findings
        self._cluster = cluster
        self._targets = {ATTACK: (self.services.ports, cluster.token)}
        if other is not None:
            self._targets[ELSEWHERE] = (AttackedServices(other).ports, other.token)
        self._path = path
        self._files = self.services.files()
        self._attacks = 0

    def period(self, kind: str, seed: str, amount: Amount, seconds: float) -> Period:
        """Perform one period.

        Args:
            kind: quiet, elsewhere or attack.
            seed: seed of its choices.
            amount: amount of attacks, unless the period is quiet.
            seconds: time over which they are spread; 0 = as fast as possible.
        """
        began_s = time.monotonic()
        if kind == QUIET:
            time.sleep(seconds)
        else:
            began_s = self._attack(kind, seed, amount, seconds)
        period = Period(kind, began_s, time.monotonic() - began_s)
        period.steps = [s for s in steps_of(self._path) if s.at_s - s.took_s >= began_s]
        self.periods.append(period)
        if kind == ATTACK:
            self._look(seed)
        return period

    def _attack(self, kind: str, seed: str, amount: Amount, seconds: float) -> float:
        """Attack, and return the time of the begin."""
        ports, token = self._targets[kind]
        self._attacks += 1
        done = attack(
            Orders(
                ports=ports,
                token=token,
                job=JOB,
                seed=seed,
                cases=str(self._findings.directory / f"attack-{self._attacks}"),
                seconds=seconds,
                messages=amount.messages,
                connections=amount.connections,
                servers=amount.servers,
                level=self._level,
            )
        )
        self._findings.take(done.findings)
        self.late += done.late
        self.held_up_s = max(self.held_up_s, done.held_up_s)
        if kind == ATTACK:
            self.health_s += asyncio.run(self.services.healthy_s()).values()
            self.connections += Counter(done.connections)
            self.met += done.met
            self.messages += done.messages
            self.statuses += Counter(done.statuses)
        else:
            self.elsewhere += sum(done.connections.values())
        return done.began_s

    def _look(self, seed: str) -> None:
        """Check that the services live and have closed the attackers' connections; record their memory."""
        if dead := self.services.dead():
            self._findings.add(f"{dead} died", [Case("sockets", seed)], self.logs())
            return
        deadline_s = time.monotonic() + SETTLED_S
        while (more := self._more_files()) and time.monotonic() < deadline_s:
            time.sleep(0.2)
        if more:
            self._findings.add(f"descriptors are not closed: {more}", [Case("sockets", seed)])
        self.memory_mib.append(self.services.memory_mib())
        for name, log in self._logs().items():
            if "Traceback (most recent call last)" in log:
                self._findings.add(f"{name} logged a traceback", [Case("sockets", seed)], log[-4000:])

    def _more_files(self) -> dict[str, int]:
        return {n: f - self._files[n] for n, f in self.services.files().items() if f > self._files[n] + MORE_FILES}

    def _logs(self) -> dict[str, str]:
        shards = {f"shard {i}": self._cluster.process("shard", i).output for i in range(beside.SHARDS)}
        return {"coordinator": self._cluster.process("coordinator").output, **shards}

    def logs(self) -> str:
        """Return the ends of the logs of the services."""
        return "\n".join(f"--- {name}\n{log[-2000:]}" for name, log in self._logs().items())

    def compare_losses(self) -> int:
        """Compare the job's losses with those of a job without an attack; returns the number of steps compared."""
        steps = steps_of(self._path)
        self.uncommitted = sum(not s.committed for s in steps)
        committed = [s.loss for s in steps if s.committed][:COMPARED]
        expected = beside.losses(len(committed))
        for number, (loss, wanted) in enumerate(zip(committed, expected, strict=True)):
            if loss != wanted:
                self._findings.add(f"step {number} of the job beside has loss {loss}, without attack {wanted}", [])
                break
        return len(committed)

    def medians_ms(self) -> dict[str, float]:
        """Return the median step of the job, by kind of period."""
        return {kind: 1000 * statistics.median(steps) for kind in PERIODS if (steps := self._took_s(kind))}

    def longest_ms(self) -> dict[str, float]:
        """Return the longest step, by kind of period."""
        return {kind: 1000 * max(steps) for kind in PERIODS if (steps := self._took_s(kind))}

    def worst_windows(self) -> dict[str, float]:
        """Return the worst window's median step, by kind of period.

        It is a multiple of the mean of the two nearest quiet periods. That of quiet periods is the machine's own
        variation.
        """
        quiet = [(t.began_s, statistics.median(t.windows_ms())) for t in self.periods if t.kind == QUIET and t.steps]
        found: dict[str, float] = {}
        for period in self.periods:
            near = sorted(quiet, key=lambda q: abs(q[0] - period.began_s))[:2]
            if near and period.steps:
                usual = statistics.mean(ms for _, ms in near)
                found[period.kind] = max(found.get(period.kind, 0.0), max(period.windows_ms()) / usual)
        return found

    def growth(self) -> dict[str, float]:
        """Return the memory of each service in the last tenth of the attacks, relative to that after the first."""
        tenth = max(1, len(self.memory_mib) // 10)
        before, after = self.memory_mib[tenth - 1 : 2 * tenth - 1], self.memory_mib[-tenth:]
        return {
            name: statistics.median(m[name] for m in after) / statistics.median(m[name] for m in before)
            for name in self.memory_mib[0]
        }

    def _took_s(self, kind: str) -> list[float]:
        return [s.took_s for t in self.periods if t.kind == kind for s in t.steps]


@contextmanager
def outside(
    findings: Findings, directory: Path, *, level: int = LOW, pause_s: float = 0.0, elsewhere: bool = False
) -> Iterator[Outside]:
    """Run a cluster with a job that trains in this context; its worker must end without an error.

    Args:
        findings: gets the findings.
        directory: directory for the worker's files.
        level: niceness of the attackers.
        pause_s: seconds between two steps of the job.
        elsewhere: whether there is another cluster for attacks.

    Raises:
        AssertionError: the job did not begin.
    """
    path, stop = directory / "steps", directory / "stop"
    kwargs: dict[str, Any] = {"shards": beside.SHARDS, "world_size": 1, "job": JOB}
    with ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster(**kwargs))
        other = stack.enter_context(LocalCluster(**kwargs)) if elsewhere else None
        workers: list[WorkerProcess] = cluster.start_workers(beside.train, args=(str(path), str(stop), pause_s))
        deadline_s = time.monotonic() + 60.0
        while not (path.exists() and len(steps_of(path)) > 20):
            if time.monotonic() > deadline_s or workers[0].process.exit_code is not None:
                raise AssertionError(f"the job beside did not begin: {workers[0].process.output}")
            time.sleep(0.1)
        made = Outside(findings, cluster, other, path, level)
        yield made
        stop.touch()
        results_of(workers, timeout_s=60.0, check=True)
        made.steps = made.compare_losses()

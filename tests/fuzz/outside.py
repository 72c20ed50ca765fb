"""Real services under attack, in turns: a quiet one, one in which others of the same machine are attacked, an attack.

The turn in between says what the attacker itself costs, which shares this machine with the job: it is the same attack,
on the services of another cluster.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import beside
from axon_ps.testing import LocalCluster
from axon_ps.testing.workers import WorkerProcess, results_of
from beside import Services, Step, steps_of
from findings import Case, Findings
from fuzzed_sockets import Sockets
from hostile_servers import HostileServers

JOB: Final = "fuzz"
SETTLED_S: Final = 20.0
"""How long services may take to close what attackers have left."""

MORE_FILES: Final = 12
"""How many more descriptors a service may have than before: connections of the job that were made anew."""

COMPARED: Final = 20_000
"""Steps whose losses are compared, from the first on: they are made again, which takes as long."""

QUIET, ELSEWHERE, ATTACK = "quiet", "elsewhere", "attack"
TURNS: Final = (QUIET, ELSEWHERE, ATTACK)


@dataclass
class Amount:
    """How much a turn attacks.

    Attributes:
        messages: sent in calls.
        connections: hostile ones, to services.
        servers: connections of the SDK's to hostile servers.
    """

    messages: int = 400
    connections: int = 300
    servers: int = 40


@dataclass
class Turn:
    """What a turn was like.

    Attributes:
        kind: quiet, elsewhere or attack.
        seconds: how long.
        steps: of the job.
    """

    kind: str
    seconds: float
    steps: list[Step] = field(default_factory=list)


class Outside:
    """See the module.

    Args:
        findings: where findings go.
        cluster: with a worker that trains.
        other: a cluster that nobody uses.
        path: where the worker writes its steps.
    """

    def __init__(self, findings: Findings, cluster: LocalCluster, other: LocalCluster, path: Path) -> None:
        self.services = Services(cluster)
        self.turns: list[Turn] = []
        self.health_s: list[float] = []
        self.warm_mib: dict[str, float] = {}
        self.memory_mib: dict[str, float] = {}
        self.messages = 0
        self.connections: Counter[str] = Counter()
        self.elsewhere = 0
        self.statuses: Counter[str] = Counter()
        self.met = 0
        self.steps = self.uncommitted = 0
        self._findings = findings
        self._cluster = cluster
        self._targets = {
            ATTACK: (self.services.ports, cluster.token),
            ELSEWHERE: (Services(other).ports, other.token),
        }
        self._path = path
        self._files = self.services.files()

    def turn(self, kind: str, seed: str, amount: Amount, quiet_s: float) -> Turn:
        """One turn; an attack is as long as it takes, a quiet one `quiet_s`."""
        began_s = time.monotonic()
        if kind == QUIET:
            time.sleep(quiet_s)
        else:
            asyncio.run(self._attack(kind, seed, amount))
        turn = Turn(kind, time.monotonic() - began_s)
        turn.steps = [s for s in steps_of(self._path) if s.at_s - s.took_s >= began_s]
        self.turns.append(turn)
        if kind == ATTACK:
            self._look(seed)
        return turn

    async def _attack(self, kind: str, seed: str, amount: Amount) -> None:
        ports, token = self._targets[kind]
        sockets = Sockets(self._findings, ports, JOB, token)
        servers = HostileServers(self._findings)
        calls = sockets.calls(f"{seed}/calls", amount.messages)
        attacks = sockets.attacks(f"{seed}/attacks", amount.connections, 96)
        await asyncio.gather(calls, attacks, servers.run(f"{seed}/servers", amount.servers))
        await sockets.close()
        if kind == ATTACK:
            self.health_s += (await self.services.healthy_s()).values()
            self.connections += sockets.connections
        else:
            self.elsewhere += sockets.connections.total()
        self.messages += sockets.messages
        self.statuses += sockets.statuses
        self.met += servers.connections

    def _look(self, seed: str) -> None:
        """After an attack: whether they live, and have let go of what attackers left; how large they are."""
        if dead := self.services.dead():
            self._findings.add(f"{dead} died", [Case("sockets", seed)], self.logs())
            return
        deadline_s = time.monotonic() + SETTLED_S
        while (more := self._more_files()) and time.monotonic() < deadline_s:
            time.sleep(0.2)
        if more:
            self._findings.add(f"descriptors are not closed: {more}", [Case("sockets", seed)])
        self.memory_mib = self.services.memory_mib()
        if sum(turn.kind == ATTACK for turn in self.turns) == 1:
            self.warm_mib = self.memory_mib
        for name, log in self._logs().items():
            if "Traceback (most recent call last)" in log:
                self._findings.add(f"{name} logged a traceback", [Case("sockets", seed)], log[-4000:])

    def _more_files(self) -> dict[str, int]:
        return {n: f - self._files[n] for n, f in self.services.files().items() if f > self._files[n] + MORE_FILES}

    def _logs(self) -> dict[str, str]:
        shards = {f"shard {i}": self._cluster.process("shard", i).output for i in range(beside.SHARDS)}
        return {"coordinator": self._cluster.process("coordinator").output, **shards}

    def logs(self) -> str:
        """What the services have logged."""
        return "\n".join(f"--- {name}\n{log[-2000:]}" for name, log in self._logs().items())

    def compare_losses(self) -> int:
        """Compare what the job has lost with a job that nobody attacked; returns the number of steps compared."""
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
        """The median step of the job, by kind of turn."""
        found = {kind: [s.took_s for t in self.turns if t.kind == kind for s in t.steps] for kind in TURNS}
        return {kind: 1000 * statistics.median(steps) for kind, steps in found.items() if steps}

    def longest_ms(self) -> dict[str, float]:
        """The longest step, by kind of turn."""
        found = {kind: [s.took_s for t in self.turns if t.kind == kind for s in t.steps] for kind in TURNS}
        return {kind: 1000 * max(steps) for kind, steps in found.items() if steps}


@contextmanager
def outside(findings: Findings, directory: Path) -> Iterator[Outside]:
    """A cluster with a job that trains, and another one; the job's worker ends well in the end."""
    path, stop = directory / "steps", directory / "stop"
    kwargs: dict[str, Any] = {"shards": beside.SHARDS, "world_size": 1, "job": JOB}
    with LocalCluster(**kwargs) as cluster, LocalCluster(**kwargs) as other:
        workers: list[WorkerProcess] = cluster.start_workers(beside.train, args=(str(path), str(stop)))
        deadline_s = time.monotonic() + 60.0
        while not (path.exists() and len(steps_of(path)) > 20):
            if time.monotonic() > deadline_s or workers[0].process.exit_code is not None:
                raise AssertionError(f"the job beside did not begin: {workers[0].process.output}")
            time.sleep(0.1)
        made = Outside(findings, cluster, other, path)
        yield made
        stop.touch()
        results_of(workers, timeout_s=60.0, check=True)
        made.steps = made.compare_losses()

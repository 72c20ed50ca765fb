"""The useful part of a job's time when hosts die, from its life in virtual time with deaths drawn from a seed.

Owns: the cost of a death. A step in which a worker dies or joins is repeated by all workers. A worker that dies under
local steps loses its own progress since the last outer steps. The death of a shard server is a pause if there is a
backup; else all progress since the last checkpoint is lost, too. If servers are on the workers' hosts, a host's
death is both.

The deaths of workers and of servers are independent, so two lives are simulated, with equally many deaths, and their
useful parts are multiplied. In a single life there would be only a few deaths of the rarer kind.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field
from random import Random

from axon_ps_lab.simulate.scenario import Scenario

_DEATHS = 4000
"""Deaths in a life; with so many, the mean is within two percent of that of more deaths."""


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """The use of a job's time.

    Attributes:
        useful: steps of workers that count, divided by the steps for which the workers present had time.
        throughput: steps of workers that count, divided by those of a job without deaths.
    """

    useful: float
    throughput: float


def goodput(scenario: Scenario, step_s: float, *, horizon_s: float = 0.0, seed: int = 0) -> Goodput:
    """Return the part of the time that is useful in spite of deaths.

    Args:
        scenario: the scenario, with the frequency and effects of deaths.
        step_s: seconds of a step; under "local_steps" of an inner one.
        horizon_s: length of the simulated life, from its beginning; 0 = long enough for a mean.
        seed: seed of the times of the deaths.
    """
    failures = scenario.failures
    useful = throughput = 1.0
    workers = "worker", scenario.num_hosts, failures.worker_mtbf_h
    servers = "server", scenario.num_servers, failures.server_mtbf_h
    for kind, count, mtbf_h in (workers, servers):
        if mtbf_h:
            rate = count / (mtbf_h * 3600)
            begin_s = 0.0 if horizon_s else failures.worker_away_s  # then the number of absent hosts is steady
            life = _Life(scenario, step_s, Random(seed), begin_s)
            life.play(kind, rate, horizon_s or begin_s + _DEATHS / rate)
            useful *= life.counted / life.there if life.there else 0.0
            throughput *= life.counted / (scenario.num_hosts * (life.now_s - begin_s))
    return Goodput(useful=useful, throughput=throughput)


@dataclass
class _Life:
    """A job's life.

    Attributes:
        there: summed seconds of the workers that were present.
        counted: the part of these seconds that is in the job's parameters.
        now_s: virtual time.
    """

    scenario: Scenario
    step_s: float
    random: Random
    begin_s: float  # begin of the sums
    there: float = 0.0
    counted: float = 0.0
    now_s: float = 0.0
    paused_until_s: float = 0.0
    unsaved: float = 0.0  # the part of `counted` since the last checkpoint
    unsaved_s: float = 0.0  # seconds since the last checkpoint
    born: list[float] = field(default_factory=list)  # the time at which each present worker joined

    def play(self, kind: str, rate: float, horizon_s: float) -> None:
        """Simulate until `horizon_s`; `rate` is the deaths a second of a kind of hosts while all are present."""
        failures, hosts = self.scenario.failures, self.scenario.num_hosts
        own = not self.scenario.servers.count
        self.born = [0.0] * hosts
        back: list[float] = []
        next_s = self._length_s(rate)
        while min([next_s, *back[:1]]) < horizon_s:
            if back and back[0] <= next_s:
                self._train_until(heapq.heappop(back))
                self.born.append(self.now_s)
                continue
            death_s, next_s = next_s, next_s + self._length_s(rate)
            if kind == "server":
                self._train_until(death_s)
                self._lose_server(failures.server_away_s)
            elif self.born and (failures.regular or self.random.random() * hosts < len(self.born)):
                self._train_until(death_s)
                self._lose_worker()
                heapq.heappush(back, death_s + failures.worker_away_s)
                if own:
                    self._lose_server(failures.worker_away_s)
        self._train_until(horizon_s)

    def _length_s(self, rate: float) -> float:
        return 1 / rate if self.scenario.failures.regular else self.random.expovariate(rate)

    def _train_until(self, then_s: float) -> None:
        """Train until `then_s`; a step that is disturbed then is repeated, unless steps are local."""
        begin_s, alive = max(self.now_s, self.paused_until_s), len(self.born)
        summed = then_s > self.begin_s
        if summed:
            self.there += alive * (then_s - max(self.now_s, self.begin_s))
        self.now_s = then_s
        length_s = max(0.0, then_s - begin_s)
        if not length_s or alive < (self.scenario.failures.min_workers or self.scenario.num_hosts):
            return
        if self.scenario.job.strategy != "local_steps":
            length_s = length_s // self.step_s * self.step_s
        if not summed:
            return
        every_s = self.scenario.failures.checkpoint_every_s or math.inf
        self.counted += alive * length_s
        self.unsaved_s += length_s
        self.unsaved += alive * length_s
        if self.unsaved_s >= every_s:
            self.unsaved_s %= every_s
            self.unsaved = min(self.unsaved, alive * self.unsaved_s)

    def _lose_worker(self) -> None:
        """Let a worker die: with regular times the oldest, else a random one."""
        came_s = self.born.pop(0 if self.scenario.failures.regular else self.random.randrange(len(self.born)))
        job = self.scenario.job
        if job.strategy != "local_steps":
            self.paused_until_s = max(self.paused_until_s, self.now_s + self.scenario.failures.notice_s)
            return
        lived_s, every_s = self.now_s - came_s, job.inner_steps * self.step_s
        phases = ((lived_s + fragment * every_s / job.fragments) % every_s for fragment in range(job.fragments))
        lost_s = sum(min(lived_s, phase) for phase in phases) / job.fragments
        self.counted = max(0.0, self.counted - lost_s)

    def _lose_server(self, away_s: float) -> None:
        """Let a server die; its slices are lost if they have no other copies."""
        failures = self.scenario.failures
        if self.scenario.copies > 1:
            pause_s = failures.promote_s
        else:
            pause_s = away_s + failures.restore_s
            self.counted -= min(self.counted, self.unsaved)
            self.unsaved = self.unsaved_s = 0.0
        self.paused_until_s = max(self.paused_until_s, self.now_s + pause_s)

"""The useful part of the time when hosts die: a job's life in virtual time, with deaths drawn from a seed.

Owns: what a death costs. A step in which a worker dies or comes is made again by all. A worker that dies under local
steps takes its own progress since the last outer steps with it. The death of a shard server is a pause where there is a
replica, and where there is none what came since the last checkpoint is lost. Where servers are on the workers' hosts, a
host's death is both.

Workers and servers that die independently have lives of their own, of as many deaths each, and what is left is the
product: else the rarer kind would be seen a few times only.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field
from random import Random

from axon_ps_lab.simulate.scenario import Scenario

_DEATHS = 4000
"""So many are played: the mean is within two percent of what more of them would give."""


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """The use of a job's time.

    Attributes:
        useful: steps of workers that count, over those that the workers which were there had time for.
        throughput: steps of workers that count, over those of a job in which nothing dies.
    """

    useful: float
    throughput: float


def goodput(scenario: Scenario, step_s: float, *, horizon_s: float = 0.0, seed: int = 0) -> Goodput:
    """The useful part of the time after deaths.

    Args:
        scenario: what dies how often, and what then.
        step_s: seconds of a step; under "local_steps" of an inner one.
        horizon_s: length of the life that is played, from its beginning; 0 = long enough for a mean.
        seed: of the deaths' times.
    """
    failures = scenario.failures
    useful = throughput = 1.0
    workers = "worker", scenario.num_hosts, failures.worker_mtbf_h
    servers = "server", scenario.num_servers, failures.server_mtbf_h
    for kind, count, mtbf_h in (workers, servers):
        if mtbf_h:
            rate = count / (mtbf_h * 3600)
            begin_s = 0.0 if horizon_s else failures.worker_away_s  # until as many are away as ever
            life = _Life(scenario, step_s, Random(seed), begin_s)
            life.play(kind, rate, horizon_s or begin_s + _DEATHS / rate)
            useful *= life.counted / life.there if life.there else 0.0
            throughput *= life.counted / (scenario.num_hosts * (life.now_s - begin_s))
    return Goodput(useful=useful, throughput=throughput)


@dataclass
class _Life:
    """A job's life.

    Attributes:
        there: seconds of workers that were there.
        counted: of these, what is in the job's parameters.
        now_s: virtual time.
    """

    scenario: Scenario
    step_s: float
    random: Random
    begin_s: float  # of what is summed up
    there: float = 0.0
    counted: float = 0.0
    now_s: float = 0.0
    paused_until_s: float = 0.0
    unsaved: float = 0.0  # of `counted`, since the last checkpoint
    unsaved_s: float = 0.0  # since then
    born: list[float] = field(default_factory=list)  # when each worker that is there came

    def play(self, kind: str, rate: float, horizon_s: float) -> None:
        """Live until `horizon_s`, while hosts of a kind die at a rate, when all are there."""
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
        """A step that is disturbed at `then_s` is made again, unless steps are local."""
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
        """One that is there dies: who has been there for longest where times are regular."""
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
        """A server dies, with the only copy of its slices if there are no others."""
        failures = self.scenario.failures
        if self.scenario.copies > 1:
            pause_s = failures.promote_s
        else:
            pause_s = away_s + failures.restore_s
            self.counted -= min(self.counted, self.unsaved)
            self.unsaved = self.unsaved_s = 0.0
        self.paused_until_s = max(self.paused_until_s, self.now_s + pause_s)

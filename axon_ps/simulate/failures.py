"""What is left of the time when hosts die: a job's life in virtual time, with deaths drawn from a seed.

Owns: what a death costs. A step in which a worker dies or comes is made again by all. A worker that dies under local
steps takes its own progress since the last outer steps with it. The death of a shard server is a pause where there is a
replica, and where there is none the steps since the last checkpoint are lost.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from axon_ps.simulate.scenario import Scenario

_DEATHS = 4000
"""So many are played: the mean is within two percent of what more of them would give."""


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """What came of a job's time.

    Attributes:
        useful: steps of workers that count, over those that the workers which were there had time for.
        throughput: steps of workers that count, over those of a job in which nothing dies.
    """

    useful: float
    throughput: float


@dataclass
class _Life:
    """Sums over a job's life, in seconds of workers."""

    there: float = 0.0
    counted: float = 0.0


def goodput(scenario: Scenario, step_s: float, *, horizon_s: float = 0.0, seed: int = 0) -> Goodput:
    """What deaths leave.

    Args:
        scenario: what dies how often, and what then.
        step_s: seconds of a step; under "local_steps" of an inner one.
        horizon_s: length of the life that is played; 0 = long enough for a mean.
        seed: of the deaths' times.
    """
    failures, hosts = scenario.failures, scenario.num_hosts
    worker_mtbf_s, server_mtbf_s = failures.worker_mtbf_h * 3600, failures.server_mtbf_h * 3600
    rates = [
        count / mtbf_s for count, mtbf_s in ((hosts, worker_mtbf_s), (scenario.num_servers, server_mtbf_s)) if mtbf_s
    ]
    if not rates:
        return Goodput(useful=1.0, throughput=1.0)
    horizon_s = horizon_s or _DEATHS / max(rates)
    life = _Life()
    now_s, alive = 0.0, hosts
    paused_until_s = 0.0
    least = failures.min_workers or hosts
    for then_s, event in _events(scenario, horizon_s, seed):
        life.there += alive * (then_s - now_s)
        if alive >= least:
            life.counted += alive * max(0.0, then_s - max(now_s, paused_until_s))
        now_s = then_s
        if event == "server":
            pause_s, lost_s = _server_dies(scenario)
            paused_until_s = max(paused_until_s, now_s + pause_s)
            life.counted -= min(life.counted, hosts * lost_s)
        else:
            died = event == "dies"
            before = alive >= least
            life.counted -= min(life.counted, _disturbed(scenario, step_s, alive, died=died, trained=before))
            alive += -1 if died else event == "back"
    total = hosts * horizon_s
    return Goodput(useful=life.counted / life.there if life.there else 0.0, throughput=life.counted / total)


def _disturbed(scenario: Scenario, step_s: float, alive: int, *, died: bool, trained: bool) -> float:
    """Seconds of workers that a death or a join costs."""
    if not trained:
        return 0.0
    if scenario.job.strategy == "local_steps":
        return step_s * scenario.job.inner_steps / 2 if died else 0.0
    notice_s = scenario.failures.notice_s if died else 0.0
    return alive * (step_s / 2 + notice_s)


def _server_dies(scenario: Scenario) -> tuple[float, float]:
    """Seconds that the job pauses, and seconds of it that are lost."""
    failures = scenario.failures
    if scenario.job.replication > 1:
        return failures.promote_s, 0.0
    if not failures.checkpoint_every_s:
        return failures.server_away_s, math.inf
    return failures.server_away_s + failures.restore_s, failures.checkpoint_every_s / 2


def _events(scenario: Scenario, horizon_s: float, seed: int) -> Iterator[tuple[float, str]]:
    """Deaths and returns in the order of time, and the end."""
    failures, hosts, random = scenario.failures, scenario.num_hosts, Random(seed)
    heap: list[tuple[float, int, str]] = []

    def after(now_s: float, mtbf_h: float, count: int, event: str) -> None:
        if mtbf_h and count:
            mean_s = mtbf_h * 3600 / count
            length_s = mean_s if failures.regular else random.expovariate(1 / mean_s)
            heapq.heappush(heap, (now_s + length_s, len(heap), event))

    after(0.0, failures.worker_mtbf_h, hosts, "dies")
    after(0.0, failures.server_mtbf_h, scenario.num_servers, "server")
    away = 0
    while heap and heap[0][0] < horizon_s:
        now_s, _, event = heapq.heappop(heap)
        if event == "dies":
            after(now_s, failures.worker_mtbf_h, hosts, "dies")
            if away == hosts:
                continue
            away += 1
            heapq.heappush(heap, (now_s + failures.worker_away_s, len(heap), "back"))
        elif event == "server":
            after(now_s, failures.server_mtbf_h, scenario.num_servers, "server")
        else:
            away -= 1
        yield now_s, event
    yield horizon_s, "end"

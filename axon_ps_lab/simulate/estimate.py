"""The result of a simulation of a scenario, and the comparison of several numbers of servers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from axon_ps_lab.simulate.failures import Goodput, goodput
from axon_ps_lab.simulate.memory import server_bytes, worker_bytes
from axon_ps_lab.simulate.profile import Profile
from axon_ps_lab.simulate.scenario import Scenario
from axon_ps_lab.simulate.step import StepTimes, play


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The forecast for a cluster.

    Attributes:
        servers: number of shard servers.
        step: times of a step; of an inner one under "local_steps".
        worker_bytes: memory of a worker, without activations.
        server_bytes: memory of a shard server.
        goodput: the part of the work that deaths leave.
        tokens_per_s: tokens a second of all workers, without deaths.
        per_hour: price of all hosts.
    """

    servers: int
    step: StepTimes
    worker_bytes: int
    server_bytes: int
    goodput: Goodput
    tokens_per_s: float
    per_hour: float

    @property
    def useful_tokens_per_s(self) -> float:
        """Tokens a second that count, with deaths."""
        return self.tokens_per_s * self.goodput.throughput

    @property
    def per_million_tokens(self) -> float:
        """Price of a million tokens that count."""
        return self.per_hour / 3600 / self.useful_tokens_per_s * 1e6 if self.useful_tokens_per_s else float("inf")

    def hours(self, steps: int) -> float:
        """Return the hours that so many steps take."""
        return steps * self.step.step_s / 3600 / self.goodput.throughput if self.goodput.throughput else float("inf")


def estimate(scenario: Scenario, profile: Profile) -> Estimate:
    """Simulate a scenario.

    Raises:
        InvalidRequest: the profile lacks costs that the job needs.
    """
    step = play(scenario, profile)
    workers, servers = scenario.workers, scenario.servers
    devices = sum(group.count * group.devices for group in workers)
    return Estimate(
        servers=scenario.num_servers,
        step=step,
        worker_bytes=worker_bytes(scenario),
        server_bytes=server_bytes(scenario),
        goodput=goodput(scenario, step.step_s),
        tokens_per_s=devices * scenario.job.tokens / step.step_s,
        per_hour=sum(group.count * group.per_hour for group in workers) + servers.count * servers.per_hour,
    )


def sweep(scenario: Scenario, profile: Profile, counts: Iterable[int]) -> list[Estimate]:
    """Simulate a scenario with each of these numbers of servers.

    Raises:
        InvalidRequest: a number of servers is too small, or the profile lacks costs.
    """
    return [estimate(scenario.with_servers(count), profile) for count in counts]


def best(estimates: Iterable[Estimate]) -> Estimate:
    """Choose the estimate to rent: the cheapest by token, or without prices the smallest within 5 % of the fastest."""
    found = list(estimates)
    if all(each.per_hour for each in found):
        return min(found, key=lambda each: (each.per_million_tokens, each.servers))
    fastest = max(each.useful_tokens_per_s for each in found)
    return min((e for e in found if e.useful_tokens_per_s >= 0.95 * fastest), key=lambda each: each.servers)

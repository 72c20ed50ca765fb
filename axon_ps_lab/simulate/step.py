"""Steps of a job in virtual time, in the runtime's order of events.

Owns: the dependencies of a step's events. The rules are those of `parallel.fsdp.gathering` (Note: [Memory]),
`parallel.fsdp.on_servers.speculation` (Note: [Speculative gathers]), `parallel.diloco` and `shard.client.line`. When
these change, this module must change, too; `benchmarks/simulator.py` shows a difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import simpy

from axon_ps.errors import InvalidRequest
from axon_ps.shard.client.line import filling_s
from axon_ps.sharding.traffic import BUFFERS, fitting
from axon_ps_lab.simulate.cluster import Cluster, Hosts
from axon_ps_lab.simulate.fluid import Process, Resource
from axon_ps_lab.simulate.profile import Profile
from axon_ps_lab.simulate.scenario import Scenario
from axon_ps_lab.simulate.tables import DTYPES, WorkersTable

_FORWARD = 1 / 3  # of compute; backward makes two products for forward's one
_SHORT = 0.5  # of a step; a resource in use for longer limits the step
_COMPUTE = "the compute of a worker"
_STEPS = 4  # steps that are simulated; the last one is the result


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """A step of the slowest group of workers.

    Attributes:
        step_s: time from one decision to the next.
        compute_s: time of forward and backward alone.
        gather_wait_s: time waiting for parameters.
        push_wait_s: time waiting for free memory for a gradient, or until the last gradients are sent.
        decision_wait_s: time waiting for the other workers and for the decision.
        received_bytes: bytes that a worker host receives from all servers.
        sent_bytes: bytes that a worker host sends to all servers.
        server_busy: processor seconds of a shard server per second of a step.
        in_use: by resource, the fraction of a step in which it is in use; the highest first.
    """

    step_s: float
    compute_s: float
    gather_wait_s: float
    push_wait_s: float
    decision_wait_s: float
    received_bytes: float
    sent_bytes: float
    server_busy: float
    in_use: Mapping[str, float]

    @property
    def bottleneck(self) -> str:
        """The resource in use for most of a step, as text; after "waits" if it is in use for less than half of it."""
        name, fraction = next(iter(self.in_use.items()))
        return (
            f"{name} ({fraction:.0%} of a step)"
            if fraction >= _SHORT
            else f"waits; most in use: {name} ({fraction:.0%})"
        )


@dataclass(eq=False)
class _Step:
    """One step of the job."""

    pushed: list[list[int]]  # by unit and stage, the number of groups that have pushed
    updated: list[list[simpy.Event]]  # by unit and stage
    votes: int
    decided: simpy.Event


class _Job:
    """The state that all workers share: pushed gradients, updates, votes."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.speculates = not cluster.scenario.job.clip
        self._steps: dict[int, _Step] = {}

    def step(self, number: int) -> _Step:
        """Return the step of this number."""
        if number not in self._steps:
            env, units = self.cluster.env, range(len(self.cluster.scenario.spec.layout.units))
            stages = [range(self.cluster.stages(unit)) for unit in units]
            pushed = [[0 for _ in each] for each in stages]
            updated = [[env.event() for _ in each] for each in stages]
            self._steps[number] = _Step(pushed, updated, 0, env.event())
        return self._steps[number]

    def pushed(self, number: int, unit: int, stage: int) -> None:
        """Count a group's gradients that have arrived at the servers."""
        step = self.step(number)
        step.pushed[unit][stage] += 1
        if step.pushed[unit][stage] == len(self.cluster.workers):
            self.cluster.env.process(self._sum(step, unit, stage))

    def _sum(self, step: _Step, unit: int, stage: int) -> Process:
        """Send sums to backups when all groups have pushed, and update if the step's hyperparameters are known."""
        yield self.cluster.replicate(unit)
        if self.speculates:
            yield self.cluster.env.process(self._update(step, unit, stage))

    def _update(self, step: _Step, unit: int, stage: int) -> Process:
        yield self.cluster.update(unit)
        step.updated[unit][stage].succeed()

    def vote(self, number: int) -> simpy.Event:
        """Count the vote of a group; returns the event of the decision."""
        step = self.step(number)
        step.votes += 1
        if step.votes == len(self.cluster.workers):
            self.cluster.env.process(self._decide(step))
        return step.decided

    def _decide(self, step: _Step) -> Process:
        yield self.cluster.env.timeout(self.cluster.profile.decision_s)  # with the replies to the last pushes
        step.decided.succeed()
        if not self.speculates:
            for unit, stages in enumerate(step.updated):
                for stage in range(len(stages)):
                    self.cluster.env.process(self._update(step, unit, stage))


class _Worker:
    """The workers of a group; one of them is simulated for all."""

    def __init__(self, cluster: Cluster, job: _Job, hosts: Hosts, kind: WorkersTable) -> None:
        scenario = cluster.scenario
        self._cluster, self._job, self._hosts, self._kind = cluster, job, hosts, kind
        self._env = cluster.env
        self._numel = [unit.numel for unit in scenario.spec.layout.units]
        self._blocks = range(1, len(self._numel))
        self._resident = scenario.job.strategy != "full_shard" or scenario.job.offload_params
        self._buffered = scenario.buffered(kind)
        compute_s = kind.step_s(scenario.model, scenario.job)
        self._compute_s = [compute_s * numel / sum(self._numel) for numel in self._numel]
        self._have: dict[int, simpy.Event] = {}  # units that are present or on their way
        largest = max(self._numel[1:], default=self._numel[0])
        self._itemsize = DTYPES[scenario.job.compute].itemsize
        self._wire_itemsize = scenario.gathered_as.itemsize
        under_way = round(hosts.received.capacity * filling_s(cluster.rtt_s)) if cluster.far else 0
        self._budget = BUFFERS * largest * self._itemsize + under_way  # bytes of parameters, without the root
        self._buffers = BUFFERS * largest * self._wire_itemsize + under_way  # bytes of buffers of gathers
        in_use = self._itemsize + (self._wire_itemsize if self._buffered else 0)  # of an element that is unsharded
        sizes = [numel * in_use for numel in self._numel[1:]]
        self._staying = len(sizes) - fitting(reversed(sizes), self._budget)  # units after it stay for backward
        self._first = fitting([0, *sizes], self._budget)  # units before it are gathered before the decision
        self._capacity = BUFFERS * largest + under_way // self._itemsize  # elements of gradients
        self._pushing: dict[simpy.Event, int] = {}  # elements of each push
        self._permits = {way: simpy.Resource(self._env, 1) for way in (True, False)} if cluster.far else {}
        # see `shard.client.server_lines.IN_ORDER_BYTES`
        two_hosts = cluster.own and scenario.num_hosts == 2 and not cluster.far
        self._in_order = simpy.PriorityResource(self._env, 1) if two_hosts else None
        self.waits = {"gather": 0.0, "push": 0.0, "decision": 0.0}
        self.totals: list[_Total] = []  # by step
        self.inner_steps = 1  # in each outer step

    # ------------------------------------------------------------------ transfers

    def _in_node(self, unit: int) -> simpy.Event:
        """Share a unit among a node's devices, or sum its gradients, by a ring: (N - 1) / N of the bytes each way."""
        devices = self._kind.devices
        size_bytes = self._itemsize * self._numel[unit]
        return self._env.timeout(size_bytes * (devices - 1) / devices / (self._kind.device_gb_per_s * 1e9))

    @contextmanager
    def _permit(self, *, inward: bool) -> Iterator[simpy.Event]:
        """Wait for the order of transfers on a long line; see `shard.client.line`."""
        if not self._permits:
            yield self._env.timeout(0.0)
            return
        with self._permits[inward].request() as permit:
            yield permit

    def _gather(self, unit: int, step: _Step | None = None) -> Process:
        """Gather a unit; for a step that is not decided, in stages, each once it is updated."""
        yield self._env.timeout(self._cluster.rtt_s / 2)
        with self._permit(inward=True) as permit:
            yield permit
            for stage in range(self._cluster.stages(unit)):
                if step is not None:
                    yield step.updated[unit][stage]
                yield self._cluster.move(self._hosts, unit, inward=True)
        yield self._env.timeout(self._cluster.rtt_s / 2)
        yield self._in_node(unit)

    def _gather_in_order(self, unit: int, step: _Step, order: simpy.PriorityResource) -> Process:
        with order.request(priority=unit) as permit:
            yield permit
            yield self._env.process(self._gather(unit, step))

    def _push(self, number: int, unit: int) -> Process:
        yield self._in_node(unit)
        with self._permit(inward=False) as permit:
            yield permit
            for stage in range(self._cluster.stages(unit)):
                yield self._cluster.move(self._hosts, unit, inward=False)
                self._env.process(self._arrive(number, unit, stage))
        yield self._env.timeout(self._cluster.rtt_s)

    def _arrive(self, number: int, unit: int, stage: int) -> Process:
        yield self._env.timeout(self._cluster.rtt_s / 2)
        self._job.pushed(number, unit, stage)

    def _start(self, unit: int, step: _Step | None = None) -> None:
        if unit not in self._have:
            self._have[unit] = self._env.process(self._gather(unit, step))

    def _used(self, units: Mapping[int, simpy.Event]) -> int:
        """Return the bytes of units that are present or on their way, without the root."""
        return sum(
            self._numel[u] * (self._itemsize if e.processed else self._wire_itemsize) for u, e in units.items() if u
        )

    def _has_capacity(self, unit: int) -> bool:
        """Return True if a unit may be gathered before it is needed; see `UnitGathering.prefetch`."""
        gather_bytes = self._numel[unit] * self._wire_itemsize
        coming = sum(self._numel[u] * self._wire_itemsize for u, e in self._have.items() if not e.processed)
        if self._buffered and coming and coming + gather_bytes > self._buffers:
            return False
        return not unit or self._resident or self._used(self._have) + gather_bytes <= self._budget

    def _prefetch(self, upcoming: Iterable[int], step: _Step | None = None) -> None:
        """Gather the units needed next while memory is free; with a `step`, each of their stages once it is updated."""
        for unit in upcoming:
            if unit in self._have:
                continue
            if not self._has_capacity(unit):
                return
            self._start(unit, step)

    # ------------------------------------------------------------------ a step

    def _wait(self, what: str, event: simpy.Event) -> Process:
        began = self._env.now
        yield event
        self.waits[what] += self._env.now - began

    def _need(self, unit: int, upcoming: Sequence[int]) -> Process:
        self._start(unit)
        yield from self._wait("gather", self._have[unit])
        self._prefetch(upcoming)

    def _compute(self, unit: int, fraction: float) -> simpy.Event:
        return self._cluster.compute(self._hosts, self._kind, self._compute_s[unit] * fraction)

    def _push_within_capacity(self, number: int, unit: int) -> Process:
        numel = self._numel[unit]
        most = self._capacity - numel
        while (under_way := self._under_way()) and sum(self._pushing[push] for push in under_way) > most:
            yield from self._wait("push", self._env.any_of(under_way))
        self._pushing[self._env.process(self._push(number, unit))] = numel

    def _under_way(self) -> list[simpy.Event]:
        return [push for push in self._pushing if not push.processed]

    def _reshard(self, unit: int) -> None:
        if not self._resident:
            self._have.pop(unit, None)

    def run(self) -> Process:
        """Simulate all steps of the workers."""
        for number in range(_STEPS):
            yield from self._forward()
            expected: dict[int, simpy.Event] = {}
            yield from self._backward(number, expected)
            yield from self._wait("push", self._env.all_of(self._under_way()))
            step = self._job.step(number)
            yield from self._wait("decision", self._job.vote(number))
            self._pushing, self._have = {}, expected
            self._prefetch(range(len(self._numel)), step)
            self._end_step()

    def _end_step(self) -> None:
        moved = self._cluster.bytes[self._hosts, True], self._cluster.bytes[self._hosts, False]
        waits, used = tuple(self.waits.values()), self._cluster.used()
        self.totals.append(_Total(self._env.now, waits, moved, self._cluster.server_cpu_s, used))

    def _forward(self) -> Process:
        backward = list(reversed(self._blocks))
        yield from self._need(0, [*self._blocks, *backward])
        for unit in self._blocks:
            upcoming = [*range(unit + 1, len(self._numel)), *backward]
            yield from self._need(unit, upcoming)
            yield self._compute(unit, _FORWARD)
            if unit <= self._staying:
                self._reshard(unit)
            self._prefetch(upcoming)
        yield self._compute(0, _FORWARD)

    def _backward(self, number: int, expected: dict[int, simpy.Event]) -> Process:
        """Run backward. The root is computed first, like a head. The root's gradient is complete at the end."""
        yield self._compute(0, 1 - _FORWARD)
        for unit in reversed(self._blocks):
            upcoming = list(range(unit - 1, 0, -1))
            yield from self._need(unit, upcoming)
            yield self._compute(unit, 1 - _FORWARD)
            self._reshard(unit)
            yield from self._push_within_capacity(number, unit)
            self._speculate(number, unit, expected)
            self._prefetch(upcoming)
        yield from self._push_within_capacity(number, 0)
        self._speculate(number, 0, expected)

    def _speculate(self, number: int, unit: int, expected: dict[int, simpy.Event]) -> None:
        """Gather a unit behind its push, with the values that the step will give it."""
        if not self._job.speculates or (self._buffered and not self._resident):
            return
        if not self._resident and unit:
            used = self._used(self._have) + self._used(expected)
            if unit >= self._first or used + self._numel[unit] * self._itemsize > self._budget:
                return
        step, order = self._job.step(number), self._in_order
        expected[unit] = self._env.process(
            self._gather(unit, step) if order is None else self._gather_in_order(unit, step, order)
        )


class _LocalSteps(_Worker):
    """Workers that make inner steps, and then an outer step of a fragment; see `parallel.diloco`."""

    def run(self) -> Process:
        """Simulate `_STEPS` outer steps, each of the next fragment."""
        job = self._cluster.scenario.job
        self.inner_steps = job.inner_steps // job.fragments
        inner_s = sum(self._compute_s)
        under_way: simpy.Event | None = None
        for number in range(_STEPS):
            for inner in range(self.inner_steps):
                yield self._cluster.compute(self._hosts, self._kind, inner_s)
                if under_way is not None and inner + 1 == job.overlap_steps:
                    yield from self._wait("decision", under_way)
                    under_way = None
            under_way = self._env.process(self._outer_step(number))
            if not job.overlap_steps:
                yield from self._wait("decision", under_way)
                under_way = None
            self._end_step()

    def _outer_step(self, number: int) -> Process:
        fragment = number % len(self._numel)
        yield self._env.process(self._push(number, fragment))
        yield self._job.vote(number)
        yield self._env.process(self._gather(fragment, self._job.step(number)))


@dataclass(frozen=True)
class _Total:
    """The counters at the end of a step, summed since the begin."""

    now_s: float
    waits: tuple[float, ...]
    moved: tuple[float, float]
    server_cpu_s: float
    used: Mapping[Resource, float]


def play(scenario: Scenario, profile: Profile) -> StepTimes:
    """Return the times of a step of a scenario, once steps are alike.

    Raises:
        InvalidRequest: the profile lacks costs of the optimizer, or of a wire form.
    """
    _check(scenario, profile)
    env = simpy.Environment()
    cluster = Cluster(scenario, profile, env)
    job = _Job(cluster)
    kind = _LocalSteps if scenario.job.strategy == "local_steps" else _Worker
    workers = [kind(cluster, job, hosts, each) for hosts, each in zip(cluster.workers, scenario.workers, strict=True)]
    for worker in workers:
        env.process(worker.run())
    env.run()
    slowest = min(workers, key=lambda worker: worker.waits["decision"])
    before, last = slowest.totals[-2:]
    steps, step_s = slowest.inner_steps, last.now_s - before.now_s
    gather_s, push_s, decision_s = (now - then for now, then in zip(last.waits, before.waits, strict=True))
    compute_s = max(group.step_s(scenario.model, scenario.job) for group in scenario.workers)
    fractions = {r.name: (used - before.used[r]) / (r.capacity * step_s) for r, used in last.used.items()}
    fractions[_COMPUTE] = compute_s * steps / step_s
    return StepTimes(
        step_s=step_s / steps,
        compute_s=compute_s,
        gather_wait_s=gather_s / steps,
        push_wait_s=push_s / steps,
        decision_wait_s=decision_s / steps,
        received_bytes=(last.moved[0] - before.moved[0]) / steps,
        sent_bytes=(last.moved[1] - before.moved[1]) / steps,
        server_busy=(last.server_cpu_s - before.server_cpu_s) / step_s,
        in_use=dict(sorted(fractions.items(), key=lambda each: -each[1])),
    )


def _check(scenario: Scenario, profile: Profile) -> None:
    if (optimizer := scenario.servers_optimizer) not in profile.update_s:
        raise InvalidRequest(f"the profile has no cost of {optimizer!r}; it has {', '.join(profile.update_s)}")
    for wire in (scenario.job.sent, scenario.job.reduced):
        if wire not in profile.wires:
            raise InvalidRequest(f"the profile has no costs of {wire!r}; it has {', '.join(profile.wires)}")

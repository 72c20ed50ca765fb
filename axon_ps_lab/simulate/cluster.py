"""The hosts of a scenario, and the use of their resources by transfers, updates and compute.

Equal hosts are one `Hosts` with a count: they do the same at the same time. A transfer between all workers of a group
and all servers is one activity, whose unit is an element between one pair.
"""

from __future__ import annotations

from dataclasses import dataclass

import simpy

from axon_ps.shard.client.line import SHORT_RTT_S
from axon_ps.sharding.traffic import gathered_bytes, sent_bytes
from axon_ps_lab.simulate.fluid import Fluid, Resource
from axon_ps_lab.simulate.profile import Profile
from axon_ps_lab.simulate.scenario import Scenario
from axon_ps_lab.simulate.tables import WorkersTable

RECEIVED = 0.94
"""The fraction of its rate at which a card receives from several hosts that send at once.

TCP then loses packets, and waits before it sends again (incast; Chen et al. 2009,
https://doi.org/10.1145/1592681.1592693).
"""
FAR = 0.84
"""The fraction of its rate that a line with a long round trip carries: bursts fill its queue, and TCP recovers slowly.

This and `RECEIVED` are the only fitted values. They are fitted to every second configuration of
`benchmarks/simulator.py`.
"""

_STAGES = 4


@dataclass(eq=False)
class Hosts:
    """Equal hosts.

    Attributes:
        count: number of hosts.
        received, sent: the card of each host, in bytes a second.
        cores: the processors of each host.
        loop: the threads that move the bytes of each host, one for each process.
    """

    count: int
    received: Resource
    sent: Resource
    cores: Resource
    loop: Resource

    @classmethod
    def of(
        cls, name: str, count: int, rate: float, cores: Resource, *, senders: int, far: bool, processes: int = 1
    ) -> Hosts:
        """Make hosts whose cards carry `rate` bytes a second, and receive from `senders` hosts at once."""
        rate *= FAR if far else 1.0
        return cls(
            count,
            Resource(f"the card of {name}, receiving", rate * (RECEIVED if senders > 1 else 1.0)),
            Resource(f"the card of {name}, sending", rate),
            cores,
            Resource(f"the threads of {name} that move bytes", float(processes)),
        )


class Cluster:
    """The resources of a scenario, and transfers over them."""

    def __init__(self, scenario: Scenario, profile: Profile, env: simpy.Environment) -> None:
        self.scenario, self.profile, self.env = scenario, profile, env
        self.fluid = Fluid(env)
        self.rtt_s = scenario.network.rtt_ms / 1e3
        self.far = self.rtt_s > SHORT_RTT_S
        self._units = scenario.spec.layout.units
        self._plan = scenario.spec.plan(scenario.num_servers)
        shared = scenario.network.shared_cores
        one = Resource("the machine's cores", float(shared)) if shared else None

        def cores(name: str, given: int) -> Resource:
            return one or Resource(f"the cores of {name}", float(given or profile.cores))

        self.workers = [
            Hosts.of(
                self._name(i),
                group.count,
                scenario.network.payload_rate(group.rate_mbit),
                cores(self._name(i), group.cores),
                senders=scenario.num_servers - (not scenario.servers.count),
                far=self.far,
                processes=group.devices,
            )
            for i, group in enumerate(scenario.workers)
        ]
        servers = scenario.servers
        self.own = not servers.count
        if self.own:
            card = self.workers[0]
            self.servers = Hosts(
                card.count,
                card.received,
                card.sent,
                card.cores,
                Resource("the threads of a server that move bytes", 1.0),
            )
        else:
            rate = scenario.network.payload_rate(servers.rate_mbit)
            server_cores = cores("a server", servers.cores)
            self.servers = Hosts.of(
                "a server", servers.count, rate, server_cores, senders=scenario.num_hosts, far=self.far
            )
        self.server_cpu_s = 0.0  # of one server
        self.bytes = {(group, inward): 0.0 for group in self.workers for inward in (True, False)}  # of one host

    def _name(self, group: int) -> str:
        """Return the name of a group's hosts, for messages."""
        return "a worker host" if len(self.scenario.workers) == 1 else f"a worker host of group {group}"

    def used(self) -> dict[Resource, float]:
        """Return the amount of each resource that has been used until now."""
        self.fluid.advance()
        hosts = (*self.workers, self.servers)
        return {r: r.used for each in hosts for r in (each.received, each.sent, each.cores, each.loop)}

    def numel(self, unit: int) -> int:
        """Return the elements of a unit."""
        return self._units[unit].numel

    def _wire_bytes(self, unit: int, inward: bool) -> int:
        """Return the bytes of a unit that come from all servers, or that go to them."""
        of_form = gathered_bytes if inward else sent_bytes
        return of_form(self.scenario.spec.precision, self.numel(unit))

    def _uses(self, group: Hosts, inward: bool, unit: int) -> dict[Resource, float]:
        """Return the use of each resource by an element that moves between each pair of a worker and a server."""
        servers, job, profile = self.servers, self.scenario.job, self.profile
        wire = job.sent if inward else job.reduced
        cost = profile.wires[wire]
        numel = self.numel(unit)
        by_element = self._wire_bytes(unit, inward) / numel
        holders = len(self._plan.slices[unit])
        by_call = holders / numel  # calls by element of a pair
        worker_s = (cost.worker_gather_s if inward else cost.worker_push_s) + profile.worker_call_s * by_call
        server_s = (cost.server_gather_s if inward else cost.server_push_s) + profile.server_call_s * by_call
        self.server_cpu_s += server_s * group.count * numel / servers.count / self.stages(unit)
        remote = servers.count - self.own  # servers of a worker that are behind other cards
        uses: dict[Resource, float] = {}

        def add(resource: Resource, amount: float) -> None:
            if amount:
                uses[resource] = uses.get(resource, 0.0) + amount

        add(group.received if inward else group.sent, remote * by_element)
        add(servers.sent if inward else servers.received, (group.count - self.own) * by_element)
        add(group.loop, servers.count * worker_s)
        add(servers.loop, group.count * server_s)
        pairs = group.count * servers.count if self.scenario.network.shared_cores else 0
        add(group.cores, (pairs or servers.count) * worker_s)
        add(servers.cores, (pairs or group.count) * server_s)
        return uses

    def stages(self, unit: int) -> int:
        """Return the number of stages in which a unit is moved: one for each chunk of a slice, at most `_STAGES`."""
        return min(_STAGES, -(-self.numel(unit) // (self.servers.count * self.scenario.spec.options.chunk_numel)))

    def move(self, group: Hosts, unit: int, *, inward: bool) -> simpy.Event:
        """Move a stage of a unit between the workers of a group and the servers."""
        stages = self.stages(unit)
        self.bytes[group, inward] += self._wire_bytes(unit, inward) / stages
        return self.fluid.run(self.numel(unit) / self.servers.count / stages, self._uses(group, inward, unit))

    def replicate(self, unit: int) -> simpy.Event:
        """Send a stage's sums of a unit from every server to the servers that have copies of its slice."""
        job, servers = self.scenario.job, self.servers
        copies, cost = self.scenario.copies - 1, self.profile.wires[job.reduced]
        numel = self.numel(unit) / servers.count / self.stages(unit) if copies else 0.0
        both_s = copies * (cost.server_push_s + cost.server_gather_s)
        self.server_cpu_s += both_s * numel
        size = float(copies * self.scenario.spec.precision.grad.itemsize)
        cores = both_s * self._together
        return self.fluid.run(
            numel, {servers.sent: size, servers.received: size, servers.loop: both_s, servers.cores: cores}
        )

    def update(self, unit: int) -> simpy.Event:
        """Update and encode a stage of a unit on every server."""
        encode_s = self.profile.wires[self.scenario.job.sent].server_encode_s
        by_element = self.profile.update_s[self.scenario.servers_optimizer] * self.scenario.copies + encode_s
        numel = self.numel(unit) / self.servers.count / self.stages(unit)
        self.server_cpu_s += by_element * numel
        return self.fluid.run(by_element * numel, {self.servers.cores: self._together}, most=1.0, weight=1e9)

    @property
    def _together(self) -> float:
        """The number of servers on the same cores."""
        return float(self.servers.count if self.scenario.network.shared_cores else 1)

    def compute(self, group: Hosts, kind: WorkersTable, seconds: float) -> simpy.Event:
        """Compute for `seconds` on a device of each worker of a group."""
        if kind.device != "cpu":
            return self.env.timeout(seconds)
        together = group.count if self.scenario.network.shared_cores else 1
        return self.fluid.run(seconds, {group.cores: float(together)}, most=1.0, weight=1e9)

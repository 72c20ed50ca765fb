"""Replicas that step asynchronously, in any order of events: coordinator, shard servers and workers as pure machines.

Events travel late, gradients arrive in pieces and twice, applying takes time, members die and join, the coordinator
restarts. Each gradient is made of integers of its own and the optimizer is plain SGD, so the parameters are exactly
minus the sum of the gradients that were applied: every decision counts once, everywhere, in one order.
"""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from axon_ps.coordinator.client.delivery import Delivery
from axon_ps.coordinator.core.actions import Action, SendEvent
from axon_ps.coordinator.core.records import decision_record
from axon_ps.coordinator.messages import ready_from_proto, vote_from_proto
from axon_ps.errors import StepAborted
from axon_ps.shard.core import gradients
from axon_ps.shard.core.engine import ShardEngine
from axon_ps.shard.core.slices import OwnedSlice
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.layout import Layout, build_unit
from axon_ps.sharding.plan import PlanOptions
from axon_ps.sharding.policy import Asynchronous, BoundedStaleness, Policy
from axon_ps.types import Array, Decision, DType, Membership, OptimizerSpec, Outcome, Role
from axon_ps.wire.events import JobState, Ready, Vote
from axon_ps.worker.steps.stepping import AsynchronousSteps, Origin
from coordinator_driver import Driver, Peer

LAYOUT = Layout(units=(build_unit("a", [("a", (12,), DType.F32)]), build_unit("b", [("b", (8,), DType.F32)])))
OPTIMIZER = OptimizerSpec(name="sgd", groups=({"lr": 1.0},), group_of=(0, 0))
SERVERS = 2


class Client:
    """A member: the delivery state of its session, and the events sent to it that it has not received yet."""

    def __init__(self, sim: Simulation, peer: Peer) -> None:
        self.sim, self.peer = sim, peer
        self.delivery = Delivery()
        self.resends = False

    def deliver(self) -> bool:
        """Receive the next event."""
        if not self.peer.inbox:
            return False
        event = self.peer.inbox.pop(0)
        for new in self.delivery.receive(event):
            self.receive(new)
        if self.resends and isinstance(event, Membership):  # it is let in
            self.resends = False
            for message in self.delivery.to_resend():
                if message.HasField("vote"):
                    self.send(vote_from_proto(message.vote))
                elif message.HasField("ready"):
                    self.send(ready_from_proto(message.ready))
        return True

    def receive(self, event: Any) -> None:
        raise NotImplementedError

    def record(self, message: Vote | Ready, replica: int) -> None:
        for event in self.delivery.record(message, replica):
            self.receive(event)
        if not self.delivery.to_resend() or not self.peer.open:
            return
        self.send(message)

    def send(self, message: Vote | Ready) -> None:
        d = self.sim.d
        if isinstance(message, Vote):
            d.perform(d.state.vote([self.peer.session], message, d.clock()))
        else:
            d.perform(d.state.ready(self.peer.session, message, d.clock()))

    def come_back(self) -> None:
        """A new stream: receive what was missed, send again what is not settled."""
        self.peer.inbox.clear()
        self.resends = True
        self.peer.join()
        while self.deliver():
            pass


class Server(Client):
    """A shard server, as `shard.server.shell` runs its engine."""

    def __init__(self, sim: Simulation, peer: Peer) -> None:
        super().__init__(sim, peer)
        self.engine = ShardEngine()
        self.waiting: deque[Any] = deque()
        self.slices: list[OwnedSlice] = []  # that are being applied
        self.reported: dict[int, tuple[int, int]] = {}

    def receive(self, event: Any) -> None:
        if self.slices:
            self.waiting.append(event)
        else:
            self.take(event)

    def take(self, event: Any) -> None:
        e = self.engine
        if isinstance(event, Membership):
            e.membership(event.generation, event.step, event.version, event.num_replicas)
        elif isinstance(event, JobState) and event.spec is not None and not e.configured:
            e.configure(event.spec, self.peer.rank, SERVERS, event.placement)
        elif isinstance(event, Decision):
            self.slices = e.decide(event)
        if isinstance(event, JobState) and event.optimizer is not None and e.optimizer.updater is None:
            e.optimizer.set(event.optimizer)
        self.report()

    def report(self) -> None:
        for replica, clock in self.engine.gradients.complete():
            name = (self.engine.generation, clock)
            sums, placement = self.engine.gradients.ready(replica), self.engine.placement
            if self.reported.get(replica) != name and sums is not None and placement is not None:
                self.reported[replica] = name
                ready = Ready(
                    generation=name[0], step=clock, sums_of_squares=sums, replica=replica, placement=placement.number
                )
                self.record(ready, replica)

    def apply(self) -> bool:
        """Finish one slice of the step that is being applied."""
        if not self.slices:
            return False
        owned = self.slices.pop(0)
        for index in range(len(owned.chunks.bounds)):
            owned.change.apply(index, index + 1, self.engine.scratch())
        owned.finish()
        if not self.slices:
            self.report()
            while self.waiting and not self.slices:
                self.take(self.waiting.popleft())
        return True


class Worker(Client):
    """A worker, as `worker.steps` makes its steps."""

    def __init__(self, sim: Simulation, peer: Peer) -> None:
        super().__init__(sim, peer)
        self.stepping = AsynchronousSteps(sim.policy)
        self.version = 0
        self.generation = 0
        self.origin: Origin | None = None
        self.name = (0, 0, 0)  # (generation, replica, clock) of the step under way
        self.left: list[tuple[Server, int, int, int]] = []
        self.voted = False
        self.waits: int | None = None

    def receive(self, event: Any) -> None:
        if isinstance(event, Membership):
            self.generation, self.version = event.generation, event.version
            ours = [m.replica for m in event.workers if m.incarnation == self.peer.incarnation]
            self.stepping.begin(event.generation, 0, ours[0] if ours else -1)
            if self.origin is not None and self.name[0] != event.generation:
                self.end(Outcome.ABORT)
        elif isinstance(event, Decision):
            self.version = event.version
            replica_clock = event.replica_clock
            name = None if replica_clock is None else (event.generation, replica_clock.replica, replica_clock.clock)
            self.stepping.decided(event)
            if self.voted and name == self.name:
                self.end(event.outcome)

    def end(self, outcome: Outcome) -> None:
        self.sim.received[self.name] = outcome
        self.origin, self.left, self.voted = None, [], False
        self.waits = self.name[0]
        self.stepping.end_step()

    def act(self, rng: random.Random) -> bool:
        """Begin a step, push a piece of it, or vote."""
        if self.generation == 0 or not self.delivery.membership.complete:  # type: ignore[union-attr]
            return False
        if self.origin is None:
            if self.waits is not None and not self.stepping.may_proceed(self.waits):
                return False
            return self.begin(rng)
        if not self.left:
            if self.voted:
                return False
            self.voted = True
            generation, replica, clock = self.name
            self.record(Vote(generation=generation, step=clock, version=self.origin.version), replica)
            return True
        at = rng.randrange(len(self.left))
        server, unit, begin, end = self.left[at]
        if server.engine.generation != self.name[0]:  # a fence: it has not received it yet, or it is over
            return False
        grad = self.sim.grads[self.name][unit][begin:end]
        try:
            what = server.engine.gradients.push(self.name[2], unit, begin, self.name[1], DType.F32, grad)
        except StepAborted:
            return False
        if what is gradients.Push.WAIT:
            return False
        server.report()
        if rng.random() < 0.8:  # else the answer is lost, and it is pushed again
            del self.left[at]
        return True

    def begin(self, rng: random.Random) -> bool:
        self.origin = self.stepping.origin(self.version)
        sim = self.sim
        self.name = (self.origin.generation, self.stepping._replica, self.stepping.clock)
        sim.grads[self.name] = [rng_integers(rng, u.numel) for u in LAYOUT.units]
        sim.read[self.name] = self.origin.version
        self.left = [
            (sim.servers[s.server], s.unit, begin, end)
            for pieces in sim.spec.plan(SERVERS).slices
            for s in pieces
            for begin, end in s.chunks(sim.spec.options.chunk_numel)
        ]
        return True


def rng_integers(rng: random.Random, numel: int) -> Array:
    return np.array([rng.randint(-8, 8) for _ in range(numel)], np.float32)


class Simulation:
    def __init__(self, policy: Policy, workers: int) -> None:
        self.policy = policy
        self.spec = JobSpec(layout=LAYOUT, options=PlanOptions(chunk_numel=4, min_slice_numel=4), policy=policy)
        self.d = Driver(world_size=workers, num_shards=SERVERS, replication=1, min_workers=1)
        self.decisions: dict[int, Decision] = {}
        self.grads: dict[tuple[int, int, int], list[Array]] = {}
        self.read: dict[tuple[int, int, int], int] = {}
        self.received: dict[tuple[int, int, int], Outcome] = {}
        perform = self.d.perform

        def watched(actions: list[Action]) -> None:
            for action in actions:
                if isinstance(action, SendEvent) and isinstance(action.event, Decision):
                    known = self.decisions.setdefault(action.event.step, action.event)
                    assert decision_record(known) == decision_record(action.event), "one decision for one step"
            perform(actions)

        self.d.perform = watched  # type: ignore[method-assign]
        self.servers = [Server(self, self.d.peer(Role.SHARD)) for _ in range(SERVERS)]
        self.workers: list[Worker] = []
        for rank, server in enumerate(self.servers):
            server.peer.rank = rank
            server.come_back()
        for _ in range(workers):
            self.join()
        for server in self.servers:
            while server.deliver():
                pass
            for piece in self.spec.plan(SERVERS).by_server[server.peer.rank]:
                for begin, end in piece.chunks(4):
                    server.engine.parameters.upload(piece.unit, begin, np.zeros(end - begin, np.float32), 0)
            server.peer.initialized()

    def join(self) -> None:
        for server in self.servers:  # before they are back nobody is let in
            if not server.peer.open:
                server.come_back()
        worker = Worker(self, self.d.peer(Role.WORKER))
        worker.come_back()
        self.d.register(worker.peer, self.spec, OPTIMIZER)
        self.workers.append(worker)

    def restart(self) -> None:
        self.d.restart()

    def drain(self) -> None:
        """All messages are received, all decisions applied."""
        for client in (*self.servers, *self.workers):
            if not client.peer.open:
                client.come_back()
        clients = (*self.servers, *self.workers)
        while any(c.deliver() for c in clients) or any(s.apply() for s in self.servers):
            pass

    def check(self) -> None:
        """What must hold at any moment of every server, and of the decisions that workers received."""
        commits = [d for d in sorted(self.decisions.values(), key=lambda d: d.step) if d.outcome is Outcome.COMMIT]
        assert [d.version for d in commits] == list(range(1, len(commits) + 1))
        names = [(d.generation, of.replica, of.clock) for d in commits if (of := d.replica_clock) is not None]
        assert len(names) == len(set(names)) == len(commits), "a gradient is applied once"
        for server in self.servers:
            if server.slices:
                continue
            for owned in server.engine.slices.values():
                unit, begin, end = owned.chunks.unit, owned.chunks.begin, owned.chunks.end
                parts = [self.grads[n][unit][begin:end] for n in names[: server.engine.version]]
                np.testing.assert_array_equal(
                    owned.master.values, -sum(parts, np.zeros(owned.chunks.numel, np.float32))
                )
        for name, outcome in self.received.items():
            assert (outcome is Outcome.COMMIT) == (name in names), "a worker gets the outcome of its gradient"
        by_generation: dict[int, dict[int, int]] = {}
        for generation, replica, clock in names:
            clocks = by_generation.setdefault(generation, {})
            assert clock == clocks.get(replica, 0), "in the order of its clock"
            clocks[replica] = clock + 1
        if self.policy.most_behind is not None:
            self.check_bound(commits, names)

    def check_bound(self, commits: list[Decision], names: list[tuple[int, int, int]]) -> None:
        assert self.policy.most_behind is not None
        bound = self.policy.most_behind
        for decision, (generation, replica, clock) in zip(commits, names, strict=True):
            assert decision.replica_clock is not None
            assert clock - decision.replica_clock.slowest_clock <= bound
            others = {n[1] for n in names if n[0] == generation} - {replica}
            stale = decision.version - 1 - self.read[(generation, replica, clock)]
            assert stale <= len(others) * (2 * bound + 1), "no gradient is staler than the bound"


@given(
    policy=st.sampled_from([Asynchronous(), BoundedStaleness(max_staleness=0), BoundedStaleness(max_staleness=2)]),
    workers=st.integers(1, 3),
    seed=st.integers(0, 1 << 30),
)
@settings(max_examples=40)
def test_every_gradient_counts_once_everywhere_in_one_order(policy: Policy, workers: int, seed: int) -> None:
    rng = random.Random(seed)
    sim = Simulation(policy, workers)
    for _ in range(250):
        what = rng.random()
        if what < 0.008 and len(sim.workers) < 4:
            sim.join()
        elif what < 0.016 and len(sim.workers) > 1:
            victim = sim.workers.pop(rng.randrange(len(sim.workers)))
            sim.received.pop(victim.name, None)
            if victim.peer.open:
                victim.peer.lose()
        elif what < 0.022:
            sim.restart()
        elif what < 0.30:
            rng.choice([*sim.servers, *sim.workers]).deliver()
        elif what < 0.40:
            rng.choice(sim.servers).apply()
        elif what < 0.45:
            client = rng.choice([*sim.servers, *sim.workers])
            if not client.peer.open:
                client.come_back()
        else:
            rng.choice(sim.workers).act(rng)
    sim.check()
    sim.drain()
    sim.d.advance(6.0, beat=True)  # who died while there was no coordinator is missed
    sim.drain()
    sim.check()
    before = set(sim.received)
    for _ in range(200):  # undisturbed, everybody gets on
        for worker in sim.workers:
            worker.act(rng)
        sim.drain()
    sim.check()
    assert {s.engine.version for s in sim.servers} == {sim.d.state.status().version}
    went_on = {replica for _, replica, _ in set(sim.received) - before}
    assert went_on == set(range(sim.d.state.status().membership.num_replicas))

"""Random joins, deaths, silences, votes and restarts (crashes between writing and saying included), and what must
hold through all of them.

Members have the delivery state that `CoordinatorClient` has; what is simulated is the network between. With each step
they commit one more than the newest number that they know of.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from axon_ps.coordinator.client.delivery import Delivery
from axon_ps.coordinator.core import records
from axon_ps.coordinator.core.access.callers import Caller
from axon_ps.coordinator.core.actions import Action, Persist
from axon_ps.coordinator.messages import ready_from_proto, vote_from_proto
from axon_ps.errors import Busy, Drained, InvalidRequest, MemberLost, Misuse
from axon_ps.types import Decision, Membership, Outcome, Role
from axon_ps.wire.events import Copied, JobState, Ready, Vote, Welcome
from coordinator_driver import Driver, Peer


class Client:
    """A member: its delivery state is the real one; the test decides whether the network delivers."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.delivery = Delivery()
        self.deaf = True
        self.resends = False  # once it is let in
        self.is_in = False
        self.rank: int | None = None
        self.acted: tuple[int, ...] = (0, 0)
        self.votes: set[tuple[int, int]] = set()
        self.received_by_step: dict[int, list[Decision]] = {}
        self.has: set[int] = set()  # a shard server: the slices that it has completely
        self.placement = 0  # number of the newest
        self.used = 0

    @property
    def membership(self) -> Membership | None:
        return self.delivery.membership

    def drain(self) -> None:
        events, self.peer.inbox[:] = list(self.peer.inbox), []
        for event in () if self.deaf else events:
            self.is_in = self.is_in or isinstance(event, Membership)
            if isinstance(event, Welcome):
                assert self.peer.role is Role.SHARD or self.rank in (None, event.rank), "a worker's rank is for life"
                self.rank = self.peer.rank = event.rank
            for news in self.delivery.receive(event):
                if isinstance(news, Decision):
                    self.used = int(news.commit.get("used", self.used))
                    self.received_by_step.setdefault(news.step, []).append(news)
                elif isinstance(news, JobState):
                    self.used = int(news.committed.get("used", "0"))
                    self.placed(news)

    def placed(self, job: JobState) -> None:
        if job.placement is None or self.peer.role is not Role.SHARD:
            return
        assert job.placement.number >= self.placement, "placements are numbered upwards"
        self.placement = job.placement.number
        complete = {i for i, h in enumerate(job.placement.holders) if self.rank in h.complete}
        if job.initialized:
            assert complete <= self.has, "what a placement says of a server is so"
            self.has = complete

    def next_step(self) -> tuple[int, int] | None:
        """Generation and step of the attempt this member is in; None when it has acted in it, or there is none."""
        m = self.membership
        if m is None or not m.complete:
            return None
        name = (m.generation, max([m.step, *(s + 1 for s in self.received_by_step)]))
        return None if self.full_name(name) == self.acted else name

    def full_name(self, name: tuple[int, int]) -> tuple[int, ...]:
        """A shard server reports anew under another placement."""
        return (*name, self.placement) if self.peer.role is Role.SHARD else name


class Coordinator(RuleBasedStateMachine):
    @initialize(min_workers=st.sampled_from([None, 1]), step_timeout_s=st.sampled_from([2.0, float("inf")]))
    def start(self, min_workers: int | None, step_timeout_s: float) -> None:
        self.d = Driver(world_size=2, num_shards=2, min_workers=min_workers, lease_s=5.0, step_timeout_s=step_timeout_s)
        self.clients: list[Client] = []
        self.decisions: dict[int, Decision] = {}
        self.memberships: dict[int, Membership] = {}
        self.generation = 0
        self.kept: dict[str, bytes] = {}
        perform = self.d.perform

        def watched(actions: list[Action]) -> None:
            self.watch(actions)
            perform(actions)

        self.d.perform = watched  # type: ignore[method-assign]
        for role in (Role.SHARD, Role.WORKER, Role.SHARD, Role.WORKER):
            self.a_new_process_joins(role)

    # ------------------------------------------------------------------ what must hold for every action

    def watch(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Persist):
                self.watch_records({r.key: r.value for r in action.records if r.value is not None})

    def watch_records(self, written: dict[str, bytes]) -> None:
        wanted = ("job", "members", "progress", "committed")
        keys = {k: v for k, v in written.items() if k in wanted or k.startswith("decision/")}
        durable = records.load({**self.kept, **keys})
        assert durable is not None
        for decision in durable.models[0].decisions:
            known = self.decisions.setdefault(decision.step, decision)
            assert records.decision_record(known) == records.decision_record(decision), "one decision for one step"
        commits = sum(x.outcome is Outcome.COMMIT for x in self.decisions.values())
        assert durable.models[0].version == commits, "the version moves by commits alone"
        used = sum(x.outcome is not Outcome.ABORT for x in self.decisions.values())
        assert int(durable.models[0].committed.get("used", "0")) == used, "what is committed moves with the steps"
        assert not any("disagree" in x.reason for x in self.decisions.values()), "all know what was committed"
        assert durable.membership.generation >= self.generation, "the generation never falls"
        assert durable.models[0].step > max(self.decisions, default=0), "steps ascend"
        self.generation = durable.membership.generation
        self.kept.update(keys)

    @invariant()
    def members_are_consistent(self) -> None:
        if not hasattr(self, "d"):
            return
        for client in self.clients:
            client.drain()
        m = self.d.state.status().membership
        assert repr(self.memberships.setdefault(m.generation, m)) == repr(m), "a generation is immutable"
        for members in (m.workers, m.shards):
            ranks = [x.rank for x in members]
            assert ranks == sorted(set(ranks)), "ranks are unique"
        incarnations = [x.incarnation for x in (*m.workers, *m.shards)]
        assert len(incarnations) == len(set(incarnations))
        assert {w.replica for w in m.workers} == set(range(m.num_replicas))
        assert not {x.id for x in m.workers} & {x.id for x in m.finished}, "who has finished is no member"
        if m.complete:
            assert m.workers, "without workers there are no steps"
        for client in self.clients:
            assert all(len(each) == 1 for each in client.received_by_step.values()), "at most one decision per step"

    # ------------------------------------------------------------------ rules

    def pick(self, data: Any, role: Role | None = None) -> Client | None:
        there = [c for c in self.clients if not c.deaf and c.peer.open and (role is None or c.peer.role is role)]
        return data.draw(st.sampled_from(there)) if there else None

    def attach(self, client: Client) -> None:
        client.peer.inbox.clear()
        if isinstance(client.peer.error, Drained):  # its process has ended
            self.clients.remove(client)
            return
        client.deaf, client.resends, client.is_in = False, True, False
        try:
            client.peer.join()
        except (Busy, InvalidRequest):  # no place, or its rank was given to another: it ends
            self.clients.remove(client)
            return
        client.drain()
        self.resend(client)

    def resend(self, client: Client) -> None:
        """Messages that are not settled, once it is let in."""
        if client.resends and client.is_in:
            client.resends = False
            for message in client.delivery.to_resend():
                if message.HasField("vote"):
                    self.record(client, vote_from_proto(message.vote))
                else:
                    self.record(client, ready_from_proto(message.ready))

    def record(self, client: Client, message: Vote | Ready, perform: Any = None) -> None:
        d = self.d
        session = client.peer.session
        if isinstance(message, Vote):
            actions = d.state.vote([session], message, d.clock())
        else:
            actions = d.state.ready(session, message, d.clock())
        (perform or d.perform)(actions)

    @precondition(lambda self: len(self.clients) < 8)
    @rule(role=st.sampled_from(list(Role)))
    def a_new_process_joins(self, role: Role) -> None:
        client = Client(self.d.peer(role))
        self.clients.append(client)
        self.attach(client)
        for worker in self.clients:
            if worker.peer.role is Role.WORKER and worker.peer.open and not self.d.state.status().registered:
                with contextlib.suppress(MemberLost):  # a server is missing, which is to say what it can hold
                    self.d.register(worker.peer)
        self.upload()

    def upload(self) -> None:
        """Every shard server that is to have first values, and has its stream, gets them."""
        status = self.d.state.status()
        for client in self.clients:
            if client.peer.role is Role.SHARD and client.peer.open and not client.deaf:
                client.drain()
                state = client.delivery.job_state
                if state is None or state.placement is None or status.initialized or status.version:
                    continue
                if client.rank in state.placement.servers:
                    client.has = set(state.placement.slices_of(client.rank))
                    client.peer.initialized()

    @rule(data=st.data())
    def slices_are_copied(self, data: Any) -> None:
        if (client := self.pick(data, Role.SHARD)) is not None:
            self.copy(client)

    def copy(self, client: Client) -> None:
        client.drain()
        state = client.delivery.job_state
        if client.rank is None or state is None or state.placement is None or not state.initialized:
            return
        got = tuple(i for i, h in enumerate(state.placement.holders) if client.rank in h.copying)
        if got:
            client.has |= set(got)
            report = Copied(model=0, epoch=state.epoch, slices=got, placement=state.placement.number)
            self.d.perform(self.d.state.copied(client.peer.session, report, self.d.clock()))

    @rule(rank=st.integers(0, 3))
    def a_server_is_drained(self, rank: int) -> None:
        with contextlib.suppress(InvalidRequest, Misuse):
            self.d.call(lambda call: self.d.state.drain(call, Caller(job="job"), rank, self.d.clock()))

    @rule(data=st.data())
    def a_stream_resets(self, data: Any) -> None:
        if (client := self.pick(data)) is not None:
            client.drain()
            client.deaf = True
            client.peer.lose()

    @rule(data=st.data())
    def a_process_is_cut_off(self, data: Any) -> None:
        if (client := self.pick(data)) is not None:
            client.drain()
            client.deaf = True

    @rule(data=st.data())
    def a_process_comes_back(self, data: Any) -> None:
        away = [c for c in self.clients if c.deaf or not c.peer.open]
        if away:
            self.attach(data.draw(st.sampled_from(away)))

    @rule(data=st.data(), finished=st.booleans())
    def a_process_leaves(self, data: Any, finished: bool) -> None:
        if (client := self.pick(data)) is not None:
            client.peer.leave(finished=finished)
            self.clients.remove(client)

    @rule(data=st.data())
    def a_worker_waits_behind_another(self, data: Any) -> None:
        if (client := self.pick(data, Role.WORKER)) is not None and (m := client.membership) is not None:
            client.peer.arrive(generation=m.generation)

    def act(self, client: Client, sum_of_squares: float, perform: Any = None) -> None:
        self.resend(client)
        name = client.next_step()
        if name is None:
            return
        generation, step = name
        client.acted = client.full_name(name)
        if client.peer.role is Role.WORKER:
            client.votes.add(name)
            message: Vote | Ready = Vote(generation=generation, step=step, commit={"used": str(client.used + 1)})
        else:
            message = Ready(
                generation=generation,
                step=step,
                sums_of_squares=(sum_of_squares,),
                placement=client.placement,
            )
        assert client.delivery.record(message) == []
        self.record(client, message, perform)

    @rule(data=st.data(), sum_of_squares=st.sampled_from([1.0, 1.0, float("nan")]))
    def one_member_acts(self, data: Any, sum_of_squares: float) -> None:
        if (client := self.pick(data)) is not None:
            self.act(client, sum_of_squares)

    @rule(steps=st.integers(1, 3), sum_of_squares=st.sampled_from([1.0, 1.0, 1.0, float("inf")]))
    def all_members_act(self, steps: int, sum_of_squares: float) -> None:
        for _ in range(steps):
            for client in list(self.clients):
                if not client.deaf and client.peer.open:
                    if client.peer.role is Role.SHARD:
                        self.copy(client)
                    client.drain()
                    self.act(client, sum_of_squares)

    @rule()
    def everybody_comes_back(self) -> None:
        for client in list(self.clients):
            if client.deaf or not client.peer.open:
                self.attach(client)

    @rule(data=st.data(), written=st.booleans())
    def the_coordinator_crashes_over_a_message(self, data: Any, written: bool) -> None:
        """It dies after its decision is written, or before that; nobody receives the decision either way."""

        def crash(actions: list[Action]) -> None:
            if written and actions and isinstance(actions[0], Persist):
                self.watch(actions[:1])
                self.d.store.apply(actions[0].records)

        if (client := self.pick(data)) is not None:
            for other in self.clients:
                if other is not client and not other.deaf and other.peer.open:
                    other.drain()
                    self.act(other, 1.0)
            self.act(client, 1.0, crash)
            self.the_coordinator_restarts()
            self.everybody_comes_back()

    @rule()
    def the_coordinator_restarts(self) -> None:
        for client in self.clients:
            client.drain()
            client.deaf = True
        self.d.restart()
        members = self.d.state.membership
        assert members == self.memberships.get(members.generation, members), "a generation is immutable"

    @rule(seconds=st.sampled_from([1.0, 3.0, 6.0]))
    def time_passes(self, seconds: float) -> None:
        left = seconds
        while left > 0:
            left -= 1.0
            for client in self.clients:
                if not client.deaf and client.peer.open:
                    client.peer.beat()
            self.d.advance(1.0)

    def teardown(self) -> None:
        """All members reconnect; each has received the decision of every step that it voted in, once."""
        if not hasattr(self, "d"):
            return
        for client in list(self.clients):
            client.drain()
            self.attach(client)
        for client in self.clients:
            client.drain()
        status = self.d.state.status()
        for client in self.clients:
            for generation, step in client.votes:
                decisions = client.received_by_step.get(step, [])
                over = step < status.step or generation < status.membership.generation
                assert len(decisions) == (1 if over else 0), (step, decisions)
                truth = self.decisions.get(step)
                if decisions and truth is not None and status.step - step <= records.HISTORY:
                    received, made = map(records.decision_record, (decisions[0], truth))
                    assert received == made, "the decision received is the one made"


TestCoordinatorStateful = pytest.mark.timeout(300)(Coordinator.TestCase)
TestCoordinatorStateful.settings = settings(
    max_examples=40,
    stateful_step_count=40,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)

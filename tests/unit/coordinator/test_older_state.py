"""A coordinator comes back with a state from before: its members know more, and it learns that from shard servers.

Tests of `coordinator/core/restart/comeback.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

import pytest

from axon_ps.coordinator import messages
from axon_ps.coordinator.client.delivery import Delivery
from axon_ps.coordinator.core import records
from axon_ps.coordinator.core.restart.knowledge import MAX_GENERATIONS, Knowledge, check_known, learned
from axon_ps.errors import InvalidRequest
from axon_ps.sharding.placement import Holders
from axon_ps.storage.state_store import MemoryStateStore, Record
from axon_ps.types import Decision, Membership, Outcome, Role
from axon_ps.wire.events import JobState, JoinRequest, RevokedNames, Welcome
from coordinator_driver import Driver, Peer
from test_models import OTHER, OTHER_OPTIMIZER, step, versions


class Killed(Exception):
    """The coordinator is killed."""


class Journal(MemoryStateStore):
    """A store that has a copy of its state after each batch.

    Args:
        batches: it raises `Killed` instead of writing one more.
    """

    def __init__(self, batches: int | None = None) -> None:
        super().__init__()
        self.states: list[Mapping[str, bytes]] = []
        self._batches = batches

    def apply(self, records: Sequence[Record]) -> None:
        if len(self.states) == self._batches:
            raise Killed
        super().apply(records)
        self.states.append(self.load())


def a_life() -> tuple[Driver, list[Peer], list[Peer]]:
    """A job with two models in which servers and workers were replaced; its journal, servers and workers."""
    d = Driver(world_size=2, num_shards=3, replication=2, min_workers=1)
    d.store = Journal()
    return d, *lived(d)


def lived(d: Driver) -> tuple[list[Peer], list[Peer]]:
    d.perform([*d.state.tick(d.clock())])
    servers, workers = [d.shard() for _ in range(3)], [d.worker() for _ in range(2)]
    for w in workers:  # one after the other, as `worker.steps` does
        d.register(w, optimizer=None, name="first")
        d.register(w, spec=None, name="first")
    for s in servers:
        s.initialized()
    step(workers, servers, 0)
    for w in workers:  # in the middle of a generation
        d.register(w, OTHER, OTHER_OPTIMIZER, name="second")
        d.register(w, OTHER, OTHER_OPTIMIZER, name="third")
    for model in (1, 2):
        for s in servers:
            s.initialized(model=model)
        step(workers, servers, model)
    d.call(lambda call: d.state.registrations.release(call, workers[0].caller, 2, "third"))
    servers[1].lose()
    step(workers, [servers[0], servers[2]], 0)
    servers[1] = d.shard(rank=1)
    step(workers, [servers[0], servers[2]], 1)
    step(workers, [servers[0], servers[2]], 0)
    while copying := [(s, model) for s in servers for model in (0, 1) if s.copying(model)]:
        for s, model in copying:
            s.copied(model=model)
    workers[1].lose()
    workers[1] = d.worker(rank=1)
    d.register(workers[1], name="first")
    d.register(workers[1], OTHER, OTHER_OPTIMIZER, name="second")
    for model in (0, 1, 0):
        step(workers, servers, model)
    return servers, workers


def knows(peer: Peer) -> Delivery:
    """The delivery state of a member that has received all its events."""
    delivery = Delivery()
    for event in peer.inbox:
        if not isinstance(event, RevokedNames):  # is the session's own
            delivery.receive(event)
    return delivery


def behind(d: Driver, peer: Peer) -> str:
    """Text on what the coordinator does not know."""
    request = JoinRequest(
        job="job", incarnation=peer.incarnation, node=peer.node, state_id=d.state.id, position=knows(peer).position
    )
    _, read = messages.join_from_proto(messages.join_to_proto(request, Role.WORKER).join)
    assert read == request
    return d.state.comeback.behind(peer.role, request)


def tell(d: Driver, peer: Peer) -> None:
    known = knows(peer).knowledge({"id": "why"})
    read = messages.knowledge_from_proto(messages.knowledge_to_proto(known).knowledge)
    assert read == known
    check_known(read, d.state.id, d.state.membership.generation)
    d.store.apply(learned(d.store.load(), read))
    d.restart()


def holders(peer: Peer, model: int) -> tuple[Holders, ...]:
    placement = [state.placement for state in peer.received(JobState) if state.model == model][-1]
    assert placement is not None
    return placement.holders


STATES = len(a_life()[0].store.states)  # type: ignore[attr-defined]


@pytest.mark.parametrize("late", [False, True], ids=["at-once", "after-its-lease"])
@pytest.mark.parametrize("index", range(STATES - 1))
def test_a_job_goes_on_from_what_its_servers_know_whatever_the_state_has_lost(index: int, *, late: bool) -> None:
    d, servers, workers = a_life()
    assert isinstance(d.store, Journal)
    stored = d.store.states[index]
    before, generation = versions(d), d.state.membership.generation
    held = [holders(servers[0], model) for model in (0, 1)]
    d.store = MemoryStateStore()
    d.store.apply([Record(key, value) for key, value in stored.items()])
    d.restart()
    if late:  # it declares everybody lost that it knows, before somebody comes
        d.advance(6.0)
    told = 0
    while teller := next((s for s in servers if behind(d, s)), None):
        tell(d, teller)
        told += 1
    assert told <= 2
    assert not [w for w in workers if behind(d, w)]
    for peer in (*servers, *workers):
        assert peer.join().last(Welcome).rank == peer.given_rank
    assert versions(d) == before
    assert d.state.membership.complete
    assert d.state.membership.generation >= generation
    assert not d.state.assembly.lost_parameters
    for model in (0, 1):
        assert all(
            set(a.complete) >= set(b.complete) for a, b in zip(holders(servers[0], model), held[model], strict=True)
        )
        step(workers, servers, model)
        decision = [x for x in servers[0].received(Decision) if x.model == model][-1]
        assert (decision.outcome, decision.version) == (Outcome.COMMIT, before[("first", "second")[model]] + 1)
    for peer in (*servers, *workers):
        assert knows(peer).membership == d.state.membership
    assert records.load(d.store.load()) is not None


@pytest.mark.parametrize("written", range(2, STATES + 1))
def test_nothing_that_a_server_was_told_is_lost_with_the_last_batch(written: int) -> None:
    d = Driver(world_size=2, num_shards=3, replication=2, min_workers=1)
    d.store = Journal(written)
    with pytest.raises(Killed) if written < STATES else contextlib.nullcontext():
        lived(d)
    servers = [peer for peer in d.peers.values() if peer.role is Role.SHARD and peer.inbox]
    stored = d.store.states[written - 2]
    d.store = MemoryStateStore()
    d.store.apply([Record(key, value) for key, value in stored.items()])
    d.restart()
    while teller := next((s for s in servers if behind(d, s)), None):
        tell(d, teller)
    durable = records.load(d.store.load())
    assert durable is not None
    for theirs in (model for server in servers for model in knows(server).knowledge({}).models):
        ours = durable.models[theirs.state.model]
        assert ours.parameters.epoch >= theirs.state.epoch
        assert ours.version >= theirs.state.version
        assert ours.spec == theirs.state.spec
        assert theirs.state.optimizer in (None, ours.optimizer)


def test_values_that_were_there_are_not_waited_for_again() -> None:
    """The journal has lost that they are; and then one of those that had them dies."""
    d = Driver(world_size=1, num_shards=3, replication=2)
    d.store = Journal()
    d.perform([*d.state.tick(d.clock())])
    servers, worker = [d.shard() for _ in range(3)], d.worker()
    d.register(worker)
    before = len(d.store.states)
    for s in servers:
        s.initialized()
    stored = d.store.states[before - 1]
    d.store = MemoryStateStore()
    d.store.apply([Record(key, value) for key, value in stored.items()])
    d.restart()
    assert "all values of model 0" in behind(d, worker)
    assert "all values of model 0" in behind(d, servers[0])
    tell(d, servers[0])
    for peer in (*servers[:2], worker):
        peer.join()
    d.advance(6.0)
    d.shard(rank=2)
    assert worker.last(JobState).initialized


def test_a_state_that_lacks_nothing_is_not_behind() -> None:
    d, servers, workers = a_life()
    d.restart()
    assert [behind(d, peer) for peer in (*servers, *workers)] == [""] * 5


def test_knowledge_of_another_job_or_of_no_generation_that_can_be_is_refused() -> None:
    d, servers, _ = a_life()
    known = knows(servers[0]).knowledge({})

    def changed(**changes: object) -> Knowledge:
        members = {**vars(known.membership), **changes}
        return Knowledge(**{**vars(known), "membership": Membership(**members)})

    for wrong in (changed(state_id="another"), changed(generation=2 * MAX_GENERATIONS)):
        with pytest.raises(InvalidRequest, match="a shard server tells of"):
            check_known(wrong, d.state.id, d.state.membership.generation)

"""After a restart members are let in together, in order. Tests of `coordinator/core/restart/comeback.py`."""

from __future__ import annotations

import math

from axon_ps.errors import InvalidRequest
from axon_ps.types import Membership, Role
from axon_ps.wire.events import JoinRequest, Position, Welcome
from coordinator_driver import Driver, Peer

LEASE_S = 5.0


def restarted(shards: int = 2) -> tuple[Driver, list[Peer], list[Peer]]:
    """A job whose coordinator has come back, and none of its members yet."""
    d = Driver(num_shards=shards, lease_s=LEASE_S)
    workers, servers = d.assembled(shards=shards)
    d.restart()
    for peer in (*workers, *servers):
        peer.inbox.clear()
    return d, workers, servers


def let_in(*peers: Peer) -> list[bool]:
    return [bool(peer.received(Welcome)) for peer in peers]


def test_members_wait_for_the_shard_servers_of_the_state() -> None:
    d, (a, b), (first, second) = restarted()
    b.join(), first.join(), a.join()
    assert let_in(a, b, first) == [False, False, False]
    assert d.state.status().awaited == {second.incarnation}
    generation = d.state.membership.generation
    second.join()
    assert let_in(a, b, first, second) == [True] * 4
    assert b.received(Membership)[0].generation == generation, "none was announced meanwhile"
    assert not d.state.status().awaited


def test_they_wait_for_a_lease_at_most_and_that_can_be_extended() -> None:
    d, (a, _), (first, _) = restarted()
    a.join(), first.join()
    assert d.state.next_deadline() <= d.clock() + LEASE_S
    d.state.paused(2.0)
    d.advance(LEASE_S + 1.0)
    assert let_in(a, first) == [False, False]
    d.advance(1.0)
    assert let_in(a, first) == [True, True]


def test_a_new_server_at_the_address_of_another_shows_that_it_is_dead() -> None:
    d, _, (first, second) = restarted()
    first.join()
    replacement = d.peer(Role.SHARD, node="s")
    replacement.address = second.address
    replacement.join()
    assert let_in(first, replacement) == [True, True]
    assert d.state.status().awaited.isdisjoint({first.incarnation})


def test_a_process_that_leaves_while_it_waits_is_forgotten() -> None:
    d, (a, b), servers = restarted()
    a.join().lose()
    for peer in (*servers, b):
        peer.join()
    assert let_in(a, b) == [False, True]
    assert a.incarnation in d.state.status().awaited


def test_one_that_may_not_join_is_told_so_later_and_the_others_are_let_in() -> None:
    d, (a, b), (first, second) = restarted()
    stranger = d.peer(Role.WORKER)
    stranger.incarnation = first.incarnation
    stranger.join()
    assert stranger.open
    a.join(), b.join()
    first.incarnation = "f" * 32
    first.join(), second.join()
    assert isinstance(stranger.error, InvalidRequest)
    assert let_in(a, b, second) == [True, True, True]


def test_if_a_worker_knows_more_a_server_that_is_not_in_the_state_has_a_lease_to_come() -> None:
    d, (a, _), (first, second) = restarted()
    knows_more = JoinRequest(
        job="job",
        incarnation=a.incarnation,
        node=a.node,
        position=Position(generation=d.state.membership.generation + 2),
        state_id=d.state.assembly.state_id,
    )
    assert d.state.comeback.behind(Role.WORKER, knows_more)
    first.join(), second.join()
    assert let_in(first, second) == [False, False], "they would make generations that others have seen"
    d.advance(LEASE_S + 1.0)
    assert let_in(first, second) == [True, True]


def test_without_servers_in_its_state_its_workers_are_waited_for() -> None:
    d = Driver()
    worker = d.worker()
    d.restart()
    worker.inbox.clear()
    assert math.isfinite(d.state.next_deadline())
    newcomer = d.peer(Role.WORKER).join()
    assert let_in(newcomer) == [False], "a state may be older, and the worker may know of later generations"
    assert let_in(worker.join(), newcomer) == [True, True]


def test_without_members_in_its_state_nobody_waits() -> None:
    d = Driver()
    d.restart()
    assert let_in(d.peer(Role.WORKER).join()) == [True]

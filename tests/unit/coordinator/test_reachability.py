"""Members that reach the coordinator and not each other: who of them goes, who stays, and what is said of it.

Tests of `coordinator/core/reachability.py`.
"""

from __future__ import annotations

import contextlib

import pytest

from axon_ps.errors import Busy, MemberLost
from axon_ps.types import Decision, Outcome
from coordinator_driver import Driver, Peer, Recording

LEASE_S = 5.0


def step(workers: list[Peer], servers: list[Peer]) -> Decision:
    """Everybody does its part of a step; returns what became of it."""
    for worker in workers:
        worker.vote()
    for server in servers:
        server.ready()
    return workers[0].last(Decision)


def events(d: Recording, kind: str) -> list[str]:
    return [event.text for event in d.everything().events if event.kind == kind]


def test_a_worker_goes_where_enough_others_remain() -> None:
    d = Recording(world_size=3, min_workers=1, num_shards=2)
    [a, b, c], servers = d.assembled(workers=3, shards=2)
    b.reaches(unreachable=[servers[0]])
    d.advance(1.5, beat=True)
    assert b.open, "the others have time to report, too"
    d.advance(1.0, beat=True)
    assert not b.open
    assert isinstance(b.error, MemberLost)
    assert str(b.error) == (
        "worker 1 (node a) and shard server 0 (node s) cannot reach each other, though all reach the coordinator; this "
        "one is no member any more, and joins again when it can"
    )
    assert [w.rank for w in a.membership.workers] == [0, 2]
    assert step([a, c], servers).outcome is Outcome.COMMIT
    assert events(d, "cut")[0].startswith("worker 1 (node a) and shard server 0 (node s) cannot reach each other")
    assert d.state.status().counters["cut_off"] == 1


def test_a_report_that_is_withdrawn_has_no_consequences() -> None:
    d = Driver(world_size=3, min_workers=1)
    [a, _, _], servers = d.assembled(workers=3)
    for _ in range(20):
        a.reaches(unreachable=servers)
        d.advance(1.0, beat=True)
        a.reaches(*servers)
        d.advance(1.0, beat=True)
    assert a.open
    assert servers[0].open


def test_one_that_is_silent_is_not_cut_off_but_silent() -> None:
    d = Driver(world_size=2, num_shards=2, lease_s=LEASE_S)
    workers, servers = d.assembled(workers=2, shards=2)
    d.advance(0.5, beat=True)
    for worker in workers:
        worker.reaches(unreachable=[servers[1]])
    for _ in range(18):
        d.clock.advance(0.25)
        for peer in (*workers, servers[0]):
            peer.beat()
        d.perform(d.state.tick(d.clock()))
        assert servers[1].open, "its lease is not over"
    servers[1].beat()
    for worker in workers:
        worker.reaches()
    d.advance(20.0, beat=True)
    assert servers[1].open, "it was frozen, and is back"


def test_a_server_that_most_cannot_reach_goes_where_others_have_copies() -> None:
    d = Driver(world_size=2, num_shards=3)
    [a, b], servers = d.assembled(workers=2, shards=3)
    for peer in (a, b):
        peer.reaches(unreachable=[servers[2]])
    d.advance(3.0, beat=True)
    assert isinstance(servers[2].error, MemberLost)
    assert [s.rank for s in a.membership.shards] == [0, 1]
    assert a.membership.complete
    assert step([a, b], servers[:2]).outcome is Outcome.COMMIT


def test_a_server_goes_where_the_job_needs_the_worker() -> None:
    d = Driver(world_size=2, num_shards=2)
    [a, b], servers = d.assembled(workers=2, shards=2)
    a.reaches(unreachable=[servers[0]])
    d.advance(3.0, beat=True)
    assert a.open
    assert not servers[0].open
    assert step([a, b], servers[1:]).outcome is Outcome.COMMIT


def test_of_two_servers_the_newest_goes() -> None:
    d = Driver(world_size=1, num_shards=2)
    [a], servers = d.assembled(workers=1, shards=2)
    servers[0].reaches(unreachable=[servers[1]])
    servers[1].reaches(unreachable=[servers[0]])
    d.advance(3.0, beat=True)
    assert servers[0].open
    assert not servers[1].open
    assert step([a], servers[:1]).outcome is Outcome.COMMIT


def test_nobody_goes_where_something_would_be_lost() -> None:
    d = Recording(world_size=1, num_shards=2, replication=1)
    [a], servers = d.assembled(workers=1, shards=2)
    servers[0].reaches(unreachable=[servers[1]])
    d.advance(12.0, beat=True)
    assert all(server.open for server in servers)
    assert d.state.status(d.clock()).pending[0] == (
        "shard server 0 (node s) and shard server 1 (node s) cannot reach each other, though both reach the "
        "coordinator, since 12 s; neither may go: 2 slices of shard server 0 (node s) have no other copy and 2 slices "
        "of shard server 1 (node s) have no other copy"
    )
    assert len(events(d, "cut")) == 1
    servers[0].reaches(servers[1])
    assert d.state.status(d.clock()).pending == ()
    assert events(d, "healed") == ["shard server 0 (node s) and shard server 1 (node s) reach each other again"]
    assert step([a], servers).outcome is Outcome.COMMIT


def test_one_that_reaches_hardly_anybody_takes_no_others_with_it() -> None:
    """A worker whose own card is broken says that it reaches no server, and the job needs it."""
    d = Driver(world_size=2, num_shards=3)
    [a, _], servers = d.assembled(workers=2, shards=3)
    a.reaches(unreachable=servers)
    d.advance(30.0, beat=True)
    assert all(server.open for server in servers)
    assert "the job needs 2 workers" in d.state.status(d.clock()).pending[0]


def test_one_that_says_that_it_reaches_nobody_goes() -> None:
    d = Driver(world_size=3, min_workers=1, num_shards=3)
    [a, _, _], servers = d.assembled(workers=3, shards=3)
    a.reaches(unreachable=servers)
    d.advance(3.0, beat=True)
    assert not a.open
    assert all(server.open for server in servers)


def test_it_comes_back_when_it_reaches_everybody() -> None:
    d = Driver(world_size=3, min_workers=1, num_shards=2)
    [a, b, _], servers = d.assembled(workers=3, shards=2)
    b.reaches(unreachable=[servers[0]])
    d.advance(3.0, beat=True)
    for _ in range(4):
        d.advance(10.0, beat=True)
        with pytest.raises(
            Busy, match=r"this worker \(node a\) reaches the coordinator, not shard server 0 \(node s\)"
        ):
            b.join(rank=-1)
    b.reaches(*servers)
    b.join(rank=-1)
    assert len(a.membership.workers) == 3


def test_one_that_goes_again_and_again_waits_longer_each_time() -> None:
    """It reaches everybody, as far as it says; others say otherwise."""
    d = Driver(world_size=1, num_shards=3)
    [_], servers = d.assembled(workers=1, shards=3)
    waited = []
    for _ in range(4):
        servers[0].reaches(unreachable=[servers[2]])
        d.advance(3.0, beat=True)
        assert not servers[2].open
        began_s = d.clock()
        while not servers[2].open:
            d.advance(0.5, beat=True)
            with contextlib.suppress(Busy):
                servers[2].join()
        waited.append(d.clock() - began_s)
        for server in servers:
            while server.copying():
                server.copied()
                d.advance(0.5, beat=True)
    assert waited == sorted(waited)
    assert waited[-1] >= 2 * waited[0]


def test_a_server_that_joins_is_not_needed_before_it_has_shown_that_it_works() -> None:
    d = Driver(world_size=1, num_shards=2)
    [a], servers = d.assembled(workers=1, shards=2)
    for server in servers:
        server.reaches(*servers)
        server.join()
    servers[1].lose()
    assert step([a], servers[:1]).outcome is Outcome.COMMIT
    new = d.peer(role=servers[0].role, node="t")
    new.reaches()
    new.join()
    d.advance(10.0, beat=True)
    for _ in range(20):
        assert step([a], servers[:1]).outcome is Outcome.COMMIT
        d.advance(1.0, beat=True)
    assert new.given_rank in [s.rank for s in a.membership.shards]
    assert new.copying() == ()
    assert "gets no slices before it and shard server 0 (node s) have reached each other" in " ".join(
        d.state.status(d.clock()).pending
    )
    servers[0].reaches(new)
    assert new.copying() == ()
    new.reaches(servers[0])
    assert new.copying(), "both have shown it"
    while new.copying():
        new.copied()
        d.advance(30.0, beat=True)
    assert step([a], [servers[0], new]).outcome is Outcome.COMMIT
    assert not d.state.status(d.clock()).pending


def test_servers_of_older_builds_are_not_asked_whom_they_reach() -> None:
    d = Driver(world_size=1, num_shards=2)
    [_], servers = d.assembled(workers=1, shards=2)
    servers[1].lose()
    new = d.peer(role=servers[0].role, node="t").join()
    assert new.copying()


def test_a_server_that_nobody_reaches_goes_and_was_never_needed() -> None:
    d = Driver(world_size=1, num_shards=2)
    [a], servers = d.assembled(workers=1, shards=2)
    for server in servers:
        server.reaches(*servers)
        server.join()
    new = d.peer(role=servers[0].role, node="t")
    new.reaches()
    new.join()
    for server in servers:
        server.reaches(unreachable=[new])
    for _ in range(4):
        assert step([a], servers).outcome is Outcome.COMMIT
        d.advance(1.0, beat=True)
    assert not new.open
    assert step([a], servers).outcome is Outcome.COMMIT

"""A shard server whose connection broke is back before another step was committed: it still holds what it held."""

from __future__ import annotations

import pytest

from axon_ps.errors import InvalidRequest
from axon_ps.sharding.placement import Placement
from axon_ps.types import Membership
from coordinator_driver import Driver, Peer


def trained(shards: int = 2) -> tuple[Driver, list[Peer], list[Peer]]:
    d = Driver(num_shards=shards, replication=2, lease_s=5.0)
    workers, servers = d.assembled(shards=shards)
    step(workers, servers)
    return d, workers, servers


def step(workers: list[Peer], servers: list[Peer]) -> None:
    for server in servers:
        server.ready()
    for worker in workers:
        worker.vote()


def placement(d: Driver) -> Placement:
    found = d.state.models.first.holders.placement
    return found


def test_it_needs_no_copies() -> None:
    d, _, servers = trained()
    servers[0].lose()
    assert placement(d).servers == {1}
    servers[0].join()
    assert all(set(h.complete) == {0, 1} and not h.copying for h in placement(d).holders)
    assert {h.primary for h in placement(d).holders} == {1}, "others have gone on as primaries"


def test_nothing_is_lost_if_the_other_holder_was_dead_already() -> None:
    d, workers, servers = trained()
    d.advance(4.0, beat=True)
    servers[1].open = False  # dead, and not missed yet
    servers[0].lose()
    servers[0].join()
    d.advance(d.config.lease_s + 1, beat=True)
    assert not d.state.assembly.lost_parameters
    assert placement(d).servers == {0}
    third = d.shard()
    d.advance(d.config.lease_s, beat=True)
    assert third.given_rank == 1
    assert workers[0].last(Membership).complete


def test_also_if_the_other_one_is_missed_before_it_is_back() -> None:
    d, _, servers = trained()
    servers[1].open = False
    servers[0].lose()
    d.advance(d.config.lease_s + 1, beat=True)
    assert placement(d).servers == {1}
    servers[0].join()
    assert placement(d).servers == {0}
    assert not d.state.assembly.lost_parameters


def test_after_another_step_it_holds_nothing() -> None:
    d, workers, servers = trained(shards=3)
    servers[0].lose()
    step(workers, servers[1:])
    servers[0].join()
    assert all(0 not in h.complete for h in placement(d).holders)


def test_frozen_for_longer_than_its_lease_it_does_not_end_the_step_a_second_time() -> None:
    d, workers, servers = trained(shards=3)
    servers[0].open = False
    d.advance(d.config.lease_s + 1, beat=True)
    generation = workers[0].last(Membership).generation
    servers[0].join()
    assert workers[0].last(Membership).generation == generation
    step(workers, servers[1:])
    assert (servers[0].open, servers[0].given_rank) == (True, 0)
    assert all(0 not in h.complete for h in placement(d).holders), "the others have gone on without it"


def test_its_rank_may_have_been_given_away() -> None:
    d, workers, servers = trained(shards=3)
    servers[0].lose()
    newcomer = d.shard()
    d.advance(d.config.lease_s, beat=True)  # in which no step ends
    assert newcomer.given_rank == 0
    servers[0].join(rank=0)
    assert (servers[0].open, servers[0].given_rank) == (True, 3)
    assert 3 in placement(d).servers
    assert workers[0].last(Membership).complete


def test_without_anything_of_the_job_it_does_not_get_another_rank() -> None:
    d, workers, servers = trained(shards=3)
    servers[0].lose()
    d.shard()
    step(workers, servers[1:])
    d.advance(d.config.lease_s, beat=True)
    with pytest.raises(InvalidRequest, match="rank 0 is held by"):
        servers[0].join(rank=0)

"""Memory of shard servers that failed, as they report it or as copies differ: other copies go on with the slices.

Tests of `coordinator/core/placement/failed_memory.py`.
"""

from __future__ import annotations

from typing import Any

import pytest

from axon_ps.sharding.placement import Holders
from axon_ps.types import Decision, Outcome
from axon_ps.wire.events import Corrupted
from coordinator_driver import Driver, Peer
from test_placements import job, outcomes, placement, primary_of, step


def test_copies_that_differ_stop_the_job_until_a_checkpoint_is_restored() -> None:
    d, workers, servers = job(2)
    version = step(workers, servers, digests={0: 5, 1: 6}).version
    servers[0].ready(digests={0: 5, 1: 7})
    servers[1].ready(digests={0: 5, 1: 8})
    for w in workers:
        w.vote()
    assert not workers[0].membership.complete
    damage = "slice 1 differs between shard servers 0 and 1: one of them is damaged"
    assert damage in workers[0].membership.waiting_for
    assert "restore a checkpoint" in workers[0].membership.waiting_for
    assert d.state.status().version == version, "nothing is committed"
    assert outcomes(workers[0])[-1] is Outcome.ABORT
    d.restart()
    assert damage in d.state.status().membership.waiting_for


def test_a_copy_that_is_outvoted_is_got_again() -> None:
    d, workers, servers = job(3, replication=3)
    for s, value in zip(servers, (5, 9, 5), strict=True):
        s.ready(digests={1: value})
    assert outcomes(workers[0])[-1] is Outcome.ABORT
    assert "shard server 1 is damaged" in workers[0].last(Decision).reason
    assert workers[0].membership.complete
    assert placement(d).holders[1].copying == (1,)
    assert set(placement(d).holders[1].complete) == {0, 2}
    servers[1].copied()
    assert step(workers, servers, digests={}).version == 2


def test_a_digest_that_one_server_lacks_is_no_damage() -> None:
    _d, workers, servers = job(2)
    servers[0].ready(digests={0: 5})
    servers[1].ready()
    for w in workers:
        w.vote()
    assert workers[0].last(Decision).version == 2


def corrupted(d: Driver, server: Peer, number: int, *, lost: bool = True, **changes: Any) -> None:
    """A server reports that memory of a slice failed."""
    fields = {
        "model": 0,
        "epoch": 0,
        "slice": number,
        "placement": server.placement_number(0),
        "generation": d.state.status().membership.generation,
        "lost": lost,
        "version": 1,
        "blocks": (("exp_avg", 0, 4),),
        **changes,
    }
    d.perform(d.state.corrupted(server.session, Corrupted(**fields), d.clock()))


def test_another_server_goes_on_with_a_corrupt_slice_and_its_server_gets_it_again() -> None:
    d, workers, servers = job(2)
    generation, rank = d.state.status().membership.generation, primary_of(d, 0)
    for w in workers:
        w.vote()
    corrupted(d, servers[rank], 0)
    assert outcomes(workers[0])[-1] is Outcome.ABORT, "what was summed there is made again"
    assert d.state.status().membership.generation == generation + 1
    assert placement(d).holders[0] == Holders((1 - rank,), (rank,))
    waiting = workers[0].last(Decision).reason
    assert f"memory of shard server {rank} " in waiting
    assert "is corrupt: exp_avg from element 0 to 4 of unit" in waiting
    servers[rank].copied()
    assert step(workers, servers).outcome is Outcome.COMMIT
    assert set(placement(d).holders[0].complete) == {0, 1}


def test_a_backup_that_is_corrupt_ends_no_step() -> None:
    d, workers, servers = job(2)
    generation, rank = d.state.status().membership.generation, 1 - primary_of(d, 0)
    corrupted(d, servers[rank], 0)
    assert d.state.status().membership.generation == generation
    assert placement(d).holders[0] == Holders((1 - rank,), (rank,))
    servers[rank].copied()
    assert step(workers, servers).outcome is Outcome.COMMIT


def test_a_sum_that_is_corrupt_ends_the_step_and_nothing_else() -> None:
    d, workers, servers = job(2)
    before, rank = placement(d).holders, primary_of(d, 0)
    workers[0].vote()
    corrupted(d, servers[rank], 0, lost=False, generation=0)
    assert outcomes(workers[0])[-1] is Outcome.COMMIT, "a generation that is over"
    corrupted(d, servers[rank], 0, lost=False)
    assert outcomes(workers[0])[-1] is Outcome.ABORT
    assert placement(d).holders == before
    assert step(workers, servers).outcome is Outcome.COMMIT


def test_a_corrupt_slice_that_nobody_else_has_is_restored() -> None:
    d, workers, servers = job(2, replication=1)
    rank = primary_of(d, 0)
    corrupted(d, servers[rank], 0)
    assert not workers[0].membership.complete
    assert "no other shard server holds that slice" in workers[0].membership.waiting_for
    assert "restore a checkpoint" in workers[0].membership.waiting_for


def test_both_copies_of_a_slice_corrupt_are_one_too_many() -> None:
    d, workers, servers = job(2)
    corrupted(d, servers[1 - primary_of(d, 0)], 0)
    corrupted(d, servers[primary_of(d, 0)], 0)
    assert not workers[0].membership.complete
    assert "no other shard server holds that slice" in workers[0].membership.waiting_for


@pytest.mark.parametrize("restarted", [False, True])
def test_a_server_that_comes_back_with_the_other_copy_ends_that(restarted: bool) -> None:
    d, workers, servers = job(2)
    rank = primary_of(d, 0)
    other = servers[1 - rank]
    other.lose()
    for number in (0, 1):
        corrupted(d, servers[rank], number)
    assert "no other shard server holds that slice" in servers[rank].membership.waiting_for
    if restarted:
        d.restart()
        for p in (*workers, servers[rank]):
            p.join()
    assert "no other shard server holds that slice" in servers[rank].membership.waiting_for
    other.join()
    assert [h.copying for h in placement(d).holders[:2]] == [(rank,), (rank,)]
    assert workers[0].membership.complete
    servers[rank].copied()
    assert step(workers, servers).outcome is Outcome.COMMIT


def job_without_a_slice() -> tuple[Driver, list[Peer], list[Peer], int]:
    """One server was lost; then the other's memory of slice 0 failed, and it was lost, too. The last is its rank."""
    d, workers, servers = job(2)
    rank = primary_of(d, 0)
    servers[1 - rank].lose()
    corrupted(d, servers[rank], 0)
    servers[rank].lose()
    return d, workers, servers, rank


def test_a_server_that_comes_back_with_a_slice_that_it_alone_has_and_has_lost_still_waits() -> None:
    d, workers, servers, rank = job_without_a_slice()
    servers[rank].join()
    assert "no other shard server holds that slice" in servers[rank].membership.waiting_for
    servers[1 - rank].join()
    servers[rank].copied()
    assert step(workers, servers).outcome is Outcome.COMMIT
    assert set(placement(d).holders[0].complete) == {0, 1}


def test_a_server_that_is_away_when_the_other_copy_comes_back_gets_its_slice_again() -> None:
    d, workers, servers, rank = job_without_a_slice()
    servers[1 - rank].join()
    servers[rank].join()
    assert len(placement(d).holders[0].complete) == len(placement(d).holders[0].copying) == 1
    servers[rank].copied()
    assert step(workers, servers).outcome is Outcome.COMMIT


def test_a_report_of_what_was_there_before_is_ignored() -> None:
    d, workers, servers = job(2)
    rank = primary_of(d, 0)
    old = servers[rank].placement_number(0)
    corrupted(d, servers[rank], 0)
    before = placement(d).number
    corrupted(d, servers[rank], 0, placement=old)  # sent again: it is copying
    assert placement(d).number == before
    servers[rank].copied()
    before = placement(d).number
    corrupted(d, servers[rank], 0, placement=old)  # sent again: it has it again
    assert placement(d).number == before
    for bad in ({"epoch": 3}, {"slice": 1 << 30}, {"model": 9}):
        corrupted(d, servers[rank], **{"number": bad.pop("slice", 0), **bad})
    assert placement(d).number == before
    assert step(workers, servers).outcome is Outcome.COMMIT


def test_a_server_that_comes_back_with_a_corrupt_slice_says_so() -> None:
    d, workers, servers = job(2)
    rank, number = primary_of(d, 0), servers[primary_of(d, 0)].placement_number(0)
    servers[rank].lose()
    servers[rank].join()
    assert rank in placement(d).holders[0].complete, "it still holds what it held"
    corrupted(d, servers[rank], 0, placement=number)
    assert placement(d).holders[0] == Holders((1 - rank,), (rank,))
    servers[rank].copied()
    assert step(workers, servers).outcome is Outcome.COMMIT

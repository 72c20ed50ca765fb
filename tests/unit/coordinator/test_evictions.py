"""Members are evicted: silent, not replaced, cut off from each other, or late in a step. Each has a reason.

Tests of `coordinator/core/evictions.py`.
"""

from __future__ import annotations

import pytest

from axon_ps.errors import MemberLost, Timeout
from axon_ps.types import Decision
from coordinator_driver import Driver


def test_silence_is_death_after_the_lease() -> None:
    d = Driver(lease_s=5.0)
    (w, other), (shard,) = d.assembled()
    d.advance(4.0)
    other.beat(), shard.beat()
    d.advance(1.0)
    assert isinstance(w.error, MemberLost)
    assert "worker 0 (node a) was silent for 5 s" in str(w.error)
    assert [m.rank for m in other.membership.workers] == [1]
    assert d.state.next_deadline() == pytest.approx(d.clock() + 4.0)


def test_members_lost_together_make_one_generation() -> None:
    d = Driver(world_size=3)
    (_, _, last), (shard,) = d.assembled(workers=3)
    generation = last.membership.generation
    d.advance(4.0)
    last.beat(), shard.beat()
    d.advance(1.0)
    assert last.membership.generation == generation + 1
    assert "worker 0" in last.last(Decision).reason
    assert "worker 1" in last.last(Decision).reason


def test_a_pause_of_the_coordinator_itself_kills_nobody() -> None:
    d = Driver()
    d.assembled()
    d.clock.advance(60.0)
    d.state.paused(60.0)
    d.perform(d.state.tick(d.clock()))
    assert len(d.state.status().membership.workers) == 2


def test_waiting_for_a_replacement_ends_with_a_clear_error_and_later_workers_may_join() -> None:
    d = Driver(join_timeout_s=30.0)
    (w, other), (shard,) = d.assembled()
    other.lose()
    d.advance(29.0, beat=True)
    assert w.open
    d.advance(1.0, beat=True)
    assert isinstance(w.error, Timeout)
    assert str(w.error) == "the job waited 30 s for 1 of 2 workers"
    assert shard.open
    d.advance(100.0, beat=True)
    a, b = d.worker(), d.worker()
    d.advance(20.0, beat=True)
    assert a.open
    assert b.membership.complete


def test_the_later_of_two_members_that_cannot_reach_each_other_is_evicted() -> None:
    d = Driver(world_size=3, min_workers=2, lease_s=5.0)
    (first, second, last), _ = d.assembled(workers=3)
    last.reaches(unreachable=[second])
    d.advance(5.0, beat=True)
    assert (first.open, second.open, last.open) == (True, True, False)
    assert isinstance(last.error, MemberLost)
    assert "worker 2 (node a) and worker 1 (node a) cannot reach each other" in str(last.error)
    assert "this one is no member any more, and joins again when it can" in str(last.error)
    assert d.state.status().counters["cut_off"] == 1


def test_leases_come_before_stragglers() -> None:
    d = Driver(world_size=3, min_workers=1, lease_s=5.0, step_timeout_s=5.0)
    (first, second, last), (shard,) = d.assembled(workers=3)
    first.vote()
    for _ in range(9):
        d.advance(0.5)
        first.beat(), second.beat(), shard.beat()
    d.advance(0.5)
    assert isinstance(last.error, MemberLost), "it was silent"
    assert second.open, "its time begins anew with the generation"
    first.vote()
    d.advance(5.0, beat=True)
    assert isinstance(second.error, Timeout)
    assert "worker 1 (node a) was set aside: the step to version 1 waited 5 s for it" in str(second.error)

"""Barriers, as the pure state machine does them."""

from __future__ import annotations

from typing import Any

import pytest

from axon_ps.coordinator.core import barriers
from axon_ps.coordinator.core.access.callers import Caller
from axon_ps.errors import Busy, Disagreement, GenerationChanged, InvalidRequest, MemberLost, Timeout
from coordinator_driver import Driver, Peer


def arrive(d: Driver, peer: Peer, name: str = "b", ranks: tuple[int, ...] = (), timeout_s: float = 10.0) -> Any:
    """The answer, or the call's number while there is none."""
    return d.call(lambda call: d.state.barrier(call, peer.caller, name, ranks, d.clock(), timeout_s))


def test_it_opens_when_all_have_come_and_may_be_used_again() -> None:
    d = Driver()
    (a, b), _ = d.assembled()
    generation = a.membership.generation
    for _ in range(2):
        waiting = arrive(d, a)
        assert waiting not in d.replies
        arrive(d, b)
        assert d.replies[waiting] == generation
    assert d.state.status().pending == ()


def test_the_missing_ranks_are_named_when_time_is_over() -> None:
    d = Driver(world_size=3)
    (a, b, _), _ = d.assembled(workers=3)
    first = arrive(d, a, timeout_s=2.0)
    second = arrive(d, b, timeout_s=60.0)
    assert d.state.status().pending == ("barrier 'b' still waits for rank 2",)
    d.advance(2.0)
    assert isinstance(d.replies[first], Timeout)
    assert str(d.replies[first]) == "barrier 'b' still waits for rank 2 after 2 s"
    assert second not in d.replies
    assert d.state.status().pending == ("barrier 'b' still waits for rank 0, 2",), "who gave up has not arrived"


def test_without_ranks_it_waits_until_the_job_is_complete() -> None:
    d = Driver()
    a = d.worker()
    waiting = arrive(d, a, timeout_s=1.0)
    b = d.worker()
    other = arrive(d, b)
    d.advance(1.0)
    assert str(d.replies[waiting]) == "barrier 'b' still waits for shard server 0 of 1 after 1 s"
    again = arrive(d, a)
    d.shard()
    assert d.replies[again] == d.replies[other] == 3


def test_groups_of_the_same_name_do_not_meet() -> None:
    d = Driver(world_size=4)
    (a, b, c, e), _ = d.assembled(workers=4)
    first, second = arrive(d, a, ranks=(0, 1)), arrive(d, c, ranks=(2, 3))
    arrive(d, b, ranks=(1, 0))
    assert first in d.replies
    assert second not in d.replies
    arrive(d, e, ranks=(3, 2))
    assert second in d.replies


def test_a_death_ends_the_barriers_that_need_it() -> None:
    d = Driver(world_size=3)
    (a, b, c), _ = d.assembled(workers=3)
    needs, other, everybody = arrive(d, a, "x", (0, 2)), arrive(d, a, "y", (0, 1)), arrive(d, b, "z")
    c.lose()
    assert isinstance(d.replies[needs], MemberLost)
    assert "barrier 'x' needs rank 2: worker 2 (node a) was lost" in str(d.replies[needs])
    assert isinstance(d.replies[everybody], GenerationChanged)
    assert d.replies[everybody].generation == a.membership.generation
    arrive(d, b, "y", (0, 1))
    assert d.replies[other] == a.membership.generation


def test_a_joiner_ends_the_barriers_of_everybody() -> None:
    d = Driver()
    (a, _), _ = d.assembled()
    waiting = arrive(d, a)
    d.worker()
    assert isinstance(d.replies[waiting], GenerationChanged)


def test_arriving_again_replaces_the_earlier_call() -> None:
    d = Driver()
    (a, b), _ = d.assembled()
    first = arrive(d, a)
    second = arrive(d, a)
    assert isinstance(d.replies[first], MemberLost)
    arrive(d, b)
    assert d.replies[second] == a.membership.generation


def test_who_gives_up_has_not_arrived() -> None:
    d = Driver()
    (a, b), _ = d.assembled()
    first = arrive(d, a)
    d.perform(d.state.cancel(first))
    assert arrive(d, b) not in d.replies


def test_what_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    d = Driver()
    (a, _), (shard,) = d.assembled()
    for name in ("", "x" * 513):
        with pytest.raises(InvalidRequest, match="a barrier's name has 1 to 512 characters"):
            arrive(d, a, name)
    with pytest.raises(InvalidRequest, match="rank 0 arrived at barrier 'b', which is for rank 1, 2"):
        arrive(d, a, ranks=(2, 1))
    with pytest.raises(InvalidRequest, match="waits at a barrier; only a worker may"):
        arrive(d, shard)
    with pytest.raises(GenerationChanged, match="an operator is no member"):
        d.call(lambda call: d.state.barrier(call, Caller(job="job"), "b", (), d.clock(), 1.0))
    monkeypatch.setattr(barriers, "MAX_BARRIERS", 1)
    arrive(d, a, "one")
    with pytest.raises(Busy, match="wait at 1 barriers already"):
        arrive(d, a, "two")


def test_a_barrier_deadlocked_with_a_step_fails() -> None:
    d = Driver(world_size=3)
    (a, b, c), _ = d.assembled(workers=3)
    waiting = arrive(d, c, timeout_s=1000.0)
    a.vote()
    d.advance(100.0, beat=True)
    assert waiting not in d.replies, "b may still come"
    b.vote()
    d.advance(9.0, beat=True)
    assert waiting not in d.replies, "another thread of c may still vote"
    assert d.state.next_deadline() <= d.clock() + 1.0
    d.advance(1.0, beat=True)
    assert isinstance(d.replies[waiting], Disagreement)
    assert "waits for rank 0, 1, which waits in a step for rank 2, which waits here" in str(d.replies[waiting])
    late = arrive(d, c, ranks=(0, 2), timeout_s=1000.0)  # the other order
    d.advance(9.0, beat=True)
    c.vote()
    d.advance(100.0, beat=True)
    assert late not in d.replies
    assert "gradients at shard server 0" in d.state.status().pending, "nothing else was disturbed"


def test_a_barrier_beside_a_step_that_everybody_has_voted_in_waits_on() -> None:
    d = Driver()
    (a, b), (shard,) = d.assembled()
    a.vote()
    b.vote()
    waiting = arrive(d, a)
    assert waiting not in d.replies
    shard.ready()
    arrive(d, b)
    assert d.replies[waiting] == a.membership.generation

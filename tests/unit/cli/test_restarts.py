"""When a process of `axon-ps run` is started again: one rule for workers and shard servers."""

from __future__ import annotations

from axon_ps.cli.launch.restarts import MAX_PAUSE_S, STEADY_S, Restarts


def test_at_once_the_first_time_and_then_after_growing_pauses() -> None:
    restarts = Restarts(9, now=0.0)
    pauses = []
    for second in range(9):
        pauses.append(restarts.ended(float(second)))
        restarts.began(float(second))
    assert pauses == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, MAX_PAUSE_S, MAX_PAUSE_S, MAX_PAUSE_S]
    assert not restarts.left
    assert restarts.ended(10.0) is None


def test_who_ran_for_long_is_started_again_at_once() -> None:
    restarts = Restarts(4, now=0.0)
    assert restarts.ended(1.0) == 0.0
    restarts.began(1.0)
    assert restarts.ended(1.0 + STEADY_S) == 1.0, "not yet"
    restarts.began(100.0)
    assert restarts.ended(100.1 + STEADY_S) == 0.0
    restarts.began(200.0)
    assert restarts.ended(201.0) == 1.0
    assert restarts.count == 4
    restarts.began(300.0)
    assert restarts.ended(900.0) is None, "the limit is for all of them"


def test_a_limit_of_those_in_a_row_begins_anew() -> None:
    restarts = Restarts(2, now=0.0, in_a_row=True)
    for now in (1.0, 2.0):
        assert restarts.ended(now) is not None
        restarts.began(now)
    assert restarts.ended(3.0) is None
    assert restarts.ended(3.0 + STEADY_S) == 0.0
    assert restarts.count == 1


def test_what_is_printed() -> None:
    restarts = Restarts(3, now=0.0)
    assert (
        restarts.described("it is started again", restarts.ended(0.0) or 0.0) == "it is started again (restart 1 of 3)"
    )
    pause_s = restarts.ended(0.0) or 0.0
    assert restarts.described("it is started again", pause_s) == "it is started again in 1 s (restart 2 of 3)"


def test_none_at_all() -> None:
    assert Restarts(0, now=0.0).ended(1.0) is None

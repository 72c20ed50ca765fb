"""Shard servers join and leave between two steps, if one ends soon. Tests of `coordinator/core/handover.py`."""

from __future__ import annotations

import math

import pytest

from axon_ps.coordinator.core.handover import LEAST_PATIENCE_S, MOST_PATIENCE_S, Handover, Joining
from axon_ps.wire.events import JoinRequest


def joining(session: int, since: float, incarnation: str = "s") -> Joining:
    return Joining(session, JoinRequest(job="job", incarnation=incarnation, node="n", address=f"a:{session}"), since)


def test_nothing_is_overdue_while_no_server_waits() -> None:
    handover = Handover()
    assert (len(handover), handover.next_deadline(), handover.pending()) == (0, math.inf, [])
    assert not handover.overdue(1e9)


def test_the_server_that_has_waited_longest_sets_the_deadline() -> None:
    handover = Handover()
    handover.joining[7] = joining(7, 12.0)
    handover.leaving[3] = 10.0
    assert (len(handover), handover.next_deadline()) == (2, 10.0 + LEAST_PATIENCE_S)
    assert not handover.overdue(10.0 + LEAST_PATIENCE_S - 0.01)
    assert handover.overdue(10.0 + LEAST_PATIENCE_S)
    del handover.leaving[3]
    assert handover.next_deadline() == 12.0 + LEAST_PATIENCE_S


@pytest.mark.parametrize(
    ("step_s", "patience_s"), [(0.1, LEAST_PATIENCE_S), (5.0, 15.0), (600.0, MOST_PATIENCE_S), (-3.0, LEAST_PATIENCE_S)]
)
def test_patience_is_three_steps_within_its_bounds(step_s: float, patience_s: float) -> None:
    handover = Handover()
    handover.leaving[0] = 50.0
    handover.step_ends(20.0)
    assert handover.next_deadline() == 50.0 + LEAST_PATIENCE_S, "one end does not show how long a step takes"
    handover.step_ends(20.0 + step_s)
    assert handover.next_deadline() == 50.0 + patience_s


def test_a_step_forgets_the_servers_that_were_silent() -> None:
    handover = Handover()
    handover.silent.add("s")
    handover.step_ends(1.0)
    assert not handover.silent


def test_a_process_is_found_by_its_sessions_and_named_by_its_address() -> None:
    handover = Handover()
    for session, incarnation in ((4, "s"), (5, "t"), (6, "s")):
        handover.joining[session] = joining(session, 0.0, incarnation)
    handover.leaving = {9: 0.0, 2: 0.0}
    assert handover.waiting("s") == [4, 6]
    assert handover.pending() == [
        "shard server 2 is empty and leaves after this step",
        "shard server 9 is empty and leaves after this step",
        *(f"the shard server at a:{session} joins after this step" for session in (4, 5, 6)),
    ]

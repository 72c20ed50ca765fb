"""When all members are gone at once it is the leader that seems to be cut off.

Tests of `coordinator/core/evictions.py`.
"""

from __future__ import annotations

from axon_ps.coordinator.config import CoordinatorConfig
from axon_ps.coordinator.core.state import CoordinatorState
from axon_ps.types import Role
from axon_ps.wire.events import JoinRequest

LEASE_S = 4.0


def job(workers: int = 2) -> CoordinatorState:
    """A job at time 0 of a shard server (session 0) and workers (sessions 1, 2, ...)."""
    state = CoordinatorState(CoordinatorConfig(job="job", world_size=workers, num_shards=1, lease_s=LEASE_S), 0.0)
    for session in range(workers + 1):
        role = Role.WORKER if session else Role.SHARD
        request = JoinRequest(job="job", incarnation=f"{session:032x}", node="n", address="" if session else "h:1")
        state.join(session, role, request, 0.0)
    assert not state.isolation.suspected(0.0)
    return state


def test_members_that_send_heartbeats_are_there() -> None:
    state = job()
    for now in range(1, 20):
        for session in range(3):
            state.heartbeat(session, {}, float(now))
        assert not state.isolation.suspected(now + 0.5)
        assert state.isolation.silent_s(now + 0.5) == 0.0


def test_all_silent_is_suspicious_when_the_first_lease_is_over_and_not_before() -> None:
    state = job()
    state.heartbeat(1, {}, 1.0)
    assert not state.isolation.suspected(3.9)
    assert state.isolation.suspected(4.0), "a lease is over, and all others are overdue"
    assert state.isolation.silent_s(4.0) > 0


def test_one_that_was_just_there_is_enough() -> None:
    state = job()
    state.heartbeat(1, {}, 3.0)
    assert not state.isolation.suspected(4.0)
    state.tick(4.0)
    assert not state.isolation.suspected(4.9)


def test_all_lost_by_resets_is_suspicious_half_a_lease_later() -> None:
    state = job()
    state.isolation.silent_s(1.0)
    for session in range(3):
        state.streams_lost([session], 1.0)
    assert not state.isolation.suspected(2.9)
    assert state.isolation.suspected(3.0)


def test_members_that_leave_are_not_cut_off() -> None:
    state = job()
    for session in range(3):
        state.leave(session, "done", 1.0, finished=session > 0)
    assert not state.isolation.suspected(50.0)
    assert state.isolation.silent_s(50.0) >= 49.0


def test_a_leader_that_never_had_members_suspects_nothing() -> None:
    stored = {}
    for action in job().registrations.release(0, _operator(), 5, "model 0"):
        for record in getattr(action, "records", ()):
            stored[record.key] = record.value
    state = CoordinatorState(CoordinatorConfig(job="job", world_size=2, num_shards=1, lease_s=LEASE_S), 100.0, stored)
    assert not state.isolation.suspected(104.0)
    state.tick(104.0)
    assert not state.isolation.suspected(150.0)
    assert state.isolation.silent_s(150.0) == 50.0


def _operator() -> object:
    from axon_ps.coordinator.core.access.callers import Caller

    return Caller(job="job")

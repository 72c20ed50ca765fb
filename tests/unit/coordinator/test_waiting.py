"""Deadlines and waiting calls: the next moment is always the true one, however much waits, and the limits hold."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from axon_ps.coordinator.core import waiting
from axon_ps.coordinator.core.kv import MAX_WAITERS
from axon_ps.coordinator.core.waiting import Deadlines, Waiting
from axon_ps.errors import Busy, Timeout
from coordinator_driver import Driver

KEYS = st.integers(0, 5)


@given(st.lists(st.one_of(st.tuples(KEYS, st.floats(0, 100)), st.tuples(KEYS, st.none()), st.floats(0, 100))))
def test_it_agrees_with_a_dictionary(events: list[tuple[int, float | None] | float]) -> None:
    deadlines: Deadlines[int] = Deadlines()
    model: dict[int, float] = {}
    for event in events:
        if isinstance(event, float):
            expired = list(deadlines.expired(event))
            assert expired == sorted(expired, key=lambda k: model[k])
            assert set(expired) == {k for k, moment in model.items() if moment <= event}
            model = {k: moment for k, moment in model.items() if moment > event}
        elif event[1] is None:
            deadlines.remove(event[0])
            model.pop(event[0], None)
        else:
            deadlines.set(event[0], event[1])
            model[event[0]] = event[1]
        assert deadlines.next() == min(model.values(), default=float("inf"))
        assert len(deadlines) == len(model)


def test_what_was_removed_is_not_kept() -> None:
    deadlines: Deadlines[int] = Deadlines()
    for key in range(10_000):
        deadlines.set(key, float(key))
        deadlines.remove(key)
    assert len(deadlines._heap) < 100


def test_the_next_moment_costs_the_same_however_many_wait() -> None:
    """Every heartbeat asks for it: what 16,384 waiting calls cost must not cost others their leases."""
    d = Driver(world_size=64)
    workers = [d.worker() for _ in range(64)]
    begun = time.process_time()
    for i in range(MAX_WAITERS):
        d.kv(workers[i % 64], "wait", f"k{i}", d.clock(), 100.0, workers[i % 64].incarnation)
        d.state.next_deadline()
    for _ in range(MAX_WAITERS):
        d.state.next_deadline()
        d.perform(d.state.tick(d.clock()))
    assert time.process_time() - begun < 5.0, "this took half a minute when the next moment was searched for"
    d.advance(99.5, beat=True)
    assert not d.replies
    d.advance(1.0, beat=True)
    assert len(d.replies) == MAX_WAITERS
    assert all(isinstance(r, Timeout) for r in d.replies.values())
    assert len(d.state.status().membership.workers) == 64


def test_one_caller_cannot_take_all_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "MAX_PER_CALLER", 2)
    calls = Waiting("keys", 3)
    calls.add(1, "a", 0.0, 1.0)
    calls.add(2, "a", 0.0, 1.0)
    with pytest.raises(Busy, match="2 calls of this process wait for keys already"):
        calls.add(3, "a", 0.0, 1.0)
    calls.add(4, "b", 0.0, 2.0)
    with pytest.raises(Busy, match="3 calls wait for keys already, which is the most of a job"):
        calls.add(5, "c", 0.0, 1.0)
    calls.remove(1)
    calls.remove(1)
    calls.add(6, "a", 0.0, 5.0)
    assert list(calls.late(2.0)) == [2, 4]
    assert calls.timeout_s(4) == 2.0
    assert len(calls) == 3


def test_barriers_have_limits_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "MAX_PER_CALLER", 2)
    d = Driver()
    [w, _], _ = d.assembled()

    def arrive(name: str) -> object:
        return d.call(lambda call: d.state.barrier(call, w.caller, name, (), d.clock(), 10.0))

    arrive("a"), arrive("b")
    with pytest.raises(Busy, match="wait for barriers already"):
        arrive("c")
    d.advance(10.0, beat=True)
    assert len([r for r in d.replies.values() if isinstance(r, Timeout)]) == 2
    arrive("c")

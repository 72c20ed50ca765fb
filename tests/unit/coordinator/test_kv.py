"""The job's key-value store, as the pure state machine does it."""

from __future__ import annotations

import pytest

from axon_ps.coordinator.core import kv
from axon_ps.coordinator.core.access.callers import Caller
from axon_ps.coordinator.core.kv import KVResult
from axon_ps.coordinator.core.waiting import MAX_WAIT_S
from axon_ps.errors import Busy, GenerationChanged, InvalidRequest, PermissionDenied, Timeout
from coordinator_driver import Driver


def test_put_get_delete() -> None:
    d = Driver()
    w = d.worker()
    assert d.kv(w, "get", "k") == KVResult(False)
    assert d.kv(w, "put", "k", b"v") == KVResult(True, b"v")
    assert d.kv(None, "get", "k") == KVResult(True, b"v")
    assert d.kv(w, "delete", "k") == KVResult(True)
    assert d.kv(w, "delete", "k") == KVResult(False)
    assert d.kv(w, "put", "empty", b"").found
    assert d.kv(w, "get", "empty") == KVResult(True, b"")


def test_it_survives_a_restart() -> None:
    d = Driver()
    d.kv(None, "put", "kept", b"\x00\xff")
    d.kv(None, "put", "removed", b"x")
    d.kv(None, "delete", "removed")
    d.restart()
    assert d.kv(None, "get", "kept").value == b"\x00\xff"
    assert not d.kv(None, "get", "removed").found


def test_add_counts_from_zero_in_64_bits() -> None:
    d = Driver()
    assert d.kv(None, "add", "n", 5).sum == 5
    assert d.kv(None, "add", "n", -7) == KVResult(True, b"-2", -2)
    d.kv(None, "put", "text", b"four")
    with pytest.raises(InvalidRequest, match="holds b'four', which is no integer"):
        d.kv(None, "add", "text", 1)
    d.kv(None, "put", "n", str((1 << 63) - 1).encode())
    with pytest.raises(InvalidRequest, match="more than 64 bits"):
        d.kv(None, "add", "n", 1)


def test_compare_and_set() -> None:
    d = Driver()
    assert d.kv(None, "compare_and_set", "k", b"", b"a") == KVResult(True, b"a")
    assert d.kv(None, "compare_and_set", "k", b"", b"b") == KVResult(False, b"a")
    assert d.kv(None, "compare_and_set", "k", b"a", b"b") == KVResult(True, b"b")


def test_wait_is_answered_by_the_put_and_by_the_clock() -> None:
    d = Driver()
    now = d.clock()
    first = d.kv(None, "wait", "k", now, 10.0)
    second = d.kv(None, "wait", "k", now, 2.0)
    given_up = d.kv(None, "wait", "k", now, 10.0)
    assert d.state.next_deadline() == now + 2.0
    d.perform(d.state.cancel(given_up))
    d.advance(2.0)
    assert isinstance(d.replies[second], Timeout)
    assert str(d.replies[second]) == "nobody stored key 'k' within 2 s"
    d.kv(None, "put", "k", b"v")
    assert d.replies[first] == KVResult(True, b"v")
    assert given_up not in d.replies
    assert d.kv(None, "wait", "k", now, 10.0) == KVResult(True, b"v")
    assert d.state.next_deadline() == float("inf")


def test_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    d = Driver()
    for key in ("", "x" * 513, "é" * 257):
        with pytest.raises(InvalidRequest, match="a key has 1 to 512"):
            d.kv(None, "put", key, b"")
    with pytest.raises(InvalidRequest, match="at most 1048576 are allowed"):
        d.kv(None, "put", "k", bytes((1 << 20) + 1))
    monkeypatch.setattr(kv, "MAX_TOTAL_BYTES", 1000)
    d.kv(None, "put", "a", bytes(800))
    with pytest.raises(Busy, match="holds 929 of 1000 bytes"):
        d.kv(None, "put", "b", bytes(100))
    d.kv(None, "put", "a", b"")
    d.kv(None, "put", "b", bytes(100))
    monkeypatch.setattr(kv, "MAX_WAITERS", 1)
    d = Driver()
    d.kv(None, "wait", "c", d.clock(), 1.0)
    with pytest.raises(Busy, match="1 calls wait"):
        d.kv(None, "wait", "c", d.clock(), 1.0)


def test_only_members_and_operators_of_the_job() -> None:
    d = Driver()
    w = d.worker()
    w.lose()
    with pytest.raises(GenerationChanged, match="is no member of generation 2") as caught:
        d.kv(w, "get", "k")
    assert caught.value.generation == 2
    with pytest.raises(PermissionDenied):
        d.state.kv(Caller(job="other"))


def test_putting_what_is_there_writes_nothing() -> None:
    d = Driver()
    d.kv(None, "put", "k", b"v")
    d.performed.clear()
    d.kv(None, "put", "k", b"v")
    assert len(d.performed) == 1


def test_keys_are_counted_and_the_coordinator_has_room_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv, "MAX_TOTAL_BYTES", 1000)
    monkeypatch.setattr(kv, "MAX_KEYS", 2)
    d = Driver()
    d.kv(None, "put", "a", bytes(800))
    with pytest.raises(Busy, match="holds 929 of 1000 bytes, which is the most of a job; delete what"):
        d.kv(None, "put", "b", bytes(800))
    d.call(lambda call: (d.state.kv(Caller(job="job")).put(call, "b", bytes(800), own=True), d.state.flush())[1])
    with pytest.raises(Busy, match="has 2 keys, which is the most of a job"):
        d.call(lambda call: (d.state.kv(Caller(job="job")).put(call, "c", b"", own=True), d.state.flush())[1])
    d.kv(None, "put", "b", bytes(700)), "what shrinks it is taken, also from others"


def test_what_a_lost_member_waits_for_takes_no_room() -> None:
    d = Driver()
    w = d.worker()
    call = d.kv(w, "wait", "k", d.clock(), 1e9, w.incarnation)
    w.lose()
    assert isinstance(d.replies[call], GenerationChanged)
    assert d.state.next_deadline() == float("inf")


def test_no_wait_is_longer_than_a_day() -> None:
    d = Driver()
    call = d.kv(None, "wait", "k", d.clock(), float("inf"))
    assert d.state.next_deadline() == d.clock() + MAX_WAIT_S
    d.clock.advance(MAX_WAIT_S + 1)
    d.perform(d.state.tick(d.clock()))
    assert isinstance(d.replies[call], Timeout)

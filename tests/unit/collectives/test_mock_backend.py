"""MockBackend and MemoryStore beyond what the conformance suite asks of every backend."""

from __future__ import annotations

import dataclasses
import threading

import numpy as np
import pytest

from axon_ps.collectives.backends.base import Call, Operation, Request
from axon_ps.collectives.backends.mock import MockBackend, mock_contexts
from axon_ps.collectives.store import MAX_VALUE_BYTES, MemoryStore
from axon_ps.errors import Broken, Closed, InvalidRequest, MemberLost, Timeout
from axon_ps.types import DType, ReduceOp

BARRIER = Call(sequence=0, operation=Operation.BARRIER)


def test_a_store_gives_what_was_put() -> None:
    store = MemoryStore()
    store.put("a", b"1")
    assert store.wait("a", 0.0) == b"1"
    store.delete("a")
    store.delete("a")
    with pytest.raises(Timeout, match="'a'"):
        store.wait("a", 0.01)
    with pytest.raises(InvalidRequest, match="at most"):
        store.put("a", bytes(MAX_VALUE_BYTES + 1))


def test_a_store_wakes_who_waits() -> None:
    store = MemoryStore()
    threading.Timer(0.02, store.put, ["a", b"1"]).start()
    assert store.wait("a", 10.0) == b"1"


def test_one_rank_needs_no_threads() -> None:
    (backend,) = MockBackend.create_world(1)
    data = np.array([3, 4], np.int32)
    backend.run(
        Request(
            call=Call(sequence=0, operation=Operation.ALL_REDUCE, dtype=DType.I32, counts=(2,), op=ReduceOp.SUM),
            data=data,
        ),
        0.0,
    )
    assert data.tolist() == [3, 4]
    backend.send(data, DType.I32, 0, 1, 0.0)
    got = np.zeros(2, np.int32)
    assert backend.recv(got, DType.I32, -1, 1, 0.0) == 0
    assert got.tolist() == [3, 4]
    with pytest.raises(Timeout):
        backend.recv(got, DType.I32, -1, 1, 0.01)


def test_a_closed_backend_and_its_peers_say_so() -> None:
    first, second = MockBackend.create_world(2)
    first.send(np.ones(1, np.uint8), DType.U8, 1, 0, 1.0)
    first.close()
    with pytest.raises(Closed, match="was closed"):
        first.run(Request(call=BARRIER), 1.0)
    assert second.recv(np.zeros(1, np.uint8), DType.U8, 0, 0, 1.0) == 0  # what was sent before still arrives
    with pytest.raises(Broken, match="rank 0 has closed"):
        second.run(Request(call=BARRIER), 1.0)


def test_groups_of_one_store_are_told_apart_by_name() -> None:
    one, other = (mock_contexts(1, name=name)[0] for name in ("one", "other"))
    other = dataclasses.replace(other, store=one.store)
    MockBackend(one).close()
    MockBackend(other).run(Request(call=BARRIER), 1.0)


def test_what_it_cannot_be_made_of() -> None:
    with pytest.raises(InvalidRequest, match="at least 1"):
        MockBackend.create_world(0)


@pytest.mark.parametrize(
    ("counts", "numel", "words"),
    [((2,), 3, "has 3 elements; needed are 2"), ((1, 1), 2, r"counts \(1, 1\); needed are 1"), ((-1,), 0, "counts")],
)
def test_arrays_and_counts_must_fit(counts: tuple[int, ...], numel: int, words: str) -> None:
    (backend,) = MockBackend.create_world(1)
    call = Call(sequence=0, operation=Operation.BROADCAST, dtype=DType.F32, counts=counts, root=0)
    with pytest.raises(InvalidRequest, match=words):
        backend.run(Request(call=call, data=np.zeros(numel, np.float32)), 1.0)
    with pytest.raises(InvalidRequest, match="contiguous"):
        backend.run(Request(call=dataclasses.replace(call, counts=(2,)), data=np.zeros(4, np.float32)[::2]), 1.0)
    with pytest.raises(InvalidRequest, match="root"):
        backend.run(Request(call=dataclasses.replace(call, counts=(2,), root=1), data=np.zeros(2, np.float32)), 1.0)


def test_messages_need_a_rank_that_is_there() -> None:
    (backend,) = MockBackend.create_world(1)
    data = np.zeros(1, np.uint8)
    for act in (lambda: backend.send(data, DType.U8, 1, 0, 1.0), lambda: backend.recv(data, DType.U8, -2, 0, 1.0)):
        with pytest.raises(InvalidRequest, match="no rank"):
            act()
    with pytest.raises(InvalidRequest, match="tag"):
        backend.send(data, DType.U8, 0, -1, 1.0)


def test_what_was_sent_is_received_though_its_sender_has_finished_and_nothing_after_closing() -> None:
    first, second = MockBackend.create_world(2)
    data = np.array([3], np.int32)
    for _ in range(2):
        second.send(data, DType.I32, 0, 7, 1.0)
    second.close()
    first.abort(MemberLost("rank 1 has finished"))
    out = np.zeros_like(data)
    assert first.recv(out, DType.I32, 1, 7, 1.0) == 1
    assert out == data
    with pytest.raises(MemberLost, match="has finished"):
        first.recv(out, DType.I32, 1, 8, 1.0)
    first, second = MockBackend.create_world(2)
    second.send(data, DType.I32, 0, 7, 1.0)
    first.close()
    with pytest.raises(Closed):
        first.recv(out, DType.I32, 1, 7, 1.0)

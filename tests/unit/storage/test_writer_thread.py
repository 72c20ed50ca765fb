"""A thread that writes copies: nobody waits for the storage, unless there is no more room, and it never lies."""

from __future__ import annotations

import hashlib
import threading
from typing import Any

import pytest

from axon_ps.errors import CheckpointError, StorageFull
from axon_ps.host.priority import Throttle
from axon_ps.storage import writer_thread
from axon_ps.storage.writer_thread import WriterThread


class SlowSink:
    """Storage that takes a block when the test lets it."""

    def __init__(self) -> None:
        self.content = b""
        self.turns = threading.Semaphore(0)
        self.error: Exception | None = None

    def write(self, data: Any, /) -> None:
        assert self.turns.acquire(timeout=10)
        if self.error is not None:
            raise self.error
        self.content += bytes(data)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_thread, "BLOCK_BYTES", 4)


def test_what_is_put_may_change_before_it_is_written() -> None:
    sink = SlowSink()
    writer = WriterThread(sink)
    values = bytearray(b"0123456789")
    writer.put(memoryview(values))
    writer.put(b"ab")
    values[:] = b"----------"
    sink.turns.release(10)
    assert writer.finish() == (hashlib.sha256(b"0123456789ab").hexdigest(), 12)
    assert sink.content == b"0123456789ab"


@pytest.mark.parametrize("size", [0, 1, 4, 5, 8])
def test_any_size(size: int) -> None:
    sink = SlowSink()
    sink.turns.release(10)
    writer = WriterThread(sink)
    writer.put(bytes(range(size)))
    assert writer.finish() == (hashlib.sha256(bytes(range(size))).hexdigest(), size)
    assert sink.content == bytes(range(size))


def test_copies_take_no_more_memory_than_they_may() -> None:
    sink = SlowSink()
    writer = WriterThread(sink, buffer_bytes=8)
    done = threading.Event()

    def put() -> None:
        writer.put(bytes(20))
        done.set()

    putting = threading.Thread(target=put)
    putting.start()
    assert not done.wait(0.05), "there is room for two blocks"
    sink.turns.release(10)
    putting.join()
    assert writer.finish()[1] == 20


def test_an_error_is_raised_to_whoever_writes_on_and_at_the_end() -> None:
    sink = SlowSink()
    sink.error = StorageFull("no")
    writer = WriterThread(sink, buffer_bytes=4)
    sink.turns.release(1)
    with pytest.raises(StorageFull):
        writer.put(bytes(100))
    with pytest.raises(StorageFull):
        writer.finish()
    writer.abandon()


def test_storage_that_does_not_move_is_given_up() -> None:
    sink = SlowSink()
    writer = WriterThread(sink, stalled_s=0.05)
    writer.put(bytes(8))
    with pytest.raises(CheckpointError, match="storage has taken nothing for"):
        writer.finish()
    writer.abandon()
    sink.turns.release(10)


def test_what_is_abandoned_is_not_written() -> None:
    sink = SlowSink()
    writer = WriterThread(sink)
    writer.put(bytes(100))
    sink.turns.release(1)
    writer.abandon()
    assert len(sink.content) <= 4


class Noted(Throttle):
    """Rests are counted, not slept."""

    def rest(self, worked_s: float) -> None:
        assert worked_s >= 0.0
        rests.append(worked_s)


rests: list[float] = []


def test_it_rests_after_each_block_unless_somebody_waits_for_a_free_one() -> None:
    rests.clear()
    sink = SlowSink()
    writer = WriterThread(sink, Noted(0.5), buffer_bytes=8)
    putting = threading.Thread(target=writer.put, args=(bytes(20),))
    putting.start()
    for written in range(3):  # of five blocks three are waited for
        while not (writer._wanted and writer._written == written):
            assert putting.is_alive()
        sink.turns.release()
    putting.join()
    sink.turns.release(2)
    assert writer.finish()[1] == 20
    assert len(rests) == 2


@pytest.mark.parametrize(("duty_cycle", "rest_s"), [(1.0, []), (0.5, [0.25]), (0.2, [1.0]), (0.01, [1.0])])
def test_what_is_throttled_sleeps(duty_cycle: float, rest_s: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("axon_ps.host.priority.time.sleep", slept.append)
    Throttle(duty_cycle).rest(0.25)
    assert slept == pytest.approx(rest_s)

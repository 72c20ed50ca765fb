"""The thread that ends calls: overdue ones, failed ones, each end once.

Tests of `collectives/backends/nccl/watchdog.py`.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator

import pytest

from axon_ps.collectives.backends.nccl.watchdog import Watchdog
from axon_ps.errors import AxonError, NcclError

LONG_S = 20.0


class Watched:
    """A transport whose calls fail when a test says so; `ends` has the arguments of `expire`."""

    def __init__(self) -> None:
        self.error: AxonError | None = None
        self.ends: queue.Queue[AxonError | None] = queue.Queue()
        self.watchdog = Watchdog("axon-ps-watched", lambda: self.error, self.ends.put)


@pytest.fixture
def watched() -> Iterator[Watched]:
    made = Watched()
    yield made
    made.watchdog.close()


def test_an_overdue_call_is_ended_once(watched: Watched) -> None:
    with watched.watchdog.until(time.monotonic() + LONG_S), watched.watchdog.until(time.monotonic()):
        assert watched.ends.get(timeout=LONG_S) is None
    assert watched.ends.empty()


def test_a_failure_ends_the_call_that_is_under_way(watched: Watched) -> None:
    with watched.watchdog.until(time.monotonic() + LONG_S):
        watched.error = NcclError("a peer is gone")
        assert watched.ends.get(timeout=LONG_S) is watched.error
    assert watched.ends.empty()


def test_calls_that_end_in_time_are_left_alone(watched: Watched) -> None:
    for _ in range(3):
        with watched.watchdog.until(time.monotonic() + LONG_S):
            pass
    watched.error = NcclError("nobody calls now")
    watched.watchdog.close()
    assert watched.ends.empty()


def test_the_function_that_ends_calls_may_close_it() -> None:
    closed = threading.Event()

    def expire(error: AxonError | None) -> None:
        watchdog.close()
        closed.set()

    watchdog = Watchdog("axon-ps-watched", lambda: None, expire)
    with watchdog.until(time.monotonic()):
        assert closed.wait(LONG_S)
    watchdog.close()

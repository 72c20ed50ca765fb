"""A worker that stops at a point of its own until the test lets it go on, through two named pipes."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deadlines import HANG_S

TO_TEST, FROM_TEST = "to-test", "from-test"
LIMIT_S = HANG_S


def make_pipes(directory: Path) -> None:
    """In the test, before the worker starts."""
    for name in (TO_TEST, FROM_TEST):
        os.mkfifo(directory / name)


def pause(directory: Path) -> None:
    """In the worker: say that we are here, and wait until the test is done."""
    _meet(directory / TO_TEST, "ab")
    _meet(directory / FROM_TEST, "rb")


@contextmanager
def paused(directory: Path) -> Iterator[None]:
    """In the test: what is done here is done while the worker waits; an error if it does not come to its point."""
    here = os.open(directory / TO_TEST, os.O_RDONLY | os.O_NONBLOCK)
    try:
        came = select.poll()
        came.register(here)  # its end is there when the worker has been there
        assert came.poll(1000 * LIMIT_S), f"the worker was not where it pauses within {LIMIT_S} s"
    finally:
        os.close(here)
    yield
    _meet(directory / FROM_TEST, "ab")


def _meet(path: Path, mode: str) -> None:
    with open(path, mode):  # returns when the other end is opened, too
        pass

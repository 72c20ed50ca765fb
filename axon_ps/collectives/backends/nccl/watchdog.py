"""`Watchdog`: a thread that notices overdue or failed calls. It calls `expire`, which ends them.

Invariant: `expire` is called outside the lock, at most once until no call is under way.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator

from axon_ps.errors import AxonError

POLL_S = 0.05


class Watchdog:
    """Watches over the bodies of `until`.

    Args:
        name: name of the thread.
        failed: checks for an error; called every `POLL_S` while a call is under way.
        expire: called with the error found, or with None when a deadline has passed.
    """

    def __init__(
        self, name: str, failed: Callable[[], AxonError | None], expire: Callable[[AxonError | None], object]
    ) -> None:
        self._changed = threading.Condition()
        self._keys = itertools.count()
        self._deadlines: dict[int, float] = {}
        self._failed = failed
        self._expire = expire
        self._closed = False
        self._thread = threading.Thread(target=self._watch, name=name, daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def until(self, deadline: float) -> Iterator[None]:
        """Watch over the body; `deadline` is one of `time.monotonic`."""
        key = next(self._keys)
        with self._changed:
            self._deadlines[key] = deadline
            self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                del self._deadlines[key]
                self._changed.notify()

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _watch(self) -> None:
        while (left_s := self._next_check()) is not None:
            if left_s <= 0.0:
                self._expire(None)
                self._until_idle()
            elif (error := self._failed()) is not None:
                self._expire(error)
                self._until_idle()

    def _next_check(self) -> float | None:
        """Wait a while, or until there is a call; return the seconds to the next deadline, or None when closed."""
        with self._changed:
            if not self._deadlines:
                self._changed.wait_for(lambda: self._closed or bool(self._deadlines))
            if not self._closed and (left_s := self._left()) > 0.0:
                self._changed.wait(min(POLL_S, left_s))
            return None if self._closed else self._left()

    def _left(self) -> float:
        return min(self._deadlines.values(), default=float("inf")) - time.monotonic()

    def _until_idle(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not self._deadlines)

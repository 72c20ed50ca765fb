"""Deadlines of calls and leases, in order, and the number of waiting calls of each caller. Pure.

The next deadline is found in constant time, since the coordinator asks for it after every event. A deadline is added or
removed in logarithmic time.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

from axon_ps.errors import Busy

MAX_PER_CALLER = 1 << 8
"""Most pending calls of one member (or of all operators) for the same kind of event."""

MAX_WAIT_S = 86400.0
"""Longest wait of a call, also with a longer time-out: a day. A caller that waits longer calls again."""

K = TypeVar("K", bound=Hashable)


class Deadlines(Generic[K]):
    """Deadlines by key: a heap whose moved and removed entries are skipped when they come up."""

    def __init__(self) -> None:
        self._deadlines: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._pushed = 0

    def __len__(self) -> int:
        return len(self._deadlines)

    def set(self, key: K, deadline: float) -> None:
        """Set or move a deadline. A deadline that only moves later, like a lease's, has one entry in the heap."""
        known = self._deadlines.get(key)
        self._deadlines[key] = deadline
        if known is None or deadline < known:
            self._push(key, deadline)

    def remove(self, key: K) -> None:
        """Remove a key; harmless when it is absent."""
        self._deadlines.pop(key, None)
        if len(self._heap) > 2 * len(self._deadlines) + 64:  # most entries are of removed keys
            self._heap = []
            for known, deadline in self._deadlines.items():
                self._push(known, deadline)

    def next(self) -> float:
        """Return the earliest deadline; inf when there is none."""
        while self._heap:
            deadline, _, key = self._heap[0]
            now = self._deadlines.get(key)
            if now == deadline:
                return deadline
            heapq.heappop(self._heap)
            if now is not None and now > deadline:
                self._push(key, now)
        return float("inf")

    def expired(self, now: float) -> Iterator[K]:
        """Yield the keys whose deadline has passed, earliest first. Each is removed."""
        while self.next() <= now:
            key = self._heap[0][2]
            self.remove(key)
            yield key

    def _push(self, key: K, deadline: float) -> None:
        self._pushed += 1
        heapq.heappush(self._heap, (deadline, self._pushed, key))


class Waiting:
    """Pending calls, with their callers and time-outs.

    Args:
        what: a plural noun for the object of the wait, for errors.
        most: the number that may be pending at a time; of one caller at most `MAX_PER_CALLER`.
    """

    def __init__(self, what: str, most: int) -> None:
        self._what = what
        self._most = most
        self._calls: dict[int, tuple[str, float]] = {}  # caller and time-out
        self._deadlines: Deadlines[int] = Deadlines()
        self._of_caller: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, call: int, caller: str, now: float, timeout_s: float) -> None:
        """Add a pending call."""
        if self._of_caller[caller] >= MAX_PER_CALLER:
            raise Busy(
                f"{MAX_PER_CALLER} calls of this process wait for {self._what} already, which is the most of one; "
                "wait for fewer at a time"
            )
        if len(self._calls) >= self._most:
            raise Busy(f"{self._most} calls wait for {self._what} already, which is the most of a job; try again later")
        timeout_s = min(timeout_s, MAX_WAIT_S)
        self._calls[call] = caller, timeout_s
        self._of_caller[caller] += 1
        self._deadlines.set(call, now + timeout_s)

    def remove(self, call: int) -> str:
        """Remove a call, and return its caller; harmless when it is not pending."""
        known = self._calls.pop(call, None)
        if known is not None:
            self._deadlines.remove(call)
            self._of_caller[known[0]] -= 1
            if not self._of_caller[known[0]]:
                del self._of_caller[known[0]]
        return "" if known is None else known[0]

    def timeout_s(self, call: int) -> float:
        """Return the time-out of a call."""
        return self._calls[call][1]

    def late(self, now: float) -> Iterator[int]:
        """Yield the calls that have timed out, earliest first. The caller removes them."""
        yield from self._deadlines.expired(now)

    def next_deadline(self) -> float:
        """Return the time at which the next call times out."""
        return self._deadlines.next()

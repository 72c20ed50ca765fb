"""The lines from a worker to the shard servers: the bytes in flight that fill them, and the order of transfers.

Data requested only when it is needed arrives a round trip later, and the line is idle meanwhile. The line is busy if
the bytes in flight are at least the product of its rate and the round trip (RFC 7323, section 1.1). The rate is the
median of the last windows' rates. The fastest window may contain bytes that had waited in the kernel while this process
did something else. The measured rate is below the line's while too little is in flight, so more is requested: the next
windows measure more, up to the line's rate. Twice the product, as in BBR
(https://datatracker.ietf.org/doc/draft-ietf-ccwg-bbr/, "cwnd_gain"), needs BBR's pacing: without it a full product, and
a unit, are in the queue before the line. So the bytes in flight are twice the product if the round trip is at most
`QUEUE_S`. On longer lines the excess is what the line carries in `QUEUE_S`, or half of the product if that is more.
This was measured with 500 Mbit/s and 100 ms. The queue held 0.2 s:

    in flight              median step over the bound    the queue
    twice the product      1.11 to 1.87                  full in every second or third step
    1.5 times the product  1.04 to 1.06                  without losses

A step with losses took twice as long.

More in flight than that would do harm. Transfers that share a line all end late, also the first one needed, and then
the line is idle for a round trip. So on a long line transfers begin in order. Each begins once the bytes left of those
before it no longer fill the line. The same holds for speculative gathers that share a network card with pushes
(`server_lines.IN_ORDER_BYTES`).
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import statistics
from collections import deque
from collections.abc import AsyncIterator, Callable

WINDOW_S = 0.3
SHORT_RTT_S = 0.002
"""Longest round trip of a near line, in seconds."""
_WINDOWS = 9
QUEUE_S = 0.05
"""The longest queue before a line, in seconds. The queues of routers hold 0.1 s and more."""


def filling_s(rtt_s: float) -> float:
    """Return the amount that should be in flight on a line with this round trip, in seconds of its rate."""
    return rtt_s + max(rtt_s / 2, min(rtt_s, QUEUE_S))


class Rate:
    """The speed at which gathers arrive. One thread, but `in_flight_bytes` may be called in any."""

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=_WINDOWS)  # bytes a second
        self._rate = 0.0  # the median of them
        self._begin_s = 0.0  # of the window
        self._bytes = 0

    def received(self, size_bytes: int, now_s: float) -> None:
        """Count bytes that have arrived.

        Args:
            size_bytes: payload since the previous call.
            now_s: a monotonic clock.
        """
        lasted_s = now_s - self._begin_s
        if lasted_s > 2 * WINDOW_S:  # nothing arrived for a while, so the begin of this arrival is not known
            self._begin_s, self._bytes = now_s, 0
            return
        self._bytes += size_bytes
        if lasted_s >= WINDOW_S:
            self._rates.append(self._bytes / lasted_s)
            self._rate = statistics.median_high(self._rates)
            self._begin_s, self._bytes = now_s, 0

    def in_flight_bytes(self, rtt_s: float) -> int:
        """Return the bytes that should be in flight beyond those needed now, for lines with this round trip
        (seconds)."""
        return round(self._rate * filling_s(rtt_s)) if rtt_s > SHORT_RTT_S else 0


class Permit:
    """One transfer on the lines, with its bytes still in flight."""

    def __init__(self, size_bytes: int, done: Callable[[int], None]) -> None:
        self._left_bytes = size_bytes
        self._done = done

    def moved(self, size_bytes: int) -> None:
        """Count bytes of it that have arrived."""
        size_bytes = min(size_bytes, self._left_bytes)
        self._left_bytes -= size_bytes
        self._done(size_bytes)

    def end(self) -> None:
        """End the transfer, with or without success."""
        self.moved(self._left_bytes)


class Permits:
    """The order of transfers in one direction. Everything runs on one event loop."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, int, int, float, asyncio.Future[None]]] = []  # a heap
        self._count = itertools.count()
        self._under_way_bytes = 0

    @contextlib.asynccontextmanager
    async def request(self, size_bytes: int, most_bytes: float, order: int = 0) -> AsyncIterator[Permit]:
        """Wait until at most `most_bytes` of other transfers are in flight; infinite = at once.

        The next transfer to begin is the first with the least `order`.
        """
        begins: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (order, next(self._count), size_bytes, most_bytes, begins))
        self._go_on()
        permit = Permit(size_bytes, self._moved)
        try:
            await begins
            yield permit
        finally:
            if begins.cancelled():
                self._go_on()  # the transfers behind it
            else:
                permit.end()

    def _go_on(self) -> None:
        while self._waiting:
            _, _, size_bytes, most_bytes, begins = self._waiting[0]
            if not begins.cancelled():
                if self._under_way_bytes > most_bytes:
                    return
                self._under_way_bytes += size_bytes
                begins.set_result(None)
            heapq.heappop(self._waiting)

    def _moved(self, size_bytes: int) -> None:
        self._under_way_bytes -= size_bytes
        self._go_on()

"""The lines from a worker to the shard servers: what fills them for a round trip, and whose turn it is.

What is asked for only when it is needed comes a round trip later, and the line is idle meanwhile. It is busy where what
is under way is the product of its rate and the round trip at least (RFC 7323, section 1.1). The rate is what was
received in the median one of the last windows: the best one may have what had waited in the kernel while this process
did something else. Since that is less than the line's while too little was under way, more is asked for: the next
windows find more, up to the line's. Twice the product, as BBR has under way
(https://datatracker.ietf.org/doc/draft-ietf-ccwg-bbr/, "cwnd_gain"), needs BBR's pacing: without it a whole product,
and a unit, wait in the queue before the line. So it is twice the product while the second one waits there for `QUEUE_S`
at most, and half as much again on longer lines. *Measured*, 500 Mbit/s and 100 ms, a queue of 0.2 s: with twice the
product it was full in every second or third step, and a step in which it lost something took twice as long (medians of
1.11 to 1.87 times the bound); with half as much again nothing is lost (1.04 to 1.06).

More than that need not be under way, and would be in the way: transfers that share a line all end late, the one that is
needed first among them, and then the line is idle for a round trip. So on a long line transfers begin in order, each
once the rest of those before it fills the line no more. So do speculative gathers that share a card with pushes
(`client.IN_ORDER_BYTES`).
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
"""What comes in so short a round trip is less than a unit that is worth a message."""
_WINDOWS = 9
QUEUE_S = 0.05
"""How long the queue before a line may be; those of routers hold 0.1 s and more."""


def filling_s(rtt_s: float) -> float:
    """The amount that should be under way on a line with this round trip, in seconds of its rate."""
    return rtt_s + max(rtt_s / 2, min(rtt_s, QUEUE_S))


class Rate:
    """The speed at which gathers come. One thread; `in_flight_bytes` may be called by others."""

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=_WINDOWS)  # bytes a second
        self._rate = 0.0  # the median of them
        self._begin_s = 0.0  # of the window
        self._bytes = 0

    def received(self, size_bytes: int, now_s: float) -> None:
        """So much has come.

        Args:
            size_bytes: payload, since the call before.
            now_s: a monotonic clock.
        """
        lasted_s = now_s - self._begin_s
        if lasted_s > 2 * WINDOW_S:  # nothing came for a while: when this began to come is not known
            self._begin_s, self._bytes = now_s, 0
            return
        self._bytes += size_bytes
        if lasted_s >= WINDOW_S:
            self._rates.append(self._bytes / lasted_s)
            self._rate = statistics.median_high(self._rates)
            self._begin_s, self._bytes = now_s, 0

    def in_flight_bytes(self, rtt_s: float) -> int:
        """The bytes that should be under way beyond what is needed now, for lines with this round trip in seconds."""
        return round(self._rate * filling_s(rtt_s)) if rtt_s > SHORT_RTT_S else 0


class Turn:
    """One transfer on the lines: how much of it is still under way."""

    def __init__(self, size_bytes: int, done: Callable[[int], None]) -> None:
        self._left_bytes = size_bytes
        self._done = done

    def moved(self, size_bytes: int) -> None:
        """So much more of it is over."""
        size_bytes = min(size_bytes, self._left_bytes)
        self._left_bytes -= size_bytes
        self._done(size_bytes)

    def end(self) -> None:
        """It is over, however it went."""
        self.moved(self._left_bytes)


class Turns:
    """Transfers in one direction, in the order in which they are wanted. Everything runs on one event loop."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, int, int, float, asyncio.Future[None]]] = []  # a heap
        self._count = itertools.count()
        self._under_way_bytes = 0

    @contextlib.asynccontextmanager
    async def turn(self, size_bytes: int, most_bytes: float, order: int = 0) -> AsyncIterator[Turn]:
        """A transfer's turn, once at most `most_bytes` of others are under way; infinite = at once.

        Of those that wait, the next is that with the least `order`, and of these the first that came.
        """
        begins: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (order, next(self._count), size_bytes, most_bytes, begins))
        self._go_on()
        turn = Turn(size_bytes, self._moved)
        try:
            await begins
            yield turn
        finally:
            if begins.cancelled():
                self._go_on()  # those behind it
            else:
                turn.end()

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

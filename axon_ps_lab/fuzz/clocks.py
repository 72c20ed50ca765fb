"""Clocks that stand still while their process, or their event loop, is held up.

A fuzzer gives way to all others of its machine. A wait in which the fuzzer itself was held up is not a hang of its
target, so limits of waits are of these clocks.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from typing import Any, Final

TICK_S: Final = 0.05
"""Seconds between two advances of a clock, and of each advance, however long it took."""


class ProcessClock:
    """A clock of this process."""

    def __init__(self) -> None:
        self.now_s = 0.0
        threading.Thread(target=self._run, name="fuzz-clock", daemon=True).start()

    def _run(self) -> None:
        while True:
            time.sleep(TICK_S)
            self.now_s += TICK_S


class LoopClock:
    """A clock of the running event loop.

    Attributes:
        now_s: the time that it shows.
        longest_s: the longest time for which the loop did not run.
    """

    def __init__(self) -> None:
        self.now_s = self.longest_s = 0.0
        self._running = asyncio.create_task(self._run())

    async def _run(self) -> None:
        before_s = time.monotonic()
        while True:
            await asyncio.sleep(TICK_S)
            now_s = time.monotonic()
            self.now_s += TICK_S
            self.longest_s, before_s = max(self.longest_s, now_s - before_s), now_s

    async def ends(self, task: asyncio.Task[Any], limit_s: float) -> bool:
        """Return True if a task ends within so much time of this clock."""
        until_s = self.now_s + limit_s
        while not task.done() and self.now_s < until_s:
            await asyncio.wait([task], timeout=max(TICK_S, until_s - self.now_s))
        return task.done()

    def close(self) -> None:
        """Stop it."""
        self._running.cancel()


async def paced(count: int, seconds: float) -> AsyncIterator[int]:
    """Yield the numbers below `count`, spread over the time; the late ones at once, and none after it."""
    began_s = time.monotonic()
    for number in range(count):
        if seconds:
            await asyncio.sleep(max(0.0, began_s + number * seconds / count - time.monotonic()))
            if time.monotonic() > began_s + seconds:
                return
        yield number

"""Deadlines, and retries with backoff."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from axon_ps.errors import InvalidRequest, Timeout

T = TypeVar("T")


class Deadline:
    """The time by which something must be done; made once from a number of seconds, and passed along."""

    def __init__(self, timeout_s: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        """Start counting `timeout_s` seconds now; None = never ends.

        Raises:
            InvalidRequest: `timeout_s` is negative or not a number.
        """
        if timeout_s is not None and not timeout_s >= 0:
            raise InvalidRequest(f"timeout_s is {timeout_s}; it must be 0 or more, or None to wait without end")
        self.timeout_s = math.inf if timeout_s is None else timeout_s
        self._clock = clock
        self._end_s = clock() + self.timeout_s

    def remaining(self) -> float:
        """Return the seconds left: 0 once it passed, `math.inf` when it never ends."""
        return max(0.0, self._end_s - self._clock())

    @property
    def expired(self) -> bool:
        """True if no time is left."""
        return self.remaining() <= 0

    def check(self, what: str) -> None:
        """Raise `Timeout` naming `what` when no time is left."""
        if self.expired:
            raise Timeout(f"{what} was not done within {self.timeout_s:g} s")


async def retry(
    fn: Callable[[], Awaitable[T]],
    *,
    until: Deadline,
    on: tuple[type[BaseException], ...],
    first_s: float = 0.05,
    max_s: float = 2.0,
    rng: random.Random | None = None,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
) -> T:
    """Call `fn` until it succeeds, raises an error that is not in `on`, or the deadline has passed.

    The wait before attempt n+1 is drawn evenly from [w/2, w], w = min(max_s, first_s * 2**(n-1)): so a job's workers
    do not return all at once. The last attempt is made at the deadline.

    Args:
        fn: the operation; called at least once.
        until: the deadline.
        on: the errors after which it is tried again.
        first_s: longest first wait.
        max_s: longest wait.
        rng: source of the jitter.
        sleep: the function that waits (a test's clock).

    Raises:
        BaseException: the last error of `fn`; an error in `on` has a note of the number of attempts.
    """
    rng = rng or random.Random()
    attempts = 0
    longest_s = first_s
    while True:
        attempts += 1
        try:
            return await fn()
        except on as error:
            if until.expired:
                error.add_note(f"gave up after {attempts} attempts in {until.timeout_s:g} s")
                raise
        await sleep(min(rng.uniform(longest_s / 2, longest_s), until.remaining()))
        longest_s = min(max_s, longest_s * 2)

"""The availability of a session, for those that wait for it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable

from axon_ps.errors import AxonError, Timeout, again
from axon_ps.rpc.deadlines import Deadline


class Availability:
    """A session is down at first and while it reconnects. It may fail permanently.

    It is used on one event loop.

    Attributes:
        is_up: whether messages can be sent on it.
        error: the error with which it has failed; None while it may come up.
    """

    def __init__(self) -> None:
        self.is_up = False
        self.error: AxonError | None = None
        self._settled = asyncio.Event()  # while it is up, and when it has failed
        self._changed = asyncio.Event()  # set, and replaced, when a condition of `until` may have changed

    def up(self) -> None:
        """Note that it is up."""
        self.is_up = True
        self._settled.set()

    def down(self) -> None:
        """Note that it is down, and may come up again."""
        self.is_up = False
        self._settled.clear()

    def fail(self, error: AxonError) -> bool:
        """Note that it has failed; return False if it had failed before."""
        if self.error is not None:
            return False
        self.is_up, self.error = False, again(error)
        self._settled.set()
        self.changed()
        return True

    def changed(self) -> None:
        """Have the conditions of `until` looked at again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def until_up(self) -> None:
        """Return when it is up.

        Raises:
            AxonError: the error with which it has failed.
        """
        await self._settled.wait()
        self._check()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return when a condition is true.

        Raises:
            AxonError: the error with which it has failed.
        """
        while self.error is None and not condition():
            await self._changed.wait()
        self._check()

    def _check(self) -> None:
        if self.error is not None:
            raise again(self.error)


async def in_time(waiting: Awaitable[None], deadline: Deadline, late: str) -> None:
    """Wait for something until a deadline.

    Raises:
        Timeout: the deadline is over. Its message is `late`.
    """
    left_s = deadline.remaining()
    try:
        async with asyncio.timeout(None if math.isinf(left_s) else left_s) as limit:
            await waiting
    except TimeoutError:
        if not limit.expired():  # it ended with this error
            raise
        raise Timeout(late) from None

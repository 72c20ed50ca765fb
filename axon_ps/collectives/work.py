"""`Work`: a handle on something that goes on in the background."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Coroutine
from typing import Any, Generic, TypeVar

from axon_ps.errors import Closed, Timeout
from axon_ps.transport.loop import BackgroundLoop

T = TypeVar("T")


class Work(Generic[T]):
    """A coroutine under way on the background loop.

    `wait` may be called from any thread and any number of times.

    Args:
        loop: where it runs.
        coroutine: what to do; started at once.
        what: for error messages ("gathering unit 3").
    """

    def __init__(self, loop: BackgroundLoop, coroutine: Coroutine[Any, Any, T], what: str) -> None:
        self._loop = loop
        self._what = what
        self._task: asyncio.Task[Any] | None = None
        self._cancelled = False
        try:
            self._future = loop.submit(self._run(coroutine))
        except Closed:
            coroutine.close()
            raise

    async def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        self._task = asyncio.current_task()
        if self._cancelled:
            coroutine.close()
            raise asyncio.CancelledError
        return await coroutine

    def wait(self, timeout_s: float | None = None) -> T:
        """Block until it is done and return its result.

        Args:
            timeout_s: how long to wait; None = until its own deadline.

        Raises:
            Timeout: it is not done yet; it goes on, and may be waited for again.
            AxonError: what it failed with.
        """
        try:
            return self._future.result(timeout_s)
        except TimeoutError as error:
            if self._future.done():
                raise
            raise Timeout(
                f"{self._what} is not done after {timeout_s} s; it goes on, wait again or cancel it"
            ) from error
        except concurrent.futures.CancelledError as error:
            raise Closed(f"{self._what} was cancelled") from error

    def is_completed(self) -> bool:
        """Whether it ended, well or not."""
        return self._future.done()

    def exception(self) -> BaseException | None:
        """What it failed with; None when it went well or is not done."""
        if not self._future.done() or self._future.cancelled():
            return None
        return self._future.exception()

    def cancel(self) -> None:
        """Stop it and block until it has stopped, so that its buffers are free; what was sent stays sent."""
        self._cancelled = True
        if not self._future.done():
            self._loop.submit(self._cancel_task())
            concurrent.futures.wait([self._future])

    async def _cancel_task(self) -> None:
        if self._task is not None:
            self._task.cancel()

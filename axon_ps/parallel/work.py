"""`QueuedWork`: a handle on a call of a `WorkQueue`, and on the work that the call started on the background loop."""

from __future__ import annotations

import concurrent.futures
import contextlib
import time
from typing import Any, Generic, TypeVar

from axon_ps.collectives.work import Work
from axon_ps.errors import Timeout

T = TypeVar("T")


class QueuedWork(Generic[T]):
    """A call on a `WorkQueue`. If its result is another `Work`, this handle is done when that work is done.

    Args:
        future: the call.
        what: for error messages.
    """

    def __init__(self, future: concurrent.futures.Future[Any], what: str) -> None:
        self._future = future
        self.what = what

    def wait(self, timeout_s: float | None = None) -> Any:
        """Block until the call is done, and the work that it started.

        Raises:
            Timeout: it is not done yet, and goes on.
            AxonError: the call or the work failed.
        """
        began = time.monotonic()
        try:
            result = self._future.result(timeout_s)
        except TimeoutError as error:
            if self._future.done() or timeout_s is None or time.monotonic() < began + timeout_s:
                raise  # raised by the call, or by a signal handler of the user's
            raise Timeout(f"{self.what} is not done after {timeout_s} s; it goes on") from error
        return result.wait(timeout_s) if isinstance(result, Work) else result

    def is_completed(self) -> bool:
        """Return True if the call and the work that it started have ended, with a result or an error."""
        if not self._future.done():
            return False
        result = None if self._future.exception() is not None else self._future.result()
        return not isinstance(result, Work) or result.is_completed()

    def cancel(self) -> None:
        """Block until the call has ended: the other workers take part in it, so it cannot be cancelled."""
        with contextlib.suppress(Exception):
            self.wait()

"""`LaneWork`: a handle on what a lane does, and on what that leaves under way on the background loop."""

from __future__ import annotations

import concurrent.futures
import contextlib
from typing import Any, Generic, TypeVar

from axon_ps.collectives.work import Work
from axon_ps.errors import Timeout

T = TypeVar("T")


class LaneWork(Generic[T]):
    """A call that a lane does among others, in order; it may result in another `Work`, which then counts.

    Args:
        future: the call.
        what: for error messages.
    """

    def __init__(self, future: concurrent.futures.Future[Any], what: str) -> None:
        self._future = future
        self.what = what

    def wait(self, timeout_s: float | None = None) -> Any:
        """Block until it is done, and what it left under way as well.

        Raises:
            Timeout: it is not done yet; it goes on.
            AxonError: what it failed with.
        """
        try:
            result = self._future.result(timeout_s)
        except TimeoutError as error:
            if self._future.done():
                raise
            raise Timeout(f"{self.what} is not done after {timeout_s} s; it goes on") from error
        return result.wait(timeout_s) if isinstance(result, Work) else result

    def is_completed(self) -> bool:
        """Whether it ended, well or not, and what it left under way as well."""
        if not self._future.done():
            return False
        left = None if self._future.exception() is not None else self._future.result()
        return not isinstance(left, Work) or left.is_completed()

    def cancel(self) -> None:
        """Block until it has ended: the other workers take part in it, so it cannot be taken back."""
        with contextlib.suppress(Exception):
            self.wait()

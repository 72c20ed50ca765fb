"""`Work` handles of c10d over ours, for `dist.all_reduce(..., async_op=True)` and DDP's buckets.

Invariants:
- Results have been copied to the user's tensors before a handle is complete.
- `wait` raises the operation's own error.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work as C10dWork
from torch.futures import Future

from axon_ps.collectives.work import CALLBACKS, Work
from axon_ps.errors import AxonError, Timeout, again

NO_TIMEOUT = timedelta()


class AxonWork(C10dWork):
    """One operation.

    Args:
        result: the tensors of its result, which its future gives.
        what: its name, for messages.
        devices: the accelerators that the result is on.
    """

    def __init__(self, result: Any, what: str, devices: Sequence[torch.device] = ()) -> None:
        super().__init__()
        self._result = result
        self._what = what
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._source = -1
        self._future: Future[Any] | None = None
        self._devices: list[int | str | torch.device] = list(devices)

    @classmethod
    def done(cls, result: Any, what: str, value: object = None, devices: Sequence[torch.device] = ()) -> AxonWork:
        """Make the handle of an operation that has succeeded with `value`."""
        work = cls(result, what, devices)
        work._end(None, value)
        return work

    @classmethod
    def following(
        cls, result: Any, ours: Work[Any], finish: Callable[[], object], devices: Sequence[torch.device] = ()
    ) -> AxonWork:
        """Make the handle of an operation that ends after `ours` has ended and `finish` has returned."""
        work = cls(result, ours.what, devices)

        def ended(ours: Work[Any]) -> None:
            error = ours.exception()
            value = None
            if error is None:
                try:
                    value = ours.wait(0.0)
                    finish()
                except BaseException as failure:
                    error = failure
            work._end(error, value)

        ours.on_end(ended)
        return work

    # ------------------------------------------------------------------ c10d's methods

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Block until it has ended.

        Raises:
            Timeout: it has not ended after `timeout`; it goes on.
            AxonError: it failed with this error.
        """
        limit_s = timeout.total_seconds()
        if not self._ended.wait(limit_s if limit_s > 0 else None):
            raise Timeout(f"{self._what} is not done after {limit_s:g} s; it goes on, wait again")
        if self._error is not None:
            raise again(self._error)
        return True

    def synchronize(self) -> None:
        """Block until it has ended. C++ calls `wait` by this name."""
        self.wait()

    def is_completed(self) -> bool:
        """Return True if it has ended, well or not."""
        return self._ended.is_set()

    def is_success(self) -> bool:
        """Return True if it has ended well."""
        return self._ended.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        """Return the error with which it failed, or None if it went well or has not ended."""
        return self._error

    def result(self) -> Any:
        """Return the tensors of the result."""
        return self._result

    def source_rank(self) -> int:
        """Return the rank (position in the group) that sent a received message, or -1 for other operations."""
        return self._source

    _source_rank = source_rank

    def get_future(self) -> Future[Any]:
        """Return a future of the result's tensors. It fails with a `RuntimeError` that quotes our error."""
        with self._lock:
            if self._future is not None:
                return self._future
            self._trigger: Future[Any] = Future(devices=self._devices or None)
            # A failure must be raised by a callback: a torch future takes no exception from Python.
            self._future = self._trigger.then(lambda _: self._outcome())
            ended = self._ended.is_set()
        if ended:
            self._trigger.set_result(self._result)
        return self._future

    # ------------------------------------------------------------------ the end

    def _outcome(self) -> Any:
        if self._error is not None:
            raise again(self._error)
        return self._result

    def _end(self, error: BaseException | None, value: object) -> None:
        self._error = None if error is None else again(error)
        if isinstance(value, int):
            self._source = value
        with self._lock:
            self._ended.set()
            asked_for = self._future is not None
        if asked_for:  # callbacks of the user, which may wait for other operations
            CALLBACKS.run(partial(self._trigger.set_result, self._result))


class CoalescedWork(C10dWork):
    """Several operations as one.

    Args:
        works: the operations, in their order.
        result: the tensors that the future gives.
    """

    def __init__(self, works: Sequence[AxonWork], result: list[Tensor]) -> None:
        super().__init__()
        self._works = list(works)
        self._result = result

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Block until all have ended.

        Raises:
            Timeout: an operation had not ended after `timeout`, which counts for each of them; it goes on.
            AxonError: the error of the first that failed; the others were waited for, too.
        """
        failure: AxonError | None = None
        for work in self._works:
            try:
                work.wait(timeout)
            except AxonError as error:
                failure = failure or error
        if failure is not None:
            raise failure
        return True

    def synchronize(self) -> None:
        """Block until all have ended. C++ calls `wait` by this name."""
        self.wait()

    def is_completed(self) -> bool:
        """Return True if all have ended, well or not."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Return True if all have ended well."""
        return all(work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:
        """Return the error of the first that failed, or None."""
        return next((e for work in self._works if (e := work.exception()) is not None), None)

    def result(self) -> list[Tensor]:
        """Return the tensors of the results."""
        return self._result

    def get_future(self) -> Future[Any]:
        """Return a future that gives all tensors."""
        futures = torch.futures.collect_all([work.get_future() for work in self._works])
        return futures.then(lambda _: self._checked())

    def _checked(self) -> list[Tensor]:
        if (error := self.exception()) is not None:
            raise error
        return self._result

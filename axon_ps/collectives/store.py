"""The stores of groups: `MemoryStore` for threads, and `AbortableStore` around any store, whose waits can be aborted.

The store across processes is the coordinator's (`worker.world`).

Invariant: every thread sees a value as soon as `put` has returned.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from axon_ps.collectives.backends.base import GroupStore
from axon_ps.errors import AxonError, InvalidRequest, Timeout, again

MAX_VALUE_BYTES = 1 << 20
LOOK_EVERY_S = 0.25
"""Seconds between two checks for an abort in a wait."""

T = TypeVar("T")


class MemoryStore:
    """A `collectives.backends.base.GroupStore` in the memory of this process."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._values: dict[str, bytes] = {}
        self._shared: dict[str, Any] = {}

    def put(self, key: str, value: bytes) -> None:
        """Store a value.

        Raises:
            InvalidRequest: it is larger than 1 MiB.
        """
        if len(value) > MAX_VALUE_BYTES:
            raise InvalidRequest(f"the value of {key!r} has {len(value)} bytes; at most {MAX_VALUE_BYTES} are stored")
        with self._changed:
            self._values[key] = bytes(value)
            self._changed.notify_all()

    def wait(self, key: str, timeout_s: float) -> bytes:
        """Return the value of a key as soon as there is one.

        Raises:
            Timeout: it was not stored in time.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values, timeout_s):
                raise Timeout(f"nobody stored {key!r} within {timeout_s:g} s")
            return self._values[key]

    def delete(self, key: str) -> None:
        """Remove a key, if there is one."""
        with self._changed:
            self._values.pop(key, None)

    def get_or_make(self, key: str, make: Callable[[], T]) -> T:
        """Return the object of that name that all threads share; the first call makes it."""
        with self._changed:
            if key not in self._shared:
                self._shared[key] = make()
            shared: T = self._shared[key]
            return shared


class AbortableStore:
    """A store whose waits end when a member is lost, so that a backend's maker does not wait for that member.

    Attributes:
        inner: the store that it wraps.
    """

    def __init__(self, inner: GroupStore) -> None:
        self.inner = inner
        self._error: AxonError | None = None
        self._no_more: AxonError | None = None

    def expect_no_more(self, error: AxonError) -> None:
        """End with `error` all waits for values that are not stored: a member has finished. Any thread may call it."""
        self._no_more = self._no_more or again(error)

    def abort(self, error: AxonError) -> None:
        """End pending and later waits with `error`. Any thread may call it."""
        self._error = self._error or again(error)

    def put(self, key: str, value: bytes) -> None:
        """Store a value."""
        self.inner.put(key, value)

    def wait(self, key: str, timeout_s: float) -> bytes:
        """Return the value of a key as soon as there is one.

        Raises:
            Timeout: it was not stored in time.
            AxonError: the error given to `abort` or `expect_no_more`.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            if self._error is not None:
                raise again(self._error)
            no_more = self._no_more  # must be read before the key
            left_s = 0.0 if no_more is not None else max(0.0, deadline - time.monotonic())
            try:
                return self.inner.wait(key, min(left_s, LOOK_EVERY_S))
            except Timeout:
                if no_more is not None:
                    raise no_more from None
                if left_s <= LOOK_EVERY_S and self._error is None:
                    raise

    def delete(self, key: str) -> None:
        """Remove a key, if there is one."""
        self.inner.delete(key)

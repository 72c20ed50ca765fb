"""`MemoryStore`: the store that groups of threads meet in. Their counterpart across processes is the coordinator's.

Invariant: a value is there for every thread as soon as `put` returned; nobody waits for what was deleted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from axon_ps.errors import InvalidRequest, Timeout

MAX_VALUE_BYTES = 1 << 20

T = TypeVar("T")


class MemoryStore:
    """A `collectives.backend.Store` in the memory of this process."""

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
        """The value of a key as soon as there is one.

        Raises:
            Timeout: nobody stored it in time.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values, timeout_s):
                raise Timeout(f"nobody stored {key!r} within {timeout_s:g} s")
            return self._values[key]

    def delete(self, key: str) -> None:
        """Remove a key; harmless when there is none."""
        with self._changed:
            self._values.pop(key, None)

    def share(self, key: str, make: Callable[[], T]) -> T:
        """The one object of that name that all threads share; made by whoever asks first."""
        with self._changed:
            if key not in self._shared:
                self._shared[key] = make()
            shared: T = self._shared[key]
            return shared

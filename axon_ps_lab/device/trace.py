"""The trace of the stand-in: calls of NCCL, and copies between device memory and the host's."""

from __future__ import annotations

import threading
from dataclasses import dataclass


@dataclass(frozen=True)
class Event:
    """One call or copy.

    Attributes:
        what: "download" or "upload": a copy from or to page-locked memory. "get" or "asarray": a copy from or to
            other memory. "torch": a copy by torch, in either direction. Else a call of NCCL, by its name in cupy.
        size_bytes: bytes of this rank's array.
    """

    what: str
    size_bytes: int


class Trace:
    """Events in order; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: list[Event] = []

    def record(self, what: str, size_bytes: int) -> None:
        """Record an event."""
        with self._lock:
            self._events.append(Event(what, size_bytes))

    def take(self) -> list[Event]:
        """Return the events since the last call."""
        with self._lock:
            events, self._events = self._events, []
            return events

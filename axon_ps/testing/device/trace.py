"""What the stand-in saw: calls of NCCL, and copies between device memory and the host's."""

from __future__ import annotations

import threading
from dataclasses import dataclass


@dataclass(frozen=True)
class Event:
    """One call or copy.

    Attributes:
        what: "download" or "upload": a copy from or to page-locked memory. "get" or "asarray": one from or to other
            memory. "torch": a copy that torch was asked for, either way. Else a call of NCCL, by its name in cupy.
        size_bytes: bytes of this rank's array.
    """

    what: str
    size_bytes: int


class Trace:
    """Events in the order in which they came; any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: list[Event] = []

    def note(self, what: str, size_bytes: int) -> None:
        """Something happened."""
        with self._lock:
            self._events.append(Event(what, size_bytes))

    def take(self) -> list[Event]:
        """What has happened since the last time."""
        with self._lock:
            events, self._events = self._events, []
            return events

"""A flight recorder: the last collectives of a world's groups, with their times, to diagnose hangs.

Owns: a bounded ring buffer of `Entry`, cheap enough to be always on. Refuses: to print; `axon-ps doctor` does that.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from axon_ps.collectives.backends.base import Call, Operation

MAX_ENTRIES = 512
"""The most entries that it keeps; the oldest is dropped first."""


@dataclass(slots=True)
class Entry:
    """One collective.

    Attributes:
        group: name of the group.
        ranks: its world ranks.
        call: the call.
        started: time of the call, in seconds since the epoch.
        ended: time of its end; 0 while it is pending.
        outcome: "" while it is pending, "done", or the error as text.
    """

    group: str
    ranks: tuple[int, ...]
    call: Call
    started: float
    ended: float = 0.0
    outcome: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the entry as `axon-ps doctor` reads it."""
        return {
            "group": self.group,
            "ranks": self.ranks,
            "sequence": self.call.sequence,
            "call": str(self.call),
            "started": self.started,
            "ended": self.ended,
            "outcome": self.outcome,
        }


class Recorder:
    """The last `MAX_ENTRIES` collectives of the groups that share it: those of a world. Thread-safe."""

    def __init__(self) -> None:
        self._entries: deque[Entry] = deque(maxlen=MAX_ENTRIES)
        self._lock = threading.Lock()
        self._counts: dict[Operation, int] = dict.fromkeys(Operation, 0)
        self._seconds: dict[Operation, float] = dict.fromkeys(Operation, 0.0)

    def begin(self, group: str, ranks: tuple[int, ...], call: Call) -> Entry:
        """Record the begin of a collective; return its entry."""
        entry = Entry(group, ranks, call, time.time())
        self._entries.append(entry)  # a deque's append is atomic
        return entry

    def end(self, entry: Entry, outcome: str = "done") -> None:
        """Record its end."""
        entry.ended = time.time()
        entry.outcome = outcome
        with self._lock:
            self._counts[entry.call.operation] += 1
            self._seconds[entry.call.operation] += entry.ended - entry.started

    def entries(self) -> list[Entry]:
        """Return all entries, oldest first."""
        return list(self._entries)

    def pending(self) -> list[Entry]:
        """Return the collectives that have not ended."""
        return [e for e in self.entries() if not e.ended]

    def statistics(self) -> dict[str, float]:
        """Return the number of operations of each kind that ended, and the seconds that they took together."""
        with self._lock:
            counted = [op for op, count in self._counts.items() if count]
            return {f"{op.value}_calls": float(self._counts[op]) for op in counted} | {
                f"{op.value}_s": self._seconds[op] for op in counted
            }

"""A flight recorder: the last collectives of this process, with their times, for when something hangs.

Owns: a ring of `Entry`, bounded, cheap enough to be always on. Refuses: to print; `axon-ps doctor` does that.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from axon_ps.collectives.backends.base import Call, Operation

KEPT = 512
"""Entries kept; the oldest is forgotten first."""


@dataclass(slots=True)
class Entry:
    """One collective.

    Attributes:
        group: name of the group.
        ranks: its world ranks.
        call: what was asked for.
        started: seconds since the epoch, when it was asked for.
        ended: when it ended; 0 while it is under way.
        outcome: "" while it is under way, "done", or the error in words.
    """

    group: str
    ranks: tuple[int, ...]
    call: Call
    started: float
    ended: float = 0.0
    outcome: str = ""

    def as_json(self) -> dict[str, Any]:
        """For the doctor."""
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
    """The last `KEPT` collectives of this process. Thread-safe."""

    def __init__(self) -> None:
        self._entries: deque[Entry] = deque(maxlen=KEPT)
        self._lock = threading.Lock()
        self._counts: dict[Operation, int] = dict.fromkeys(Operation, 0)
        self._seconds: dict[Operation, float] = dict.fromkeys(Operation, 0.0)

    def begin(self, group: str, ranks: tuple[int, ...], call: Call) -> Entry:
        """A collective begins."""
        entry = Entry(group, ranks, call, time.time())
        self._entries.append(entry)  # a deque's append is atomic
        return entry

    def end(self, entry: Entry, outcome: str = "done") -> None:
        """It has ended."""
        entry.ended = time.time()
        entry.outcome = outcome
        with self._lock:
            self._counts[entry.call.operation] += 1
            self._seconds[entry.call.operation] += entry.ended - entry.started

    def entries(self) -> list[Entry]:
        """What is kept, oldest first."""
        return list(self._entries)

    def pending(self) -> list[Entry]:
        """What is under way."""
        return [e for e in self.entries() if not e.ended]

    def statistics(self) -> dict[str, float]:
        """How many of each operation ended, and the seconds they took together."""
        with self._lock:
            counted = [op for op, count in self._counts.items() if count]
            return {f"{op.value}_calls": float(self._counts[op]) for op in counted} | {
                f"{op.value}_s": self._seconds[op] for op in counted
            }

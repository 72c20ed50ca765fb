"""The number of restarts of a process of `axon-ps run`, and the pause before each; pure: time is passed in.

The rule for workers and services: the first restart is at once, the next are after 1, 2, 4, ... `MAX_PAUSE_S` seconds.
A process that has run for `STEADY_S` failed for another reason than its predecessors: the pauses begin anew.
"""

from __future__ import annotations

from typing import Final

MAX_PAUSE_S: Final = 30.0
STEADY_S: Final = 60.0


class Restarts:
    """The restarts of a worker's rank, or of a service.

    Args:
        limit: most restarts.
        now: the time, in seconds; the first process starts.
        in_a_row: whether the limit is for those in a row, each within `STEADY_S`; else it is for all of them.

    Attributes:
        limit: most restarts.
        count: restarts so far, of those that the limit is for.
    """

    def __init__(self, limit: int, now: float, *, in_a_row: bool = False) -> None:
        self.limit = limit
        self.count = 0
        self._in_a_row = in_a_row
        self._quick = 0  # in a row
        self._began_s = now

    @property
    def left(self) -> bool:
        """True if another restart would be allowed now."""
        return self.count < self.limit

    def ended(self, now: float) -> float | None:
        """Note that the process has failed; returns the seconds until the next is started, None = it is not."""
        if now - self._began_s > STEADY_S:
            self._quick = 0
            if self._in_a_row:
                self.count = 0
        if not self.left:
            return None
        pause_s = min(MAX_PAUSE_S, 2.0 ** (self._quick - 1)) if self._quick else 0.0
        self.count += 1
        self._quick += 1
        return pause_s

    def began(self, now: float) -> None:
        """Note that the next process starts."""
        self._began_s = now

    def described(self, how: str, pause_s: float) -> str:
        """Return the decision, for the console: "it is started again in 2 s (restart 3 of 5)"."""
        pause = f" in {pause_s:g} s" if pause_s else ""
        return f"{how}{pause} (restart {self.count} of {self.limit})"

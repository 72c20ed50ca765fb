"""`Histogram`: counts of durations. An update is a search in 15 numbers and three additions."""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

BOUNDS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds of the buckets, in seconds; a last one has everything above."""


class Histogram:
    """Durations in buckets. One thread observes at a time. If two do, a duration may be lost.

    Attributes:
        count: number of durations.
        sum_s: their sum, in seconds.
    """

    def __init__(self) -> None:
        self.count = 0
        self.sum_s = 0.0
        self._counts = [0] * (len(BOUNDS_S) + 1)

    def observe(self, seconds: float) -> None:
        """Count a duration."""
        self._counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.count += 1
        self.sum_s += seconds

    def merge(self, other: Histogram) -> None:
        """Add the counts of another histogram."""
        self._counts = [a + b for a, b in zip(self._counts, other._counts, strict=True)]
        self.count += other.count
        self.sum_s += other.sum_s

    def buckets(self) -> list[tuple[float, int]]:
        """Return for every upper bound, inf the last, the number of durations up to it."""
        found, total = [], 0
        for bound, count in zip((*BOUNDS_S, float("inf")), self._counts, strict=True):
            total += count
            found.append((bound, total))
        return found

"""The times at which workers arrive in steps: the last worker, the others' wait for it, and the usual last one. Pure.

A worker arrives when it votes, or waits until the servers take its gradients. A step's time has three phases: until the
first worker has arrived, from then until the last worker has, and from then until the servers have every sum. Without
the last worker, the second phase would have ended earlier by that worker's *marginal* time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

SCORED_STEPS: Final = 100
"""Newest steps over which workers are scored."""

SMOOTHING: Final = 0.1
"""Weight of the newest step in a worker's lag."""


@dataclass(frozen=True, kw_only=True)
class Phases:
    """The phases of a step, in seconds; see `StepRecord`."""

    computing_s: float = 0.0
    waiting_s: float = 0.0
    summing_s: float = 0.0
    waited_for: int = -1
    marginal_s: float = 0.0


class Timing:
    """The arrivals in the present step of each model, and the scores of the workers."""

    def __init__(self) -> None:
        self._arrivals: dict[int, tuple[int, dict[int, float]]] = {}  # by model: the step, and times by rank
        self._last: deque[tuple[int, float]] = deque(maxlen=SCORED_STEPS)
        self.lag_s: dict[int, float] = {}

    def arrived(self, ranks: Sequence[int], model: int, step: int, now: float) -> None:
        """Note that workers have arrived in a step. The first time counts."""
        present, arrivals = self._arrivals.get(model, (-1, {}))
        if step > present:
            arrivals = {}
            self._arrivals[model] = step, arrivals
        if step >= present:
            for rank in ranks:
                arrivals.setdefault(rank, now)

    def decided(self, model: int, step: int, began: float, now: float, *, commits: bool) -> Phases:
        """Return the phases of a decided step. If it does not commit, they do not count in the scores."""
        present, arrivals = self._arrivals.pop(model, (-1, {}))
        if present != step or not arrivals:
            return Phases()
        (first, *_), (*others, (last, came)) = arrivals.values(), arrivals.items()
        if not commits:
            return Phases(computing_s=max(0.0, first - began), waiting_s=now - first)
        marginal_s = came - others[-1][1] if others else 0.0
        self._last.append((last, marginal_s))
        for rank, at in arrivals.items():
            before = self.lag_s.get(rank, at - first)
            self.lag_s[rank] = before + SMOOTHING * (at - first - before)
        return Phases(
            computing_s=max(0.0, first - began),
            waiting_s=came - first,
            summing_s=now - came,
            waited_for=last,
            marginal_s=marginal_s,
        )

    def scores(self) -> dict[int, tuple[int, float]]:
        """Return by rank the newest steps in which it was the last, and the marginal seconds of these."""
        found: dict[int, tuple[int, float]] = {}
        for rank, marginal_s in self._last:
            count, cost_s = found.get(rank, (0, 0.0))
            found[rank] = count + 1, cost_s + marginal_s
        return found

    def forget(self, rank: int) -> None:
        """Forget a former worker."""
        self.lag_s.pop(rank, None)
        self._last = deque((entry for entry in self._last if entry[0] != rank), maxlen=SCORED_STEPS)

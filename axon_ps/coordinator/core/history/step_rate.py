"""Steps per second, counted over steps and not over time, so that steps of any length have a rate. Pure.

The window of a rate begins and ends with a step: it is the newest second, or the newest step where that is longer. The
step under way counts once it takes longer than those before, so the rate of a job that stands still approaches 0.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import Final

WINDOW_S: Final = 1.0
"""The shortest window of a rate."""

MAX_STEPS: Final = 512
"""The most steps in a window: at a thousand steps a second, those of half a second are enough."""

STEPS_AMISS: Final = 3
"""A model whose next step takes this many times as long as those before does not step at present."""


@dataclass(frozen=True, kw_only=True)
class Rhythm:
    """The rhythm of a model's steps at a moment, for measurements over whole steps.

    Attributes:
        model: number of the model.
        steps: number of its steps.
        since_s: seconds since the newest step.
        step_s: seconds of a step.
    """

    model: int
    steps: int
    since_s: float
    step_s: float


class StepRate:
    """The steps of one model.

    Args:
        model: its number.
    """

    def __init__(self, model: int = 0) -> None:
        self._model = model
        self._made_s: deque[float] = deque(maxlen=MAX_STEPS)
        self._steps = 0
        self._step_s: float | None = 0.0

    def made(self, now: float) -> None:
        """Count a step."""
        self._made_s.append(now)
        self._steps += 1
        self._step_s = None

    def steps_per_s(self, now: float) -> float:
        """Return the rate now; 0 = unknown, before the second step."""
        steps, first_s = self._window(now)
        if not steps or now <= first_s:
            return 0.0
        window_s = self._made_s[-1] - first_s
        with_next = (steps + 1) / (now - first_s)
        return min(steps / window_s, with_next) if window_s > 0 else with_next

    @property
    def step_s(self) -> float:
        """Seconds of the newest steps; 0 = unknown."""
        if self._step_s is None:
            steps, first_s = self._window(self._made_s[-1])
            self._step_s = (self._made_s[-1] - first_s) / steps if steps else 0.0
        return self._step_s

    def rhythm(self, now: float) -> Rhythm | None:
        """Return the rhythm now; None = the model does not step."""
        if not (step_s := self.step_s):
            return None
        since_s = now - self._made_s[-1]
        if since_s > max(WINDOW_S, STEPS_AMISS * step_s):
            return None
        return Rhythm(model=self._model, steps=self._steps, since_s=since_s, step_s=step_s)

    def _window(self, now: float) -> tuple[int, float]:
        """Return the number of steps in the window, and its begin. It begins at the end of the step before these."""
        steps, first_s = 0, 0.0
        for before_s in islice(reversed(self._made_s), 1, None):
            steps, first_s = steps + 1, before_s
            if now - before_s >= WINDOW_S:
                break
        return steps, first_s

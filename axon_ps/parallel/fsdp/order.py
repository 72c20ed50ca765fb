"""The order in which units will be needed: the last iteration's is expected for this one. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

_FORGET_AFTER = 64


class GatherOrder:
    """Predicts the next units from the order of the last complete iteration.

    Args:
        expected: the order to expect before anything was seen.
    """

    def __init__(self, expected: Sequence[int]) -> None:
        self._expected = list(expected)
        self._seen: list[int] = []
        self._next = 0
        self._limit = _FORGET_AFTER * max(1, len(self._expected))

    def visit(self, unit: int) -> None:
        """Note that `unit` is needed now."""
        if len(self._seen) >= self._limit:  # forwards without a backward, for ever: not an iteration
            self.restart()
        self._seen.append(unit)
        for start in (self._next, 0):
            try:
                self._next = self._expected.index(unit, start) + 1
                return
            except ValueError:
                continue

    def upcoming(self) -> Iterator[int]:
        """Yield the units expected after the last one visited, in order, repetitions included."""
        yield from self._expected[self._next :]

    def first(self) -> Iterator[int]:
        """Yield the units expected in the next iteration, in order, repetitions included."""
        yield from self._expected

    def finish(self) -> None:
        """End a complete iteration: its order is expected from now on."""
        if self._seen:
            self._expected = self._seen
        self.restart()

    def restart(self) -> None:
        """Begin again at the first unit, without learning."""
        self._seen = []
        self._next = 0

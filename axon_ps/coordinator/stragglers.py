"""For whom the others wait in a step, and since when. Pure.

The time of a step begins with the first worker that waits in it. Where all replicas step together that is the first
that has voted, or says that it *arrived*: it has computed all its gradients, and waits until the servers take them
(they sum in replica order, so who comes after a straggler cannot push, and so not vote). Where each steps alone, it is
the first that may not go on before the slowest.

Invariants: a straggler is named only while at least as many others as the job needs take part; nothing is looked
through before the time is over.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from axon_ps.coordinator.assembly import Assembly
from axon_ps.coordinator.steps import ranks_in_words

RECHECK_S = 1.0
"""How often it is looked whether enough others take part, once the time is over."""


class Stragglers:
    """The wait in the present step.

    Args:
        assembly: generations and steps.
        step_timeout_s: how long the others wait; inf = for ever.
    """

    def __init__(self, assembly: Assembly, step_timeout_s: float) -> None:
        self._assembly = assembly
        self._step_timeout_s = step_timeout_s
        self._name = (0, -1)  # generation, and step or lowest clock: what the wait is in
        self._since = math.inf
        self._recheck = -math.inf

    def look(self, now: float) -> None:
        """Somebody has spoken in a step, or one was decided."""
        name = self._present()
        if name != self._name:
            self._name, self._since, self._recheck = name, math.inf, -math.inf
        if self._since == math.inf and self._assembly.attempts.somebody_waits:
            self._since = now

    @property
    def what(self) -> str:
        """What the wait is in, in words."""
        return f"clock {self._name[1]}" if self._assembly.attempts.alone else f"step {self._name[1]}"

    def late(self, now: float) -> Sequence[int]:
        """The workers to go on without; none while it is not time, or too few others take part."""
        if now < self.next_deadline():
            return ()
        self._recheck = now + RECHECK_S
        missing = self._assembly.attempts.missing()
        there = len(self._assembly.membership.workers) - len(missing)
        return missing if there >= max(1, self._assembly.needed_workers) else ()

    def next_deadline(self) -> float:
        """When `late` is to be asked."""
        return max(self._since + self._step_timeout_s, self._recheck) if self._waiting() else math.inf

    def held_up(self, now: float) -> tuple[float, str]:
        """How long the others have waited, in seconds, and for whom, in words; (0, "") when they do not."""
        missing = self._assembly.attempts.missing() if self._waiting() else ()
        if not missing:
            return 0.0, ""
        waited_s = now - self._since
        without = "" if math.isinf(self._step_timeout_s) else f"; they are set aside after {self._step_timeout_s:g} s"
        return waited_s, f"{self.what} has waited {waited_s:.0f} s for worker {ranks_in_words(missing)}{without}"

    def _waiting(self) -> bool:
        return self._since < math.inf and self._name == self._present() and self._assembly.attempts.somebody_waits

    def _present(self) -> tuple[int, int]:
        a = self._assembly
        return a.generation, a.attempts.slowest if a.attempts.alone else a.step

"""What a worker knows of who waits for whom: its clock, the slowest clock, and what it computes from. Pure.

Where all replicas step together none of this is used. Where each steps alone (`sharding.policy`), others commit while
this worker computes, so it needs three things:

Note: [View]
    A *view* is (generation, version) when this worker ended its last step: every gather until its next one asks for
    that version or a later one, and values that are kept stay, so that backward sees what forward saw. A step that was
    begun in another generation than the present one is lost; its ticket is void from the start.

Invariants: `clock` is how many of our steps were decided in this generation, `slowest` the lowest clock that we were
told of; both start again at 0 with every generation. `may_go_on` is what a policy's bound means for what we read.
"""

from __future__ import annotations

from dataclasses import dataclass

from axon_ps.sharding.policy import Policy, Synchronous
from axon_ps.types import Decision


@dataclass(frozen=True, slots=True)
class View:
    """What a step is computed from; see Note: [View]."""

    generation: int
    version: int


class Pace:
    """One worker's place among replicas that step alone.

    Attributes:
        policy: of the job, once this worker has registered it.
        clock: our decided steps in this generation.
        slowest: the lowest clock of all replicas, as last told.
    """

    def __init__(self) -> None:
        self.policy: Policy = Synchronous()
        self.clock = 0
        self.slowest = 0
        self._generation = 0
        self._replica = -1
        self._view: View | None = None

    @property
    def alone(self) -> bool:
        """Whether our gradients are steps of their own."""
        return self.policy.asynchronous

    def begin(self, generation: int, replica: int) -> None:
        """A generation begins, in which we are `replica`."""
        if generation != self._generation:
            self._generation, self._replica = generation, replica
            self.clock = self.slowest = 0

    def decided(self, decision: Decision) -> bool:
        """Take a decision with a turn; whether it is on an attempt of ours."""
        turn = decision.turn
        if turn is None or decision.generation != self._generation:
            return False
        self.slowest = max(self.slowest, turn.slowest_clock)
        if turn.replica != self._replica:
            return False
        self.clock = max(self.clock, turn.clock + 1)
        return True

    def view(self, version: int) -> View:
        """What the present step is computed from; the first call of a step fixes it to `version`."""
        if self._view is None:
            self._view = View(self._generation, version)
        return self._view

    def look_again(self) -> None:
        """The present step is over, or the parameters were replaced: the next call of `view` fixes another."""
        self._view = None

    def may_go_on(self, generation: int) -> bool:
        """Whether the next step may begin, or the generation in which we wait is over."""
        most = self.policy.most_behind
        return most is None or generation != self._generation or self.clock - self.slowest <= most

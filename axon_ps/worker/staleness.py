"""A worker's staleness in asynchronous training: its clock, the slowest clock, and the version it computes from. Pure.

Where replicas step together none of this is used. Where they step asynchronously (`sharding.policy`), others commit
while this worker computes.

Note: [View]
    A *view* is (generation, version) when this worker ended its last step: every gather until its next one asks for
    that version or a later one, and parameters that stay unsharded do not change, so that backward sees what forward
    saw. A step that was begun in another generation than the present one cannot commit; its ticket is void.

Invariants: `clock` is how many of our steps were decided in this generation, `slowest` the lowest clock known; both
start again at 0 with every generation. `may_proceed` applies the policy's bound to what this worker reads.
"""

from __future__ import annotations

from dataclasses import dataclass

from axon_ps.sharding.policy import Policy, Synchronous
from axon_ps.types import Decision


@dataclass(frozen=True, slots=True)
class View:
    """The parameters that a step is computed from; see Note: [View]."""

    generation: int
    version: int


class Staleness:
    """One worker's clock among asynchronous replicas.

    Attributes:
        policy: of the job, once this worker has registered it.
        clock: our decided steps in this generation.
        slowest: the lowest clock of all replicas, by the newest decision.
    """

    def __init__(self) -> None:
        self.policy: Policy = Synchronous()
        self.clock = 0
        self.slowest = 0
        self._generation = 0
        self._replica = -1
        self._view: View | None = None

    @property
    def asynchronous(self) -> bool:
        """Whether our gradients are steps of their own."""
        return self.policy.asynchronous

    def begin(self, generation: int, replica: int) -> None:
        """A generation begins, in which we are `replica`."""
        if generation != self._generation:
            self._generation, self._replica = generation, replica
            self.clock = self.slowest = 0

    def decided(self, decision: Decision) -> bool:
        """Apply a decision on one replica; returns whether it is on an attempt of ours."""
        turn = decision.turn
        if turn is None or decision.generation != self._generation:
            return False
        self.slowest = max(self.slowest, turn.slowest_clock)
        if turn.replica != self._replica:
            return False
        self.clock = max(self.clock, turn.clock + 1)
        return True

    def view(self, version: int) -> View:
        """The view of the current step; the first call of a step fixes it to `version`."""
        if self._view is None:
            self._view = View(self._generation, version)
        return self._view

    def end_step(self) -> None:
        """The current step is over, or the parameters were replaced: the next call of `view` fixes a new view."""
        self._view = None

    def may_proceed(self, generation: int) -> bool:
        """Whether the next step may begin, or the generation in which we wait is over."""
        most = self.policy.most_behind
        return most is None or generation != self._generation or self.clock - self.slowest <= most

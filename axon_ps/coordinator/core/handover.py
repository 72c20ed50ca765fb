"""Shard servers that join and leave between two steps, so that no step is aborted. Pure.

A change of members makes a new generation, which ends the steps under way. A shard server that wants to join a training
job, or that was drained, can wait. The decision on the next step names the generation that begins with the step after
it. So every worker takes its next ticket in that generation. When the members change for another reason, the waiting
servers join and leave with that change. They also do so when no step ends for much longer than steps take.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from axon_ps.wire.events import JoinRequest

LEAST_PATIENCE_S, MOST_PATIENCE_S = 5.0, 45.0
"""Least and most seconds for which a change of shard servers is deferred to the end of a step.

A joining server gives up after a minute by default.
"""

STEPS_OF_PATIENCE = 3.0
"""Multiple of the last step's duration for which it is deferred, between these bounds."""


@dataclass(frozen=True)
class Joining:
    """A shard server that waits to be let in."""

    session: int
    request: JoinRequest
    since: float


class Handover:
    """The shard servers that wait.

    Attributes:
        joining: by session.
        leaving: by rank, the time since which they wait.
        silent: incarnations of members lost since the last step whose leases had expired.
    """

    def __init__(self) -> None:
        self.joining: dict[int, Joining] = {}
        self.leaving: dict[int, float] = {}
        self.silent: set[str] = set()
        self._patience_s = LEAST_PATIENCE_S
        self._step_ended = math.inf

    def step_ends(self, now: float) -> None:
        """Note the end of a step."""
        step_s, self._step_ended = max(0.0, now - self._step_ended), now
        self._patience_s = min(max(LEAST_PATIENCE_S, STEPS_OF_PATIENCE * step_s), MOST_PATIENCE_S)
        self.silent.clear()

    def __len__(self) -> int:
        """Return the number of generations that it takes to let all of them join and leave."""
        return len(self.joining) + len(self.leaving)

    def waiting(self, incarnation: str) -> list[int]:
        """Return the sessions on which a process waits to join."""
        return [session for session, joining in self.joining.items() if joining.request.incarnation == incarnation]

    def overdue(self, now: float) -> bool:
        """Return True if one of them has waited for too long."""
        return now >= self.next_deadline()

    def next_deadline(self) -> float:
        """Return the time at which one of them will have waited for too long; inf when none waits."""
        since = [joining.since for joining in self.joining.values()] + list(self.leaving.values())
        return min(since, default=math.inf) + self._patience_s

    def pending(self) -> list[str]:
        """Return the reasons for waiting, as text."""
        found = [f"shard server {rank} is empty and leaves after this step" for rank in sorted(self.leaving)]
        addresses = [joining.request.address for joining in self.joining.values()]
        return [*found, *(f"the shard server at {address} joins after this step" for address in addresses)]

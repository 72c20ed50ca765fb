"""Shard servers that come and go between two steps, so that none is aborted. Pure.

A change of members makes a new generation, which ends the steps under way. A shard server that wants to join a job
that is training, and one that was drained, can wait: the decision on the next step names the generation that begins
with the step after it, so every worker takes its next ticket in that. A job in which no step ends for `PATIENCE_S` is
not made to wait longer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from axon_ps.coordinator.core.events import JoinRequest

PATIENCE_S = 30.0
"""How long a change of shard servers waits for the end of a step."""


@dataclass(frozen=True)
class Joining:
    """A shard server that waits to be let in."""

    session: int
    request: JoinRequest
    since: float


class Handover:
    """The shard servers that wait.

    Attributes:
        joining: by their session.
        leaving: since when, by rank.
    """

    def __init__(self) -> None:
        self.joining: dict[int, Joining] = {}
        self.leaving: dict[int, float] = {}

    def __len__(self) -> int:
        """How many generations it takes to let all of them come and go."""
        return len(self.joining) + len(self.leaving)

    def overdue(self, now: float) -> bool:
        """Whether one of them has waited long enough."""
        return now >= self.next_deadline()

    def next_deadline(self) -> float:
        """When one of them will have; inf when there is none."""
        since = [joining.since for joining in self.joining.values()] + list(self.leaving.values())
        return min(since, default=math.inf) + PATIENCE_S

    def pending(self) -> list[str]:
        """What is waited for, as text."""
        found = [f"shard server {rank} is empty and leaves after this step" for rank in sorted(self.leaving)]
        addresses = [joining.request.address for joining in self.joining.values()]
        return [*found, *(f"the shard server at {address} joins after this step" for address in addresses)]

"""The order of a worker's steps: together with the other replicas, or asynchronously; pure.

    SynchronousSteps    a step takes the gradients of all replicas; its decision is for all of them
    AsynchronousSteps   each replica's gradient is a step of its own; others commit while this worker computes

Note: [Origin]
    The *origin* of an asynchronous step is (generation, version) when this worker first reads it in the step. Every
    gather until the next step requests that version or a later one. Parameters that stay unsharded do not change, so
    backward reads the values that forward read. A step that was begun in another generation than the present one cannot
    commit. Its ticket is void.
"""

from __future__ import annotations

from dataclasses import dataclass

from axon_ps.sharding.policy import Policy
from axon_ps.types import Decision, Membership, Outcome
from axon_ps.worker.steps.ticket import Ticket

_MAX_DECISIONS = 16
"""Number of decisions stored. After a reconnect several come at once, and this worker may need an early one of them."""


class SynchronousSteps:
    """Every step takes the gradients of all replicas.

    Attributes:
        wait_s: seconds that we have waited for `may_proceed`.
    """

    wait_s = 0.0

    def __init__(self) -> None:
        self._generation = 0
        self._step = 0
        self._decisions: dict[int, Decision] = {}

    @property
    def attempt(self) -> int:
        """The name of the current step in a ticket: its number, or our clock."""
        return self._step

    @property
    def next_attempt(self) -> int:
        """The number of the attempt that is decided next."""
        return self._step

    @property
    def replica(self) -> int:
        """The replica whose step it is; -1 = a step of all."""
        return -1

    def begin(self, generation: int, step: int, replica: int) -> None:
        """Begin a generation, with this step; we are `replica` in it, or -1."""
        self._generation, self._step = generation, step

    def decided(self, decision: Decision) -> None:
        """Apply a decision."""
        if decision.replica_clock is None:
            self._decisions[decision.step] = decision
        for old in [s for s in self._decisions if s <= decision.step - _MAX_DECISIONS]:
            del self._decisions[old]
        if decision.generation == self._generation:  # the membership includes those of earlier generations
            self._step = decision.step + 1

    def acknowledges(self, decision: Decision) -> bool:
        """Return True if a decision shows, as it arrives, that all current workers made the program's last step."""
        return decision.replica_clock is None and decision.outcome is Outcome.COMMIT

    def version(self, latest: int) -> int:
        """Return the version that the current step is computed from; `latest` is the newest known to this worker."""
        return latest

    def ticket(self, latest: int, membership: Membership, replica: int) -> Ticket:
        """Return the ticket of the current step."""
        return Ticket(
            generation=membership.generation, step=self._step, replica=replica, num_replicas=membership.num_replicas
        )

    def decision_on(self, ticket: Ticket) -> Decision | None:
        """Return the decision on the step of a ticket, if it has come."""
        decision = self._decisions.get(ticket.step)
        return decision if decision is not None and decision.generation == ticket.generation else None

    def voter(self, ticket: Ticket) -> int | None:
        """Return the replica whose step a vote is for; None = a step of all."""
        return None

    def end_step(self) -> None:
        """End the current step, which is over, or whose parameters were replaced."""

    def may_proceed(self, generation: int) -> bool:
        """Return True if the next step may begin, or the generation in which we wait is over."""
        return True

    def why_waiting(self) -> str:
        """Return the reason for which `may_proceed` returns False, for an error."""
        return ""

    def statistics(self) -> dict[str, float]:
        """Return the clocks, and the seconds waited for the slowest replica."""
        return {}


@dataclass(frozen=True, slots=True)
class Origin:
    """The parameters that a step is computed from; see Note: [Origin]."""

    generation: int
    version: int


class AsynchronousSteps:
    """Each replica's gradient is a step of its own; see `SynchronousSteps` for the methods.

    `clock` and `slowest` start again at 0 with every generation.

    Args:
        policy: bounds how far the slowest replica may be behind a replica that goes on.

    Attributes:
        policy: as given.
        clock: our decided steps in this generation.
        slowest: the lowest clock of all replicas, by the newest decision.
        wait_s: seconds that we have waited for `may_proceed`.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.clock = 0
        self.slowest = 0
        self.wait_s = 0.0
        self._generation = 0
        self._replica = -1
        self._next = 0
        self._origin: Origin | None = None
        self._decision: Decision | None = None  # the newest on a step of ours

    @property
    def attempt(self) -> int:
        """Our clock."""
        return self.clock

    @property
    def next_attempt(self) -> int:
        """One more than the newest decided attempt that this worker knows of."""
        return self._next

    @property
    def replica(self) -> int:
        """Ours."""
        return self._replica

    def begin(self, generation: int, step: int, replica: int) -> None:
        """Begin a generation: clocks begin at 0."""
        self._next = max(self._next, step)
        if generation != self._generation:
            self._generation, self._replica = generation, replica
            self.clock = self.slowest = 0

    def decided(self, decision: Decision) -> None:
        """Apply a decision on one replica's step."""
        self._next = max(self._next, decision.step + 1)
        of = decision.replica_clock
        if of is None or decision.generation != self._generation:
            return
        self.slowest = max(self.slowest, of.slowest_clock)
        if of.replica == self._replica:
            self.clock = max(self.clock, of.clock + 1)
            self._decision = decision

    def acknowledges(self, decision: Decision) -> bool:
        """Return False, since others need not have made a step."""
        return False

    def origin(self, latest: int) -> Origin:
        """Return the origin of the current step. The first call of a step fixes it to version `latest`."""
        if self._origin is None:
            self._origin = Origin(self._generation, latest)
        return self._origin

    def version(self, latest: int) -> int:
        """Return the origin's version."""
        return self.origin(latest).version

    def ticket(self, latest: int, membership: Membership, replica: int) -> Ticket:
        """Return the ticket of our own step."""
        return Ticket(generation=self.origin(latest).generation, step=self.clock, replica=replica, num_replicas=1)

    def decision_on(self, ticket: Ticket) -> Decision | None:
        """Return the decision on our own step."""
        decision = self._decision
        if decision is None or decision.replica_clock is None or decision.replica_clock.clock != ticket.step:
            return None
        return decision if decision.generation == ticket.generation else None

    def voter(self, ticket: Ticket) -> int | None:
        """Return our own replica."""
        return ticket.replica

    def end_step(self) -> None:
        """Forget the origin: the next step has another."""
        self._origin = None

    def may_proceed(self, generation: int) -> bool:
        """Return True if the slowest replica is not further behind than the policy allows, or `generation` is over."""
        most = self.policy.most_behind
        return most is None or generation != self._generation or self.clock - self.slowest <= most

    def why_waiting(self) -> str:
        """Return the clocks as text."""
        return (
            f"this worker is at clock {self.clock} and the slowest at {self.slowest}, which is more than {self.policy} "
            "allows; its step is decided, the next may not begin"
        )

    def statistics(self) -> dict[str, float]:
        """Return the clocks, and the seconds waited."""
        return {
            "clock": float(self.clock),
            "slowest_clock": float(self.slowest),
            "staleness_wait_s": self.wait_s,
        }


Stepping = SynchronousSteps | AsynchronousSteps

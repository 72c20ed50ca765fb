"""The grid of faults, as data: victims, faults, moments, strategies and promises."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from axon_ps_lab.faults import Moment
from axon_ps_lab.faults.fault import Fault, Means

LEASE_S = 1.0
PATIENCE_S = LEASE_S + 2.0
"""No worker waits longer than so many seconds after a fault has healed."""


class Victim(Enum):
    """The struck processes."""

    WORKER = "worker"
    TWO_WORKERS = "two-workers"
    SHARD = "shard"
    COORDINATOR = "coordinator"
    BOTH = "coordinator+worker"
    SERVICES = "coordinator+shard"


@dataclass(frozen=True)
class Strike:
    """A fault of the grid.

    Attributes:
        fault: its kind.
        seconds: its duration; 0 = it is over at once.
    """

    fault: Fault
    seconds: float = 0.0

    @property
    def name(self) -> str:
        """The fault as text."""
        return self.fault.value.replace("_", " ") + (f" for {self.seconds:g} s" if self.seconds else "")


STRIKES = {
    "sigkill": Strike(Fault.KILL),
    "sigstop-short": Strike(Fault.FREEZE, 0.4 * LEASE_S),
    "sigstop-long": Strike(Fault.FREEZE, 2.5 * LEASE_S),
    "reset": Strike(Fault.RESET),
    "half-close": Strike(Fault.HALF_CLOSE),
    "black-hole": Strike(Fault.BLACK_HOLE, 8.0),
    "delay": Strike(Fault.DELAY, 4.0),
    "resets": Strike(Fault.RESETS, 5.0),
    "cut": Strike(Fault.CUT, 5.0),  # only between it and one server
    "failing-disk": Strike(Fault.FAILING_DISK),
    "older-state": Strike(Fault.OLDER_STATE),
    "lost-journal": Strike(Fault.TRUNCATED_JOURNAL),
}
"""The faults, by their names in cases."""

CUT_OFF = (Victim.WORKER, Victim.SHARD)
"""The victims that can be cut off from a shard server."""

CALLING = (Moment.GATHER, Moment.PUSH, Moment.DECISION)
"""The moments of a cut: one of the two reads, writes, or waits for the other's step."""

DECIDING = (Moment.PUSH, Moment.DECISION, Moment.BETWEEN_STEPS)
"""The moments of faults of the state: at any other moment the coordinator's state is as at one of these."""

MOMENTS = tuple(moment for moment in Moment if moment not in (Moment.RESTORE, Moment.REMOVE))
"""The moments of a step; the two others are those of `all_killed`."""

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One combination."""

    target: Victim
    struck_by: str
    moment: Moment
    strategy: str
    direct: bool
    replication: int

    @property
    def name(self) -> str:
        """The name: "worker*sigkill*forward*FULL_SHARD*direct*r2"."""
        direct = "direct" if self.direct else "sent"
        moment = self.moment.name.lower().replace("_", "-")
        return "*".join((self.target.value, self.struck_by, moment, self.strategy, direct, f"r{self.replication}"))

    @property
    def strike(self) -> Strike:
        """The fault and its duration."""
        return STRIKES[self.struck_by]

    @property
    def fault(self) -> Fault:
        """The kind of fault."""
        return self.strike.fault

    @property
    def hybrid(self) -> bool:
        """True if a replica is a node of two workers."""
        return self.strategy == "HYBRID_SHARD"

    @property
    def victims(self) -> tuple[int, ...]:
        """Ranks of the workers that are struck."""
        if self.target is Victim.TWO_WORKERS:
            return (2, 3) if self.hybrid else (1, 2)
        return (1,) if self.target in (Victim.WORKER, Victim.BOTH) else ()

    @property
    def restores(self) -> bool:
        """True if parameters are lost, and an operator restores them."""
        return Victim.SHARD in self.struck and self.fault is Fault.KILL and self.replication == 1

    @property
    def struck(self) -> tuple[Victim, ...]:
        """The kinds of process that are struck."""
        both = {Victim.BOTH: (Victim.COORDINATOR, Victim.WORKER), Victim.SERVICES: (Victim.COORDINATOR, Victim.SHARD)}
        return both.get(self.target, (self.target,))

    @property
    def most_aborts(self) -> int | None:
        """The number of attempts of a worker that may end without a commit; None = any."""
        only_a_server_dies = self.target is Victim.SHARD and self.fault in (Fault.KILL, Fault.FREEZE)
        return 1 if only_a_server_dies and self.replication > 1 else None

    @property
    def promise(self) -> str:
        """The promise, beside that of every case: no worker waits longer than `PATIENCE_S`, and all bits are right."""
        if self.most_aborts is not None:
            return "its backup goes on at once, at most one attempt does not commit; another server gets a second copy"
        if self.restores:
            return "another server takes its place, an operator restores the last checkpoint, the workers go on"
        if self.hybrid and self.victims:
            return "a node fails as a whole or not at all: its workers end with the reason, and are started again"
        if self.fault is Fault.CUT:
            return "one of the two that cannot reach each other goes and comes back, if the job can do without it"
        if self.victims and self.fault is Fault.KILL:
            return "another worker takes its place and needs no peer"
        return "everybody goes on"


def cannot_occur(case: Case) -> str:
    """Return the reason why a combination cannot occur; empty if it can."""
    if case.fault is Fault.CUT:
        if case.target not in CUT_OFF:
            return "one member is cut off from one server"
        return "" if case.moment in CALLING else "it lasts, so a call meets it like one of these"
    if case.fault.traits.means is not Means.STATE:
        return ""
    if case.target is not Victim.COORDINATOR:
        return "only a coordinator has a state"
    return "" if case.moment in DECIDING else "the coordinator knows no more and no less than at another moment"


def all_cases() -> tuple[Case, ...]:
    """Return every combination, also those that cannot occur."""
    return tuple(
        Case(
            target=target, struck_by=struck_by, moment=moment, strategy=strategy, direct=direct, replication=replication
        )
        for replication, strategy, direct, moment, struck_by, target in itertools.product(
            (1, 2), STRATEGIES, (True, False), MOMENTS, STRIKES, Victim
        )
    )


def possible_cases() -> tuple[Case, ...]:
    """Return the combinations that can occur."""
    return tuple(c for c in all_cases() if not cannot_occur(c))


def pairwise(cases: Sequence[Case]) -> tuple[Case, ...]:
    """Return a small sample of the cases with each pair of values of two dimensions that occurs in any case.

    The choice is greedy, and the same each time: the next case is that with the most pairs that are still missing. Of
    equals it is the first in a random order, so that the sample has various combinations of three, too.
    """
    missing = set().union(*map(_pairs, cases))
    left, chosen = random.Random(14).sample(cases, len(cases)), []
    while missing:
        best = max(left, key=lambda c: len(_pairs(c) & missing))
        chosen.append(best)
        left.remove(best)
        missing -= _pairs(best)
    return tuple(chosen)


def _pairs(case: Case) -> frozenset[tuple[object, object]]:
    values: Iterable[object] = (
        ("target", case.target),
        ("struck by", case.struck_by),
        ("moment", case.moment),
        ("strategy", case.strategy),
        ("direct", case.direct),
        ("replication", case.replication),
    )
    return frozenset(itertools.combinations(values, 2))

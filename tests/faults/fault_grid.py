"""The grid of faults, as data: who is struck, by what, at which moment, under which strategy, and what is promised."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from axon_ps_lab.faults import Moment
from axon_ps_lab.faults.proxy import Disturbance, Kind

LEASE_S = 1.0
PATIENCE_S = LEASE_S + 2.0
"""Nobody waits longer than this after a fault has healed."""


class Target(Enum):
    """Who is struck."""

    WORKER = "worker"
    TWO_WORKERS = "two-workers"
    SHARD = "shard"
    COORDINATOR = "coordinator"
    BOTH = "coordinator+worker"
    SERVICES = "coordinator+shard"


class Fault(Enum):
    """By what."""

    SIGKILL = "sigkill"
    STOP_SHORT = "sigstop-short"
    STOP_LONG = "sigstop-long"
    RESET = "reset"
    HALF_CLOSE = "half-close"
    BLACK_HOLE = "black-hole"
    DELAY = "delay"
    RESETS = "resets"
    CUT = "cut"
    FAILING_DISK = "failing-disk"
    OLDER_STATE = "older-state"
    LOST_JOURNAL = "lost-journal"


STOPS_S = {Fault.STOP_SHORT: 0.4 * LEASE_S, Fault.STOP_LONG: 2.5 * LEASE_S}

DISTURBANCES = {
    Fault.RESET: Disturbance(kind=Kind.RESET),
    Fault.HALF_CLOSE: Disturbance(kind=Kind.HALF_CLOSE),
    Fault.BLACK_HOLE: Disturbance(kind=Kind.BLACK_HOLE, seconds=8.0),
    Fault.DELAY: Disturbance(kind=Kind.DELAY, seconds=4.0),
    Fault.RESETS: Disturbance(kind=Kind.RESETS, seconds=5.0, every_s=0.1),
    Fault.CUT: Disturbance(kind=Kind.BLACK_HOLE, seconds=5.0),  # only between it and one server
}

OF_THE_STATE = (Fault.FAILING_DISK, Fault.OLDER_STATE, Fault.LOST_JOURNAL)
"""Those of the coordinator's state on disk."""

CUT_OFF = (Target.WORKER, Target.SHARD)
"""Those that have servers of whom they can be cut off."""

CALLING = (Moment.GATHER, Moment.PUSH, Moment.DECISION)
"""The moments at which they are: while one of them reads, writes, or waits for the other's step."""

DECIDING = (Moment.PUSH, Moment.DECISION, Moment.BETWEEN_STEPS)
"""The moments at which they strike: elsewhere the coordinator knows no more and no less."""

MOMENTS = tuple(moment for moment in Moment if moment not in (Moment.RESTORE, Moment.REMOVE))
"""Those of a step; the two others are all_killed.py's."""

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One combination."""

    target: Target
    fault: Fault
    moment: Moment
    strategy: str
    direct: bool
    replication: int

    @property
    def name(self) -> str:
        """What it is called: "worker*sigkill*forward*FULL_SHARD*direct*r2"."""
        direct = "direct" if self.direct else "sent"
        moment = self.moment.name.lower().replace("_", "-")
        return "*".join((self.target.value, self.fault.value, moment, self.strategy, direct, f"r{self.replication}"))

    @property
    def hybrid(self) -> bool:
        """Whether a replica is a node of two workers."""
        return self.strategy == "HYBRID_SHARD"

    @property
    def victims(self) -> tuple[int, ...]:
        """Ranks of the workers that are struck."""
        if self.target is Target.TWO_WORKERS:
            return (2, 3) if self.hybrid else (1, 2)
        return (1,) if self.target in (Target.WORKER, Target.BOTH) else ()

    @property
    def restores(self) -> bool:
        """Whether parameters are lost, and an operator restores them."""
        return Target.SHARD in self.struck and self.fault is Fault.SIGKILL and self.replication == 1

    @property
    def struck(self) -> tuple[Target, ...]:
        """The kinds of process."""
        both = {Target.BOTH: (Target.COORDINATOR, Target.WORKER), Target.SERVICES: (Target.COORDINATOR, Target.SHARD)}
        return both.get(self.target, (self.target,))

    @property
    def most_aborts(self) -> int | None:
        """How many attempts of a worker may end without a commit; None = any number."""
        only_a_server_dies = self.target is Target.SHARD and self.fault in (Fault.SIGKILL, *STOPS_S)
        return 1 if only_a_server_dies and self.replication > 1 else None

    @property
    def promise(self) -> str:
        """What is to happen, beside what every cell promises: nobody waits longer than `PATIENCE_S`, right bits."""
        if self.most_aborts is not None:
            return "its backup goes on at once, at most one attempt does not commit; another server gets a second copy"
        if self.restores:
            return "another server takes its place, an operator restores the last checkpoint, the workers go on"
        if self.hybrid and self.victims:
            return "a node fails as a whole or not at all: its workers end with the reason, and are started again"
        if self.fault is Fault.CUT:
            return "one of the two that cannot reach each other goes and comes back, if the job can do without it"
        if self.victims and self.fault is Fault.SIGKILL:
            return "another worker takes its place and needs no peer"
        return "everybody goes on"


def cannot_occur(cell: Cell) -> str:
    """Why a combination cannot be had; empty when it can."""
    if cell.fault is Fault.CUT:
        if cell.target not in CUT_OFF:
            return "one member is cut off from one server"
        return "" if cell.moment in CALLING else "it lasts, so a call meets it like one of these"
    if cell.fault not in OF_THE_STATE:
        return ""
    if cell.target is not Target.COORDINATOR:
        return "only a coordinator has a state"
    return "" if cell.moment in DECIDING else "the coordinator knows no more and no less than at another moment"


def all_cells() -> tuple[Cell, ...]:
    """Every combination, those that cannot occur too."""
    return tuple(
        Cell(target=target, fault=fault, moment=moment, strategy=strategy, direct=direct, replication=replication)
        for replication, strategy, direct, moment, fault, target in itertools.product(
            (1, 2), STRATEGIES, (True, False), MOMENTS, Fault, Target
        )
    )


def possible_cells() -> tuple[Cell, ...]:
    """Those that can occur."""
    return tuple(c for c in all_cells() if not cannot_occur(c))


def pairwise(cells: Sequence[Cell]) -> tuple[Cell, ...]:
    """Few of the cells in which every pair of values of two dimensions occurs that occurs in any.

    Greedy, and the same each time: always the cell with the most pairs that are still missing. Of equals the first in
    an order without pattern, so that the sample says something about combinations of three, too.
    """
    missing = set().union(*map(_pairs, cells))
    left, chosen = random.Random(14).sample(cells, len(cells)), []
    while missing:
        best = max(left, key=lambda c: len(_pairs(c) & missing))
        chosen.append(best)
        left.remove(best)
        missing -= _pairs(best)
    return tuple(chosen)


def _pairs(cell: Cell) -> frozenset[tuple[object, object]]:
    values: Iterable[object] = (
        ("target", cell.target),
        ("fault", cell.fault),
        ("moment", cell.moment),
        ("strategy", cell.strategy),
        ("direct", cell.direct),
        ("replication", cell.replication),
    )
    return frozenset(itertools.combinations(values, 2))

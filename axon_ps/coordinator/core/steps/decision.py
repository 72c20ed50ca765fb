"""The decision on a step: votes of workers and sums of shard servers in, one decision out. Pure.

Note: [One decider]
    A step commits if and only if the coordinator has written a decision to commit it. A worker that votes pushes
    nothing else in the step. A shard server that is ready holds the gradients of every replica, also late ones. So when
    all have reported, nothing is missing, and the decision is the same for all members. With a non-finite gradient
    the step is skipped, with disagreeing votes it is aborted.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

from axon_ps.errors import AxonError
from axon_ps.optim.clipping import clip_factor, global_norm
from axon_ps.optim.registry import create
from axon_ps.types import NO_GRADIENTS, Decision, Hyper, OptimizerSpec, Outcome
from axon_ps.wire.events import Ready, Vote

_MAX_RANKS = 8


@dataclass(frozen=True, slots=True)
class Difference:
    """Copies of a slice that differ although each holds the values written to it: an update has failed on a server.

    Attributes:
        slice: its number.
        ranks: the servers, grouped by equal copies.
        outvoted: the servers whose copies differ from the majority; empty without a majority.
    """

    slice: int
    ranks: tuple[tuple[int, ...], ...]
    outvoted: tuple[int, ...]

    def __str__(self) -> str:
        servers = " and ".join(format_ranks(ranks) for ranks in self.ranks)
        blame = f"shard server {format_ranks(self.outvoted)} is" if self.outvoted else "one of them is"
        return f"slice {self.slice} differs between shard servers {servers}: {blame} damaged"


class Tally:
    """The votes by worker rank, the sums by shard server rank, and the workers that arrived, of the current step.

    `arrived` has the addend that each worker pushes then. `blocked` are the workers that voted or arrived and do
    nothing else meanwhile. `copies` is True if a worker voted for a step that takes another model's values.
    """

    def __init__(self) -> None:
        self.votes: dict[int, Vote] = {}
        self.sums: dict[int, tuple[float, ...]] = {}
        self._addends: dict[int, int] = {}  # by shard server rank, the last one in its sums
        self._digests: dict[int, dict[int, list[int]]] = {}  # by slice and value, the servers that have it
        self.arrived: dict[int, int] = {}
        self.blocked: set[int] = set()
        self.copies = False

    def clear(self) -> None:
        """Start the next step."""
        self.arrived.clear()
        self.blocked.clear()
        self.votes.clear()
        self.copies = False
        self.forget_reports()

    def forget_reports(self) -> None:
        """Drop the reports of shard servers, which report anew after a change of placement."""
        self.sums.clear()
        self._addends.clear()
        self._digests.clear()

    def vote(self, rank: int, vote: Vote) -> bool:
        """Count a vote; return False for a repeated vote, of which the first counts."""
        if vote.blocked:
            self.blocked.add(rank)
        is_first = self.votes.setdefault(rank, vote) is vote
        self.copies = self.copies or (is_first and vote.copy is not None)
        return is_first

    def ready(self, rank: int, ready: Ready) -> bool:
        """Count a shard server's sum; return False for one of no later addend than the sum before."""
        if ready.last_addend <= self._addends.get(rank, -1):
            return False
        is_first = rank not in self.sums
        self.sums[rank], self._addends[rank] = ready.sums_of_squares, ready.last_addend
        for number, value in ready.digests.items() if is_first else ():
            self._digests.setdefault(number, {}).setdefault(value, []).append(rank)
        return True

    @property
    def difference(self) -> Difference | None:
        """The first difference between copies of a slice; None = none. All copies get the same updates."""
        for number, ranks_by_value in sorted(self._digests.items()):
            if len(ranks_by_value) > 1:
                most, *others = sorted(ranks_by_value.values(), key=len, reverse=True)
                outvoted = sorted(chain.from_iterable(others)) if len(most) > len(others[0]) else []
                return Difference(number, tuple(tuple(ranks) for ranks in ranks_by_value.values()), tuple(outvoted))
        return None

    def is_complete(self, workers: Collection[int], owners: Iterable[int]) -> bool:
        """Return True if every worker has voted and every owner is ready.

        Owners are not awaited if a vote is withdrawn, or if workers pushed different numbers of addends, since the step
        is aborted then. They do not report on a step that takes another model's values. It aborts if a worker pushes
        gradients.
        """
        if any(vote.withdrawn for vote in self.votes.values()):  # so that every worker goes on after the same attempt
            return all(w in self.votes or self._has_more(w) for w in workers)
        if len(self.votes) + len(self.arrived) < len(workers):
            return False
        if self.copies:
            return all(map(self.has_come, workers))
        if any(map(self._has_more, workers)):
            return all(map(self.has_come, workers))
        return all(w in self.votes for w in workers) and all(self._is_ready(o) for o in owners)

    @property
    def last_addend(self) -> int:
        """The last addend that a worker has voted for."""
        return max((vote.last_addend for vote in self.votes.values()), default=0)

    def _has_more(self, worker: int) -> bool:
        """Return True if a worker has pushed an addend that another one does not push."""
        least = min((vote.last_addend for vote in self.votes.values()), default=math.inf)
        vote = self.votes.get(worker)
        return least < (self.arrived.get(worker, 0) if vote is None else vote.last_addend)

    def _is_ready(self, owner: int) -> bool:
        return self._addends.get(owner) == self.last_addend

    def missing(self, workers: Iterable[int]) -> list[int]:
        """Return the workers that have neither voted nor arrived."""
        return [w for w in workers if not self.has_come(w)]

    def has_come(self, worker: int) -> bool:
        """Return True if a worker has voted or arrived."""
        return worker in self.votes or worker in self.arrived

    def pending(self, workers: Sequence[int], owners: Iterable[int]) -> list[str]:
        """Return the reasons why the step is not decided, as text; none before the first vote or report."""
        if not self.votes and not self.sums and not self.arrived:
            return []
        silent = self.missing(workers) or [w for w in workers if w not in self.votes]
        missing = silent, [o for o in owners if not self._is_ready(o)]
        waits = []
        if missing[0]:
            waits.append(f"votes of worker {format_ranks(missing[0])}")
        if missing[1]:
            waits.append(f"gradients at shard server {format_ranks(missing[1])}")
        return waits

    def decide(
        self,
        *,
        step: int,
        generation: int,
        version: int,
        optimizer: OptimizerSpec | None,
        workers: Iterable[int] = (),
        per_replica: int = 1,
    ) -> Decision:
        """Return the decision of a complete tally.

        Args:
            step: the attempt.
            generation: the generation it ran in.
            version: the version before it.
            optimizer: the model's. Votes may leave its hyperparameters out. None when nothing is trainable.
            workers: the workers that take part.
            per_replica: so many votes have the weight of the same gradient, of which each voter has sent a part.
        """

        def ended(outcome: Outcome, *, reason: str = "", norm: float = 0.0, refused: int = 0) -> Decision:
            return Decision(
                step=step,
                generation=generation,
                outcome=outcome,
                version=version,
                grad_norm=norm,
                reason=reason,
                refused=refused,
            )

        vote = next(iter(self.votes.values()))
        if withdrawn := [rank for rank, v in self.votes.items() if v.withdrawn]:
            return ended(Outcome.ABORT, reason=f"worker {format_ranks(withdrawn)} withdrew its gradients of this step")
        if self.copies and (pushing := [w for w in workers if w not in self.votes]):
            return ended(Outcome.ABORT, reason=_mixed(self.votes, pushing), refused=1)
        optimizer = optimizer if vote.optimizer is None else vote.optimizer.spec
        problem = _disagreement(self.votes) or _different_addends(self.votes, self.arrived)
        if problem := problem or _problem(vote, optimizer):
            return ended(Outcome.ABORT, reason=problem, refused=1)
        if vote.copy is not None:
            return Decision(
                step=step,
                generation=generation,
                outcome=Outcome.COMMIT,
                version=version + 1,
                copy=vote.copy,
                commit=vote.commit,
            )
        norm = _norm(chain.from_iterable(self.sums.values()))  # exactly rounded, wherever slices are
        trainable = {n for n, group in enumerate(optimizer.group_of) if group >= 0} if optimizer is not None else set()
        untouched = trainable.intersection(*(v.untouched for v in self.votes.values()))
        if untouched and untouched == trainable:
            skipped = ended(Outcome.SKIP, reason=NO_GRADIENTS)
            return dataclasses.replace(skipped, commit=vote.commit)
        weights = [v.weight for v in self.votes.values() if v.weight is not None]
        weight = math.fsum(weights) / per_replica
        if weights and not weight:
            return ended(Outcome.SKIP, reason="every worker's weight in the step is 0")
        norm /= weight or 1.0
        if not math.isfinite(norm):
            guilty = [rank for rank, s in self.sums.items() if not all(map(math.isfinite, s))] or list(self.sums)
            where = f"shard server {format_ranks(guilty)}"
            skipped = ended(Outcome.SKIP, norm=norm, reason=f"the gradients are not finite (seen at {where})")
            return dataclasses.replace(skipped, commit=vote.commit)
        try:
            factor = clip_factor(norm, vote.max_norm) if vote.max_norm else 1.0
        except AxonError as error:
            return ended(Outcome.ABORT, reason=str(error), refused=1)
        return Decision(
            step=step,
            generation=generation,
            outcome=Outcome.COMMIT,
            version=version + 1,
            grad_norm=norm,
            clip_factor=factor / (weight or 1.0),
            weight=weight,
            hyper=_merged(vote.hyper, optimizer.groups if optimizer is not None else ()),
            commit=vote.commit,
            untouched=tuple(sorted(untouched)),
            optimizer=vote.optimizer,
        )


def format_ranks(ranks: Iterable[int]) -> str:
    """Return ranks as text, "3" or "0, 1, 5". A long list is cut."""
    ranks = sorted(ranks)
    listed = ", ".join(str(r) for r in ranks[:_MAX_RANKS])
    return listed if len(ranks) <= _MAX_RANKS else f"{listed} and {len(ranks) - _MAX_RANKS} more"


def _norm(sums: Iterable[float]) -> float:
    try:
        return global_norm(sums)
    except OverflowError:  # finite terms, but not their sum
        return math.inf


def _mixed(votes: Iterable[int], pushing: Iterable[int]) -> str:
    return (
        f"worker {format_ranks(votes)} copies from another model and worker {format_ranks(pushing)} pushes "
        "gradients in the same step; every worker must do the same"
    )


def _different_addends(votes: Mapping[int, Vote], arrived: Mapping[int, int]) -> str:
    """Return the numbers of addends of the workers as text, if a worker has pushed more than another; else empty."""
    voted = {rank: vote.last_addend for rank, vote in votes.items()}
    pushed = {rank: addend for rank, addend in arrived.items() if addend > min(voted.values())} | voted
    if len(set(pushed.values())) == 1:
        return ""
    ranks_by_number: dict[int, list[int]] = defaultdict(list)
    for rank, last in sorted(pushed.items()):
        ranks_by_number[last + 1].append(rank)
    made = "; ".join(f"worker {format_ranks(ranks)}: {number}" for number, ranks in sorted(ranks_by_number.items()))
    return (
        f"the workers sent the gradients of different numbers of backwards in the step: {made}; every worker must make "
        "as many, or accumulate them without sync"
    )


def _disagreement(votes: Mapping[int, Vote]) -> str:
    """Return the first difference between the votes, as text; empty when they agree."""
    first = next(iter(votes.values()))
    if all(_agreed(vote) == _agreed(first) for vote in votes.values()):
        return ""
    for field, value_of in _fields(votes):
        ranks_by_value: dict[str, list[int]] = defaultdict(list)
        for rank, vote in sorted(votes.items()):
            ranks_by_value[value_of(vote)].append(rank)
        if len(ranks_by_value) > 1:
            values = "; ".join(f"rank {format_ranks(ranks)}: {value}" for value, ranks in ranks_by_value.items())
            return f"the votes disagree on {field}: {values}; every worker must step with the same values"
    return ""


def _agreed(vote: Vote) -> tuple[object, ...]:
    return vote.max_norm, vote.hyper, vote.copy, vote.commit, vote.weight is None, vote.optimizer


def _fields(votes: Mapping[int, Vote]) -> Iterator[tuple[str, Callable[[Vote], str]]]:
    yield "what the step takes", _taken
    yield "max_norm", lambda v: repr(v.max_norm)
    yield "whether gradients are weighted", lambda v: "no" if v.weight is None else "yes"
    yield "the optimizer", _changed
    yield "the number of parameter groups", lambda v: str(len(v.hyper))
    for group in range(min(len(v.hyper) for v in votes.values())):
        for name in sorted({n for v in votes.values() for n in v.hyper[group]}):
            yield f"{name} of group {group}", partial(_value_in, group, name)
    for name in sorted({n for v in votes.values() for n in v.commit}):
        yield f"{name!r}, which is committed with the step", partial(_committed, name)


def _taken(vote: Vote) -> str:
    return "gradients" if vote.copy is None else f"{vote.copy.weight:g} of model number {vote.copy.source}"


def _changed(vote: Vote) -> str:
    if vote.optimizer is None:
        return "as before"
    spec = vote.optimizer.spec
    how = "that goes on with the moments" if vote.optimizer.retains_moments else "with moments that begin anew"
    groups = ", ".join(f"{spec.group_of.count(index)} parameters in group {index}" for index in range(len(spec.groups)))
    return f"another {spec.name} {how}, {groups}"


def _value_in(group: int, name: str, vote: Vote) -> str:
    return repr(vote.hyper[group].get(name, "absent"))


def _committed(name: str, vote: Vote) -> str:
    return vote.commit.get(name, "absent")


def _problem(vote: Vote, optimizer: OptimizerSpec | None) -> str:
    """Return the reason why votes that agree cannot be carried out, as text; empty when they can."""
    registered = optimizer.groups if optimizer is not None else ()
    if vote.hyper and len(vote.hyper) != len(registered):
        return f"the votes have {len(vote.hyper)} parameter groups; the registered optimizer has {len(registered)}"
    if optimizer is None or not vote.hyper:
        return ""
    algorithm = create(optimizer.name)
    for index, hyper in enumerate(_merged(vote.hyper, registered)):
        try:
            algorithm.validate(hyper)
        except AxonError as error:
            return f"the votes' hyperparameters of group {index} cannot be: {error}"
    return ""


def _merged(hyper: Sequence[Hyper], registered: Sequence[Hyper]) -> tuple[Hyper, ...]:
    return tuple({**r, **h} for r, h in zip(registered, hyper or ({},) * len(registered), strict=True))

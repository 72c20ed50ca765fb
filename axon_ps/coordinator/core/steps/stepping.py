"""The steps of every model in a generation: votes and reports in, decisions out. Pure.

Note: [Copies]
    A step may take another model's values instead of gradients (`CopyFrom`). Every worker votes for it as for any step,
    so no worker reads the parameters that change. Shard servers do not report on it: it is decided when all workers
    have voted, and takes the other model's version of that moment. Servers apply decisions in this order, so all of
    them copy the same version.

Note: [Deadlocked steps]
    If a program alternates between models, a worker that waits in a step of one model cannot reach the step of another.
    After a change of members, workers may be at different positions in the program. A joiner begins at the start; of
    the survivors, one may have been in the aborted step and another just before it. When every worker waits, but not
    all in a step of the same model, they are deadlocked. Then all attempts but one are aborted, as for a change of
    members. Their workers continue with the program until they reach the attempt that was left. That is the attempt in
    which most workers wait, among equals that of the lowest model number. Before the first change of members the
    workers of a correct program cannot deadlock. A worker that makes steps in several threads does not count as waiting
    (`Vote.blocked`).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence

from axon_ps.coordinator.core import records
from axon_ps.coordinator.core.actions import Outbox
from axon_ps.coordinator.core.models import Model, Models
from axon_ps.coordinator.core.roster import Roster
from axon_ps.coordinator.core.steps.decision import Difference, Tally, format_ranks
from axon_ps.types import CopyFrom, Decision, Membership, Outcome, Role
from axon_ps.wire import committed
from axon_ps.wire.events import Arrived, Ready, Vote

_COUNTER = {Outcome.COMMIT: "steps_committed", Outcome.SKIP: "steps_skipped", Outcome.ABORT: "steps_aborted"}


class Stepping:
    """The attempts in progress.

    Args:
        models: the models of the job.
        roster: the members that get the decisions.
        out: gets the records to write and the events to send.
        disturbed: whether the members may have changed since the job was complete for the first time.

    Attributes:
        counters: those of the job, by name: steps by outcome, copies, staleness, joins and others.
        membership: that of the current generation.
        ending: called before a decision on a step of all replicas is sent; returns the generation that is to begin with
            the next step, 0 for none. See `core.members`, Note: [Between two steps].
        differing: the models whose copies differ, with the difference.
    """

    def __init__(self, models: Models, roster: Roster, out: Outbox, membership: Membership, *, disturbed: bool) -> None:
        self._models = models
        self._roster = roster
        self._out = out
        self._disturbed = disturbed
        self.counters: Counter[str] = Counter()
        self.membership = membership
        self.ending: Callable[[Model], int] = lambda model: 0
        self.differing: list[tuple[Model, Difference]] = []
        for model in models:
            self.begin_model(model)
            model.attempts.resume(model.decisions, membership.generation)

    def begin(self, membership: Membership) -> None:
        """Begin the attempts of a new generation."""
        self._disturbed = self._disturbed or self.membership.complete
        self.membership = membership
        for model in self._models:
            self.begin_model(model)

    def begin_model(self, model: Model) -> None:
        """Begin the attempts of a model, in a new generation or because it has just been registered."""
        spec = model.registration.spec
        membership = self.membership if spec is None else self.membership.numbered(spec.grouping)
        model.attempts.begin(None if spec is None else spec.policy, membership)
        model.open = membership.complete and not (membership.grouping.rows and not membership.num_replicas)

    def abort_all(self, reason: str) -> None:
        """Abort the attempt of every model, and start no other before the next generation."""
        for model in self._models:
            self.abort(model, reason, next_generation=self.membership.generation + 1)

    def abort(self, model: Model, reason: str, *, next_generation: int = 0) -> None:
        """End the attempt of a model, if there is one. The next begins with `next_generation`, or at once."""
        if model.open:
            model.open = not next_generation
            self._decided(
                model,
                Decision(
                    step=model.step,
                    generation=self.membership.generation,
                    outcome=Outcome.ABORT,
                    version=model.version,
                    reason=reason,
                    next_generation=next_generation,
                    model=model.number,
                ),
            )

    def arrived(self, rank: int, arrived: Arrived) -> None:
        """Note that a worker waits in an attempt until the servers take its gradients; ignore another attempt."""
        model = self._attempting(arrived.model, arrived.generation)
        if model is not None:
            model.attempts.arrived(rank, arrived, model.step)
            self._decide_complete(model)
            self._break_deadlock()

    def vote(self, ranks: Sequence[int], vote: Vote) -> None:
        """Count the votes of workers on an attempt. Votes of another attempt, and second ones, are ignored."""
        model = self._attempting(vote.model, vote.generation)
        if model is not None and [rank for rank in ranks if model.attempts.vote(rank, vote, model.step)]:
            self._decide_complete(model)
            self._break_deadlock()

    def ready(self, rank: int, ready: Ready) -> None:
        """Count a shard server's report on an attempt; one on another attempt, or a second one, is ignored."""
        model = self._attempting(ready.model, ready.generation)
        if model is None or ready.placement != model.holders.placement_number:
            return
        if model.attempts.ready(rank, ready, model.step):
            if (difference := model.attempts.difference(model.holders.owners)) is not None:
                self.differing.append((model, difference))
            else:
                self._decide_complete(model)

    def recheck_copies(self) -> None:
        """Decide the copies that a new placement makes possible."""
        for model in self._models:
            if model.open:
                self._decide_complete(model)

    def voted(self) -> Collection[int]:
        """Return the workers that have voted in a current step and wait for the others."""
        return {rank for model in self._models if model.open for rank in model.attempts.voted()}

    def pending(self) -> list[str]:
        """Return the reasons why steps are not decided, as text."""
        return [
            self._models.message_prefix(model) + text
            for model in self._models
            for text in model.attempts.pending(model.holders.owners)
        ]

    # ------------------------------------------------------------------ inside

    def _attempting(self, number: int, generation: int) -> Model | None:
        model = self._models.get(number)
        there = model is not None and model.open and generation == self.membership.generation
        return model if there else None

    def _decide_complete(self, model: Model) -> None:
        """Decide the attempts that are complete, one after the other."""
        attempts = model.attempts
        while (attempt := attempts.next_complete(model.holders.owners)) is not None:
            tally = attempts.tally(attempt)
            copies = tally.copies
            if copies and not self._together(model, tally):
                return
            decision = tally.decide(
                step=model.step,
                generation=self.membership.generation,
                version=model.version,
                optimizer=model.registration.optimizer,
                workers=attempts.workers(attempt),
                per_replica=attempts.per_replica,
            )
            if decision.commit and (why := committed.problem({**model.committed, **decision.commit})):
                decision = _impossible(model, decision, why)
            if copies and decision.outcome is Outcome.COMMIT:
                decision = self._copied(model, decision)
            elif decision.outcome is Outcome.COMMIT:
                self._out.persist(model.updated(decision))
                if decision.optimizer is not None and (now := model.registration.optimizer) is not None:
                    change = dataclasses.replace(decision.optimizer, spec=now)
                    decision = dataclasses.replace(decision, optimizer=change)
            if decision.refused:
                decision = dataclasses.replace(decision, refused=model.refused + 1)
            model.refused = decision.refused
            if attempts.asynchronous and decision.outcome is Outcome.COMMIT:
                self._count_staleness(decision, min(vote.version for vote in tally.votes.values()))
            model.version = decision.version
            if decision.outcome is Outcome.COMMIT and decision.copy is None:
                model.last_norm = decision.grad_norm
            decision = dataclasses.replace(decision, replica_clock=attempts.end(attempt), model=model.number)
            if not attempts.asynchronous:
                next_generation = self.ending(model)
                model.open = not next_generation
                self._decided(model, dataclasses.replace(decision, next_generation=next_generation))
                return
            self._decided(model, decision)

    def _together(self, model: Model, tally: Tally) -> bool:
        """Return True if each holder of a slice also has the source's slice. If not, the placements will be changed."""
        copy = next(vote.copy for vote in tally.votes.values() if vote.copy is not None)
        source = self._models.get(copy.source)
        if source is None or self._problem(model, source):
            return True  # the step can only be aborted
        pairs = set(zip(model.holders.placement.holders, source.holders.placement.holders, strict=True))
        return all(not h.copying and set(h.complete) <= set(theirs.complete) for h, theirs in pairs)

    def _copied(self, model: Model, decision: Decision) -> Decision:
        """Return the decision on a copy that all voted for, with the source's version; an abort if it is impossible."""
        assert decision.copy is not None
        source = self._models.get(decision.copy.source)
        if problem := self._problem(model, source):
            return _impossible(model, decision, problem)
        assert source is not None
        model.holders.parameters.copied = decision.version
        self._out.persist([records.parameters_record(model.number, model.holders.parameters)])
        self.counters["copies"] += 1
        copy = CopyFrom(source=source.number, weight=decision.copy.weight, version=source.version)
        return dataclasses.replace(decision, copy=copy)

    def _problem(self, model: Model, source: Model | None) -> str:
        """Return the reason why a model cannot take another's values, as text; empty when it can."""
        if source is None or source.registration.spec is None or model.registration.spec is None:
            return f"model {model.name!r} cannot take the values of a model that the job does not have"
        if source is model:
            return f"model {model.name!r} cannot take values of itself"
        shards = [entry.member for entry in self._roster.of_role(Role.SHARD)]
        for one in (model, source):
            if not one.state(shards).initialized:
                return f"the shard servers do not hold the parameters of model {one.name!r}"
            if one.attempts.asynchronous:
                return f"replicas of model {one.name!r} step asynchronously, so there is no version that all agree on"
        ours, theirs = model.registration.spec, source.registration.spec
        return "" if ours.is_cut_like(theirs) else ours.cut_difference(theirs)

    def _count_staleness(self, decision: Decision, read: int) -> None:
        """Count the steps applied since the version from which a gradient was computed."""
        stale = max(0, decision.version - 1 - read)
        self.counters["staleness_sum"] += stale
        self.counters["staleness_max"] = max(self.counters["staleness_max"], stale)

    def _break_deadlock(self) -> None:
        """Abort attempts in which workers are deadlocked; see Note: [Deadlocked steps]."""
        if not self._disturbed or len(self._models) < 2:
            return
        workers = {rank for model in self._models if model.open for rank in model.attempts.participants}
        waiting = {m: m.attempts.blocked() for m in self._models if m.open}
        waiting = {model: ranks for model, ranks in waiting.items() if ranks}
        if len(waiting) < 2 or set().union(*waiting.values()) != workers:
            return
        left = max(waiting, key=lambda m: (len(waiting[m]), -m.number))
        for model in waiting:
            if model is not left:
                self.abort(model, _deadlock_reason(model, left, waiting[model], waiting[left]))
        self.counters["steps_deadlocked"] += 1

    def _decided(self, model: Model, decision: Decision) -> None:
        model.step = decision.step + 1
        if decision.replica_clock is None:
            model.attempts.clear()
        model.decisions = records.retained(model.decisions, decision)
        self.counters[_COUNTER[decision.outcome]] += 1
        self._out.persist([records.decision_record(decision), records.progress_record(model.progress)])
        if decision.commit:
            model.committed = {**model.committed, **decision.commit}
            self._out.persist([records.committed_record(model.number, model.committed)])
        self._out.push(self._roster.sessions(), decision)


def _impossible(model: Model, decision: Decision, why: str) -> Decision:
    """Return an abort instead of a commit or a skip that all voted for."""
    return Decision(
        step=decision.step,
        generation=decision.generation,
        outcome=Outcome.ABORT,
        version=model.version,
        reason=why,
        refused=1,
    )


def _deadlock_reason(model: Model, left: Model, here: Iterable[int], there: Iterable[int]) -> str:
    return (
        f"worker {format_ranks(here)} waits in a step of model {model.name!r} and worker {format_ranks(there)} in "
        f"one of model {left.name!r}: since the members changed they are at different places of the program"
    )

"""The steps of every model in a generation: who has spoken, what is decided. Pure.

Note: [Copies]
    A step may take another model's values instead of gradients (`CopyFrom`). Every worker votes for it as for any step,
    so nobody reads what changes; no shard server has anything to say first, so it is decided when all have voted, every
    server has a stream (it could miss too many decisions otherwise) and the other model's version is what it is at that
    moment. Servers take decisions in this order, so all of them copy the same version.

Note: [Crossed steps]
    Where models train in turns, a worker that waits in a step of one model cannot come to the step of another. After a
    change of members that can happen: a joiner begins at the beginning of the program, and of the survivors one may
    have been in the step that was aborted and another just before it. When every worker waits, and not all in a step of
    one model, nobody would ever go on. Then all attempts but one are aborted, as for a change of members: who is in
    them goes on with its program, and comes to the one that was left. It is the one in which most wait, among equals
    that of the lowest number; who waits there stays, so the others have to come to it. Before the first change the
    workers of a correct program cannot cross; and who makes steps in several threads is not waiting (`Vote.blocked`).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterable

from axon_ps.coordinator.core import records
from axon_ps.coordinator.core.actions import Outbox
from axon_ps.coordinator.core.events import Ready, Vote
from axon_ps.coordinator.core.models import Model, Models
from axon_ps.coordinator.core.roster import Roster
from axon_ps.coordinator.core.steps.decision import ranks_in_words
from axon_ps.types import CopyFrom, Decision, Membership, Outcome, Role

_COUNTER = {Outcome.COMMIT: "steps_committed", Outcome.SKIP: "steps_skipped", Outcome.ABORT: "steps_aborted"}


class Stepping:
    """The attempts under way.

    Args:
        models: whose.
        roster: who is told.
        out: gets what is to be written and said.
        disturbed: whether the members have changed since the job was complete for the first time.

    Attributes:
        counters: steps by outcome, copies, staleness.
        membership: of the generation that they are in.
    """

    def __init__(self, models: Models, roster: Roster, out: Outbox, membership: Membership, *, disturbed: bool) -> None:
        self._models = models
        self._roster = roster
        self._out = out
        self._disturbed = disturbed
        self.counters: Counter[str] = Counter()
        self.membership = membership
        for model in models:
            self.begin_model(model)
            model.attempts.resume(model.decisions, membership.generation)

    def begin(self, membership: Membership) -> None:
        """The attempts of a new generation begin."""
        self._disturbed = self._disturbed or self.membership.complete
        self.membership = membership
        for model in self._models:
            self.begin_model(model)

    def begin_model(self, model: Model) -> None:
        """The attempts of a model begin, in a new generation or because it has just been registered."""
        spec = model.registration.spec
        membership = self.membership if spec is None else self.membership.numbered(spec.replica_is_node)
        model.attempts.begin(None if spec is None else spec.policy, membership)
        model.open = membership.complete

    def abort_all(self, reason: str) -> None:
        """End the attempt of every model that is in one, and start no other before the next generation."""
        for model in self._models:
            self.abort(model, reason, next_generation=self.membership.generation + 1)

    def abort(self, model: Model, reason: str, *, next_generation: int = 0) -> None:
        """End the attempt of a model, if there is one; the next begins with `next_generation`, or at once."""
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

    def arrived(self, rank: int, number: int, generation: int, step: int, *, blocked: bool) -> None:
        """A worker has computed everything of an attempt and waits; of another attempt it means nothing."""
        model = self._attempting(number, generation)
        if model is not None:
            model.attempts.arrived(rank, step, model.step, blocked=blocked)
            self._decide_what_is_full(model)
            self._uncross()

    def vote(self, rank: int, vote: Vote) -> None:
        """A worker has pushed everything of an attempt; one of another attempt, or a second, is ignored."""
        model = self._attempting(vote.model, vote.generation)
        if model is not None and model.attempts.vote(rank, vote, model.step):
            self._decide_what_is_full(model)
            self._uncross()

    def ready(self, rank: int, ready: Ready) -> None:
        """A shard server has every gradient of an attempt; one of another attempt, or a second, is ignored."""
        model = self._attempting(ready.model, ready.generation)
        if model is not None and model.attempts.ready(rank, ready, model.step):
            self._decide_what_is_full(model)

    def look_again(self) -> None:
        """A shard server has a stream again: copies may have waited for that."""
        for model in self._models:
            if model.open:
                self._decide_what_is_full(model)

    def voted(self) -> Collection[int]:
        """The workers that wait for the others' votes in a step under way."""
        return {rank for model in self._models if model.open for rank in model.attempts.voted()}

    def pending(self) -> list[str]:
        """What is waited for, in words."""
        return [
            self._models.words(model) + words
            for model in self._models
            for words in model.attempts.pending(model.registration.owners)
        ]

    # ------------------------------------------------------------------ inside

    def _attempting(self, number: int, generation: int) -> Model | None:
        model = self._models.get(number)
        there = model is not None and model.open and generation == self.membership.generation
        return model if there else None

    def _decide_what_is_full(self, model: Model) -> None:
        """Decide the attempts in which everybody has spoken, one after the other."""
        attempts = model.attempts
        while (lane := attempts.next_full(model.registration.owners)) is not None:
            tally = attempts.tally(lane)
            copies = tally.copies
            if copies and not self._all_connected():
                return
            decision = tally.decide(
                step=model.step,
                generation=self.membership.generation,
                version=model.version,
                optimizer=model.registration.optimizer,
                workers=attempts.workers(lane),
            )
            if copies and decision.outcome is Outcome.COMMIT:
                decision = self._copied(model, decision)
            if attempts.alone and decision.outcome is Outcome.COMMIT:
                self._count_staleness(decision, min(vote.version for vote in tally.votes.values()))
            model.version = decision.version
            if decision.outcome is Outcome.COMMIT and decision.copy is None:
                model.last_norm = decision.grad_norm
            self._decided(model, dataclasses.replace(decision, turn=attempts.end(lane), model=model.number))
            if not attempts.alone:
                return

    def _all_connected(self) -> bool:
        return all(seat.session is not None for seat in self._roster.of_role(Role.SHARD))

    def _copied(self, model: Model, decision: Decision) -> Decision:
        """A copy that all voted for, of the version that there is; an abort if it cannot be."""
        assert decision.copy is not None
        source = self._models.get(decision.copy.source)
        if problem := self._problem(model, source):
            return Decision(
                step=decision.step,
                generation=decision.generation,
                outcome=Outcome.ABORT,
                version=model.version,
                reason=problem,
            )
        assert source is not None
        model.registration.parameters.copied = decision.version
        self._out.persist([records.parameters_record(model.number, model.registration.parameters)])
        self.counters["copies"] += 1
        copy = CopyFrom(source=source.number, weight=decision.copy.weight, version=source.version)
        return dataclasses.replace(decision, copy=copy)

    def _problem(self, model: Model, source: Model | None) -> str:
        """Why a model cannot take another's values, in words; empty when it can."""
        if source is None or source.registration.spec is None or model.registration.spec is None:
            return f"model {model.name!r} cannot take the values of a model that the job does not have"
        if source is model:
            return f"model {model.name!r} cannot take values of itself"
        shards = [seat.member for seat in self._roster.of_role(Role.SHARD)]
        for one in (model, source):
            if not one.state(shards).initialized:
                return f"the shard servers do not hold the parameters of model {one.name!r}"
            if one.attempts.alone:
                return f"replicas of model {one.name!r} step alone, so there is no version that all agree on"
        return model.registration.spec.cut_difference(source.registration.spec)

    def _count_staleness(self, decision: Decision, read: int) -> None:
        """How many steps were applied since the version that a gradient was computed from."""
        stale = max(0, decision.version - 1 - read)
        self.counters["staleness_sum"] += stale
        self.counters["staleness_max"] = max(self.counters["staleness_max"], stale)

    def _uncross(self) -> None:
        """See Note: [Crossed steps]."""
        if not self._disturbed or len(self._models) < 2:
            return
        workers = {m.rank for m in self.membership.workers}
        waiting = {m: m.attempts.blocked() for m in self._models if m.open}
        waiting = {model: ranks for model, ranks in waiting.items() if ranks}
        if len(waiting) < 2 or set().union(*waiting.values()) != workers:
            return
        kept = max(waiting, key=lambda m: (len(waiting[m]), -m.number))
        for model in waiting:
            if model is not kept:
                self.abort(model, _crossed(model, kept, waiting[model], waiting[kept]))
        self.counters["steps_crossed"] += 1

    def _decided(self, model: Model, decision: Decision) -> None:
        model.step = decision.step + 1
        if decision.turn is None:
            model.attempts.clear()
        model.decisions = records.kept(model.decisions, decision)
        self.counters[_COUNTER[decision.outcome]] += 1
        self._out.persist(
            [records.decision_record(decision), records.progress_record(model.number, model.step, model.version)]
        )
        self._out.push(self._roster.sessions(), decision)


def _crossed(model: Model, kept: Model, here: Iterable[int], there: Iterable[int]) -> str:
    return (
        f"worker {ranks_in_words(here)} waits in a step of model {model.name!r} and worker {ranks_in_words(there)} in "
        f"one of model {kept.name!r}: since the members changed they are at different places of the program"
    )

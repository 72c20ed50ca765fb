"""Generations and steps: who the members are, whether they are enough, which attempt is under way. Pure.

Note: [A generation is immutable]
    Whatever would change what a `Membership` says (a member came or went, the servers lost their parameters, replicas
    are numbered otherwise) makes a new generation. A new generation ends the step attempt of the old one, if that was
    complete: first the abort is announced to those who were in it, then who is there now. So nobody ever has to guess
    in which membership a step ran.

Invariants: the generation only grows; a step is decided at most once, in ascending order (where replicas step alone it
gets its number when it is decided); the version grows by one with
every commit and changes otherwise only when a checkpoint is restored.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Sequence

from axon_ps.coordinator import records
from axon_ps.coordinator.actions import Outbox
from axon_ps.coordinator.attempts import Attempts
from axon_ps.coordinator.config import CoordinatorConfig
from axon_ps.coordinator.events import JobState, Ready, Vote, Welcome
from axon_ps.coordinator.registration import Registration
from axon_ps.coordinator.roster import Roster, Seat
from axon_ps.coordinator.steps import ranks_in_words
from axon_ps.storage.state_store import Record
from axon_ps.types import Decision, Member, Membership, Outcome, Role

MAX_FINISHED = 1 << 10
"""How many of the workers that finished last a membership names."""

_COUNTER = {Outcome.COMMIT: "steps_committed", Outcome.SKIP: "steps_skipped", Outcome.ABORT: "steps_aborted"}


class Assembly:
    """The members and the attempt they are in.

    Args:
        config: how the job is run.
        durable: as it was before the coordinator's restart.
        registration: what the job is made of.
        out: gets what is to be written and said.
        now: the time; members from before the restart have one lease from now to come back.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        durable: records.Durable,
        registration: Registration,
        out: Outbox,
        now: float,
    ) -> None:
        self._config = config
        self._registration = registration
        self._out = out
        self._state_id = durable.state_id
        self.roster = Roster()
        self.attempts = Attempts()
        self.counters: Counter[str] = Counter()
        self.world_size = config.world_size or durable.world_size
        self.was_complete = durable.was_complete
        self.generation = durable.generation
        self.step = durable.step
        self.version = durable.version
        self._finished = list(durable.finished)
        self._vacant = durable.vacant  # places of finished workers, which nobody is awaited for
        self.last_norm = next((d.grad_norm for d in durable.decisions if d.outcome is Outcome.COMMIT), 0.0)
        self._decisions = list(durable.decisions)
        for member in durable.members:
            self.roster.add(member, None, now + config.lease_s)
        self.membership = self._describe(durable.first_step, durable.first_version)
        self._attempt_open = self.membership.complete
        self.begin_attempts()
        self.attempts.resume(self._decisions, self.generation)
        if durable.members and self.membership.complete != durable.complete:  # started with other options than before
            self.change("the coordinator was restarted with other options")

    @property
    def needed_workers(self) -> int:
        """How many workers it takes to make a step: never one in the place of one that has finished."""
        least = self._config.min_workers
        needed = min(least, self.world_size) if self.was_complete and least is not None else self.world_size
        return min(needed, self.world_size - self._vacant)

    def set_world_size(self, world_size: int) -> None:
        """Take what the first worker says."""
        self.world_size = world_size
        self._out.persist([self.job_record()])

    # ------------------------------------------------------------------ generations

    def change(
        self,
        reason: str,
        *,
        lost: Sequence[Seat] = (),
        finished: bool = False,
        joined: Member | None = None,
        session: int = -1,
        now: float = 0.0,
    ) -> None:
        """Make the next generation: `lost` are gone, as they wished if `finished`; `joined` speaks on `session`.

        See Note: [A generation is immutable].
        """
        initialized = self.job_state().initialized
        if joined is not None and joined.role is Role.WORKER and not self.membership.workers:
            self._finished, self._vacant = [], 0  # the job begins anew
        for seat in lost:
            self.roster.remove(seat)
        if finished:
            self._finished = [*self._finished, *(s.member for s in lost)][-MAX_FINISHED:]
            self._vacant += len(lost)
        self.abort(reason)
        if joined is not None:
            member = dataclasses.replace(joined, joined=self.generation + 1)
            seat = self.roster.add(member, session, now + self._config.lease_s)
            self.greet(seat)
        self._vacant = max(0, min(self._vacant, self.world_size - len(self.roster.of_role(Role.WORKER))))
        self.generation += 1
        self.membership = self._describe(self.step, self.version)
        self.was_complete = self.was_complete or self.membership.complete
        self._attempt_open = self.membership.complete
        self.begin_attempts()
        self._out.persist(self.records())
        if self.job_state().initialized != initialized:
            self.announce_job()
        self._out.push(self.roster.sessions(), self.membership)

    def greet(self, seat: Seat) -> None:
        """Tell a member that has just got a stream everything but who is there, which comes last.

        The decisions it may have missed come before the job's state and the membership, which are of after them; who
        is new ignores them (see `client`).
        """
        to = [seat.session]
        self._out.push(to, self.welcome(seat))
        for decision in self._decisions:
            self._out.push(to, decision)
        is_shard = seat.member.role is Role.SHARD
        self._out.push(to, self.job_state(full=is_shard))
        order = self._registration.parameters.restore
        if is_shard and order is not None and not self._registration.holds(seat.member):
            self._out.push(to, order)

    def welcome(self, seat: Seat) -> Welcome:
        """The first word to a member."""
        return Welcome(
            rank=seat.member.rank,
            lease_s=self._config.lease_s,
            world_size=self.world_size,
            num_shards=self._config.num_shards,
            state_id=self._state_id,
        )

    def announce_job(self) -> None:
        """Tell everybody what the job is made of now."""
        for role, full in ((Role.SHARD, True), (Role.WORKER, False)):
            self._out.push([s.session for s in self.roster.of_role(role)], self.job_state(full=full))

    def job_state(self, *, full: bool = False) -> JobState:
        """What the job is made of; the layout only when `full`."""
        return self._registration.state(self.shards(), self.version, full=full)

    def shards(self) -> list[Member]:
        """The live shard servers by rank."""
        return [s.member for s in self.roster.of_role(Role.SHARD)]

    def records(self) -> list[Record]:
        """Who is there and where the job is, for the store."""
        members = records.members_record(
            self.membership, self.roster.records(), was_complete=self.was_complete, vacant=self._vacant
        )
        return [members, records.progress_record(self.step, self.version)]

    def job_record(self) -> Record:
        """What the job is called and how many members it starts with, for the store."""
        return records.job_record(self._state_id, self._config.job, self.world_size, self._config.num_shards)

    # ------------------------------------------------------------------ steps

    def abort(self, reason: str) -> None:
        """End the attempt under way, if there is one, and start no other before the next generation."""
        if self._attempt_open:
            self._attempt_open = False
            self._decided(
                Decision(
                    step=self.step,
                    generation=self.generation,
                    outcome=Outcome.ABORT,
                    version=self.version,
                    reason=reason,
                    next_generation=self.generation + 1,
                )
            )

    def begin_attempts(self) -> None:
        """The attempts of this generation begin; also when the policy has just become known."""
        spec = self._registration.spec
        self.attempts.begin(None if spec is None else spec.policy, self.membership)

    def arrived(self, rank: int, generation: int, step: int) -> None:
        """A worker has computed everything of an attempt and waits; of another attempt it means nothing."""
        if self._attempt_open and generation == self.generation:
            self.attempts.arrived(rank, step, self.step)

    def vote(self, rank: int, vote: Vote) -> None:
        """A worker has pushed everything of an attempt; one of another attempt, or a second, is ignored."""
        if self._attempt_open and vote.generation == self.generation and self.attempts.vote(rank, vote, self.step):
            self._decide_what_is_full()

    def voted(self) -> Collection[int]:
        """The workers that wait for the others' votes in the step under way."""
        return self.attempts.voted() if self._attempt_open else ()

    def ready(self, rank: int, ready: Ready) -> None:
        """A shard server has every gradient of an attempt; one of another attempt, or a second, is ignored."""
        if self._attempt_open and ready.generation == self.generation and self.attempts.ready(rank, ready, self.step):
            self._decide_what_is_full()

    def _decide_what_is_full(self) -> None:
        """Decide the attempts in which everybody has spoken, one after the other."""
        while (lane := self.attempts.next_full(self._registration.owners)) is not None:
            tally = self.attempts.tally(lane)
            decision = tally.decide(
                step=self.step,
                generation=self.generation,
                version=self.version,
                optimizer=self._registration.optimizer,
            )
            if self.attempts.alone and decision.outcome is Outcome.COMMIT:
                self._count_staleness(min(vote.version for vote in tally.votes.values()))
            self.version = decision.version
            if decision.outcome is Outcome.COMMIT:
                self.last_norm = decision.grad_norm
            self._decided(dataclasses.replace(decision, turn=self.attempts.end(lane)))
            if not self.attempts.alone:
                return

    def _count_staleness(self, read: int) -> None:
        """How many steps were applied since the version that a gradient was computed from."""
        stale = max(0, self.version - read)
        self.counters["staleness_sum"] += stale
        self.counters["staleness_max"] = max(self.counters["staleness_max"], stale)

    def pending(self) -> list[str]:
        """What is waited for, in words."""
        if not self.membership.complete:
            return [self.membership.waiting_for]
        return self.attempts.pending(self._registration.owners)

    def _decided(self, decision: Decision) -> None:
        self.step = decision.step + 1
        if decision.turn is None:
            self.attempts.clear()
        self._decisions = records.kept(self._decisions, decision)
        self.counters[_COUNTER[decision.outcome]] += 1
        self._out.persist([records.decision_record(decision), records.progress_record(self.step, self.version)])
        self._out.push(self.roster.sessions(), decision)

    # ------------------------------------------------------------------ what a membership says

    def _describe(self, step: int, version: int) -> Membership:
        spec = self._registration.spec
        workers, shards, replicas = self.roster.members(replica_is_node=spec is not None and spec.replica_is_node)
        waiting_for = self._waiting_for(len(workers), shards)
        return Membership(
            generation=self.generation,
            step=step,
            version=version,
            workers=workers,
            shards=shards,
            num_replicas=replicas,
            complete=not waiting_for,
            waiting_for=waiting_for,
            finished=tuple(self._finished),
        )

    def _waiting_for(self, workers: int, shards: Sequence[Member]) -> str:
        words = []
        if not self.world_size:
            words.append("a first worker, which says how many there will be")
        elif workers < self.needed_workers:
            words.append(f"{self.needed_workers - workers} of {self.needed_workers} workers")
        elif not workers and self._finished:
            words.append("new workers, since all have finished")
        here = {s.rank for s in shards}
        if missing := [r for r in range(self._config.num_shards) if r not in here]:
            words.append(f"shard server {ranks_in_words(missing)} of {self._config.num_shards}")
        if trouble := self._registration.trouble(shards):
            words.append(trouble)
        return " and ".join(words)

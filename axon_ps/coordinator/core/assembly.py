"""Generations: who the members are, and whether they are enough to make steps. Pure.

Note: [A generation is immutable]
    Whatever would change what a `Membership` says (a member came or went, the servers lost their parameters, replicas
    are numbered otherwise) makes a new generation. A new generation ends the step attempts of the old one, if that was
    complete: first the aborts are announced to those who were in it, then who is there now. So nobody ever has to guess
    in which membership a step ran.

Invariants: the generation only grows; a step of a model is decided at most once, in ascending order (where replicas
step alone it gets its number when it is decided); its version grows by one with every commit and changes otherwise only
when a checkpoint is restored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from axon_ps.coordinator.core import records
from axon_ps.coordinator.core.actions import Outbox
from axon_ps.coordinator.core.config import CoordinatorConfig
from axon_ps.coordinator.core.events import Welcome
from axon_ps.coordinator.core.models import Model, Models
from axon_ps.coordinator.core.roster import Roster, Seat
from axon_ps.coordinator.core.steps.decision import ranks_in_words
from axon_ps.coordinator.core.steps.stepping import Stepping
from axon_ps.storage.state_store import Record
from axon_ps.types import Member, Membership, ModelProgress, Role

MAX_FINISHED = 1 << 10
"""How many of the workers that finished last a membership names."""


class Assembly:
    """The members of each generation.

    Args:
        config: how the job is run.
        durable: as it was before the coordinator's restart.
        models: the models of the job.
        out: gets what is to be written and said.
        now: the time; members from before the restart have one lease from now to come back.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        durable: records.Durable,
        models: Models,
        out: Outbox,
        now: float,
    ) -> None:
        self._config = config
        self._models = models
        self._out = out
        self._state_id = durable.state_id
        self.roster = Roster()
        self.world_size = config.world_size or durable.world_size
        self.was_complete = durable.was_complete
        self.generation = durable.generation
        self._finished = list(durable.finished)
        self._vacant = durable.vacant  # places of finished workers, which nobody is awaited for
        for member in durable.members:
            self.roster.add(member, None, now + config.lease_s)
        began = {
            n: ModelProgress(model=n, step=d.first_step, version=d.first_version) for n, d in durable.models.items()
        }
        self.membership = self._describe(began)
        self.stepping = Stepping(models, self.roster, out, self.membership, disturbed=self.was_complete)
        self.counters = self.stepping.counters
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
        initialized = self._initialized()
        if joined is not None and joined.role is Role.WORKER and not self.membership.workers:
            self._finished, self._vacant = [], 0  # the job begins anew
        for seat in lost:
            self.roster.remove(seat)
        if finished:
            self._finished = [*self._finished, *(s.member for s in lost)][-MAX_FINISHED:]
            self._vacant += len(lost)
        self.stepping.abort_all(reason)
        if joined is not None:
            member = dataclasses.replace(joined, joined=self.generation + 1)
            seat = self.roster.add(member, session, now + self._config.lease_s)
            self.greet(seat)
        self._vacant = max(0, min(self._vacant, self.world_size - len(self.roster.of_role(Role.WORKER))))
        self.generation += 1
        self.membership = self._describe({model.number: model.progress for model in self._models})
        self.was_complete = self.was_complete or self.membership.complete
        self.stepping.begin(self.membership)
        self._out.persist(self.records())
        now_initialized = self._initialized()
        for model in self._models:
            if now_initialized[model.number] != initialized[model.number]:
                self.announce(model)
        self._out.push(self.roster.sessions(), self.membership)

    def greet(self, seat: Seat) -> None:
        """Tell a member that has just got a stream everything but who is there, which comes last.

        The decisions it may have missed come before the models' states and the membership, which are of after them; who
        is new ignores them (see `client`).
        """
        to = [seat.session]
        is_shard = seat.member.role is Role.SHARD
        self._out.push(to, self.welcome(seat))
        for model in self._models:
            for decision in model.decisions:
                self._out.push(to, decision)
        for model in self._models:
            self._out.push(to, model.state(self.shards(), full=is_shard))
            order = model.registration.parameters.restore
            if is_shard and order is not None and not model.registration.holds(seat.member):
                self._out.push(to, order)

    def welcome(self, seat: Seat) -> Welcome:
        """The first word to a member."""
        return Welcome(
            rank=seat.member.rank,
            lease_s=self._config.lease_s,
            world_size=self.world_size,
            num_shards=self._config.num_shards,
            state_id=self._state_id,
            released=self._models.released,
        )

    def announce(self, model: Model) -> None:
        """Tell everybody what a model is made of now."""
        for role, full in ((Role.SHARD, True), (Role.WORKER, False)):
            sessions = [s.session for s in self.roster.of_role(role)]
            self._out.push(sessions, model.state(self.shards(), full=full))

    def _initialized(self) -> dict[int, bool]:
        """Of which models the servers hold the parameters."""
        shards = self.shards()
        return {model.number: model.state(shards).initialized for model in self._models}

    def shards(self) -> list[Member]:
        """The live shard servers by rank."""
        return [s.member for s in self.roster.of_role(Role.SHARD)]

    def records(self) -> list[Record]:
        """Who is there and where the models are, for the store."""
        members = records.members_record(
            self.membership, self.roster.records(), was_complete=self.was_complete, vacant=self._vacant
        )
        return [members, *(records.progress_record(m.number, m.step, m.version) for m in self._models)]

    def job_record(self) -> Record:
        """What the job is called and how many members it starts with, for the store."""
        return records.job_record(self._state_id, self._config.job, self.world_size, self._config.num_shards)

    def pending(self) -> list[str]:
        """What is waited for, in words."""
        return self.stepping.pending() if self.membership.complete else [self.membership.waiting_for]

    # ------------------------------------------------------------------ what a membership says

    def _describe(self, began: dict[int, ModelProgress]) -> Membership:
        by_node = self._models.by_node
        workers, shards, replicas = self.roster.members(replica_is_node=by_node)
        first = began.get(0, ModelProgress(model=0, step=1, version=0))
        waiting_for = self._waiting_for(len(workers), shards)
        return Membership(
            generation=self.generation,
            step=first.step,
            version=first.version,
            workers=workers,
            shards=shards,
            num_replicas=replicas,
            complete=not waiting_for,
            waiting_for=waiting_for,
            finished=tuple(self._finished),
            models=tuple(progress for number, progress in sorted(began.items()) if number),
            by_node=by_node,
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
        for model in self._models:
            if trouble := model.registration.trouble(shards):
                words.append(self._models.words(model) + trouble)
        return " and ".join(words)

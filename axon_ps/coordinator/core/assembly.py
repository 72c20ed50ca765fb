"""Generations: the members of each, and whether they are enough to make steps. Pure.

Note: [A generation is immutable]
    Every change of a `Membership` (a member joined or left, the servers lost their parameters, replicas are numbered
    differently) makes a new generation. A new generation ends the step attempts of the old one, if that was complete.
    Members first receive the aborts, then the new membership. So the membership that a step ran in is always known.

Note: [Joining together]
    If every join made a generation that is announced to all, a job of n members would have n² announcements. While
    workers are missing, no member needs to know the others. So the members that join within `TOGETHER_S` make one
    generation, which is announced to them alone. All members get a generation when the job is complete, when a member
    is lost, and now and then, so that users can follow its status. In a job of fewer than `FEW` members every join is
    announced by itself.

Invariants:
- The generation only grows.
- A step of a model is decided at most once, in ascending order. An asynchronous step gets its number with its decision.
- The version of a model grows by one with every commit, and changes otherwise only when its values are replaced.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from axon_ps.coordinator.config import CoordinatorConfig
from axon_ps.coordinator.core import records
from axon_ps.coordinator.core.actions import Outbox
from axon_ps.coordinator.core.models import Model, Models
from axon_ps.coordinator.core.placement.capacity import ServerCapacity
from axon_ps.coordinator.core.roster import Roster, RosterEntry
from axon_ps.coordinator.core.steps.decision import format_ranks
from axon_ps.coordinator.core.steps.stepping import Stepping
from axon_ps.sharding.placement import Server
from axon_ps.storage.state_store.base import Record
from axon_ps.types import Member, Membership, ModelProgress, Role
from axon_ps.wire.events import RevokedNames, Welcome

MAX_FINISHED: Final = 1 << 10
"""Most workers that a membership names as finished: the last ones."""

FEW: Final = 32
"""In a job of this many members, joins are announced together."""

TOGETHER_S: Final = 0.05
"""Least seconds for which joins are collected into one generation."""

TOGETHER_A_MEMBER_S: Final = 5e-5
"""Seconds per member for which they are collected in a large job: a generation costs time for each of them."""

ANNOUNCE_S: Final = 1e-3
"""Least seconds per member between two generations for all: several times the cost of announcing one to a member."""


class Forming:
    """The members that have joined since the last generation; see Note: [Joining together].

    Attributes:
        joined: their sessions.
        deadline: the time at which the next generation begins; inf while no member waits.
    """

    def __init__(self) -> None:
        self.joined: list[int] = []
        self.deadline = math.inf
        self._members = 0
        self._all_deadline = -math.inf

    def join(self, session: int, now: float) -> None:
        """Have a member wait for others that join."""
        if not self.joined:
            self.deadline = now + max(TOGETHER_S, TOGETHER_A_MEMBER_S * self._members)
        self.joined.append(session)

    def take(self, members: int, now: float) -> list[int] | None:
        """Return the sessions that get the new generation of `members` members; None = all. Clears `joined`."""
        joined, self.joined, self.deadline, self._members = self.joined, [], math.inf, members
        if now < self._all_deadline:
            return joined
        self.announced(members, now)
        return None

    def announced(self, members: int, now: float) -> None:
        """Note that all members get a generation of `members` members."""
        self.joined, self.deadline = [], math.inf
        self._all_deadline = now + ANNOUNCE_S * members


class Assembly:
    """The members of each generation.

    Args:
        config: of the job.
        durable: the state before the coordinator's restart.
        models: the models of the job.
        out: gets the records to write and the events to send.
        now: the time. Members from before the restart have one lease from now to come back.
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
        self.state_id = durable.state_id
        self.roster = Roster()
        self.world_size = config.world_size or durable.world_size
        self.was_complete = durable.was_complete
        known = durable.membership
        self.generation = known.generation
        self._finished = list(known.finished)
        self.revoked = dict(durable.revoked)  # reasons by name; see `access.revocations`
        self._vacant = durable.vacant  # ranks of finished workers, which need no replacement
        self.draining = durable.draining
        self.needed_shards = durable.needed_shards or config.num_shards
        for member in (*known.workers, *known.shards):
            self.roster.add(member, None, now + config.lease_s)
        present = self._describe({})
        self.membership = known if known.generation else present
        self.stepping = Stepping(models, self.roster, out, self.membership, disturbed=self.was_complete)
        self.counters = self.stepping.counters
        if (known.workers or known.shards) and present.complete != known.complete:  # other options than before
            self.change("the coordinator was restarted with other options")

    @property
    def needed_workers(self) -> int:
        """The number of workers that a step needs. Finished workers are not replaced."""
        least = self._config.min_workers
        needed = min(least, self.world_size) if self.was_complete and least is not None else self.world_size
        return min(needed, self.world_size - self._vacant)

    def set_world_size(self, world_size: int) -> None:
        """Set the world size, as the first worker requests it."""
        self.world_size = world_size
        self._out.persist([self.job_record()])

    # ------------------------------------------------------------------ generations

    def change(
        self,
        reason: str,
        *,
        lost: Sequence[RosterEntry] = (),
        finished: bool = False,
        joined: Member | None = None,
        session: int = -1,
        now: float = 0.0,
        sessions: Sequence[int] | None = None,
    ) -> None:
        """Make the next generation: without `lost` members, which may have `finished`, and with `joined` on `session`.

        The generation is sent to `sessions` (None = all). The others get a later one.
        See Note: [A generation is immutable].
        """
        initialized = self.initialized()
        if joined is not None and joined.role is Role.WORKER and self.membership.is_over:
            self._finished, self._vacant = [], 0  # the job starts over
            for model in self._models:
                model.holders.parameters.run_began = model.version
                self._out.persist([records.parameters_record(model.number, model.holders.parameters)])
        numbers = {model.number: model.holders.placement_number for model in self._models}
        for entry in lost:
            self.roster.remove(entry)
            if entry.member.role is Role.SHARD:
                self.draining -= {entry.member.rank}
                for model in self._models:
                    model.holders.lose(entry.member.rank, model.version)
        if finished:
            self._finished = [*self._finished, *(s.member for s in lost)][-MAX_FINISHED:]
            self._vacant += len(lost) if self.roster.count(Role.WORKER) else self.world_size  # the job is over
        self.stepping.abort_all(reason)
        if joined is not None:
            self.add(joined, session, now)
        self._vacant = max(0, min(self._vacant, self.world_size - self.roster.count(Role.WORKER)))
        self.generation += 1
        self.membership = self._describe({model.number: (model.step, model.version) for model in self._models})
        self.was_complete = self.was_complete or self.membership.complete
        self.stepping.begin(self.membership)
        self._out.persist(self.records())
        now_initialized = self.initialized()
        for model in self._models:
            moved = model.holders.placement_number != numbers[model.number]
            if moved:
                self._out.persist([records.parameters_record(model.number, model.holders.parameters)])
            if moved or now_initialized[model.number] != initialized[model.number]:
                self.announce(model, full=not moved)
        self._out.push(self.roster.sessions() if sessions is None else sessions, self.membership)

    def add(self, joined: Member, session: int, now: float) -> RosterEntry:
        """Add a member of the next generation, and greet it."""
        member = dataclasses.replace(joined, joined=self.generation + 1)
        entry = self.roster.add(member, session, now + self._config.lease_s)
        for model in self._models if member.role is Role.SHARD else ():
            model.holders.take_back(member, self.shards(), model.version)
        self.greet(entry, joined=True)
        return entry

    def greet(self, entry: RosterEntry, *, joined: bool) -> None:
        """Send everything but the membership to a member that has just opened a stream. The caller sends that last.

        The decisions that it may have missed come first, then the models' states, which are newer. Before the
        decisions of a model a shard server gets the optimizer, whose registration it may have missed, too. A new
        process ignores the decisions (see `client.delivery`). If a lost shard server has `joined` again without slices
        of a model, it gets no decisions on it, since others have gone on.
        """
        to = [entry.session]
        is_shard = entry.member.role is Role.SHARD
        self._out.push(to, self.welcome(entry))
        if self.revoked:
            self._out.push(to, RevokedNames(reasons=dict(self.revoked)))
        for model in self._models:
            if not (joined and is_shard) or model.holders.is_holder(entry.member):
                if is_shard and model.decisions and model.holders.is_loaded(entry.member):
                    optimizer = model.state(self.shards(), full=True)
                    self._out.push(to, dataclasses.replace(optimizer, spec=None, placement=None))
                for decision in model.decisions:
                    self._out.push(to, decision)
        for model in self._models:
            self._out.push(to, model.state(self.shards(), full=is_shard))
            order = model.holders.parameters.restore
            if is_shard and order is not None and not model.holders.is_loaded(entry.member):
                self._out.push(to, order)

    def welcome(self, entry: RosterEntry) -> Welcome:
        """Return the first event that a member gets."""
        return Welcome(
            rank=entry.member.rank,
            lease_s=self._config.lease_s,
            world_size=self.world_size,
            num_shards=self._config.num_shards,
            state_id=self.state_id,
            released=self._models.released,
        )

    def announce(self, model: Model, *, full: bool = True) -> None:
        """Send all members the state of a model. Shard servers also get its layout if `full`."""
        state = model.state(self.shards())
        if not full:
            self._out.push(self.roster.sessions(), state)
            return
        for role, event in ((Role.SHARD, model.state(self.shards(), full=True)), (Role.WORKER, state)):
            self._out.push([s.session for s in self.roster.of_role(role)], event)

    def initialized(self) -> dict[int, bool]:
        """Return for each model, by number, whether the servers hold its parameters."""
        shards = self.shards()
        return {model.number: model.state(shards).initialized for model in self._models}

    @property
    def has_values(self) -> bool:
        """True if the live shard servers hold all parameters of some model."""
        return any(self.initialized().values())

    def shards(self) -> list[Member]:
        """Return the live shard servers by rank."""
        return [s.member for s in self.roster.of_role(Role.SHARD)]

    def shard(self, rank: int) -> RosterEntry | None:
        """Return the live shard server of a rank, if any."""
        return self.roster.at(Role.SHARD, rank)

    def servers(self) -> list[Server]:
        """Return the live shard servers as holders of slices; if these are too few, those that the job waits for."""
        live = [Server(s.rank, s.node) for s in self.shards()]
        return live if self.membership.complete or len(live) >= self.needed_shards else self._nominal(live)

    def capacity(self) -> ServerCapacity:
        """Return the memory of the live shard servers."""
        return ServerCapacity(self._models, self.roster.of_role(Role.SHARD), self.membership.num_replicas)

    def _nominal(self, live: Sequence[Server]) -> list[Server]:
        """Return the shard servers that the job began with, present or absent."""
        nodes = {s.rank: s.node for s in live}
        return [Server(rank, nodes.get(rank, "")) for rank in range(self._config.num_shards)]

    def records(self) -> list[Record]:
        """Return the records of the members and of the models' progress."""
        members = records.members_record(
            self.membership,
            was_complete=self.was_complete,
            vacant=self._vacant,
            draining=self.draining,
            needed_shards=self.needed_shards,
        )
        return [members, *(records.progress_record(model.progress) for model in self._models)]

    @property
    def pending_shards(self) -> bool:
        """True if the job waits for shard servers."""
        return bool(self._missing(self.shards()))

    @property
    def may_go_on(self) -> bool:
        """True if the membership is not complete, but a new one with the same members would be."""
        ranks = {s.member.rank for s in self.roster.of_role(Role.WORKER)}
        return not self.membership.complete and not self._waiting_for(ranks, self.shards())

    @property
    def forms(self) -> bool:
        """True if the job has not begun, and would lack workers even after another join."""
        return not self.was_complete and self.roster.count(Role.WORKER) + 1 < self.needed_workers

    @property
    def lost_parameters(self) -> str:
        """The reason for a restore although every shard server is a member, as text; empty when none is needed."""
        shards = self.shards()
        if len(shards) < self.needed_shards:
            return ""
        losses = ((self._models.message_prefix(model), model.holders.loss(shards)) for model in self._models)
        return " and ".join(prefix + loss for prefix, loss in losses if loss)

    @property
    def lost_everything(self) -> bool:
        """True when no shard server has parameters of any model any more."""
        shards, models = self.shards(), self._models.registered
        there = any(model.holders.is_loaded(shard) for model in models for shard in shards)
        return bool(self.lost_parameters) and not there

    def job_record(self) -> Record:
        """Return the record of the job's name and of the number of members it starts with."""
        return records.job_record(self.state_id, self._config.job, self.world_size, self._config.num_shards)

    def pending(self) -> list[str]:
        """Return the reasons why the job waits, as text."""
        return self.stepping.pending() if self.membership.complete else [self.membership.waiting_for]

    # ------------------------------------------------------------------ the membership

    def _describe(self, began: Mapping[int, tuple[int, int]]) -> Membership:
        grouping = self._models.grouping
        workers, shards, replicas = self.roster.members(grouping)
        step, version = began.get(0, (1, 0))
        waiting_for = self._waiting_for({m.rank for m in workers}, shards)
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
            models=tuple(ModelProgress(model=n, step=s, version=v) for n, (s, v) in sorted(began.items()) if n),
            grouping=grouping,
            is_over=bool(self._finished) and not workers and not self.needed_workers,
            state_id=self.state_id,
        )

    def _waiting_for(self, ranks: Collection[int], shards: Sequence[Member]) -> str:
        reasons, workers = [], len(ranks)
        if not self.world_size:
            reasons.append("a first worker, which says how many there will be")
        elif workers < self.needed_workers:
            reasons.append(f"{self.needed_workers - workers} of {self.needed_workers} workers")
        elif not workers and self._finished:
            reasons.append("new workers, since all have finished")
        elif incomplete := self._incomplete_rows(ranks):
            reasons.append(f"a worker, since no replica is complete: {self._models.grouping.gap(incomplete[0], ranks)}")
        if missing := self._missing(shards):
            reasons.append(f"shard server {format_ranks(missing)} of {self.needed_shards}")
        troubles = [
            self._models.message_prefix(model) + trouble
            for model in self._models
            if (trouble := model.holders.trouble(shards))
        ]
        anew = f"; or begin anew: {self._config.begin_anew}" if troubles and self._config.begin_anew else ""
        return " and ".join((*reasons, *troubles)) + anew

    def _incomplete_rows(self, ranks: Collection[int]) -> list[tuple[int, ...]]:
        """Return the replicas by rows if each lacks a worker; first those that lack the fewest.

        There are none while another worker need not be waited for: those that are missing have finished.
        """
        grouping = self._models.grouping
        incomplete = grouping.incomplete(ranks)
        missing = sum(rank not in ranks for row in incomplete for rank in row)
        if len(incomplete) < len(grouping.rows) or missing <= self._vacant:
            return []
        done = {m.rank for m in self._finished} - set(ranks)
        return sorted(incomplete, key=lambda row: (any(r in done for r in row), sum(r not in ranks for r in row)))

    def _missing(self, shards: Sequence[Member]) -> list[int]:
        """Return the ranks of the shard servers that the job waits for."""
        here = {s.rank for s in shards}
        registered = self._models.registered
        missing = {rank for model in registered for rank in model.holders.missing(shards)}
        if not registered and len(shards) < self.needed_shards:
            missing |= {rank for rank in range(self.needed_shards) if rank not in here}
        return sorted(missing)

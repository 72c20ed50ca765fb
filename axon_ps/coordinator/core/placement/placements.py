"""The holders of every model's slices: copies are made, primaries swapped, servers emptied during training. Pure.

`rebalance.plan_moves` plans the moves. This module times and performs them: the placement changes, members are told,
and reports that shard servers made under the previous placement count no more.

Note: [When a placement may change]
    All members see a placement at the same position among the decisions. A copy may begin at any time, since the step
    under way is then not decided before the copy is complete (`shard.server.copying`). A backup may be dropped at any
    time. Workers push to primaries, so these are swapped only between two steps: the placement is sent just before the
    decision that ends a step, when every worker has voted. With asynchronous replicas there is no such moment, and
    primaries are only swapped when a server dies.

Note: [Copies and steps]
    A step that is ready before a copy is complete is decided after it. To keep the time lost in this way small, no
    copies are begun for `REST` times as long as the last ones took.

Note: [Models that are cut alike]
    A model may take the values of another model with the same cut, on each server (`CopyFrom`). So a server that holds
    slices of the first of such models also holds those of the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from axon_ps.coordinator.core import records
from axon_ps.coordinator.core.actions import Outbox
from axon_ps.coordinator.core.assembly import Assembly
from axon_ps.coordinator.core.checkpoints.snapshots import Snapshots
from axon_ps.coordinator.core.models import Model, Models
from axon_ps.coordinator.core.placement.rebalance import Copy, Drop, Move, Promote, plan_moves
from axon_ps.coordinator.core.roster import RosterEntry
from axon_ps.coordinator.core.steps.decision import format_ranks
from axon_ps.types import Member, Role
from axon_ps.wire.events import Copied

REST = 4.0
"""Length of the pause after copies, as a multiple of their duration."""

LOOK_AGAIN_S = 10.0
"""Seconds between two checks of servers that had no memory for more slices."""

BUDGET_NUMEL = 1 << 21
"""Elements of the slices of a model that may be copied at a time. One slice may always be copied."""


class Placements:
    """The placements of all models.

    Args:
        replication: the number of shard servers that shall hold each slice.
        assembly: the members.
        models: the models of the job.
        snapshots: the checkpoint being written.
        out: gets the records to write and the events to send.

    Attributes:
        unshown: returns the ranks of the servers that have not been shown to work yet: they get no slices.
    """

    def __init__(self, replication: int, assembly: Assembly, models: Models, snapshots: Snapshots, out: Outbox) -> None:
        self._replication = replication
        self._assembly = assembly
        self._models = models
        self._snapshots = snapshots
        self._out = out
        self.unshown: Callable[[], frozenset[int]] = frozenset
        self._settled: dict[int, object] = {}  # by model, the inputs under which no move was left
        self._short: set[int] = set()  # the models for which some servers have no memory for more slices
        self._began = math.inf  # the start of the copies under way
        self._rest_until = -math.inf

    # ------------------------------------------------------------------ events

    def copied(self, entry: RosterEntry, report: Copied, now: float) -> None:
        """Take a shard server's report that it has copied slices."""
        model = self._models.get(report.model)
        if model is not None and model.holders.copied(entry.member, report, self._assembly.shards()):
            self._assembly.counters["slices_copied"] += len(report.slices)
            self.changed(model)
            if not self._under_way() and now > self._began:
                self._rest_until, self._began = now + REST * (now - self._began), math.inf
            self.plan(now)

    def cancel_copies(self, member: Member) -> None:
        """Cancel the copies to a shard server with a broken session."""
        for model in self._models:
            if model.holders.cancel_copies(member.rank):
                self.changed(model)

    def plan(self, now: float, *, ending: Model | None = None) -> None:
        """Perform the moves that are possible now.

        Args:
            now: the time.
            ending: the model whose step has been decided, before the decision is sent: primaries are swapped in its
                placement alone. No copy is begun then, since it would delay the decided step.
        """
        if not self._assembly.membership.complete:
            return
        numbers = tuple(m.holders.placement_number for m in self._models.registered)
        given = numbers, self._assembly.generation, self._assembly.draining, self.unshown()
        for model in self._models:
            p = model.holders.parameters
            if not model.registered or not p.initialized or p.restore is not None:
                continue
            current = (*given, now // LOOK_AGAIN_S) if model.number in self._short else given
            if self._settled.get(model.number) == current:
                continue
            moves = self._moves(model)
            if not moves:
                self._settled[model.number] = current
            before, after = model.holders.placement.holders, {}
            if not self._under_way():  # earlier ones may have been given up
                self._began = math.inf
            for move in moves:
                h = before[move.index]
                if isinstance(move, Promote):
                    if model is ending and not self._snapshots.under_way:
                        after[move.index] = h.with_primary(move.rank)
                elif isinstance(move, Drop):
                    after[move.index] = h.without(move.rank)
                elif ending is None and now >= self._rest_until:
                    after[move.index] = h.with_copying(move.rank)
                    self._began = min(self._began, now)
            if after:
                model.holders.change_placement(model.holders.placement.changed(after))
                self.changed(model)

    def next_deadline(self) -> float:
        """Return the next time at which `plan` may perform a move; inf when there is none."""
        waits = self._rest_until > -math.inf and not self._under_way()
        return self._rest_until if waits else math.inf

    def tick(self, now: float) -> None:
        """Plan again when the pause after copies is over."""
        if now >= self._rest_until and self._rest_until > -math.inf and not self._under_way():
            self._rest_until = -math.inf
            self.plan(now)

    def emptied(self) -> list[RosterEntry]:
        """Return the draining shard servers that hold nothing any more."""
        if not self._assembly.draining:
            return []
        held = {rank for model in self._models.registered for rank in model.holders.placement.servers}
        a = self._assembly
        return [e for e in (a.shard(rank) for rank in sorted(a.draining - held)) if e is not None]

    def pending(self) -> list[str]:
        """Return the work under way, as text."""
        found = []
        for model in self._models.registered:
            lacking = model.holders.placement.lacking(self._wanted)
            if lacking and model.holders.parameters.initialized:
                of = len(model.holders.placement.holders)
                full = self._full(model)
                why = f", and shard server {format_ranks(full)} has no memory for more" if full else ""
                found.append(f"{self._models.message_prefix(model)}{lacking} of {of} slices have too few copies{why}")
        return found

    # ------------------------------------------------------------------ inside

    @property
    def _wanted(self) -> int:
        a = self._assembly
        return min(self._replication, sum(s.rank not in a.draining for s in a.shards()))

    def _under_way(self) -> bool:
        return any(m.holders.placement.is_copied for m in self._models.registered)

    def changed(self, model: Model) -> None:
        """Publish a model's new placement: earlier reports count no more, and all members get it."""
        model.attempts.forget_reports()
        self._out.persist([records.parameters_record(model.number, model.holders.parameters)])
        self._assembly.announce(model, full=False)
        self._assembly.stepping.recheck_copies()

    def _moves(self, model: Model) -> list[Move]:
        a, holders = self._assembly, model.holders
        lead = self._follows(model)
        if lead is not model:
            return list(self._follow(model, lead))
        full = self._full(model)
        (self._short.add if full else self._short.discard)(model.number)
        none = full | self.unshown()
        placement, numels = holders.placement, holders.slice_numels
        return plan_moves(placement, numels, a.servers(), a.draining, self._replication, BUDGET_NUMEL, none)

    def _full(self, model: Model) -> frozenset[int]:
        """Return the ranks of the servers that have no memory for more slices of a model."""
        a = self._assembly
        return a.capacity().full(model) | {e.member.rank for e in a.roster.of_role(Role.SHARD) if e.full}

    def _follows(self, model: Model) -> Model:
        """Return the first model that is cut alike."""
        spec = model.registration.spec
        assert spec is not None
        for other in self._models.registered:
            theirs = other.registration.spec
            if other is model or (theirs is not None and spec.is_cut_like(theirs)):
                return other
        return model

    def _follow(self, model: Model, lead: Model) -> Iterator[Move]:
        """Yield the moves that give a model's slices the holders of another's."""
        for index, (h, theirs) in enumerate(
            zip(model.holders.placement.holders, lead.holders.placement.holders, strict=True)
        ):
            missing = [rank for rank in theirs.servers if rank not in h.servers]
            stay = [rank for rank in h.complete if rank in theirs.servers]
            if missing:
                yield Copy(index, missing[0])
            elif h.primary not in theirs.servers:
                if stay:
                    yield Promote(index, stay[0])
            elif surplus := [rank for rank in h.servers if rank not in theirs.servers]:
                yield Drop(index, surplus[0])
            elif h.primary != theirs.primary and theirs.primary in h.complete:
                yield Promote(index, theirs.primary)

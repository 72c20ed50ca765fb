"""Joins, leaves and losses, and their effect on barriers, checkpoints and the current step. Pure.

Note: [Finished]
    A worker that leaves as *finished* needs no replacement, unlike a dead one: the job needs one worker less (see
    `Assembly.needed_workers`). Barriers of all workers go on without it. Later memberships name it, so that the
    messages it sent before are still delivered. A synchronous step of the others does abort, since its average would be
    of other replicas than those that pushed. When the last worker has finished, the job is over. Workers that join
    after that begin it anew. When the last worker has died, its replacement goes on.

Note: [Between two steps]
    Shard servers that join or have been drained wait for the end of a step (`handover`). A server whose connection has
    just broken does not wait if it is back with its slices. At the end of the step primaries are swapped (`placements`)
    before the decision is sent, and the members change after it. All workers have voted by then and make
    their next step in the new generation. So no step is aborted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from axon_ps.coordinator.config import CoordinatorConfig
from axon_ps.coordinator.core.actions import Outbox
from axon_ps.coordinator.core.admission import FailedJoins, admit
from axon_ps.coordinator.core.assembly import FEW, Assembly, Forming
from axon_ps.coordinator.core.barriers import Barriers
from axon_ps.coordinator.core.checkpoints.snapshots import Snapshots
from axon_ps.coordinator.core.handover import Handover, Joining
from axon_ps.coordinator.core.models import Model, Models
from axon_ps.coordinator.core.placement.placements import Placements
from axon_ps.coordinator.core.reachability import Reachability
from axon_ps.coordinator.core.registration import check_known
from axon_ps.coordinator.core.roster import RosterEntry, name_of
from axon_ps.coordinator.core.steps.decision import format_ranks
from axon_ps.coordinator.core.steps.stragglers import StepDeadlines
from axon_ps.errors import Broken, Busy, Drained, InvalidRequest, Misuse
from axon_ps.types import Member, Role
from axon_ps.wire.events import Connectivity, Copied, JoinRequest


class Members:
    """Joins, leaves and losses of one job.

    Args:
        config: its configuration.
        assembly: generations and steps.
        models: the models of the job.
        barriers: the barriers at which workers wait.
        snapshots: the checkpoint being written.
        out: gets the events to send.
        now: the time.

    Attributes:
        on_lost: called with every former member, and the reason.
        on_change: called in this order with the time when the members have changed.
        incomplete_since: the time since which the job waits for members.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        assembly: Assembly,
        models: Models,
        barriers: Barriers,
        snapshots: Snapshots,
        out: Outbox,
        now: float,
    ) -> None:
        self._config = config
        self._assembly = assembly
        self._models = models
        self._barriers = barriers
        self._snapshots = snapshots
        self._out = out
        self.incomplete_since = now
        self._handover = Handover()
        self._failed_joins = FailedJoins()
        self._forming = Forming()
        self.step_deadlines = StepDeadlines(assembly, models, out)
        self.reachability = Reachability(assembly, models, config.lease_s, out)
        self.placements = Placements(config.copies, assembly, models, snapshots, out)
        self.placements.unshown = self.reachability.unshown
        assembly.stepping.ending = self._step_ends
        self._now = now
        self._ending = False
        self.on_lost: Callable[[RosterEntry, str], None] = lambda _entry, _reason: None
        self.on_change: list[Callable[[float], None]] = []

    def of_sessions(self, sessions: Sequence[int], now: float) -> list[RosterEntry]:
        """Return the members of sessions, and renew their leases: each message on a session renews one."""
        self._now = now
        return self._assembly.roster.renewed(sessions, now + self._config.lease_s)

    def join(self, session: int, role: Role, request: JoinRequest, now: float) -> None:
        """Let a process join that has opened a stream; see `CoordinatorState.join`."""
        a = self._assembly
        entry = a.roster.get(request.incarnation)
        if entry is not None:
            self._announce_joined(now)  # it may have joined since the last generation
        for model in self._models:
            server, r = f"the shard server at {request.address} (node {request.node})", model.registration
            check_known(server, request.known, r.name, r.spec, r.optimizer)
        replaced = Broken("a newer stream of the same process has replaced this one")
        for old in self._handover.waiting(request.incarnation):
            self._out.close(old, replaced)
            self.forget(old)
        if entry is None:
            self.reachability.check(role, request, now)
        waits = (
            role is Role.SHARD
            and self._can_wait()
            and (request.incarnation in self._handover.silent or not self._models.still_held_by(request.incarnation))
            and a.roster.at_address(request.address) is None
        )
        if entry is None and waits:
            admit(self._config, a, self._models, role, request, now)  # refused now, or let in later
            self._handover.joining[session] = Joining(session, request, now)
            return
        if entry is None:
            entry = self._admit(session, role, request, now)
        elif entry.member.role is not role:
            raise InvalidRequest(
                f"incarnation {request.incarnation} is a member already, {entry.name}, of another role"
            )
        else:
            self._out.close(a.roster.attach(entry, session), replaced)
            a.roster.renew(entry, now + self._config.lease_s)
            if role is Role.SHARD:  # an order may have been lost with the old stream
                self._snapshots.lost([entry.member.rank], f"the stream of {entry.name} was replaced")
                self.placements.cancel_copies(entry.member)
            a.greet(entry, joined=False)
            self._out.push([session], a.membership)
            if role is Role.WORKER:
                self.step_deadlines.again(entry)
            self.placements.plan(now)
        self._joined_with(entry, request, now)

    def reported(
        self, entry: RosterEntry, metrics: Mapping[str, float], connectivity: Connectivity | None, now: float
    ) -> None:
        """Take a member's measurements and its report of the members that it reaches. An empty one changes nothing."""
        entry.metrics = dict(metrics) or entry.metrics
        if connectivity is not None:
            self.reachability.reported(entry, connectivity, now)
            if connectivity.reached:
                self.placements.plan(now)

    def leave(self, entry: RosterEntry, reason: str, now: float, *, finished: bool) -> None:
        """Let a member leave; see Note: [Finished]."""
        a = self._assembly
        self._out.close(entry.session)
        a.counters["leaves"] += 1
        if finished and a.was_complete and entry.member.role is Role.WORKER:
            self.change(f"{entry.name} has finished", lost=[entry], finished=True, now=now)
        else:
            self.lose([entry], f"{entry.name} left" + (f": {reason}" if reason else ""), now, kind="left")

    def lose(
        self, entries: Sequence[RosterEntry], reason: str, now: float, *, kind: str = "lost", silent: bool = False
    ) -> None:
        """Remove lost members.

        Args:
            entries: the members.
            reason: the reason, as text.
            now: the time.
            kind: the kind of the event in the history.
            silent: whether they have sent nothing for a lease.
        """
        if silent:
            self._handover.silent.update(entry.member.incarnation for entry in entries)
        self.change(reason, lost=entries, now=now, kind=kind)
        self._snapshots.lost([s.member.rank for s in entries if s.member.role is Role.SHARD], reason)

    def change(
        self,
        reason: str,
        *,
        lost: Sequence[RosterEntry] = (),
        finished: bool = False,
        joined: Member | None = None,
        session: int = -1,
        now: float = 0.0,
        kind: str = "",
    ) -> None:
        """Make the next generation after an event, and send it to all members."""
        self._out.happened(kind or ("finished" if finished else "joined" if joined else "changed"), reason)
        self._begin(reason, lost=lost, finished=finished, joined=joined, session=session, now=now)
        self._forming.announced(len(self._assembly.membership.workers), now)

    def _begin(
        self,
        reason: str,
        *,
        lost: Sequence[RosterEntry] = (),
        finished: bool = False,
        joined: Member | None = None,
        session: int = -1,
        now: float,
        sessions: Sequence[int] | None = None,
    ) -> None:
        """Make the next generation, and update all waits that depend on its members."""
        a = self._assembly
        before, training = (
            a.membership,
            any(model.open and not model.attempts.asynchronous for model in self._models.registered),
        )
        a.change(reason, lost=lost, finished=finished, joined=joined, session=session, now=now, sessions=sessions)
        for entry in lost:
            self.on_lost(entry, reason)
            in_vain = training and before.complete and len(before.workers) > len(lost) and not entry.participated
            if in_vain and entry.member.role is Role.WORKER:
                self._failed_joins.left(entry.member.node, now)
        if before.complete or not before.workers:
            self.incomplete_since = now
        self.placements.plan(now)
        workers = [s.member.rank for s in lost if s.member.role is Role.WORKER]
        self._barriers.generation_changed(a.membership, workers, reason, finished=finished)
        self.watch_barriers(now)
        if not self._ending:
            self._hand_over(now)
        for changed in self.on_change:
            changed(now)

    # ------------------------------------------------------------------ shard servers that come and go

    def drain(self, rank: int, now: float) -> int:
        """Have a shard server give up everything it holds, and then leave; returns how many slices it still holds."""
        a = self._assembly
        if (entry := a.shard(rank)) is None:
            there = format_ranks(s.rank for s in a.shards())
            raise InvalidRequest(f"the job has no shard server {rank}; it has {there}")
        holders = (m.holders for m in self._models.registered)
        if not all(h.parameters.initialized or h.out_of_memory for h in holders):
            raise Misuse("parameters are being set or restored; drain a shard server when the job trains")
        if rank not in a.draining:
            if not [s for s in a.shards() if s.rank != rank and s.rank not in a.draining]:
                raise InvalidRequest(f"{entry.name} is the last shard server; add another one before you drain it")
            a.draining |= {rank}
            self._out.happened("drain", f"{entry.name} is drained: others take its slices, then it leaves")
            self._out.persist(a.records())
            self.placements.plan(now)
            self._find_empty(now)
        return sum(len(m.holders.placement.slices_of(rank)) for m in self._models.registered)

    def copied(self, entry: RosterEntry, report: Copied, now: float) -> None:
        """Take a shard server's report that it has received slices.

        If the server that sent them has died meanwhile, the job goes on.
        """
        self.placements.copied(entry, report, now)
        if self._assembly.may_go_on:
            self.change(f"{entry.name} has got what the job waited for", now=now)

    def settle(self, now: float) -> None:
        """Perform the changes that were deferred to the end of the step or event."""
        self._find_empty(now)
        if self._ending:
            self._ending = False
            self._hand_over(now)
        else:
            self.placements.plan(now)

    def forget(self, session: int) -> None:
        """Forget a process that is not a member yet. Its stream is over."""
        self._handover.joining.pop(session, None)

    def pending(self, now: float | None) -> list[str]:
        """Return the changes of shard servers under way, and pairs that cannot reach each other, as text."""
        cuts = [] if now is None else self.reachability.pending(now)
        return [*cuts, *self.placements.pending(), *self._handover.pending()]

    def _can_wait(self) -> bool:
        """Return True if the job is training, so that changes of shard servers can be deferred to the end of a step."""
        a = self._assembly
        trains = any(m.open and m.version > 0 and not m.attempts.asynchronous for m in self._models.registered)
        return a.membership.complete and bool(a.membership.workers) and trains

    def _step_ends(self, model: Model) -> int:
        """Prepare the decision on a model's step; return the generation that is to begin with the next step, or 0."""
        for entry in self._assembly.roster.of_role(Role.WORKER):
            entry.participated = entry.participated or entry.member.rank in model.attempts.participants
        self._handover.step_ends(self._now)
        self.placements.plan(self._now, ending=model)
        self._find_empty(self._now)
        others = [m for m in self._models if m is not model and m.open and m.attempts.has_waiters]
        if not self._handover or others:
            return 0
        self._ending = True
        return self._assembly.generation + len(self._handover)

    def _find_empty(self, now: float) -> None:
        if self._snapshots.under_way:  # a server that leaves would end it
            return
        for entry in self.placements.emptied():
            self._handover.leaving.setdefault(entry.member.rank, now)

    def _hand_over(self, now: float) -> None:
        """Let the shard servers that wait join and leave."""
        a = self._assembly
        joining, self._handover.joining = self._handover.joining, {}
        leaving, self._handover.leaving = self._handover.leaving, {}
        for each in joining.values():
            try:
                self._joined_with(self._admit(each.session, Role.SHARD, each.request, now), each.request, now)
            except (Busy, InvalidRequest) as error:  # another server has taken its rank meanwhile
                self._out.close(each.session, error)
                self.change("a shard server that waited to join was refused", now=now)
        for rank in leaving:
            if (entry := a.shard(rank)) is not None:
                a.needed_shards = min(a.needed_shards, len(a.shards()) - 1)
                self._out.close(entry.session, Drained(f"{entry.name} was drained; it holds nothing any more"))
                self.lose([entry], f"{entry.name} was drained", now, kind="left")

    def watch_barriers(self, now: float) -> None:
        """Find deadlocked barriers, after a worker has voted or arrived at one, or a step was decided."""
        if self._barriers:
            self._barriers.watch(self._assembly.stepping.voted(), self._assembly.membership, now)

    # ------------------------------------------------------------------ time

    def tick(self, now: float) -> None:
        """Handle the deadlines that have passed: of joins, hand-overs, copies and steps."""
        if now >= self._forming.deadline:
            self._announce_joined(now)
        if self._handover.overdue(now):
            self._hand_over(now)
        self.placements.tick(now)
        self.step_deadlines.tick(now)

    def next_deadline(self) -> float:
        """Return the time of the next call of `tick`."""
        waiting = (self._handover, self.placements, self.step_deadlines)
        return min(self._forming.deadline, *(each.next_deadline() for each in waiting))

    # ------------------------------------------------------------------ inside

    def _admit(self, session: int, role: Role, request: JoinRequest, now: float) -> RosterEntry:
        """Admit a process that is new, or was lost earlier."""
        a = self._assembly
        if role is Role.WORKER and a.membership.complete:
            self._failed_joins.check(request.node, now)
        admission = admit(self._config, a, self._models, role, request, now)
        if role is Role.WORKER and not a.world_size:
            a.set_world_size(request.world_size)
        for entry, why in admission.displaced:
            self._out.close(entry.session, Broken(why))
        displaced = [entry for entry, _ in admission.displaced]
        a.counters["joins"] += 1
        reason = f"{name_of(admission.member)} joined"
        if a.forms and not displaced and len(a.roster) >= FEW:
            self._out.happened("joined", reason)
            self._forming.join(session, now)
            return a.add(admission.member, session, now)
        self.change(reason, lost=displaced, joined=admission.member, session=session, now=now)
        joined = a.roster.of_session(session)
        assert joined is not None
        return joined

    def _joined_with(self, entry: RosterEntry, request: JoinRequest, now: float) -> None:
        """Note the contents of the request with which a member has joined."""
        entry.joined_with(request)
        self.reachability.joined(entry, request.connectivity, now)

    def _announce_joined(self, now: float) -> None:
        """Begin the generation of those that have joined together; see Note: [Joining together]."""
        if self._forming.joined:
            sessions = self._forming.take(len(self._assembly.roster), now)
            self._begin("members joined", now=now, sessions=sessions)

"""Joins, leaves and losses, and their effect on barriers, checkpoints and the current step. Pure.

Note: [Finished]
    A worker that leaves as *finished* needs no replacement, unlike a dead one: the job needs one worker less (see
    `Assembly.needed_workers`). Barriers of all workers go on without it. Later memberships name it, so that the
    messages it sent before are still delivered. A synchronous step that the others are in does abort, since its average
    would be of other replicas than those that pushed. When the last worker has finished, the job is over, and workers
    that join begin it anew. When the last worker has died, its replacement goes on.

Note: [Stragglers]
    A member may live and yet take no part in a step that the others are in. It is *set aside* when as many others as
    the job needs have waited for it for `step_timeout_s`: its membership ends with an error that names the reason, and
    it does not come back by itself. See `stragglers`.

Note: [Between two steps]
    Shard servers that join or have been drained wait for the end of a step (`handover`). A server whose connection has
    just broken does not wait if it is back with its slices. At the end of the step primaries are swapped (`placements`)
    before the decision is sent, and the members change after it. The workers have all voted, so they make their next
    step in the new generation, and no step is aborted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from axon_ps.coordinator.config import CoordinatorConfig
from axon_ps.coordinator.core import records
from axon_ps.coordinator.core.actions import Outbox
from axon_ps.coordinator.core.admission import FailedJoins, admit
from axon_ps.coordinator.core.assembly import FEW, Assembly, Forming
from axon_ps.coordinator.core.barriers import Barriers
from axon_ps.coordinator.core.checkpoints.snapshots import Snapshots
from axon_ps.coordinator.core.connectivity.reachability import Reachability
from axon_ps.coordinator.core.models import Model, Models
from axon_ps.coordinator.core.placement.handover import Handover, Joining
from axon_ps.coordinator.core.placement.placements import Placements
from axon_ps.coordinator.core.registration import check_known
from axon_ps.coordinator.core.roster import RosterEntry, name_of
from axon_ps.coordinator.core.steps.deadlines import StepDeadlines
from axon_ps.coordinator.core.steps.decision import Difference, format_ranks
from axon_ps.coordinator.core.steps.stragglers import Stragglers
from axon_ps.errors import Broken, Busy, Drained, InvalidRequest, MemberLost, Misuse, Timeout
from axon_ps.types import Member, Role
from axon_ps.wire.events import Connectivity, Copied, Corrupted, JoinRequest


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
        self._incomplete_since = now
        self._handover = Handover()
        self._failed_joins = FailedJoins()
        self._forming = Forming()
        self._silent: set[str] = set()  # incarnations of those lost since the last step whose leases had expired
        self.stragglers = Stragglers(assembly, models, config.step_timeout_s)
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
            and (request.incarnation in self._silent or not self._models.still_held_by(request.incarnation))
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
        """Take a member's measurements and its report of whom it reaches; an empty one changes nothing."""
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

    def lose(self, entries: Sequence[RosterEntry], reason: str, now: float, *, kind: str = "lost") -> None:
        """Remove lost members; `kind` is the kind of the event in the history."""
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
            self._incomplete_since = now
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
        """Have a shard server give up everything it holds, and then leave; returns how many slices it still holds.

        Raises:
            InvalidRequest: there is no such shard server, or no other could take its slices.
            Misuse: the job has no parameters yet.
        """
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

    def corrupted(self, entry: RosterEntry, report: Corrupted, now: float) -> None:
        """Handle failed memory of a slice: another holder goes on with it, and the server gets it again.

        If the server was the primary, workers may be using values that it sent, and may have pushed gradients to it. So
        the step under way is over. If no other server has the slice, the parameters must be restored.
        """
        model = self._models.get(report.model)
        if model is None or not model.holders.is_holding(entry.member, report):
            return
        holders = model.holders
        what = self._models.message_prefix(model) + holders.described(report, entry.name)
        self._assembly.counters["slices_corrupted"] += report.lost
        if not report.lost:
            if model.open and report.generation == self._assembly.generation:
                self.change(f"{what}: the step is made again", now=now, kind="corrupt")
            return
        was_primary = holders.placement.holders[report.slice].primary == entry.member.rank
        if not holders.corrupted(entry.member.rank, report.slice):
            self._fail(model, f"{what}, and no other shard server holds that slice", now)
        else:
            self.placements.changed(model)
            if was_primary:
                self.change(what, now=now, kind="corrupt")
            else:
                self._out.happened("corrupt", what)

    def _settle_difference(self, model: Model, difference: Difference, now: float) -> None:
        """Have outvoted copies of a slice sent again; without a majority the parameters must be restored."""
        if not difference.outvoted:
            self._fail(model, str(difference), now)
            return
        for rank in difference.outvoted:
            model.holders.corrupted(rank, difference.slice)
        self.placements.changed(model)
        self.change(self._models.message_prefix(model) + str(difference), now=now, kind="corrupt")

    def _fail(self, model: Model, failure: str, now: float) -> None:
        """Mark a model's values as untrusted: no step is made before they are restored."""
        model.holders.parameters.failure = failure
        self._out.persist([records.parameters_record(model.number, model.holders.parameters)])
        self.change(self._models.message_prefix(model) + failure, now=now, kind="corrupt")

    def settle(self, now: float) -> None:
        """Perform the changes that were deferred to the end of the step or event."""
        a = self._assembly
        differing, a.stepping.differing = a.stepping.differing, []
        for model, difference in differing:
            self._settle_difference(model, difference, now)
        self._find_empty(now)
        if self._ending:
            self._ending = False
            self._hand_over(now)
        else:
            self.placements.plan(now)

    def forget(self, session: int) -> None:
        """Forget a process that is not a member yet; its stream is over."""
        self._handover.joining.pop(session, None)

    def pending(self, now: float | None) -> list[str]:
        """Return the changes of shard servers under way, and pairs that cannot reach each other, as text."""
        cuts = [] if now is None else self.reachability.pending(now)
        return [*cuts, *self.placements.pending(), *self._handover.pending()]

    def _can_wait(self) -> bool:
        """Return True if the job is training, so that a change of shard servers can wait for the end of a step."""
        a = self._assembly
        trains = any(m.open and m.version > 0 and not m.attempts.asynchronous for m in self._models.registered)
        return a.membership.complete and bool(a.membership.workers) and trains

    def _step_ends(self, model: Model) -> int:
        """Prepare the decision on a model's step; return the generation that is to begin with the next step, or 0."""
        for entry in self._assembly.roster.of_role(Role.WORKER):
            entry.participated = True
        self._silent.clear()
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

    def look(self, now: float) -> None:
        """Update the waits in steps, after a vote or report, or a decision."""
        self.stragglers.look(now)
        self.step_deadlines.look(now)

    # ------------------------------------------------------------------ time

    def tick(self, now: float) -> None:
        """Handle all deadlines that have passed: leases, members to be replaced, stragglers."""
        a = self._assembly
        expired = a.roster.expired(now)
        if expired:
            reasons = []
            for entry in expired:
                reasons.append(self._silence(entry))
                self._out.close(entry.session, MemberLost(f"{reasons[-1]}; it is no member any more"))
            a.counters["losses"] += len(expired)
            self._silent.update(entry.member.incarnation for entry in expired)
            self.lose(expired, "; ".join(reasons), now)
        while (found := self.reachability.to_go(now)) is not None:
            self._cut_off(*found, now)
        if now >= self._forming.deadline:
            self._announce_joined(now)
        if self._handover.overdue(now):
            self._hand_over(now)
        self.placements.tick(now)
        if now >= self._join_deadline():
            self._give_up_joining(now)
        self.step_deadlines.tick(now)
        if late := self.stragglers.late(now):
            self._set_aside(late, now)

    def next_deadline(self) -> float:
        """Return the time of the next call of `tick`."""
        return min(
            self._assembly.roster.next_deadline(),
            self._forming.deadline,
            self._join_deadline(),
            self.stragglers.next_deadline(),
            self.step_deadlines.next_deadline(),
            self._handover.next_deadline(),
            self.placements.next_deadline(),
            self.reachability.next_deadline(),
        )

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

    def _silence(self, entry: RosterEntry) -> str:
        if entry.session is None:
            return f"{entry.name} did not come back within {self._config.lease_s:g} s after the coordinator's restart"
        return f"{entry.name} was silent for {self._config.lease_s:g} s"

    def _join_deadline(self) -> float:
        a = self._assembly
        waiting = a.was_complete and not a.membership.complete and a.membership.workers
        return self._incomplete_since + self._config.join_timeout_s if waiting else math.inf

    def _give_up_joining(self, now: float) -> None:
        """End the workers' sessions with an error, since no replacement joined in time."""
        a = self._assembly
        reason = f"the job waited {self._config.join_timeout_s:g} s for {a.membership.waiting_for}"
        workers = a.roster.of_role(Role.WORKER)
        for entry in workers:
            self._out.close(entry.session, Timeout(reason))
        self.lose(workers, reason, now)

    def _set_aside(self, ranks: Sequence[int], now: float) -> None:
        """Continue without workers that take no part; see Note: [Stragglers]."""
        a = self._assembly
        what, others = self.stragglers.what(), len(a.membership.workers) - len(ranks)
        entries = [s for s in a.roster.of_role(Role.WORKER) if s.member.rank in ranks]
        reasons = []
        for entry in entries:
            reasons.append(
                f"{entry.name} was set aside: {what} waited {self._config.step_timeout_s:g} s for it "
                f"(--step-timeout-s) while {others} other workers took part"
            )
            self._out.close(entry.session, Timeout(f"{reasons[-1]}; start it again to take part"))
        a.counters["set_aside"] += len(entries)
        self.lose(entries, "; ".join(reasons), now)

    def _cut_off(self, entry: RosterEntry, why: str, now: float) -> None:
        """Continue without a member that another one cannot reach; see `connectivity.reachability`."""
        self._assembly.counters["cut_off"] += 1
        self.reachability.gone(entry, why, now)
        self._out.close(
            entry.session, MemberLost(f"{why}; this one is no member any more, and joins again when it can")
        )
        self.lose([entry], f"{why}: the job goes on without {entry.name}", now, kind="cut")

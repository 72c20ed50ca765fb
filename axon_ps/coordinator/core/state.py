"""The coordinator's state machine: events in, actions out. No clock, threads or I/O.

An event is a method that returns the actions it causes, in order: a method of `CoordinatorState`, or of its
`registrations`, `snapshots`, `restores` and `revocations`. `Persist`, if there is one, comes first, so nothing is
announced that is not durable. An event that must be refused raises, and has changed at most a lease. A call also raises
the errors of `access.callers`. The time is passed in, and no clock is read. Events of a session whose member is lost
are ignored. `coordinator.core` lists its components.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from axon_ps.coordinator import attachments
from axon_ps.coordinator.config import CoordinatorConfig
from axon_ps.coordinator.core import records
from axon_ps.coordinator.core.access.callers import Caller, Callers, check_role
from axon_ps.coordinator.core.access.revocations import RevocationList
from axon_ps.coordinator.core.actions import Action, Outbox
from axon_ps.coordinator.core.assembly import Assembly
from axon_ps.coordinator.core.barriers import Barriers
from axon_ps.coordinator.core.checkpoints.restores import Restores
from axon_ps.coordinator.core.checkpoints.snapshots import Snapshots
from axon_ps.coordinator.core.evictions import Evictions, Isolation
from axon_ps.coordinator.core.history.history import History
from axon_ps.coordinator.core.history.status import JobStatus
from axon_ps.coordinator.core.kv import KeyValues
from axon_ps.coordinator.core.members import Members
from axon_ps.coordinator.core.models import Models
from axon_ps.coordinator.core.placement.failed_memory import FailedMemory
from axon_ps.coordinator.core.registrations import Registrations
from axon_ps.coordinator.core.restart.comeback import Comeback
from axon_ps.coordinator.core.roster import NOUN, RosterEntry, names_of
from axon_ps.errors import AxonError, GenerationChanged, InvalidRequest, PermissionDenied
from axon_ps.types import Membership, Role
from axon_ps.wire import codec
from axon_ps.wire.build import check as check_build
from axon_ps.wire.events import (
    Arrived,
    Connectivity,
    Copied,
    Corrupted,
    JobState,
    JoinRequest,
    Ready,
    SnapshotReport,
    Status,
    Vote,
)
from axon_ps.wire.report import REPORT_KEY
from axon_ps.wire.v1 import logs_pb2


class CoordinatorState:
    """One job. An event of a session raises `InvalidRequest` if its member's role does not allow the event.

    Args:
        config: its configuration.
        now: the time.
        stored: the records of a state store; empty for a new job.
        new_id: random id that a new job's state gets. An existing state has one.

    Attributes:
        config: the same.
        models: its models.
        assembly: its generations.
        roster: its members.
        stragglers: the workers that others wait for in a step.
        registrations: events that add and release models.
        snapshots: events that write checkpoints.
        restores: events that replace the models' values.
        revocations: events that revoke credentials.
        callers: finds the members among callers.
        comeback: the processes that have come back since the coordinator's restart.
        isolation: signs that the coordinator itself is cut off.
        history: the past events of the job.

    Raises:
        ConfigurationError: the records are not a coordinator's, or are of another job or number of shard servers.
    """

    def __init__(
        self, config: CoordinatorConfig, now: float, stored: Mapping[str, bytes] | None = None, *, new_id: str = ""
    ) -> None:
        self.config = config
        self._out = Outbox()
        durable = records.load(stored or {}) or records.Durable(state_id=new_id, job=config.job)
        records.check(durable, config.job, config.num_shards)
        out, models = self._out, Models(durable, config.num_shards, self._out)
        self.models = models
        self.assembly = assembly = Assembly(config, durable, models, out, now)
        self.roster = assembly.roster
        self.callers = Callers(config.job, assembly)
        self._barriers = Barriers(out)
        self._kv = KeyValues(durable.kv, out)
        self.snapshots = Snapshots(durable.snapshot_id, assembly, models, out)
        self._members = members = Members(config, assembly, models, self._barriers, self.snapshots, out, now)
        members.on_lost = self._ended
        self._evictions = Evictions(config, assembly, models, members, out)
        self.stragglers = self._evictions.stragglers
        self._failed_memory = FailedMemory(assembly, models, members, out)
        self.restores = Restores(assembly, models, members, self.snapshots, out, self._kv, config.copies)
        self.registrations = Registrations(
            config, self.callers, assembly, models, members, self.snapshots, self.restores, out
        )
        self.revocations = RevocationList(self.callers, assembly, members, out)
        self.comeback = Comeback(assembly, models, self.snapshots, now + config.lease_s, self._let_in, out)
        self.isolation = Isolation(assembly, config.lease_s, now)
        self.history = History(now, {model.number: model.step for model in models})
        self._status = JobStatus(config, assembly, models, self._kv, self.comeback, self.history, self._pending)
        out.persist([assembly.job_record(), *assembly.records()])

    # ------------------------------------------------------------------ sessions

    def join(self, session: int, role: Role, request: JoinRequest, now: float) -> list[Action]:
        """Let a process join that has opened a stream.

        A known incarnation has the rank it had and gets the events that it missed; its older stream is closed.

        Raises:
            PermissionDenied: it names another job.
            InvalidRequest: its version of axon_ps is incompatible, it was a member under another state, its rank or its
                world size does not fit the job, or a shard server does not know an optimizer or a compressor of it.
            Busy: the job has no rank for it, or it may not join yet (`admission`, `reachability`).
        """
        if request.job != self.config.job:
            raise PermissionDenied(f"this coordinator runs job {self.config.job!r}, not {request.job!r}")
        check_build(request.build, f"the {NOUN[role]} at node {request.node}", "this coordinator")
        if request.state_id not in ("", self.id):
            raise InvalidRequest(
                "the coordinator came back without the state it had, so the job cannot go on with this process (was "
                "the coordinator restarted with another state file, or with none?)"
            )
        self.comeback.join(session, role, request, now)
        return self._out.take()

    def _let_in(self, session: int, role: Role, request: JoinRequest, now: float) -> None:
        was_over = self.membership.is_over
        self._members.join(session, role, request, now)
        if was_over and not self.membership.is_over:
            self._kv.remove(REPORT_KEY)  # it is of the previous run
            attachments.begin_run(self._kv)

    def heartbeat(
        self, session: int, metrics: Mapping[str, float], now: float, *, connectivity: Connectivity | None = None
    ) -> list[Action]:
        """Handle a heartbeat of a member."""
        if (entry := self._sender(session, now)) is not None:
            self.history.measured(entry.member, metrics, now)
            self._members.reported(entry, metrics, connectivity, now)
        return self._out.take()

    def logged(self, session: int, records: Sequence[logs_pb2.LogRecord], dropped: int, now: float) -> list[Action]:
        """Log the records of a member. Before these it `dropped` some."""
        if (entry := self._sender(session, now)) is not None and (records or dropped):
            process = codec.role_to_proto(entry.member.role), entry.member.rank
            self.history.logs.add(process, entry.member.node, records, dropped)
        return self._out.take()

    def leave(self, session: int, reason: str, now: float, *, finished: bool = False) -> list[Action]:
        """Let a member leave. A worker may have `finished` its work: see Note: [Finished] of `members`."""
        self.comeback.forget(session)
        if (entry := self._sender(session, now)) is not None:
            self._members.leave(entry, reason, now, finished=finished)
        return self._out.take()

    def streams_lost(self, sessions: Sequence[int], now: float) -> list[Action]:
        """Remove the members of broken streams at once, and together."""
        if entries := self._members.of_sessions(sessions, now):
            self.assembly.counters["losses"] += len(entries)
            was = "was lost: its connection" if len(entries) == 1 else "were lost: their connections"
            self._members.lose(entries, f"{names_of([e.member for e in entries])} {was} broke", now)
        for session in sessions:
            self._members.forget(session)
            self.comeback.forget(session)
        return self._out.take()

    def tick(self, now: float) -> list[Action]:
        """Handle all deadlines that have passed: leases, members to be replaced, stragglers, waiting calls."""
        self.comeback.tick(now)
        self._evictions.tick(now)
        self._barriers.tick(now, self.assembly.membership)
        self.registrations.tick(now)
        self._kv.tick(now)
        self.history.tick(now)
        return self._out.take()

    def paused(self, seconds: float) -> None:
        """Extend all leases by a pause of the coordinator itself, as when it was suspended."""
        self.roster.extend(seconds)
        self.comeback.extend(seconds)

    def next_deadline(self) -> float:
        """Return the time of the next call of `tick`; inf when there is no deadline."""
        waiting = (self._evictions, self.comeback, self._barriers, self.registrations, self._kv)
        return min(each.next_deadline() for each in waiting)

    # ------------------------------------------------------------------ steps

    def arrived(self, session: int, arrived: Arrived, now: float) -> list[Action]:
        """Note that a worker waits in a step until the servers take its gradients."""
        if (entry := self._sender(session, now, Role.WORKER, "arrives")) is not None:
            self._timed([entry.member.rank], arrived.model, arrived.generation, arrived.step, now)
            self.assembly.stepping.arrived(entry.member.rank, arrived)
            self._look(now)
        return self._out.take()

    def vote(self, sessions: Sequence[int], vote: Vote, now: float) -> list[Action]:
        """Count the same vote of several workers on a step.

        Votes of another step or generation, and second ones, are ignored.
        """
        entries = self._members.of_sessions(sessions, now)
        for entry in entries:
            check_role(entry, Role.WORKER, "votes")
        if ranks := [entry.member.rank for entry in entries]:
            self._timed(ranks, vote.model, vote.generation, vote.step, now)
            self.assembly.stepping.vote(ranks, vote)
            self._settle(now)
            self._look(now)
            self._members.watch_barriers(now)
        return self._out.take()

    def ready(self, session: int, ready: Ready, now: float) -> list[Action]:
        """Take a shard server's report that it has every gradient of a step.

        A report of another step or generation, or a second one, is ignored.
        """
        if (entry := self._sender(session, now, Role.SHARD, "reports gradients")) is not None:
            self.assembly.stepping.ready(entry.member.rank, ready)
            self._settle(now)
            self._look(now)
            self._members.watch_barriers(now)
        return self._out.take()

    # ------------------------------------------------------------------ reports of shard servers

    def initialized(self, session: int, version: int, epoch: int, now: float, *, model: int = 0) -> list[Action]:
        """Take a shard server's report that it holds all its parameters of a model.

        Raises:
            InvalidRequest: the version is not the job's.
        """
        if (entry := self._sender(session, now, Role.SHARD, "holds parameters")) is not None:
            self.restores.initialized(entry, model, version, epoch)
            self.registrations.settle()
        return self._out.take()

    def out_of_memory(self, session: int, number: int, placement: int, error: AxonError, now: float) -> list[Action]:
        """Take a shard server's report that it has no memory for its slices of a model. It holds the other models."""
        if (entry := self._sender(session, now, Role.SHARD, "holds parameters")) is not None:
            self.restores.out_of_memory(entry, number, placement, error, now)
        return self._out.take()

    def copied(self, session: int, report: Copied, now: float) -> list[Action]:
        """Take a shard server's report that it has copied slices."""
        if (entry := self._sender(session, now, Role.SHARD, "reports slices")) is not None:
            self._members.copied(entry, report, now)
            self._settle(now)
        return self._out.take()

    def corrupted(self, session: int, report: Corrupted, now: float) -> list[Action]:
        """Take a shard server's report that memory of a slice failed."""
        if (entry := self._sender(session, now, Role.SHARD, "reports slices")) is not None:
            self._failed_memory.corrupted(entry, report, now)
            self._settle(now)
        return self._out.take()

    def snapshot_report(self, session: int, report: SnapshotReport, now: float) -> list[Action]:
        """Take a shard server's report on its files of a checkpoint."""
        if (entry := self._sender(session, now, Role.SHARD, "reports files")) is not None:
            self.snapshots.report(entry.member.rank, report)
        return self._out.take()

    def restore_report(self, session: int, epoch: int, error: AxonError, now: float, *, model: int = 0) -> list[Action]:
        """Take a shard server's report that it could not restore a model."""
        if (entry := self._sender(session, now, Role.SHARD, "reports a restore")) is not None:
            self.restores.failed(entry, model, epoch, error, now)
        return self._out.take()

    # ------------------------------------------------------------------ calls

    def drain(self, call: int, caller: Caller, rank: int, now: float) -> list[Action]:
        """Have a shard server give up its slices, then leave. `call` gets the number of slices that it still holds.

        Raises:
            InvalidRequest: there is no such shard server, or no other could take its slices.
            Misuse: parameters are being set or restored.
        """
        self.callers.check_takes_away(caller)
        self._out.reply(call, self._members.drain(rank, now))
        return self._out.take()

    def barrier(
        self, call: int, caller: Caller, name: str, ranks: Sequence[int], now: float, timeout_s: float
    ) -> list[Action]:
        """Have a worker wait for others. `call` gets the generation in which the barrier opened.

        Raises:
            InvalidRequest: the name is empty or too long, or the caller is not a worker of the barrier.
            GenerationChanged: the caller is not a member.
            Busy: there are too many barriers, or workers that wait at them.
        """
        entry = self.callers.member(caller, Role.WORKER, "waits at a barrier")
        self._barriers.arrive(call, entry.member.rank, name, ranks, self.assembly.membership, now, timeout_s)
        self._members.watch_barriers(now)
        return self._out.take()

    def kv(self, caller: Caller) -> KeyValues:
        """Return the key-value store, for one operation of `caller`. `flush` returns the actions it caused.

        Raises:
            GenerationChanged: the caller is neither a member nor an operator.
        """
        self.callers.check_member_or_operator(caller)
        return self._kv

    def flush(self) -> list[Action]:
        """Return the actions caused since the last event."""
        return self._out.take()

    def cancel(self, call: int) -> list[Action]:
        """Forget a call that its caller does not wait for any more."""
        for waiting in (self._kv, self._barriers, self.registrations, self.snapshots, self.restores):
            waiting.cancel(call)
        return self._out.take()

    # ------------------------------------------------------------------ queries

    @property
    def membership(self) -> Membership:
        """The members."""
        return self.assembly.membership

    @property
    def id(self) -> str:
        """The id of the job's durable state."""
        return self.assembly.state_id

    def status(self, now: float | None = None, *, measures: bool = True) -> Status:
        """Return the current status of the job.

        Args:
            now: the time; without it the status has no rates, no waiting time and no phase.
            measures: whether it has the members' measurements.
        """
        return self._status.take(now, measures=measures)

    def statistics(self, status: Status, now: float) -> dict[str, float]:
        """Return the numbers of a status that was taken now; see `JobStatus.statistics`."""
        return self._status.statistics(status, now, self.stragglers.longest_wait(now)[0])

    def describe(self, caller: Caller, name: str) -> tuple[JobState, Membership]:
        """Return a model (empty = the only one) and the members, for a process that need not be a member.

        Raises:
            PermissionDenied: it is another job's name.
            InvalidRequest: the job does not have such a model (yet).
        """
        self.callers.check(caller)
        job = self.models.described(name).state(self.assembly.shards(), full=True)
        return dataclasses.replace(job, optimizer=None), self.assembly.membership

    # ------------------------------------------------------------------ inside

    def _ended(self, entry: RosterEntry, reason: str) -> None:
        """Fail the waiting calls of a former member."""
        error = GenerationChanged(f"{reason}; who is no member waits for nothing", self.assembly.generation)
        self._kv.lost(entry.member.incarnation, error)
        self.registrations.lost(entry.member.incarnation, error)

    def _pending(self, now: float | None) -> list[str]:
        """Return the reasons for which the job waits at a time, as text; without a time, those that need none."""
        waits = [*self.assembly.pending(), *self._members.pending(now), *self._barriers.pending(self.membership)]
        waits += [*self.registrations.pending(), *self.snapshots.pending(), *self.restores.pending()]
        return waits if now is None else [*waits, self.stragglers.longest_wait(now)[1]]

    def _settle(self, now: float) -> None:
        """Perform the changes that were deferred to the end of the step or event."""
        self._failed_memory.settle(now)
        self._members.settle(now)

    def _look(self, now: float) -> None:
        """Update the waits in steps, after a vote or report, or a decision."""
        self.stragglers.look(now)
        self._members.step_deadlines.look(now)

    def _sender(self, session: int, now: float, role: Role | None = None, does: str = "") -> RosterEntry | None:
        """Return the member that a session belongs to, and renew its lease; refuse a member of another role."""
        entry = next(iter(self._members.of_sessions([session], now)), None)
        if entry is not None and role is not None:
            check_role(entry, role, does)
        return entry

    def _timed(self, ranks: Sequence[int], number: int, generation: int, step: int, now: float) -> None:
        """Tell the history that workers have voted in a step of all replicas, or wait in it for the servers."""
        model = self.models.get(number)
        present = model is not None and (generation, step) == (self.assembly.generation, model.step)
        if model is not None and present and not model.attempts.asynchronous:
            self.history.arrived(ranks, number, step, now)

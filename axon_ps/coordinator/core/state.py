"""The coordinator's state machine: events in, actions out. No clock, threads or I/O.

Every method is one event and returns the actions it causes, in order. `Persist`, if there is one, comes first, so
nothing is announced that is not durable. An event that must be refused raises, and has changed nothing. The time is
passed in and only ever compared. Events of a session whose member is lost are ignored.

It is composed of: `members` (joins, leaves and losses), `assembly` (generations), `models`, `registrations` and
`registration` (layout and parameters), `stepping` (steps), `restores`, `barriers`, `kv`, `snapshots`, `connectivity`,
`access.callers` (callers of unary calls).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from axon_ps.coordinator import attachments
from axon_ps.coordinator.attachments import Attachment
from axon_ps.coordinator.config import CoordinatorConfig
from axon_ps.coordinator.core import records
from axon_ps.coordinator.core.access.callers import Caller, Callers, check_role
from axon_ps.coordinator.core.access.revocations import RevocationList
from axon_ps.coordinator.core.actions import Action, Outbox
from axon_ps.coordinator.core.assembly import Assembly
from axon_ps.coordinator.core.barriers import Barriers
from axon_ps.coordinator.core.checkpoints.restores import Restores, Resume
from axon_ps.coordinator.core.checkpoints.snapshots import SavedModel, Snapshots
from axon_ps.coordinator.core.connectivity.leader_isolation import Isolation
from axon_ps.coordinator.core.evictions import Evictions
from axon_ps.coordinator.core.history.history import History
from axon_ps.coordinator.core.kv import KeyValues
from axon_ps.coordinator.core.members import Members
from axon_ps.coordinator.core.models import Models
from axon_ps.coordinator.core.placement.failed_memory import FailedMemory
from axon_ps.coordinator.core.registrations import Registrations
from axon_ps.coordinator.core.restart.comeback import Comeback
from axon_ps.coordinator.core.restart.knowledge import behind
from axon_ps.coordinator.core.roster import NOUN, RosterEntry, names_of
from axon_ps.coordinator.core.statistics import statistics
from axon_ps.errors import (
    AxonError,
    GenerationChanged,
    InvalidRequest,
    MemberLost,
    Misuse,
    PermissionDenied,
)
from axon_ps.sharding.job import JobSpec
from axon_ps.types import Member, Membership, OptimizerSpec, Role
from axon_ps.wire import codec
from axon_ps.wire.build import check as check_build
from axon_ps.wire.events import (
    FIRST_NAME,
    FIRST_VALUES,
    UPLOADED,
    Connectivity,
    Copied,
    Corrupted,
    JobState,
    JoinRequest,
    Position,
    Ready,
    SnapshotReport,
    Status,
    Vote,
)
from axon_ps.wire.report import REPORT_KEY, parse
from axon_ps.wire.v1 import logs_pb2


class CoordinatorState:
    """One job.

    Args:
        config: its configuration.
        now: the time.
        stored: the records of a state store; empty for a new job.
        new_id: random id that a new job's state gets; an existing state has one.

    Attributes:
        callers: finds the members among callers.

    Raises:
        ConfigurationError: the records are of another job, or of one with another number of shard servers.
    """

    def __init__(
        self, config: CoordinatorConfig, now: float, stored: Mapping[str, bytes] | None = None, *, new_id: str = ""
    ) -> None:
        self.config = config
        self._out = Outbox()
        durable = records.load(stored or {})
        if durable is None:
            durable = records.Durable(state_id=new_id, job=config.job)
        records.check(durable, config.job, config.num_shards)
        self._models = Models(durable, config.num_shards, self._out)
        self._assembly = Assembly(config, durable, self._models, self._out, now)
        self.callers = Callers(config.job, self._assembly)
        self._barriers = Barriers(self._out)
        self._kv = KeyValues(durable.kv, self._out)
        self._snapshots = Snapshots(durable.snapshot_id, self._out)
        self._members = Members(config, self._assembly, self._models, self._barriers, self._snapshots, self._out, now)
        self._evictions = Evictions(config, self._assembly, self._models, self._members, self._out)
        self._failed_memory = FailedMemory(self._assembly, self._models, self._members, self._out)
        self._restores = Restores(
            self._assembly, self._models, self._members, self._snapshots, self._out, self._kv, config.copies
        )
        self._registrations = Registrations(
            self._assembly, self._models, self._members, self._restores, self._out, config.copies
        )
        self._members.on_lost = self._ended
        self.revocations = RevocationList(self._assembly, self._members, self._out)
        self._comeback = Comeback(self._assembly.roster, now + config.lease_s, self._let_in, self._out)
        self.isolation = Isolation(self._assembly, config.lease_s, now)
        self.history = History(now, {model.number: model.step for model in self._models})
        self._out.persist([self._assembly.job_record(), *self._assembly.records()])

    # ------------------------------------------------------------------ sessions

    def join(self, session: int, role: Role, request: JoinRequest, now: float) -> list[Action]:
        """Let a process join that has opened a stream.

        A known incarnation has the rank it had and gets the events that it missed; its older stream is closed.

        Raises:
            PermissionDenied: it names another job.
            InvalidRequest: its version of axon_ps is incompatible with this one; it was a member under another state
                than this one; its rank is taken, its world size is not the job's, or a shard server does not know an
                optimizer or a compressor of the job.
            Busy: the job has no rank for it.
        """
        if request.job != self.config.job:
            raise PermissionDenied(f"this coordinator runs job {self.config.job!r}, not {request.job!r}")
        check_build(request.build, f"the {NOUN[role]} at node {request.node}", "this coordinator")
        if request.state_id not in ("", self.id):
            raise InvalidRequest(
                "the coordinator came back without the state it had, so the job cannot go on with this process (was "
                "the coordinator restarted with another state file, or with none?)"
            )
        self._comeback.join(session, role, request, now)
        return self._out.take()

    def _let_in(self, session: int, role: Role, request: JoinRequest, now: float) -> None:
        was_over = self.membership.is_over
        self._members.join(session, role, request, now)
        if was_over and not self.membership.is_over:
            self._kv.remove(REPORT_KEY)  # it is of the previous run
            attachments.begin_run(self._kv)

    def behind(self, role: Role, request: JoinRequest) -> str:
        """Return a text about the knowledge of a process that this state lacks; "" = none.

        A worker of an earlier generation begins the present one with the servers' values.
        """
        ours = Position(
            generation=self.membership.generation,
            models=tuple(model.position for model in self._models),
            released=frozenset(self._models.released),
            snapshot_id=self._snapshots.last_id,
        )
        is_earlier = role is Role.WORKER and request.position.generation < ours.generation
        return "" if is_earlier or request.state_id != self.id else behind(ours, request.position)

    def heartbeat(
        self, session: int, metrics: Mapping[str, float], now: float, *, connectivity: Connectivity | None = None
    ) -> list[Action]:
        """Handle a heartbeat of a member."""
        if (entry := self._entry(session, now)) is not None:
            self.history.measured(entry.member, metrics, now)
            self._members.reported(entry, metrics, connectivity, now)
        return self._out.take()

    def logged(self, session: int, records: Sequence[logs_pb2.LogRecord], dropped: int, now: float) -> list[Action]:
        """Log the records of a member; before these it `dropped` some."""
        if (entry := self._entry(session, now)) is not None and (records or dropped):
            process = codec.role_to_proto(entry.member.role), entry.member.rank
            self.history.logs.add(process, entry.member.node, records, dropped)
        return self._out.take()

    def leave(self, session: int, reason: str, now: float, *, finished: bool = False) -> list[Action]:
        """Let a member leave; a worker may have `finished` its work: see Note: [Finished] of `members`."""
        self._comeback.forget(session)
        if (entry := self._entry(session, now)) is not None:
            self._members.leave(entry, reason, now, finished=finished)
        return self._out.take()

    def streams_lost(self, sessions: Sequence[int], now: float) -> list[Action]:
        """Remove the members of broken streams at once, and together."""
        if entries := self._members.of_sessions(sessions, now):
            self._assembly.counters["losses"] += len(entries)
            was = "was lost: its connection" if len(entries) == 1 else "were lost: their connections"
            self._members.lose(entries, f"{names_of([e.member for e in entries])} {was} broke", now)
        for session in sessions:
            self._members.forget(session)
            self._comeback.forget(session)
        return self._out.take()

    def tick(self, now: float) -> list[Action]:
        """Handle all deadlines that have passed: leases, members to be replaced, stragglers, waiting calls."""
        self._comeback.tick(now)
        self._evictions.tick(now)
        self._barriers.tick(now, self._assembly.membership)
        self._registrations.tick(now)
        self._kv.tick(now)
        self.history.tick(now)
        return self._out.take()

    def paused(self, seconds: float) -> None:
        """Extend all leases by a pause of the coordinator itself, as when it was suspended."""
        self._assembly.roster.extend(seconds)
        self._comeback.extend(seconds)

    def next_deadline(self) -> float:
        """Return the time of the next call of `tick`; inf when there is no deadline."""
        waiting = (self._evictions, self._comeback, self._barriers, self._registrations, self._kv)
        return min(each.next_deadline() for each in waiting)

    # ------------------------------------------------------------------ steps

    def arrived(
        self, session: int, generation: int, step: int, now: float, *, model: int = 0, blocked: bool = False
    ) -> list[Action]:
        """Note that a worker has computed everything of a step and waits until the servers take it.

        Raises:
            InvalidRequest: the sender is a shard server.
        """
        if (entry := self._entry(session, now)) is not None:
            check_role(entry, Role.WORKER, "arrives")
            self._timed([entry.member.rank], model, generation, step, now)
            self._assembly.stepping.arrived(entry.member.rank, model, generation, step, blocked=blocked)
            self._look(now)
        return self._out.take()

    def vote(self, sessions: Sequence[int], vote: Vote, now: float) -> list[Action]:
        """Count the same vote of several workers, which have pushed everything of a step.

        Votes of another step or generation, and second ones, are ignored.

        Raises:
            InvalidRequest: a shard server votes.
        """
        entries = self._members.of_sessions(sessions, now)
        for entry in entries:
            check_role(entry, Role.WORKER, "votes")
        if ranks := [entry.member.rank for entry in entries]:
            self._timed(ranks, vote.model, vote.generation, vote.step, now)
            self._assembly.stepping.vote(ranks, vote)
            self._settle(now)
            self._look(now)
            self._members.watch_barriers(now)
        return self._out.take()

    def ready(self, session: int, ready: Ready, now: float) -> list[Action]:
        """Take a shard server's report that it has every gradient of a step.

        A report of another step or generation, or a second one, is ignored.

        Raises:
            InvalidRequest: the sender is a worker.
        """
        if (entry := self._entry(session, now)) is not None:
            check_role(entry, Role.SHARD, "reports gradients")
            self._assembly.stepping.ready(entry.member.rank, ready)
            self._settle(now)
            self._look(now)
            self._members.watch_barriers(now)
        return self._out.take()

    # ------------------------------------------------------------------ models

    def wants_resume(self, caller: Caller, name: str) -> bool:
        """Return True if a layout that the caller registers now must come with the manifest of `config.resume`."""
        return bool(self.config.resume) and self._registrations.gives_layout(caller.incarnation, name)

    def preparation(self, spec: JobSpec) -> Callable[[], None]:
        """Return the long part of a registration, which may be called before `register`, in any thread."""
        return self._models.preparation(spec, self._assembly.servers(), self.config.copies)

    def register(
        self,
        call: int,
        caller: Caller,
        spec: JobSpec | None,
        optimizer: OptimizerSpec | None,
        resume: Resume | None = None,
        *,
        now: float,
        name: str = FIRST_NAME,
        later: bool = False,
    ) -> list[Action]:
        """Give a model the layout or optimizer of a worker, or compare the worker's with the job's.

        Args:
            call: gets a `Registered`; or the error with which it is refused; or None if another worker's layout comes
                first: then call `await_registration` before registering again.
            caller: the worker.
            spec: layout, dtypes and policy.
            optimizer: the optimizer.
            resume: the checkpoint to begin with instead of uploaded values; used by the first spec only.
            now: the time.
            name: of the model; a new name adds a model to the job.
            later: whether the optimizer is to replace the model's with a later step; now it is only checked.

        It is refused with:
            LayoutMismatch: it differs from the job's.
            InvalidRequest: it is invalid, or a shard server does not know the optimizer or a compressor.
            Misuse: an optimizer comes before any layout.
            Busy: the job can have no more models, or the shard servers have no memory for it; the message has the bytes
                that each needs and has. Nothing is durable then.
            MemberLost: a shard server that is to hold some of it is absent.

        Raises:
            GenerationChanged: the caller is not a member.
        """
        entry = self.callers.member(caller, Role.WORKER, "registers")
        self._registrations.register(call, entry, spec, optimizer, resume, now, name, later=later)
        return self._out.take()

    def await_registration(self, call: int, caller: Caller, name: str, now: float, timeout_s: float) -> list[Action]:
        """Answer `call` with None when its worker is to register a model's layout again.

        Raises:
            GenerationChanged: the caller is not a member.
            Busy: too many calls wait.
        """
        entry = self.callers.member(caller, Role.WORKER, "registers")
        self._registrations.wait(call, entry, name, now, timeout_s)
        return self._out.take()

    def release(self, call: int, caller: Caller, number: int, name: str) -> list[Action]:
        """Release a model; `call` gets True if it was registered.

        Raises:
            InvalidRequest: it has another name.
            Busy: a checkpoint is being written, and the model is to be in it.
        """
        self.callers.check_takes_away(caller)
        if (model := self._models.get(number)) is not None and model.registered:
            if model.name != name:
                raise InvalidRequest(f"model {number} is {model.name!r}, not {name!r}; nothing is released")
            self._snapshots.check_free()
        self._out.reply(call, self._registrations.release(number))
        return self._out.take()

    def initialized(self, session: int, version: int, epoch: int, now: float, *, model: int = 0) -> list[Action]:
        """Take a shard server's report that it holds all its parameters of a model.

        Raises:
            InvalidRequest: the sender is a worker, or the version is not the job's.
        """
        if (entry := self._entry(session, now)) is not None:
            check_role(entry, Role.SHARD, "holds parameters")
            self._restores.initialized(entry, model, version, epoch)
            self._registrations.settle()
        return self._out.take()

    def out_of_memory(self, session: int, number: int, placement: int, error: AxonError, now: float) -> list[Action]:
        """Take a shard server's report that it has no memory for its slices of a model; it holds the other models.

        Raises:
            InvalidRequest: the sender is a worker.
        """
        if (entry := self._entry(session, now)) is not None:
            check_role(entry, Role.SHARD, "holds parameters")
            self._restores.out_of_memory(entry, number, placement, error, now)
        return self._out.take()

    # ------------------------------------------------------------------ placement

    def copied(self, session: int, report: Copied, now: float) -> list[Action]:
        """Take a shard server's report that it has copied slices.

        Raises:
            InvalidRequest: the sender is a worker.
        """
        if (entry := self._entry(session, now)) is not None:
            check_role(entry, Role.SHARD, "reports slices")
            self._members.copied(entry, report, now)
            self._settle(now)
        return self._out.take()

    def corrupted(self, session: int, report: Corrupted, now: float) -> list[Action]:
        """Take a shard server's report that memory of a slice failed.

        Raises:
            InvalidRequest: the sender is a worker.
        """
        if (entry := self._entry(session, now)) is not None:
            check_role(entry, Role.SHARD, "reports slices")
            self._failed_memory.corrupted(entry, report, now)
            self._settle(now)
        return self._out.take()

    def drain(self, call: int, caller: Caller, rank: int, now: float) -> list[Action]:
        """Have a shard server give up its slices, then leave; `call` gets the number of slices that it still holds.

        Raises:
            InvalidRequest: there is no such shard server, or no other could take its slices.
            Misuse: parameters are being set or restored.
        """
        self.callers.check_takes_away(caller)
        self._out.reply(call, self._members.drain(rank, now))
        return self._out.take()

    # ------------------------------------------------------------------ credentials

    def revoke(self, call: int, caller: Caller, target: str, reason: str, now: float) -> list[Action]:
        """Revoke credentials; see `RevocationList.revoke`."""
        self.callers.check_takes_away(caller)
        return self.revocations.revoke(call, target, reason, now)

    # ------------------------------------------------------------------ checkpoints

    def save(self, call: int, uri: str, *, background: bool = False) -> list[Action]:
        """Begin a checkpoint of the current version; `call` gets a `snapshots.Snapshot`.

        In the `background` it takes longer, and steps are slowed less. The callers of this and of a restore are checked
        beforehand, by `callers`, since files are read in between.

        Raises:
            Misuse: there is nothing to save.
            Busy: another is being written.
        """
        a, shards = self._assembly, self._assembly.shards()
        if not self._models.registered:
            raise Misuse("there is nothing to save: the shard servers hold no parameters yet")
        saved = []
        for model in (m for m in self._models.registered if not m.holders.out_of_memory):
            spec = model.registration.spec
            if spec is None or not model.state(shards).initialized:
                prefix = self._models.message_prefix(model)
                raise Misuse(f"there is nothing to save: {prefix}the shard servers hold no parameters yet")
            saved.append(
                SavedModel(
                    number=model.number,
                    name=model.name,
                    version=model.version,
                    spec=spec,
                    optimizer=model.optimizer,
                    placement=model.holders.placement,
                    committed=model.committed,
                )
            )
        ranks = [s.rank for s in shards]
        if a.pending_shards:
            raise MemberLost(f"nothing can be saved: the job waits for {a.membership.waiting_for}")
        self._snapshots.check_free()
        order = self._snapshots.begin(call, uri, ranks, saved, background=background)
        self._out.persist([records.orders_record(self._snapshots.last_id)])
        self._out.push([s.session for s in a.roster.of_role(Role.SHARD)], order)
        return self._out.take()

    def snapshot_report(self, session: int, report: SnapshotReport, now: float) -> list[Action]:
        """Take a shard server's report on its files of a checkpoint."""
        if (entry := self._entry(session, now)) is not None:
            check_role(entry, Role.SHARD, "reports files")
            self._snapshots.report(entry.member.rank, report)
        return self._out.take()

    def restore(self, call: int, resumes: Sequence[Resume], now: float) -> list[Action]:
        """Restore models from a checkpoint; `call` gets a `CheckpointInfo` when all servers have loaded it.

        Raises:
            Misuse: the job has no layout yet.
            InvalidRequest: the job does not have one of the models.
        """
        if not self._models.registered:
            raise Misuse("there is nothing to restore into: no worker has registered a layout yet")
        self._restores.order(resumes, now, call)
        return self._out.take()

    def replace(self, call: int, now: float, name: str) -> list[Action]:
        """Have a worker upload other values of a model; `call` gets a `CheckpointInfo` when the servers hold them.

        Raises:
            Misuse: the job has no layout yet.
            InvalidRequest: the job does not have the model.
        """
        model = self._models.named(name)
        version = 0 if model is None else model.version
        return self.restore(call, [Resume(uri=UPLOADED, version=version, model=name)], now)

    def begin_again(self, now: float) -> list[Action]:
        """Begin a job again that `lost_everything`: the next worker uploads first values, for version 0."""
        self._restores.order(
            [Resume(uri=FIRST_VALUES, version=0, model=model.name) for model in self._models.registered], now
        )
        return self._out.take()

    def restore_report(self, session: int, epoch: int, error: AxonError, now: float, *, model: int = 0) -> list[Action]:
        """Take a shard server's report that it could not restore a model."""
        if (entry := self._entry(session, now)) is not None:
            check_role(entry, Role.SHARD, "reports a restore")
            self._restores.failed(entry, model, epoch, error, now)
        return self._out.take()

    # ------------------------------------------------------------------ barriers and the key-value store

    def barrier(
        self, call: int, caller: Caller, name: str, ranks: Sequence[int], now: float, timeout_s: float
    ) -> list[Action]:
        """Have a worker wait for others; `call` gets the generation in which the barrier opened.

        Raises:
            InvalidRequest: the caller is not a worker of the barrier.
            GenerationChanged: the caller is not a member.
        """
        entry = self.callers.member(caller, Role.WORKER, "waits at a barrier")
        self._barriers.arrive(call, entry.member.rank, name, ranks, self._assembly.membership, now, timeout_s)
        self._members.watch_barriers(now)
        return self._out.take()

    def attached(self) -> dict[str, Attachment]:
        """Return by key the attachments of workers to the checkpoints of the job."""
        return attachments.stored(self._kv)

    def kv(self, caller: Caller) -> KeyValues:
        """Return the key-value store, for one operation of `caller`; `flush` returns the actions it caused.

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
        for waiting in (self._kv, self._barriers, self._registrations, self._snapshots, self._restores):
            waiting.cancel(call)
        return self._out.take()

    # ------------------------------------------------------------------ queries

    @property
    def membership(self) -> Membership:
        """The members."""
        return self._assembly.membership

    @property
    def specs(self) -> dict[str, JobSpec]:
        """The registered layouts with their dtypes and policies, by name."""
        return {m.name: m.registration.spec for m in self._models if m.registration.spec is not None}

    @property
    def lost_parameters(self) -> str:
        """The reason for a restore although every shard server is a member, as text; empty when none is needed."""
        return self._assembly.lost_parameters

    @property
    def has_values(self) -> bool:
        """True if the live shard servers hold all parameters of some model."""
        return any(self._assembly.initialized().values())

    @property
    def lost_everything(self) -> bool:
        """True when no shard server has parameters of any model any more."""
        return self._assembly.lost_everything

    @property
    def values_replaced(self) -> bool:
        """True if a model's values ever came from another source than a worker's first values and steps from these."""
        return any(model.holders.parameters.replaced for model in self._models.registered)

    @property
    def position(self) -> tuple[tuple[int, int, int], ...]:
        """The (number, epoch, version) of every model's parameters."""
        return tuple((m.number, m.holders.parameters.epoch, m.version) for m in self._models)

    def longest_wait(self, now: float) -> tuple[float, str]:
        """Return the seconds that workers have waited for others in the current step, and a text that names these."""
        return self._evictions.stragglers.longest_wait(now)

    def step_of(self, name: str) -> tuple[int, int]:
        """Return the number of a model, and its present step.

        Raises:
            InvalidRequest: the job does not have such a model (yet).
        """
        model = self._models.described(name)
        return model.number, model.step

    def members_by_session(self) -> dict[int, Member]:
        """Return the members that have a session, by session."""
        return {entry.session: entry.member for entry in self._assembly.roster if entry.session is not None}

    def rank_of(self, session: int) -> int:
        """Return the rank of the member that a session belongs to; -1 = of none."""
        entry = self._assembly.roster.of_session(session)
        return -1 if entry is None else entry.member.rank

    def is_worker(self, session: int) -> bool:
        """Return True if a session belongs to a worker, or to no member any more."""
        entry = self._assembly.roster.of_session(session)
        return entry is None or entry.member.role is Role.WORKER

    def rank_held_by(self, incarnation: str) -> int | None:
        """Return the rank that a process has; None = it is not a member."""
        entry = self._assembly.roster.get(incarnation)
        return None if entry is None else entry.member.rank

    def is_asynchronous(self, number: int) -> bool:
        """Return True if replicas of a model step asynchronously."""
        model = self._models.get(number)
        return model is not None and model.attempts.asynchronous

    @property
    def id(self) -> str:
        """The id of the job's durable state."""
        return self._assembly.state_id

    def describe(self, caller: Caller, name: str) -> tuple[JobState, Membership]:
        """Return a model and the members, for a process that gathers the model.

        Args:
            caller: the caller; it need not be a member.
            name: of the model; empty = the only one.

        Raises:
            PermissionDenied: it is another job's name.
            InvalidRequest: the job does not have such a model (yet).
        """
        self.callers.check(caller)
        job = self._models.described(name).state(self._assembly.shards(), full=True)
        return dataclasses.replace(job, optimizer=None), self._assembly.membership

    def status(self, now: float | None = None, *, measures: bool = True) -> Status:
        """Return the current status of the job.

        Args:
            now: the time; without it the status has no rates, no waiting time and no phase.
            measures: whether it has the members' measurements.
        """
        a, first, shards = self._assembly, self._models.first, self._assembly.shards()
        counters: dict[str, float] = {**a.counters, **self._models.norms(), "kv_keys": len(self._kv)}
        rates = {m.number: 0.0 if now is None else self.history.steps_per_s(now, m.number) for m in self._models}
        away = self._comeback.away()
        unknown = [member.rank for member in away if member.role is Role.SHARD]
        models = tuple(m.status(shards, self.config.copies, rates[m.number], unknown) for m in self._models.registered)
        report = parse(self._kv.peek(REPORT_KEY))
        rate = 0.0 if first is None else rates[first.number]
        if report is not None and first is not None:
            report = report.at_version(first.version, first.run_began, rate)
        counters |= a.roster.metrics() if measures else {}
        waits = [*a.pending(), *self._members.pending(now), *self._barriers.pending(a.membership)]
        waits += [*self._registrations.pending(), *self._snapshots.pending(), *self._restores.pending()]
        waits += [self.longest_wait(now)[1]] if now is not None else []
        status = Status(
            job=self.config.job,
            membership=a.membership,
            version=0 if first is None else first.version,
            step=0 if first is None else first.step,
            registered=bool(models),
            initialized=all(m.state(shards).initialized for m in self._models),
            parameters=sum(m.parameters for m in models),
            lease_s=self.config.lease_s,
            counters=counters,
            pending=tuple(filter(None, waits)),
            models=models,
            replication=self.config.copies,
            draining=tuple(sorted(a.draining)),
            awaited=frozenset(member.incarnation for member in away),
            progress=report,
            steps_per_s=report.steps_per_s if report is not None and not models else rate,
        )
        return status if now is None else self.history.with_phase(status, now)

    def statistics(self, status: Status, now: float) -> dict[str, float]:
        """Return the numbers of a status that was taken now; see `core.statistics`."""
        return statistics(status, self._assembly.roster, now, self.longest_wait(now)[0])

    # ------------------------------------------------------------------ inside

    def _ended(self, entry: RosterEntry, reason: str) -> None:
        """Fail the waiting calls of a former member."""
        error = GenerationChanged(f"{reason}; who is no member waits for nothing", self._assembly.generation)
        self._kv.lost(entry.member.incarnation, error)
        self._registrations.lost(entry.member.incarnation, error)

    def _settle(self, now: float) -> None:
        """Perform the changes that were deferred to the end of the step or event."""
        self._failed_memory.settle(now)
        self._members.settle(now)

    def _look(self, now: float) -> None:
        """Update the waits in steps, after a vote or report, or a decision."""
        self._evictions.stragglers.look(now)
        self._members.step_deadlines.look(now)

    def _entry(self, session: int, now: float) -> RosterEntry | None:
        return next(iter(self._members.of_sessions([session], now)), None)

    def _timed(self, ranks: Sequence[int], number: int, generation: int, step: int, now: float) -> None:
        """Tell the history that workers have completed their work in a step of all replicas."""
        model = self._models.get(number)
        present = model is not None and (generation, step) == (self._assembly.generation, model.step)
        if model is not None and present and not model.attempts.asynchronous:
            self.history.arrived(ranks, number, step, now)

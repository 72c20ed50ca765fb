"""The coordinator's state machine: what happened goes in, what is to be done comes out. No clock, threads or I/O.

Every method is one event and returns the actions it causes, in order; `Persist`, where there is one, comes first, so
nothing is announced that is not durable. An event that must be refused raises, and has changed nothing. The time is
passed in and only ever compared. What comes from a session that is no member's any more is ignored.

The work is done by the parts: `assembly` (generations and steps), `registration` (layout and parameters), `barriers`,
`kv`, `snapshots`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from axon_ps.coordinator import records
from axon_ps.coordinator.actions import Action, Outbox
from axon_ps.coordinator.admission import find_place
from axon_ps.coordinator.assembly import Assembly
from axon_ps.coordinator.barriers import Barriers
from axon_ps.coordinator.config import CoordinatorConfig
from axon_ps.coordinator.events import UPLOADED, CheckpointInfo, Hello, Ready, Registered, SnapshotReport, Status, Vote
from axon_ps.coordinator.kv import KeyValues
from axon_ps.coordinator.registration import RESTORE_HINT, Registration
from axon_ps.coordinator.roster import Seat, name_of
from axon_ps.coordinator.snapshots import Snapshots
from axon_ps.errors import (
    AxonError,
    Broken,
    CheckpointError,
    ConfigurationError,
    GenerationChanged,
    InvalidRequest,
    MemberLost,
    Misuse,
    PermissionDenied,
    Timeout,
)
from axon_ps.sharding.job import JobSpec
from axon_ps.types import Member, OptimizerSpec, Role


@dataclass(frozen=True, kw_only=True)
class Caller:
    """Who makes a unary call: a member by its incarnation, or an operator without one."""

    job: str
    incarnation: str = ""


@dataclass(frozen=True, kw_only=True)
class Resume:
    """A checkpoint that the job is to begin with, or go back to: what its manifest says."""

    uri: str
    version: int


class CoordinatorState:
    """One job.

    Args:
        config: how it is run.
        now: the time.
        stored: the records of a state store; empty for a new job.
        new_id: random id that a new job's state gets; a stored one keeps its own.

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
        self._check_durable(durable)
        self._registration = Registration(durable.spec, durable.optimizer, durable.parameters, config.num_shards)
        self._assembly = Assembly(config, durable, self._registration, self._out, now)
        self._barriers = Barriers(self._out)
        self._kv = KeyValues(durable.kv, self._out)
        self._snapshots = Snapshots(durable.snapshot_id, self._out)
        self._stored_parameters = records.parameters_record(durable.parameters)
        self._restore_call = -1
        self._incomplete_since = now
        self._state_id = durable.state_id
        self._persist_job()
        self._out.persist(self._assembly.records())

    # ------------------------------------------------------------------ sessions

    def join(self, session: int, role: Role, hello: Hello, now: float) -> list[Action]:
        """A process has opened a stream and says who it is.

        A known incarnation keeps its seat and rank and gets what it missed; its older stream is closed.

        Raises:
            PermissionDenied: it wants another job.
            InvalidRequest: its rank is taken, or its world size is not the job's.
            Busy: the job has no place for it.
        """
        if hello.job != self.config.job:
            raise PermissionDenied(f"this coordinator runs job {self.config.job!r}, not {hello.job!r}")
        a = self._assembly
        seat = a.roster.get(hello.incarnation)
        if seat is None:
            self._admit(session, role, hello, now)
        elif seat.member.role is not role:
            raise InvalidRequest(f"incarnation {hello.incarnation} is a member already, {seat.name}, of another role")
        else:
            replaced = Broken("a newer stream of the same process has taken the place of this one")
            self._out.close(a.roster.attach(seat, session), replaced)
            a.roster.renew(seat, now + self.config.lease_s)
            if role is Role.SHARD:  # an order may have gone with the old stream
                self._snapshots.lost([seat.member.rank], f"the stream of {seat.name} was replaced")
            a.greet(seat)
            self._out.push([session], a.membership)
        return self._out.take()

    def heartbeat(self, session: int, metrics: Mapping[str, float], now: float) -> list[Action]:
        """A member lives."""
        if (seat := self._seat(session, now)) is not None and metrics:
            seat.metrics = dict(metrics)
        return self._out.take()

    def leave(self, session: int, reason: str, now: float) -> list[Action]:
        """A member says goodbye."""
        if (seat := self._seat(session, now)) is not None:
            self._out.close(session)
            self._assembly.counters["leaves"] += 1
            self._lost([seat], f"{seat.name} left" + (f": {reason}" if reason else ""), now)
        return self._out.take()

    def stream_lost(self, session: int, now: float) -> list[Action]:
        """A member's stream has broken: it is gone at once."""
        if (seat := self._seat(session, now)) is not None:
            self._assembly.counters["losses"] += 1
            self._lost([seat], f"{seat.name} was lost: its connection broke", now)
        return self._out.take()

    def tick(self, now: float) -> list[Action]:
        """Time has passed: leases, waiting calls."""
        expired = self._assembly.roster.expired(now)
        if expired:
            reasons = []
            for seat in expired:
                reasons.append(self._silence(seat))
                self._out.close(seat.session, MemberLost(f"{reasons[-1]}; it is no member any more"))
            self._assembly.counters["losses"] += len(expired)
            self._lost(expired, "; ".join(reasons), now)
        if now >= self._join_deadline():
            self._give_up_joining(now)
        self._barriers.tick(now, self._assembly.membership)
        self._kv.tick(now)
        return self._out.take()

    def paused(self, seconds: float) -> None:
        """The coordinator itself stood still (it was suspended, say): nobody's silence meanwhile counts."""
        self._assembly.roster.extend(seconds)

    def next_deadline(self) -> float:
        """When `tick` has something to do; inf when nothing is waited for."""
        return min(
            self._assembly.roster.next_deadline(),
            self._join_deadline(),
            self._barriers.next_deadline(),
            self._kv.next_deadline(),
        )

    # ------------------------------------------------------------------ steps

    def vote(self, session: int, vote: Vote, now: float) -> list[Action]:
        """A worker has pushed everything of a step. One of another step or generation, or a second one, is ignored.

        Raises:
            InvalidRequest: a shard server votes.
        """
        if (seat := self._seat(session, now)) is not None:
            _check_role(seat, Role.WORKER, "votes")
            self._assembly.vote(seat.member.rank, vote)
        return self._out.take()

    def ready(self, session: int, ready: Ready, now: float) -> list[Action]:
        """A shard server has every gradient of a step. One of another step or generation, or a second, is ignored.

        Raises:
            InvalidRequest: a worker says so.
        """
        if (seat := self._seat(session, now)) is not None:
            _check_role(seat, Role.SHARD, "reports gradients")
            self._assembly.ready(seat.member.rank, ready)
        return self._out.take()

    # ------------------------------------------------------------------ what the job is made of

    @property
    def wants_resume(self) -> bool:
        """Whether the first registration must come with the manifest of `config.resume`."""
        return bool(self.config.resume) and self._registration.spec is None

    def register(
        self,
        call: int,
        caller: Caller,
        spec: JobSpec | None,
        optimizer: OptimizerSpec | None,
        resume: Resume | None = None,
        *,
        now: float,
    ) -> list[Action]:
        """A worker gives the job its layout or optimizer, or checks its own against the job's.

        Args:
            call: gets a `Registered`.
            caller: the worker.
            spec: layout and how it travels.
            optimizer: the optimizer.
            resume: what to begin with instead of uploaded values; used by the first spec only.
            now: the time.

        Raises:
            LayoutMismatch: it differs from what the job has.
            InvalidRequest: it cannot be.
            Misuse: an optimizer comes before any layout.
            GenerationChanged: the caller is no member.
        """
        seat = self._member(caller, Role.WORKER, "registers")
        r, rank = self._registration, seat.member.rank
        if spec is None and optimizer is None:
            raise InvalidRequest(f"worker {rank} registers neither a layout nor an optimizer")
        new_spec = spec if spec is not None and r.check_spec(spec, rank) else None
        new_optimizer = r.check_optimizer(optimizer, spec or r.spec, rank) if optimizer is not None else None
        if new_spec is not None:
            r.set_spec(new_spec)
            self._assembly.begin_attempts()
            self._out.persist([records.spec_record(new_spec)])
        if new_optimizer is not None:
            r.optimizer = new_optimizer
            self._out.persist([records.optimizer_record(new_optimizer)])
        resumes = new_spec is not None and resume is not None
        upload = spec is not None and not resumes and self._claim_upload(caller)
        self._persist_parameters()
        if new_spec is not None or new_optimizer is not None:
            self._announce_registration(new_spec, resume, rank, now)
        self._out.reply(
            call,
            Registered(
                first=new_spec is not None or new_optimizer is not None,
                initialized=self._assembly.job_state().initialized,
                version=self._assembly.version,
                upload=upload,
                generation=self._assembly.generation,
            ),
        )
        return self._out.take()

    def initialized(self, session: int, version: int, epoch: int, now: float) -> list[Action]:
        """A shard server holds all its parameters.

        Raises:
            InvalidRequest: a worker says so, or the version is not the job's.
        """
        if (seat := self._seat(session, now)) is not None:
            _check_role(seat, Role.SHARD, "holds parameters")
            a, r = self._assembly, self._registration
            if r.initialized_by(seat.member, version, epoch, a.version):
                if r.all_hold(a.shards()):
                    self._all_initialized()
                self._persist_parameters()
        return self._out.take()

    # ------------------------------------------------------------------ checkpoints

    def save(self, call: int, caller: Caller, uri: str) -> list[Action]:
        """Somebody wants a checkpoint of the current version; `call` gets a `snapshots.Snapshot`.

        Raises:
            Misuse: there is nothing to save.
            Busy: another is being written.
        """
        self.check_caller(caller)
        a, r = self._assembly, self._registration
        if r.spec is None or not a.job_state().initialized:
            raise Misuse("there is nothing to save: the shard servers hold no parameters yet")
        ranks = [s.rank for s in a.shards()]
        if len(ranks) < self.config.num_shards:
            raise MemberLost(f"nothing can be saved: the job waits for {a.membership.waiting_for}")
        self._snapshots.check_free()
        order = self._snapshots.begin(call, uri, a.version, ranks, r.spec, r.optimizer)
        self._out.persist([records.orders_record(self._snapshots.last_id)])
        self._out.push([s.session for s in a.roster.of_role(Role.SHARD)], order)
        return self._out.take()

    def snapshot_report(self, session: int, report: SnapshotReport, now: float) -> list[Action]:
        """A shard server has written its part of a checkpoint, or could not."""
        if (seat := self._seat(session, now)) is not None:
            _check_role(seat, Role.SHARD, "reports files")
            self._snapshots.report(seat.member.rank, report)
        return self._out.take()

    def restore(self, call: int, caller: Caller, resume: Resume, now: float) -> list[Action]:
        """Somebody wants the job to go back to a checkpoint; `call` gets a `CheckpointInfo` when all have loaded it.

        Raises:
            Misuse: the job has no layout yet.
        """
        self.check_caller(caller)
        if self._registration.spec is None:
            raise Misuse("there is nothing to restore into: no worker has registered a layout yet")
        self._order_restore(resume, now)
        self._restore_call = call
        return self._out.take()

    def replace(self, call: int, caller: Caller, now: float) -> list[Action]:
        """Somebody will upload other values; `call` gets a `CheckpointInfo` when the servers hold all of them.

        Raises:
            Misuse: the job has no layout yet.
        """
        return self.restore(call, caller, Resume(uri=UPLOADED, version=self._assembly.version), now)

    def restore_report(self, session: int, epoch: int, error: AxonError, now: float) -> list[Action]:
        """A shard server could not restore."""
        if (seat := self._seat(session, now)) is not None:
            _check_role(seat, Role.SHARD, "reports a restore")
            order = self._registration.parameters.restore
            if order is not None and order.epoch == epoch:
                what = f"shard server {seat.member.rank} could not restore {order.uri}: {error}"
                self._registration.fail_restore(f"{what}; {RESTORE_HINT}")
                self._persist_parameters()
                self._answer_restore(type(error)(what))
                self._change(what, now=now)
        return self._out.take()

    # ------------------------------------------------------------------ barriers and the key-value store

    def barrier(
        self, call: int, caller: Caller, name: str, ranks: Sequence[int], now: float, timeout_s: float
    ) -> list[Action]:
        """A worker waits for others; `call` gets the generation in which the barrier opened.

        Raises:
            InvalidRequest: the caller is no worker of the barrier.
            GenerationChanged: the caller is no member.
        """
        seat = self._member(caller, Role.WORKER, "waits at a barrier")
        self._barriers.arrive(call, seat.member.rank, name, ranks, self._assembly.membership, now, timeout_s)
        return self._out.take()

    def kv(self, caller: Caller) -> KeyValues:
        """The key-value store, for one operation of `caller`; `flush` gives the actions it caused.

        Raises:
            GenerationChanged: the caller is neither a member nor an operator.
        """
        self.check_caller(caller)
        if caller.incarnation:
            self._member(caller)
        return self._kv

    def flush(self) -> list[Action]:
        """What has been caused since the last event."""
        return self._out.take()

    def cancel(self, call: int) -> list[Action]:
        """Whoever made this call does not wait any more."""
        self._kv.cancel(call)
        self._barriers.cancel(call)
        self._snapshots.cancel(call)
        if self._restore_call == call:
            self._restore_call = -1
        return self._out.take()

    # ------------------------------------------------------------------ looking

    def check_caller(self, caller: Caller) -> None:
        """Refuse who asks for another job; an operator may leave the name out.

        Raises:
            PermissionDenied: it is another job's name.
        """
        if caller.job != self.config.job and (caller.job or caller.incarnation):
            raise PermissionDenied(f"this coordinator runs job {self.config.job!r}, not {caller.job!r}")

    @property
    def spec(self) -> JobSpec | None:
        """Layout and how it travels, once registered."""
        return self._registration.spec

    def status(self) -> Status:
        """What the job looks like now."""
        a, r = self._assembly, self._registration
        counters: dict[str, float] = {**a.counters, "last_grad_norm": a.last_norm, "kv_keys": len(self._kv)}
        for seat in a.roster:
            for name, value in seat.metrics.items():
                counters[f"{seat.member.role.value}/{seat.member.rank}/{name}"] = value
        order = r.parameters.restore
        restoring = [f"the restore of {order.uri} waits for the shard servers"] if order is not None else []
        return Status(
            job=self.config.job,
            membership=a.membership,
            version=a.version,
            step=a.step,
            registered=r.spec is not None,
            initialized=a.job_state().initialized,
            parameters=r.spec.layout.numel if r.spec is not None else 0,
            lease_s=self.config.lease_s,
            counters=counters,
            pending=(*a.pending(), *self._barriers.pending(a.membership), *self._snapshots.pending(), *restoring),
        )

    # ------------------------------------------------------------------ inside

    def _seat(self, session: int, now: float) -> Seat | None:
        """Whose session this is; that it speaks renews its lease."""
        seat = self._assembly.roster.of_session(session)
        if seat is not None:
            self._assembly.roster.renew(seat, now + self.config.lease_s)
        return seat

    def _member(self, caller: Caller, role: Role | None = None, does: str = "") -> Seat:
        self.check_caller(caller)
        seat = self._assembly.roster.get(caller.incarnation)
        if seat is None:
            who = f"incarnation {caller.incarnation}" if caller.incarnation else "an operator"
            words = f"{who} is no member of generation {self._assembly.generation}; join with a session first"
            raise GenerationChanged(words, self._assembly.generation)
        if role is not None:
            _check_role(seat, role, does)
        return seat

    def _admit(self, session: int, role: Role, hello: Hello, now: float) -> None:
        """Seat a process that is new, or was given up."""
        a = self._assembly
        place = find_place(self.config, a, self._registration, role, hello)
        if role is Role.WORKER and not a.world_size:
            a.world_size = hello.world_size
            self._persist_job()
        displaced = [] if place.displaced is None else [place.displaced]
        for seat in displaced:
            back = f"the shard server that holds the parameters of rank {place.member.rank} is back"
            self._out.close(seat.session, Broken(back))
        a.counters["joins"] += 1
        reason = f"{name_of(place.member)} joined"
        self._change(reason, lost=displaced, joined=place.member, session=session, now=now)

    def _lost(self, seats: Sequence[Seat], reason: str, now: float) -> None:
        self._change(reason, lost=seats, now=now)
        self._snapshots.lost([s.member.rank for s in seats if s.member.role is Role.SHARD], reason)

    def _change(
        self,
        reason: str,
        *,
        lost: Sequence[Seat] = (),
        joined: Member | None = None,
        session: int = -1,
        now: float = 0.0,
    ) -> None:
        a = self._assembly
        before = a.membership
        a.change(reason, lost=lost, joined=joined, session=session, now=now)
        if before.complete or not before.workers:
            self._incomplete_since = now
        self._barriers.generation_changed(
            a.membership, [s.member.rank for s in lost if s.member.role is Role.WORKER], reason
        )

    def _silence(self, seat: Seat) -> str:
        if seat.session is None:
            return f"{seat.name} did not come back within {self.config.lease_s:g} s after the coordinator's restart"
        return f"{seat.name} was silent for {self.config.lease_s:g} s"

    def _join_deadline(self) -> float:
        a = self._assembly
        waiting = a.was_complete and not a.membership.complete and a.membership.workers
        return self._incomplete_since + self.config.join_timeout_s if waiting else math.inf

    def _give_up_joining(self, now: float) -> None:
        """Nobody came in the place of who was lost: tell the workers, which end with a clear error."""
        a = self._assembly
        reason = f"the job waited {self.config.join_timeout_s:g} s for {a.membership.waiting_for}"
        workers = a.roster.of_role(Role.WORKER)
        for seat in workers:
            self._out.close(seat.session, Timeout(reason))
        self._lost(workers, reason, now)

    def _announce_registration(self, new_spec: JobSpec | None, resume: Resume | None, rank: int, now: float) -> None:
        if new_spec is not None and resume is not None:
            self._order_restore(resume, now)
            return
        self._assembly.announce_job()
        if new_spec is not None and new_spec.replica_is_node:  # replicas are numbered otherwise from now on
            self._change(f"worker {rank} registered a layout in which a node is a replica", now=now)

    def _claim_upload(self, caller: Caller) -> bool:
        uploader = self._assembly.roster.get(self._registration.parameters.uploader)
        return self._registration.claim_upload(caller.incarnation, uploader is not None)

    def _order_restore(self, resume: Resume, now: float) -> None:
        a, r = self._assembly, self._registration
        reason = f"checkpoint {resume.uri} is restored"
        self._answer_restore(CheckpointError(f"given up: {reason} instead"))
        self._snapshots.abandon(CheckpointError(f"the checkpoint was not written: {reason}"))
        a.abort(reason)
        order = r.begin_restore(resume.uri, resume.version)
        a.version = resume.version
        self._persist_parameters()
        a.announce_job()
        self._out.push([s.session for s in a.roster.of_role(Role.SHARD)], order)
        self._change(reason, now=now)

    def _all_initialized(self) -> None:
        p = self._registration.parameters
        order, p.restore, p.initialized = p.restore, None, True
        self._assembly.announce_job()
        if order is not None:
            self._answer_restore(CheckpointInfo(uri=order.uri, version=order.version))

    def _answer_restore(self, result: object) -> None:
        call, self._restore_call = self._restore_call, -1
        if call >= 0:
            self._out.reply(call, result)

    def _persist_job(self) -> None:
        self._out.persist(
            [records.job_record(self._state_id, self.config.job, self._assembly.world_size, self.config.num_shards)]
        )

    def _persist_parameters(self) -> None:
        record = records.parameters_record(self._registration.parameters)
        if record != self._stored_parameters:
            self._stored_parameters = record
            self._out.persist([record])

    def _check_durable(self, durable: records.Durable) -> None:
        if durable.job != self.config.job:
            raise ConfigurationError(
                f"the state store holds job {durable.job!r}, not {self.config.job!r}; give each job its own"
            )
        if durable.spec is not None and durable.num_shards != self.config.num_shards:
            raise ConfigurationError(
                f"the job was cut over {durable.num_shards} shard servers, not {self.config.num_shards}; start the "
                "coordinator as before, or with a new state store and resume from a checkpoint"
            )


def _check_role(seat: Seat, role: Role, does: str) -> None:
    if seat.member.role is not role:
        raise InvalidRequest(f"{seat.name} {does}; only a {role.value} may")

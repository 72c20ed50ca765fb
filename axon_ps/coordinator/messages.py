"""Conversions between the session's messages and `wire.events`, in both directions.

Every field of a message is checked here once, so that the state machine works with valid values.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Sequence

from axon_ps.coordinator.core.records import restore_from_proto, restore_to_proto
from axon_ps.coordinator.core.restart.knowledge import Knowledge, ModelKnowledge
from axon_ps.coordinator.core.roster import MAX_MEMBERS
from axon_ps.coordinator.span_messages import order_from_proto, order_to_proto
from axon_ps.errors import InvalidRequest
from axon_ps.observe.log_buffer import Logged
from axon_ps.observe.tracing.span import TraceOrder
from axon_ps.rpc.status import error_from_detail, error_to_detail
from axon_ps.texts import printable
from axon_ps.types import Decision, Membership, ModelProgress, Role
from axon_ps.wire import codec
from axon_ps.wire.build import Build
from axon_ps.wire.committed import checked
from axon_ps.wire.differences import announced, difference_to_proto
from axon_ps.wire.events import (
    MAX_BLOCKS,
    CheckpointReply,
    CheckpointStatus,
    Connectivity,
    Copied,
    Corrupted,
    JobPhase,
    JobState,
    JoinRequest,
    KnowledgeRequest,
    KnownNames,
    ModelPosition,
    ModelStatus,
    Position,
    Ready,
    RestoreOrder,
    RevokedNames,
    ServerEvent,
    ServerMemory,
    SnapshotFile,
    SnapshotOrder,
    SnapshotReport,
    Status,
    StepDue,
    Vote,
    Welcome,
)
from axon_ps.wire.report import Report
from axon_ps.wire.v1 import (
    checkpoint_pb2,
    logs_pb2,
    membership_pb2,
    memory_pb2,
    placement_pb2,
    policy_pb2,
    revocation_pb2,
    session_pb2,
    status_pb2,
)

MAX_SNAPSHOT_FILES = 1 << 16
"""Most files that one shard server may report for one checkpoint."""

MAX_RANK = (1 << 31) - 1
"""Highest rank that a coordinator may give."""

MIN_LEASE_S = 0.01
"""Shortest lease that it may give."""

LEAST_WEIGHT = 1e-12
"""Least weight of a vote, unless it is 0; the largest is the reciprocal."""
MAX_KNOWN_NAMES = 1 << 10
"""Most optimizers, and most compressors, that a shard server may list."""

_MAX_ARRAY = 64  # characters of an array's name

_INCARNATION = re.compile(r"[0-9a-f]{32}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def incarnation_from_proto(text: str) -> str:
    """Return an incarnation from the wire.

    Raises:
        InvalidRequest: it is not 32 hex digits.
    """
    if not _INCARNATION.fullmatch(text):
        raise InvalidRequest(f"incarnation {text[:64]!r} is not 32 hex digits, such as uuid.uuid4().hex")
    return text


def join_to_proto(request: JoinRequest, role: Role) -> session_pb2.SessionRequest:
    """Return the first message of a session."""
    known = request.known
    return session_pb2.SessionRequest(
        join=session_pb2.Join(
            job=request.job,
            role=codec.role_to_proto(role),
            incarnation=request.incarnation,
            node=request.node,
            address=request.address,
            requested_rank=request.requested_rank,
            world_size=request.world_size,
            standby=request.standby,
            optimizers=() if known is None else sorted(known.optimizers),
            compressors=() if known is None else sorted(known.compressors),
            memory=None if request.memory is None else memory_pb2.Memory(**vars(request.memory)),
            state_id=request.state_id,
            differences=True,
            position=_position_to_proto(request.position),
            build=_build_to_proto(request.build),
            connectivity=None if request.connectivity is None else connectivity_to_proto(request.connectivity),
        )
    )


def join_from_proto(message: session_pb2.Join) -> tuple[Role, JoinRequest]:
    """Return the role of a joining process, and its request.

    Raises:
        InvalidRequest: a field is malformed, a shard server gives no address, or it lists too many names.
    """
    role = codec.role_from_proto(message.role)
    if role is Role.SHARD and not message.address:
        raise InvalidRequest("a shard server joins without an address; workers could not reach it")
    return role, JoinRequest(
        job=codec.name_from_proto(message.job, "the job", empty=True),
        incarnation=incarnation_from_proto(message.incarnation),
        node=codec.name_from_proto(message.node, "the node"),
        address=codec.name_from_proto(message.address, "the address", empty=True),
        requested_rank=message.requested_rank,
        world_size=message.world_size,
        standby=message.standby,
        known=_known_from_proto(message) if message.optimizers or message.compressors else None,
        memory=_memory_from_proto(message.memory) if message.HasField("memory") else None,
        state_id=codec.name_from_proto(message.state_id, "the state's id", empty=True),
        position=_position_from_proto(message.position),
        build=_build_from_proto(message.build),
        connectivity=connectivity_from_proto(message),
    )


def connectivity_to_proto(connectivity: Connectivity) -> membership_pb2.Connectivity:
    """Return a member's report of whom it reaches, as a message."""
    return membership_pb2.Connectivity(
        unreachable=sorted(connectivity.unreachable), reached=sorted(connectivity.reached)
    )


def connectivity_from_proto(carrier: session_pb2.Join | membership_pb2.Heartbeat) -> Connectivity | None:
    """Return the report of whom a member reaches, from a message that may have one; None = none.

    Raises:
        InvalidRequest: it has a malformed incarnation, or names more members than a job can have.
    """
    if not carrier.HasField("connectivity"):
        return None
    message = carrier.connectivity
    if (named := len(message.unreachable) + len(message.reached)) > 2 * MAX_MEMBERS:
        raise InvalidRequest(f"a member names {named} others; a job has at most {MAX_MEMBERS} of each role")
    return Connectivity(
        unreachable=frozenset(map(incarnation_from_proto, message.unreachable)),
        reached=frozenset(map(incarnation_from_proto, message.reached)),
    )


def _build_to_proto(build: Build) -> membership_pb2.Build:
    return membership_pb2.Build(version=build.version, protocol=build.protocol)


def _build_from_proto(message: membership_pb2.Build) -> Build:
    return Build(
        version=codec.name_from_proto(message.version, "the version of axon_ps", empty=True), protocol=message.protocol
    )


def _position_to_proto(position: Position) -> membership_pb2.Position:
    return membership_pb2.Position(
        generation=position.generation,
        models=[membership_pb2.ModelPosition(**vars(model)) for model in position.models],
        released=sorted(position.released),
        snapshot_id=position.snapshot_id,
    )


def _position_from_proto(message: membership_pb2.Position) -> Position:
    return Position(
        generation=message.generation,
        models=tuple(
            ModelPosition(
                model=m.model,
                epoch=m.epoch,
                initialized=m.initialized,
                step=m.step,
                version=m.version,
                placement=m.placement,
            )
            for m in message.models
        ),
        released=frozenset(message.released),
        snapshot_id=message.snapshot_id,
    )


def knowledge_to_proto(known: Knowledge) -> session_pb2.SessionRequest:
    """Return a shard server's knowledge, as the events that it comes from."""
    events: list[ServerEvent] = [known.membership, RevokedNames(reasons=known.revoked)]
    events += [SnapshotOrder(id=known.snapshot_id, uri="-", version=0)]
    events += [JobState(model=number, released=True) for number in sorted(known.released)]
    for model in known.models:
        events += [model.state, *model.decisions, *([] if model.restore is None else [model.restore])]
    progress = [
        ModelProgress(model=model.state.model, step=model.step, version=model.state.version) for model in known.models
    ]
    return session_pb2.SessionRequest(
        knowledge=session_pb2.Knowledge(
            events=map(event_to_proto, events), progress=map(codec.progress_to_proto, progress)
        )
    )


def knowledge_from_proto(message: session_pb2.Knowledge) -> Knowledge:
    """Return a shard server's knowledge, from a message.

    Raises:
        InvalidRequest: an event is malformed, or the membership is missing.
    """
    events = [event_from_proto(event) for event in message.events]
    memberships = [event for event in events if isinstance(event, Membership)]
    if not memberships:
        raise InvalidRequest("a shard server tells what it knows without the members")
    decisions = [event for event in events if isinstance(event, Decision)]
    restores = {event.model: event for event in events if isinstance(event, RestoreOrder)}
    states = {event.model: event for event in events if isinstance(event, JobState)}
    return Knowledge(
        membership=memberships[-1],
        models=tuple(
            ModelKnowledge(
                state=states[p.model],
                step=p.step,
                decisions=tuple(d for d in decisions if d.model == p.model),
                restore=restores.get(p.model),
            )
            for p in map(codec.progress_from_proto, message.progress)
            if p.model in states and not states[p.model].released
        ),
        released=frozenset(number for number, state in states.items() if state.released),
        snapshot_id=max((event.id for event in events if isinstance(event, SnapshotOrder)), default=0),
        revoked={k: v for event in events if isinstance(event, RevokedNames) for k, v in event.reasons.items()},
    )


def _memory_from_proto(message: memory_pb2.Memory) -> ServerMemory:
    return ServerMemory(
        available_bytes=message.available_bytes,
        resident_bytes=message.resident_bytes,
        pool=codec.name_from_proto(message.pool, "the memory's pool", empty=True),
    )


def _known_from_proto(message: session_pb2.Join) -> KnownNames:
    if (listed := max(len(message.optimizers), len(message.compressors))) > MAX_KNOWN_NAMES:
        raise InvalidRequest(f"a shard server lists {listed} names of one kind; at most {MAX_KNOWN_NAMES} are allowed")
    return KnownNames(
        optimizers=frozenset(codec.name_from_proto(name, "an optimizer's name") for name in message.optimizers),
        compressors=frozenset(codec.name_from_proto(name, "a compressor's name") for name in message.compressors),
    )


def vote_to_proto(vote: Vote) -> session_pb2.SessionRequest:
    """Return a worker's vote as a message."""
    return session_pb2.SessionRequest(
        vote=session_pb2.Vote(
            generation=vote.generation,
            step=vote.step,
            max_norm=vote.max_norm,
            hyper=codec.hypers_to_proto(vote.hyper),
            version=vote.version,
            model=vote.model,
            copy=None if vote.copy is None else codec.copy_to_proto(vote.copy),
            blocked=vote.blocked,
            commit=vote.commit,
            traceparent=vote.traceparent,
            weight=vote.weight,
            untouched=vote.untouched,
            withdrawn=vote.withdrawn,
            optimizer=None if vote.optimizer is None else codec.change_to_proto(vote.optimizer),
        )
    )


def vote_from_proto(message: session_pb2.Vote) -> Vote:
    """Return a worker's vote, from a message; its values are checked with the step.

    Raises:
        InvalidRequest: a hyperparameter's name or a weight is malformed, or there is too much to commit.
    """
    weight = message.weight if message.HasField("weight") else None
    if weight and not LEAST_WEIGHT <= weight <= 1 / LEAST_WEIGHT:  # so that quotients by it are finite
        raise InvalidRequest(
            f"a vote's weight is {weight}; it must be 0, or from {LEAST_WEIGHT:g} to {1 / LEAST_WEIGHT:g}"
        )
    return Vote(
        generation=message.generation,
        step=message.step,
        max_norm=message.max_norm,
        hyper=codec.hypers_from_proto(message.hyper),
        version=message.version,
        model=message.model,
        copy=codec.copy_from_proto(message.copy) if message.HasField("copy") else None,
        blocked=message.blocked,
        commit=checked(dict(message.commit)),
        traceparent=message.traceparent,
        weight=weight,
        untouched=tuple(message.untouched),
        withdrawn=message.withdrawn,
        optimizer=codec.change_from_proto(message.optimizer) if message.HasField("optimizer") else None,
    )


def ready_to_proto(ready: Ready) -> session_pb2.SessionRequest:
    """Return a shard server's report that it has all gradients, as a message."""
    return session_pb2.SessionRequest(
        ready=session_pb2.Ready(
            generation=ready.generation,
            step=ready.step,
            sums_of_squares=ready.sums_of_squares,
            replica=ready.replica,
            model=ready.model,
            placement=ready.placement,
            digests=[placement_pb2.Digest(slice=number, value=value) for number, value in ready.digests.items()],
        )
    )


def step_message_to_proto(message: Vote | Ready) -> session_pb2.SessionRequest:
    """Return a worker's vote or a shard server's report as a message."""
    return vote_to_proto(message) if isinstance(message, Vote) else ready_to_proto(message)


def ready_from_proto(message: session_pb2.Ready) -> Ready:
    """Return a shard server's report that it has all gradients, from a message.

    Raises:
        InvalidRequest: a sum of squares is negative.
    """
    sums = tuple(message.sums_of_squares)
    if any(value < 0 for value in sums):
        raise InvalidRequest(f"a sum of squares is {min(sums)}; it is 0 or more")
    return Ready(
        generation=message.generation,
        step=message.step,
        sums_of_squares=sums,
        replica=message.replica,
        model=message.model,
        placement=message.placement,
        digests={digest.slice: digest.value for digest in message.digests},
    )


def copied_to_proto(copied: Copied) -> session_pb2.SessionRequest:
    """Return a shard server's report that it has received slices, as a message."""
    return session_pb2.SessionRequest(
        copied=placement_pb2.Copied(
            model=copied.model, epoch=copied.epoch, slices=copied.slices, placement=copied.placement
        )
    )


def copied_from_proto(message: placement_pb2.Copied) -> Copied:
    """Return a shard server's report that it has received slices, from a message."""
    return Copied(model=message.model, epoch=message.epoch, slices=tuple(message.slices), placement=message.placement)


def corrupted_to_proto(report: Corrupted) -> session_pb2.SessionRequest:
    """Return a shard server's report that memory of a slice failed, as a message."""
    blocks = [placement_pb2.Corrupted.Block(array=array, begin=begin, end=end) for array, begin, end in report.blocks]
    return session_pb2.SessionRequest(
        corrupted=placement_pb2.Corrupted(
            model=report.model,
            epoch=report.epoch,
            slice=report.slice,
            placement=report.placement,
            generation=report.generation,
            lost=report.lost,
            version=report.version,
            blocks=blocks,
        )
    )


def corrupted_from_proto(message: placement_pb2.Corrupted) -> Corrupted:
    """Return a shard server's report that memory of a slice failed, from a message."""
    return Corrupted(
        model=message.model,
        epoch=message.epoch,
        slice=message.slice,
        placement=message.placement,
        generation=message.generation,
        lost=message.lost,
        version=message.version,
        blocks=tuple(
            (printable(block.array, _MAX_ARRAY), block.begin, block.end) for block in message.blocks[:MAX_BLOCKS]
        ),
    )


def initialized_to_proto(version: int, epoch: int, model: int = 0) -> session_pb2.SessionRequest:
    """Return a shard server's report that it holds its parameters, as a message."""
    return session_pb2.SessionRequest(initialized=session_pb2.Initialized(version=version, epoch=epoch, model=model))


def snapshot_report_to_proto(report: SnapshotReport) -> session_pb2.SessionRequest:
    """Return a shard server's report on its checkpoint files, as a message."""
    message = checkpoint_pb2.SnapshotReport(
        id=report.id,
        files=[
            checkpoint_pb2.SnapshotFile(name=f.name, sha256=f.sha256, bytes=f.bytes, model=f.model)
            for f in report.files
        ],
    )
    if report.error is not None:
        message.error.CopyFrom(error_to_detail(report.error))
    return session_pb2.SessionRequest(snapshot=message)


def files_to_proto(files: Iterable[SnapshotFile]) -> list[checkpoint_pb2.SnapshotFile]:
    """Return files of a checkpoint as messages."""
    return [checkpoint_pb2.SnapshotFile(name=f.name, sha256=f.sha256, bytes=f.bytes, model=f.model) for f in files]


def files_from_proto(files: Sequence[checkpoint_pb2.SnapshotFile]) -> tuple[SnapshotFile, ...]:
    """Return files of a checkpoint from messages.

    Raises:
        InvalidRequest: a file's name or hash is malformed, or there are too many.
    """
    if len(files) > MAX_SNAPSHOT_FILES:
        raise InvalidRequest(f"{len(files)} files are reported; at most {MAX_SNAPSHOT_FILES} are allowed")
    for f in files:
        codec.name_from_proto(f.name, "a checkpoint file's name")
        if not _SHA256.fullmatch(f.sha256):
            raise InvalidRequest(f"the sha256 of file {f.name!r} is {f.sha256[:80]!r}; it must be 64 hex digits")
    return tuple(SnapshotFile(name=f.name, sha256=f.sha256, bytes=f.bytes, model=f.model) for f in files)


def checkpoint_to_proto(info: CheckpointReply) -> checkpoint_pb2.CheckpointReply:
    """Return a description of a checkpoint as a message."""
    return checkpoint_pb2.CheckpointReply(
        uri=info.uri,
        version=info.version,
        bytes=info.bytes,
        extra_json=info.extra_json,
        versions=info.versions,
        optimizer=info.optimizer,
        hyper=codec.hypers_to_proto(info.hyper),
        states=files_to_proto(info.states),
    )


def checkpoint_from_proto(message: checkpoint_pb2.CheckpointReply) -> CheckpointReply:
    """Return a description of a checkpoint from a message.

    Raises:
        InvalidRequest: a name or a hash is malformed.
    """
    return CheckpointReply(
        uri=message.uri,
        version=message.version,
        bytes=message.bytes,
        extra_json=message.extra_json,
        versions=dict(message.versions),
        optimizer=codec.name_from_proto(message.optimizer, "an optimizer's name", empty=True),
        hyper=codec.hypers_from_proto(message.hyper),
        states=files_from_proto(message.states),
    )


def snapshot_report_from_proto(message: checkpoint_pb2.SnapshotReport) -> SnapshotReport:
    """Return a shard server's report on its checkpoint files, from a message.

    Raises:
        InvalidRequest: a file's name or hash is malformed, or there are too many.
    """
    return SnapshotReport(
        id=message.id,
        files=files_from_proto(message.files),
        error=error_from_detail(message.error) if message.HasField("error") else None,
    )


def job_to_proto(job: JobState) -> session_pb2.JobEvent:
    """Return the state of a model, as the event that announces it."""
    return session_pb2.JobEvent(
        spec=None if job.spec is None else codec.job_spec_to_proto(job.spec),
        optimizer=None if job.optimizer is None else codec.optimizer_to_proto(job.optimizer),
        initialized=job.initialized,
        version=job.version,
        epoch=job.epoch,
        model=job.model,
        name=job.name,
        copied=job.copied,
        released=job.released,
        placement=None if job.placement is None else codec.placement_to_proto(job.placement),
        committed=job.committed,
        no_room=job.no_room,
    )


def job_from_proto(message: session_pb2.JobEvent) -> JobState:
    """Return the state of a model, from the event that announces it.

    Raises:
        InvalidRequest: the layout or the optimizer is malformed, or the placement is of other slices.
    """
    spec = codec.job_spec_from_proto(message.spec) if message.HasField("spec") else None
    placement = codec.placement_from_proto(message.placement) if message.HasField("placement") else None
    if spec is not None and placement is not None:
        placement.check(spec.plan(placement.num_cuts))
    return JobState(
        spec=spec,
        optimizer=codec.optimizer_from_proto(message.optimizer) if message.HasField("optimizer") else None,
        initialized=message.initialized,
        version=message.version,
        epoch=message.epoch,
        model=message.model,
        name=codec.name_from_proto(message.name, "a model's name", empty=True),
        copied=message.copied,
        released=message.released,
        placement=placement,
        committed=dict(message.committed),
        no_room=message.no_room,
    )


def event_to_proto(event: ServerEvent, before: Membership | None = None) -> session_pb2.SessionEvent:
    """Return an event of the coordinator, as a message: a membership as the difference to the one `before`, if any."""
    if isinstance(event, Decision):
        return session_pb2.SessionEvent(decision=codec.decision_to_proto(event))
    if isinstance(event, Membership):
        if before is not None and (difference := difference_to_proto(before, event)) is not None:
            return session_pb2.SessionEvent(difference=difference)
        return session_pb2.SessionEvent(membership=codec.membership_to_proto(event))
    if isinstance(event, JobState):
        return session_pb2.SessionEvent(job=job_to_proto(event))
    if isinstance(event, KnowledgeRequest):
        return session_pb2.SessionEvent(request_knowledge=True)
    if isinstance(event, StepDue):
        due = policy_pb2.StepDue(generation=event.generation, step=event.step, model=event.model)
        return session_pb2.SessionEvent(due=due)
    if isinstance(event, SnapshotOrder):
        return session_pb2.SessionEvent(
            snapshot=checkpoint_pb2.SnapshotOrder(
                id=event.id,
                uri=event.uri,
                version=event.version,
                models=map(codec.progress_to_proto, event.models),
                background=event.background,
            )
        )
    if isinstance(event, RestoreOrder):
        return session_pb2.SessionEvent(restore=restore_to_proto(event))
    if isinstance(event, TraceOrder):
        return session_pb2.SessionEvent(trace=order_to_proto(event))
    if isinstance(event, RevokedNames):
        return session_pb2.SessionEvent(revocations=revocation_pb2.RevocationsEvent(reasons=event.reasons))
    return session_pb2.SessionEvent(
        welcome=membership_pb2.Welcome(
            rank=event.rank,
            lease_s=event.lease_s,
            world_size=event.world_size,
            num_shards=event.num_shards,
            state_id=event.state_id,
            released=event.released,
            build=_build_to_proto(event.build),
        )
    )


def event_from_proto(message: session_pb2.SessionEvent, before: Membership | None = None) -> ServerEvent | None:
    """Return an event of the coordinator, from a message; None for an event of a newer protocol.

    Args:
        message: from a stream.
        before: the newest membership from that stream; None = none.

    Raises:
        InvalidRequest: the event is malformed.
    """
    kind = message.WhichOneof("message")
    if kind == "decision":
        return codec.decision_from_proto(message.decision)
    if kind == "membership":
        return announced(message.membership, before)
    if kind == "difference":
        return announced(message.difference, before)
    if kind == "job":
        return job_from_proto(message.job)
    if kind == "request_knowledge":
        return KnowledgeRequest()
    if kind == "due":
        due = message.due
        return StepDue(generation=due.generation, step=due.step, model=due.model)
    if kind == "snapshot":
        order = message.snapshot
        models = tuple(map(codec.progress_from_proto, order.models))
        return SnapshotOrder(
            id=order.id,
            uri=codec.name_from_proto(order.uri, "the checkpoint's URI"),
            version=order.version,
            models=models,
            background=order.background,
        )
    if kind == "restore":
        return restore_from_proto(message.restore)
    if kind == "revocations":
        return RevokedNames(reasons=dict(message.revocations.reasons))
    if kind == "trace":
        return order_from_proto(message.trace)
    if kind == "welcome":
        return _welcome_from_proto(message.welcome)
    return None


def _welcome_from_proto(welcome: membership_pb2.Welcome) -> Welcome:
    if welcome.rank > MAX_RANK:  # it is requested again after a restart, as a signed 32-bit number
        raise InvalidRequest(f"the coordinator gives rank {welcome.rank}; at most {MAX_RANK} can be asked for again")
    if not MIN_LEASE_S <= welcome.lease_s < math.inf:  # the lease sets the rate of heartbeats
        raise InvalidRequest(f"the coordinator gives a lease of {welcome.lease_s} s; at least {MIN_LEASE_S} is needed")
    return Welcome(
        rank=welcome.rank,
        lease_s=welcome.lease_s,
        world_size=welcome.world_size,
        num_shards=welcome.num_shards,
        state_id=welcome.state_id,
        released=tuple(welcome.released),
        build=_build_from_proto(welcome.build),
    )


def logged_to_proto(records: Sequence[Logged]) -> list[logs_pb2.LogRecord]:
    """Return log records of this process, as messages."""
    return [logs_pb2.LogRecord(at_s=r.at_s, level=r.level, logger=r.logger, text=r.text) for r in records]


def status_to_proto(status: Status, *, membership: bool = True) -> status_pb2.StatusReply:
    """Return the status of the job, as a message; the membership may be left out."""
    return status_pb2.StatusReply(
        job=status.job,
        membership=codec.membership_to_proto(status.membership) if membership else None,
        version=status.version,
        step=status.step,
        registered=status.registered,
        initialized=status.initialized,
        parameters=status.parameters,
        uptime_s=status.uptime_s,
        counters=dict(status.counters),
        pending=status.pending,
        lease_s=status.lease_s,
        models=[status_pb2.ModelStatus(**dataclasses.asdict(m)) for m in status.models],
        replication=status.replication,
        draining=status.draining,
        awaited=sorted(status.awaited),
        checkpoints=status_pb2.CheckpointStatus(**dataclasses.asdict(status.checkpoints)),
        progress=None if status.progress is None else status_pb2.ProgressReport(**dataclasses.asdict(status.progress)),
        phase=status.phase.value,
        headline=status.headline,
        steps_per_s=status.steps_per_s,
    )


def status_from_proto(message: status_pb2.StatusReply) -> Status:
    """Return the status of the job, from a message.

    Raises:
        InvalidRequest: a member, or the report of the training script, is malformed.
    """
    return Status(
        job=message.job,
        membership=codec.membership_from_proto(message.membership),
        version=message.version,
        step=message.step,
        registered=message.registered,
        initialized=message.initialized,
        parameters=message.parameters,
        lease_s=message.lease_s,
        uptime_s=message.uptime_s,
        counters=dict(message.counters),
        pending=tuple(message.pending),
        models=tuple(
            ModelStatus(
                model=m.model,
                name=m.name,
                version=m.version,
                step=m.step,
                epoch=m.epoch,
                initialized=m.initialized,
                parameters=m.parameters,
                slices=m.slices,
                lacking=m.lacking,
                steps_per_s=m.steps_per_s,
            )
            for m in message.models
        ),
        replication=message.replication,
        draining=tuple(message.draining),
        awaited=frozenset(message.awaited),
        checkpoints=CheckpointStatus(
            uri=message.checkpoints.uri,
            version=message.checkpoints.version,
            age_s=message.checkpoints.age_s,
            took_s=message.checkpoints.took_s,
            bytes=message.checkpoints.bytes,
            failure=message.checkpoints.failure,
            failure_age_s=message.checkpoints.failure_age_s,
            activity=message.checkpoints.activity,
        ),
        progress=_report_from_proto(message.progress) if message.HasField("progress") else None,
        phase=JobPhase(message.phase) if message.phase in tuple(JobPhase) else JobPhase.UNKNOWN,
        headline=message.headline,
        steps_per_s=message.steps_per_s,
    )


def _report_from_proto(message: status_pb2.ProgressReport) -> Report:
    if not (math.isfinite(message.step) and math.isfinite(message.steps)):
        raise InvalidRequest(f"a report is of step {message.step} of {message.steps}; steps are numbers")
    return Report(
        step=int(message.step),
        steps=int(message.steps) if message.HasField("steps") else None,
        loss=message.loss if message.HasField("loss") else None,
        steps_per_s=message.steps_per_s,
        values=dict(message.values),
        at=message.at,
        by_version=message.by_version,
    )

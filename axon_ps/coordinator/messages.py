"""Conversions between the session's messages and `wire.events`, in both directions.

Every field of a message is checked here once, so that the state machine works with valid values.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Final

from axon_ps.coordinator.core.restart.knowledge import Knowledge, ModelKnowledge
from axon_ps.coordinator.core.roster import MAX_MEMBERS
from axon_ps.coordinator.span_messages import TRACE_ORDER
from axon_ps.errors import InvalidRequest
from axon_ps.observe.log_buffer import Logged
from axon_ps.observe.tracing.span import TraceOrder
from axon_ps.rpc.status import error_from_detail, error_to_detail
from axon_ps.texts import printable
from axon_ps.types import Decision, Membership, ModelProgress, Role
from axon_ps.wire import codec, committed
from axon_ps.wire.build import Build
from axon_ps.wire.codec import name_of
from axon_ps.wire.conversion import SAME, SET, Conversion, Field, checked
from axon_ps.wire.differences import announced, difference_to_proto
from axon_ps.wire.events import (
    MAX_BLOCKS,
    Arrived,
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
    Vote,
    VoteRequest,
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
"""Least weight of a vote, unless it is 0. The largest is the reciprocal."""
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
            memory=None if request.memory is None else MEMORY.to_proto(request.memory),
            state_id=request.state_id,
            differences=True,
            position=POSITION.to_proto(request.position),
            build=BUILD.to_proto(request.build),
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
        memory=MEMORY.from_proto(message.memory) if message.HasField("memory") else None,
        state_id=codec.name_from_proto(message.state_id, "the state's id", empty=True),
        position=POSITION.from_proto(message.position),
        build=BUILD.from_proto(message.build),
        connectivity=connectivity_from_proto(message),
    )


_INCARNATIONS: Final = Field(to_proto=sorted, from_proto=lambda texts: frozenset(map(incarnation_from_proto, texts)))

CONNECTIVITY: Final = Conversion(
    Connectivity,
    membership_pb2.Connectivity,
    unreachable=_INCARNATIONS,
    reached=_INCARNATIONS,
)
connectivity_to_proto = CONNECTIVITY.to_proto


def connectivity_from_proto(carrier: session_pb2.Join | membership_pb2.Heartbeat) -> Connectivity | None:
    """Return the report of the members that a member reaches, from a message that may have one; None = none.

    Raises:
        InvalidRequest: it has a malformed incarnation, or names more members than a job can have.
    """
    if not carrier.HasField("connectivity"):
        return None
    message = carrier.connectivity
    if (named := len(message.unreachable) + len(message.reached)) > 2 * MAX_MEMBERS:
        raise InvalidRequest(f"a member names {named} others; a job has at most {MAX_MEMBERS} of each role")
    return CONNECTIVITY.from_proto(message)


BUILD: Final = Conversion(Build, membership_pb2.Build, version=name_of("the version of axon_ps", empty=True))
MEMORY: Final = Conversion(ServerMemory, memory_pb2.Memory, pool=name_of("the memory's pool", empty=True))
POSITION: Final = Conversion(
    Position,
    membership_pb2.Position,
    models=Conversion(ModelPosition, membership_pb2.ModelPosition).field.each,
    released=SET,
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


def _known_from_proto(message: session_pb2.Join) -> KnownNames:
    if (listed := max(len(message.optimizers), len(message.compressors))) > MAX_KNOWN_NAMES:
        raise InvalidRequest(f"a shard server lists {listed} names of one kind; at most {MAX_KNOWN_NAMES} are allowed")
    return KnownNames(
        optimizers=frozenset(codec.name_from_proto(name, "an optimizer's name") for name in message.optimizers),
        compressors=frozenset(codec.name_from_proto(name, "a compressor's name") for name in message.compressors),
    )


def _check_weight(weight: float) -> float:
    if weight and not LEAST_WEIGHT <= weight <= 1 / LEAST_WEIGHT:  # so that quotients by it are finite
        raise InvalidRequest(
            f"a vote's weight is {weight}; it must be 0, or from {LEAST_WEIGHT:g} to {1 / LEAST_WEIGHT:g}"
        )
    return weight


VOTE: Final = Conversion(
    Vote,
    session_pb2.Vote,
    hyper=codec.HYPERS,
    copy=codec.COPY.field.or_none,
    commit=checked(lambda values: committed.checked(dict(values))),
    weight=checked(_check_weight).or_none,
    optimizer=codec.CHANGE.field.or_none,
)
vote_from_proto = VOTE.from_proto

ARRIVED: Final = Conversion(Arrived, policy_pb2.Arrived)
arrived_from_proto = ARRIVED.from_proto


def _check_sums(ready: Ready) -> None:
    if any(value < 0 for value in ready.sums_of_squares):
        raise InvalidRequest(f"a sum of squares is {min(ready.sums_of_squares)}; it is 0 or more")


_DIGESTS: Final = Field(
    to_proto=lambda digests: [placement_pb2.Digest(slice=number, value=value) for number, value in digests.items()],
    from_proto=lambda messages: {digest.slice: digest.value for digest in messages},
)

READY: Final = Conversion(Ready, session_pb2.Ready, check=_check_sums, digests=_DIGESTS)
ready_from_proto = READY.from_proto


def step_message_to_proto(message: Vote | Ready) -> session_pb2.SessionRequest:
    """Return a worker's vote, or a shard server's report that it has all gradients, as a message."""
    if isinstance(message, Vote):
        return session_pb2.SessionRequest(vote=VOTE.to_proto(message))
    return session_pb2.SessionRequest(ready=READY.to_proto(message))


COPIED: Final = Conversion(Copied, placement_pb2.Copied)
copied_from_proto = COPIED.from_proto


def copied_to_proto(copied: Copied) -> session_pb2.SessionRequest:
    """Return a shard server's report that it has received slices, as a message."""
    return session_pb2.SessionRequest(copied=COPIED.to_proto(copied))


_BLOCKS: Final = Field(
    to_proto=lambda blocks: [placement_pb2.Corrupted.Block(array=a, begin=b, end=e) for a, b, e in blocks],
    from_proto=lambda messages: tuple((printable(m.array, _MAX_ARRAY), m.begin, m.end) for m in messages[:MAX_BLOCKS]),
)
CORRUPTED: Final = Conversion(Corrupted, placement_pb2.Corrupted, blocks=_BLOCKS)
corrupted_from_proto = CORRUPTED.from_proto


def corrupted_to_proto(report: Corrupted) -> session_pb2.SessionRequest:
    """Return a shard server's report that memory of a slice failed, as a message."""
    return session_pb2.SessionRequest(corrupted=CORRUPTED.to_proto(report))


def initialized_to_proto(version: int, epoch: int, model: int = 0) -> session_pb2.SessionRequest:
    """Return a shard server's report that it holds its parameters, as a message."""
    return session_pb2.SessionRequest(initialized=session_pb2.Initialized(version=version, epoch=epoch, model=model))


def _sha256(text: str) -> str:
    if not _SHA256.fullmatch(text):
        raise InvalidRequest(f"the sha256 of a checkpoint's file is {text[:80]!r}; it must be 64 hex digits")
    return text


_FILES: Final = Conversion(
    SnapshotFile, checkpoint_pb2.SnapshotFile, name=name_of("a checkpoint file's name"), sha256=checked(_sha256)
).field.each
files_to_proto = _FILES.to_proto


def files_from_proto(files: Sequence[checkpoint_pb2.SnapshotFile]) -> tuple[SnapshotFile, ...]:
    """Return files of a checkpoint from messages.

    Raises:
        InvalidRequest: a file's name or hash is malformed, or there are too many.
    """
    if len(files) > MAX_SNAPSHOT_FILES:
        raise InvalidRequest(f"{len(files)} files are reported; at most {MAX_SNAPSHOT_FILES} are allowed")
    found: tuple[SnapshotFile, ...] = _FILES.from_proto(files)
    return found


FILES: Final = Field(to_proto=files_to_proto, from_proto=files_from_proto)

SNAPSHOT_REPORT: Final = Conversion(
    SnapshotReport,
    checkpoint_pb2.SnapshotReport,
    files=FILES,
    error=Field(to_proto=error_to_detail, from_proto=error_from_detail, optional=True),
)
snapshot_report_from_proto = SNAPSHOT_REPORT.from_proto


def snapshot_report_to_proto(report: SnapshotReport) -> session_pb2.SessionRequest:
    """Return a shard server's report on its checkpoint files, as a message."""
    return session_pb2.SessionRequest(snapshot=SNAPSHOT_REPORT.to_proto(report))


CHECKPOINT: Final = Conversion(
    CheckpointReply,
    checkpoint_pb2.CheckpointReply,
    optimizer=name_of("an optimizer's name", empty=True),
    hyper=codec.HYPERS,
    states=FILES,
)
checkpoint_to_proto, checkpoint_from_proto = CHECKPOINT.to_proto, CHECKPOINT.from_proto


def _check_placement(job: JobState) -> None:
    if job.spec is not None and job.placement is not None:
        job.placement.check(job.spec.plan(job.placement.num_cuts))


JOB: Final = Conversion(
    JobState,
    session_pb2.JobEvent,
    check=_check_placement,
    spec=Field(to_proto=codec.job_spec_to_proto, from_proto=codec.job_spec_from_proto, optional=True),
    optimizer=codec.OPTIMIZER.field.or_none,
    name=name_of("a model's name", empty=True),
    placement=Field(to_proto=codec.placement_to_proto, from_proto=codec.placement_from_proto, optional=True),
    out_of_memory=SAME.named("no_room"),
)
job_to_proto, job_from_proto = JOB.to_proto, JOB.from_proto


def _check_welcome(welcome: Welcome) -> None:
    if welcome.rank > MAX_RANK:  # it is requested again after a restart, as a signed 32-bit number
        raise InvalidRequest(f"the coordinator gives rank {welcome.rank}; at most {MAX_RANK} can be asked for again")
    if not MIN_LEASE_S <= welcome.lease_s < math.inf:  # the lease sets the rate of heartbeats
        raise InvalidRequest(f"the coordinator gives a lease of {welcome.lease_s} s; at least {MIN_LEASE_S} is needed")


_EVENTS: Final[dict[type, tuple[str, Field]]] = {
    Decision: ("decision", codec.DECISION.field),
    JobState: ("job", JOB.field),
    KnowledgeRequest: (
        "request_knowledge",
        Field(to_proto=lambda _: True, from_proto=lambda _: KnowledgeRequest()),
    ),
    VoteRequest: ("due", Conversion(VoteRequest, policy_pb2.StepDue).field),
    SnapshotOrder: (
        "snapshot",
        Conversion(
            SnapshotOrder,
            checkpoint_pb2.SnapshotOrder,
            uri=name_of("the checkpoint's URI"),
            models=codec.PROGRESS.field.each,
        ).field,
    ),
    RestoreOrder: ("restore", codec.RESTORE.field),
    TraceOrder: ("trace", TRACE_ORDER.field),
    RevokedNames: ("revocations", Conversion(RevokedNames, revocation_pb2.RevocationsEvent).field),
    Welcome: ("welcome", Conversion(Welcome, membership_pb2.Welcome, check=_check_welcome, build=BUILD.field).field),
}
"""Of each event but a membership, its field in `SessionEvent`, and its conversion."""

_EVENTS_BACK: Final = {name: row.from_proto for name, row in _EVENTS.values()}


def event_to_proto(event: ServerEvent, before: Membership | None = None) -> session_pb2.SessionEvent:
    """Return an event of the coordinator, as a message: a membership as the difference to the one `before`, if any."""
    if isinstance(event, Membership):
        if before is not None and (difference := difference_to_proto(before, event)) is not None:
            return session_pb2.SessionEvent(difference=difference)
        return session_pb2.SessionEvent(membership=codec.membership_to_proto(event))
    name, row = _EVENTS[type(event)]
    return session_pb2.SessionEvent(**{name: row.to_proto(event)})


def event_from_proto(message: session_pb2.SessionEvent, before: Membership | None = None) -> ServerEvent | None:
    """Return an event of the coordinator, from a message; None for an event of a newer protocol.

    Args:
        message: from a stream.
        before: the newest membership from that stream; None = none.

    Raises:
        InvalidRequest: the event is malformed.
    """
    kind = message.WhichOneof("message")
    if kind == "membership" or kind == "difference":
        return announced(getattr(message, kind), before)
    from_proto = _EVENTS_BACK.get(kind)
    event: ServerEvent | None = None if from_proto is None else from_proto(getattr(message, kind))
    return event


def logged_to_proto(records: Sequence[Logged]) -> list[logs_pb2.LogRecord]:
    """Return log records of this process, as messages."""
    return [logs_pb2.LogRecord(at_s=r.at_s, level=r.level, logger=r.logger, text=r.text) for r in records]


def _finite_integer(number: float) -> int:
    if not math.isfinite(number):
        raise InvalidRequest(f"a report is of step {number}, or of {number} steps; steps are numbers")
    return int(number)


STATUS: Final = Conversion(
    Status,
    status_pb2.StatusReply,
    unwritten=("membership",),  # `status_to_proto` writes it
    membership=codec.MEMBERSHIP_ROW,
    models=Conversion(ModelStatus, status_pb2.ModelStatus).field.each,
    awaited=SET,
    checkpoints=Conversion(CheckpointStatus, status_pb2.CheckpointStatus).field,
    progress=Conversion(
        Report, status_pb2.ProgressReport, step=checked(_finite_integer), steps=checked(_finite_integer).or_none
    ).field.or_none,
    phase=Field(
        to_proto=lambda phase: phase.value,
        from_proto=lambda text: JobPhase(text) if text in tuple(JobPhase) else JobPhase.UNKNOWN,
    ),
)
status_from_proto = STATUS.from_proto


def status_to_proto(status: Status, *, membership: bool = True) -> status_pb2.StatusReply:
    """Return the status of the job, as a message. The membership may be left out."""
    message = STATUS.to_proto(status)
    if membership:
        message.membership.CopyFrom(codec.membership_to_proto(status.membership))
    return message

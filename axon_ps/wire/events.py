"""The events that members receive on their session, and the reports they send: values for state, servicer and client.

Invariant: a `Membership` of a given generation never changes. Every change makes a new generation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from axon_ps.errors import AxonError
from axon_ps.observe.tracing.span import TraceOrder
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.placement import Placement
from axon_ps.types import CopyFrom, Decision, Hyper, Membership, ModelProgress, OptimizerChange, OptimizerSpec
from axon_ps.wire.build import Build, ours
from axon_ps.wire.report import Report

FIRST_NAME: Final = "model 0"
"""The name of a model that was registered without one."""


@dataclass(frozen=True, kw_only=True)
class Welcome:
    """The first event that a member gets.

    Attributes:
        rank: the rank it has been given.
        lease_s: seconds that its silence is tolerated.
        world_size: number of workers with which the job starts; 0 until the first worker has joined.
        num_shards: number of shard servers of the job.
        state_id: id of the coordinator's durable state. A new id means that the coordinator has lost its state.
        released: numbers of the models that the job has released.
        build: the coordinator's build.
        addends: whether it decides steps of several addends.
    """

    rank: int
    lease_s: float
    world_size: int
    num_shards: int
    state_id: str = ""
    released: tuple[int, ...] = ()
    build: Build = field(default_factory=ours)
    addends: bool = True


@dataclass(frozen=True, kw_only=True)
class JobState:
    """The state of a model of the job.

    Attributes:
        model: its number.
        name: its name; empty until registered.
        spec: layout, dtypes and policy; None until registered. Only shard servers and callers of Describe get it.
        optimizer: None until registered. Only shard servers and callers of Describe get it.
        initialized: whether every shard server has its parameters.
        version: number of committed steps.
        epoch: the number of its restores. A change makes every gathered copy stale.
        copied: the newest version of this epoch that took another model's values; 0 = none. Frozen units are at it.
        released: whether the job has released it.
        placement: the placement of its slices; None until registered.
        out_of_memory: the reason why the shard servers cannot hold it, and a remedy, as text; empty when they can.
        committed: the newest values that were committed with its steps, by name.
    """

    spec: JobSpec | None = None
    optimizer: OptimizerSpec | None = None
    initialized: bool = False
    version: int = 0
    epoch: int = 0
    model: int = 0
    name: str = ""
    copied: int = 0
    released: bool = False
    placement: Placement | None = None
    out_of_memory: str = ""
    committed: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class SnapshotOrder:
    """The order to a shard server to write its slices of every model to the checkpoint `uri`.

    Attributes:
        id: number of the order.
        uri: the checkpoint.
        version: the current version of the first model; 0 if the job has released it.
        models: the progress of the other models.
        background: whether it is background work, for which no caller waits.
    """

    id: int
    uri: str
    version: int
    models: tuple[ModelProgress, ...] = ()
    background: bool = False


UPLOADED = "worker:"
"""Used instead of a checkpoint's URI: a worker uploads the values. Optimizer state and version do not change."""

FIRST_VALUES = "worker:first"
"""Used instead of a checkpoint's URI: the next worker to register the model uploads first values, as if it were new."""


@dataclass(frozen=True, kw_only=True)
class RestoreOrder:
    """The order to a shard server to load its slices of a model from the checkpoint `uri`; see also `UPLOADED`.

    Attributes:
        epoch: the model's epoch, once it is loaded.
        uri: the checkpoint.
        version: the version in the checkpoint.
        model: the model that is loaded.
        section: its name in the checkpoint; empty = the only model in it.
        sha256: the hash of the manifest that the coordinator has checked; empty = it has none.
    """

    epoch: int
    uri: str
    version: int
    model: int = 0
    section: str = ""
    sha256: str = ""


@dataclass(frozen=True, kw_only=True)
class SessionLost:
    """A local event: the stream broke. The client reconnects unless `final`."""

    error: AxonError
    final: bool = False


@dataclass(frozen=True, kw_only=True)
class SessionRestored:
    """A local event: the stream is up again, and all missed events have been delivered."""


@dataclass(frozen=True, kw_only=True)
class RevokedNames:
    """All names that are revoked: ids of tokens, certificates and processes, with the reasons."""

    reasons: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class VoteRequest:
    """The request to a worker to vote on a step with the gradients that it has, since enough others have voted.

    Attributes:
        generation: the generation.
        step: the attempt.
        model: the step's model.
    """

    generation: int
    step: int
    model: int = 0


@dataclass(frozen=True, kw_only=True)
class KnowledgeRequest:
    """The request to a joining shard server to send its `Knowledge`, which is newer than the coordinator's state."""


ServerEvent = (
    Welcome
    | KnowledgeRequest
    | Membership
    | JobState
    | Decision
    | VoteRequest
    | SnapshotOrder
    | RestoreOrder
    | TraceOrder
    | RevokedNames
)
"""The events that the coordinator sends."""

Event = Membership | JobState | Decision | VoteRequest | SnapshotOrder | RestoreOrder | SessionLost | SessionRestored
"""The events that a client's `on_event` gets, in order."""


@dataclass(frozen=True, kw_only=True)
class KnownNames:
    """The optimizers and compressors that a shard server can make, by name."""

    optimizers: frozenset[str]
    compressors: frozenset[str]


@dataclass(frozen=True, kw_only=True)
class ServerMemory:
    """The memory that a shard server has for parameters.

    Attributes:
        available_bytes: bytes that it could allocate now.
        resident_bytes: bytes that it has in RAM.
        pool: servers with the same pool share the available bytes; empty = no other server shares them.
    """

    available_bytes: int
    resident_bytes: int = 0
    pool: str = ""


@dataclass(frozen=True, kw_only=True)
class ModelPosition:
    """The newest known state of a model.

    Attributes:
        model: its number.
        epoch: the number of its restores.
        step: the step attempt under way.
        version: number of committed steps.
        placement: number of the newest placement.
        initialized: whether the shard servers have all its values of that epoch.
        optimized: whether it has an optimizer.
    """

    model: int
    epoch: int
    initialized: bool
    optimized: bool
    step: int
    version: int
    placement: int


@dataclass(frozen=True, kw_only=True)
class Position:
    """The newest known state of a job.

    Attributes:
        generation: the newest generation.
        models: the newest known state of each model.
        released: the numbers of models that were released.
        snapshot_id: id of the newest order of a checkpoint; 0 = there was none.
    """

    generation: int = 0
    models: tuple[ModelPosition, ...] = ()
    released: frozenset[int] = frozenset()
    snapshot_id: int = 0


@dataclass(frozen=True, kw_only=True)
class Connectivity:
    """The members that a member reaches, by incarnation; see `core.reachability`.

    Attributes:
        unreachable: all members that it cannot reach now.
        reached: members that have answered it. Each has to be reported once only.
    """

    unreachable: frozenset[str] = frozenset()
    reached: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class JoinRequest:
    """A member's data about itself when it joins.

    Attributes:
        job: name of the job it wants to join.
        incarnation: 32 hex digits.
        node: host or container.
        address: the address at which a shard server listens.
        requested_rank: wanted rank; -1 = any.
        world_size: worker: number of workers with which the job starts; 0 = as the coordinator is configured.
        standby: worker: joins only to replace a worker that the job has lost.
        known: shard server: the optimizers and compressors it can make; None = not reported, nothing is checked.
        memory: shard server: its memory for parameters; None = not reported, nothing is checked.
        state_id: id of the durable state in which it was a member; empty = it was none.
        position: the newest state of the job that it knows.
        build: its build.
        credentials: ids of the certificate and token that it has shown. If one of them is revoked, so is the process.
        makes_itself: whether it has the job's secret, and so can make itself other credentials.
        connectivity: the members that it reaches; None = it never reports them.
    """

    job: str
    incarnation: str
    node: str
    address: str = ""
    requested_rank: int = -1
    world_size: int = 0
    standby: bool = False
    known: KnownNames | None = None
    memory: ServerMemory | None = None
    state_id: str = ""
    position: Position = Position()
    build: Build = field(default_factory=ours)
    credentials: tuple[str, ...] = ()
    makes_itself: bool = False
    connectivity: Connectivity | None = None


@dataclass(frozen=True, kw_only=True)
class Vote:
    """A worker's message that it has pushed all gradients of a step.

    Attributes:
        generation: the generation in which it pushed.
        step: the attempt; for asynchronous replicas, the replica's clock.
        max_norm: global L2 norm to clip to; 0 = do not clip.
        hyper: per parameter group, this step's hyperparameters; empty = as registered.
        version: the oldest version that the gradients may come from.
        model: the step's model.
        copy: the copy that the step makes from another model; None = it takes gradients.
        blocked: whether the worker makes no step of another model before this one is decided.
        commit: values to commit with the step, by name; the same in all votes. See `committed`.
        traceparent: the worker's span of it; empty = the step is not traced.
        weight: the factor of its gradients, whose sum is divided by the sum of weights over all votes; None = gradients
            are only summed. It is in all votes or in none.
        untouched: numbers in the layout of the trainable parameters without a gradient, ascending.
        withdrawn: its gradients must not count, so the step is aborted once all have voted.
        optimizer: replaces the model's optimizer with the step; the same in all votes. None = it does not change.
        last_addend: number of the last addend that it has pushed; the same in all votes. See `shard.core.gradients`.
    """

    generation: int
    step: int
    max_norm: float = 0.0
    hyper: tuple[Hyper, ...] = ()
    version: int = 0
    model: int = 0
    copy: CopyFrom | None = None
    blocked: bool = False
    commit: Mapping[str, str] = field(default_factory=dict)
    traceparent: str = ""
    weight: float | None = None
    untouched: tuple[int, ...] = ()
    withdrawn: bool = False
    optimizer: OptimizerChange | None = None
    last_addend: int = 0


@dataclass(frozen=True, kw_only=True)
class Arrived:
    """A worker's message that it waits in a step until the servers take its gradients.

    Attributes:
        generation: the generation.
        step: the attempt.
        model: the model.
        blocked: as of a vote.
        addend: number of the addend that it pushes.
    """

    generation: int
    step: int
    model: int = 0
    blocked: bool = False
    addend: int = 0


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A shard server's report that it has the gradients of a step in every slice it holds.

    They are the gradients of every replica, or of one replica if these are asynchronous.

    Attributes:
        generation: the generation.
        step: the attempt; for asynchronous replicas, the replica's clock.
        sums_of_squares: of the summed gradient of each slice whose primary it is; non-finite when that is.
        replica: the replica of the gradients, for asynchronous replicas.
        model: the model.
        placement: number of the placement that it knows. A report for an old placement does not count.
        digests: by number, digests of the slices that others have, too, after the last commit.
        last_addend: number of the last addend in the sums. A later report may have a later one.
    """

    generation: int
    step: int
    sums_of_squares: tuple[float, ...]
    replica: int = 0
    model: int = 0
    placement: int = 0
    digests: Mapping[int, int] = field(default_factory=dict)
    last_addend: int = 0


@dataclass(frozen=True, kw_only=True)
class Copied:
    """A shard server's report that it has copied slices of a model.

    Attributes:
        model: the model.
        epoch: the number of its restores, as the server knew it.
        slices: the numbers of the slices.
        placement: number of the placement that it knows.
    """

    model: int
    epoch: int
    slices: tuple[int, ...]
    placement: int = 0


MAX_BLOCKS: Final = 16
"""Most blocks of a slice that a report names."""


@dataclass(frozen=True, kw_only=True)
class Corrupted:
    """A shard server's report that memory of a slice differs from the values written; see `shard.core.digests`.

    Attributes:
        model: the model.
        epoch: the number of its restores, as the server knew it.
        slice: its number in the plan.
        placement: number of the placement that the server knew.
        generation: the generation that it knew.
        lost: whether values or moments are lost; else only the sums for the step under way.
        version: the server's version.
        blocks: (array, first element, one past the last) in the slice's unit, of the first `MAX_BLOCKS`.
    """

    model: int
    epoch: int
    slice: int
    placement: int
    generation: int
    lost: bool
    version: int
    blocks: tuple[tuple[str, int, int], ...]


@dataclass(frozen=True, kw_only=True)
class SnapshotFile:
    """A file of a checkpoint: a shard server's slices of model `model`, or the own state of worker `model`."""

    name: str
    sha256: str
    bytes: int
    model: int = 0


@dataclass(frozen=True, kw_only=True)
class SnapshotReport:
    """A shard server's reply to a `SnapshotOrder`: its files, or why there are none."""

    id: int
    files: Sequence[SnapshotFile] = ()
    error: AxonError | None = None


@dataclass(frozen=True, kw_only=True)
class Registered:
    """The answer to a registration.

    Attributes:
        first: whether this call added something that the job lacked.
        initialized: whether the servers have parameters already (a joiner must not upload).
        version: number of committed steps.
        upload: whether the caller is to upload the first values.
        generation: the generation of the answer.
        model: the model's number.
    """

    first: bool
    initialized: bool
    version: int
    upload: bool
    generation: int = 0
    model: int = 0


@dataclass(frozen=True, kw_only=True)
class RevokeReply:
    """The effects of a revocation.

    Attributes:
        names: the ids and serial numbers that are revoked.
        members: the members that were ended, by name.
        has_secret: whether one of them can make itself other credentials.
    """

    names: tuple[str, ...]
    members: tuple[str, ...]
    has_secret: bool


@dataclass(frozen=True, kw_only=True)
class CheckpointReply:
    """A checkpoint that was written or read.

    Attributes:
        uri: the checkpoint.
        version: its version.
        bytes: bytes of all its files.
        extra_json: the caller's values saved with it, a JSON object.
        versions: if it has several models, the version of each by name.
        optimizer: name of the optimizer of the first model requested; empty = it has none.
        hyper: per parameter group of that, the hyperparameters at its version.
        states: the files of workers' own state.
    """

    uri: str
    version: int
    bytes: int = 0
    extra_json: str = ""
    versions: Mapping[str, int] = field(default_factory=dict)
    optimizer: str = ""
    hyper: tuple[Hyper, ...] = ()
    states: tuple[SnapshotFile, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ModelStatus:
    """The present state of a model of the job.

    Attributes:
        model: its number.
        name: its name.
        version: number of committed steps.
        step: current step attempt.
        epoch: the number of its restores.
        initialized: whether the servers have its parameters.
        parameters: number of elements of its layout.
        slices: number of its slices.
        lacking: number of slices that have too few copies.
        steps_per_s: its steps that commit; 0 = unknown, or none do.
    """

    model: int
    name: str
    version: int
    step: int
    epoch: int
    initialized: bool
    parameters: int
    slices: int = 0
    lacking: int = 0
    steps_per_s: float = 0.0


class JobPhase(StrEnum):
    """The activity of a job. `core.history.phase` determines it."""

    UNKNOWN = ""  # an older coordinator does not report it
    WAITING = "waiting"  # for members, or for a restore
    RUNNING = "running"  # every member is there, and there is no model on the servers whose steps could be observed
    LOADING = "loading"  # its parameters are uploaded or restored
    READY = "ready"  # every member is there, and no step has committed since
    TRAINING = "training"  # steps commit
    STALLED = "stalled"  # every member is there, and no step commits any more
    FINISHED = "finished"  # its workers have done all their work


@dataclass(frozen=True, kw_only=True)
class CheckpointStatus:
    """A job's checkpoints, as far as they are known. Times are in seconds before the reply.

    Attributes:
        uri: the newest that was written, by any caller; empty = none is known.
        version: the version of the first model in it.
        age_s: its age since it was complete.
        took_s: the duration of writing it; 0 = it was written before this coordinator started.
        bytes: bytes of all its files.
        failure: the error of the newest failed write, check, removal or restore; empty = none failed.
        failure_age_s: the age of that failure.
        activity: the automatic work on checkpoints, now or next, as text; empty = none.
    """

    uri: str = ""
    version: int = 0
    age_s: float = 0.0
    took_s: float = 0.0
    bytes: int = 0
    failure: str = ""
    failure_age_s: float = 0.0
    activity: str = ""


@dataclass(frozen=True, kw_only=True)
class Status:
    """The present state of the job.

    Attributes:
        job: its name.
        membership: its members.
        version: number of committed steps of the first model.
        step: its current step attempt.
        registered: whether there is a layout.
        initialized: whether the servers have the parameters of every model.
        parameters: number of elements of all layouts.
        lease_s: seconds that a silent member stays a member.
        uptime_s: the coordinator's uptime.
        counters: steps committed, skipped, aborted; joins, losses; last gradient norm; members' own metrics.
        pending: the reasons why the current step, a barrier or a checkpoint is held up, as text.
        models: the job's models by number.
        replication: number of shard servers that are to have each slice.
        draining: ranks of the shard servers that are draining.
        awaited: incarnations of the members that have not contacted a restarted coordinator yet: it is not known
            whether they live.
        checkpoints: its checkpoints.
        progress: the newest report of the training script; None = there is none.
        phase: the job's activity.
        headline: the phase in words, with problems.
        steps_per_s: the steps of the first model that commit, or, without a model, the script's; 0 = unknown, or none.
    """

    job: str
    membership: Membership
    version: int
    step: int
    registered: bool
    initialized: bool
    parameters: int
    lease_s: float
    uptime_s: float = 0.0
    counters: Mapping[str, float] = field(default_factory=dict)
    pending: tuple[str, ...] = ()
    models: tuple[ModelStatus, ...] = ()
    replication: int = 1
    draining: tuple[int, ...] = ()
    awaited: frozenset[str] = frozenset()
    checkpoints: CheckpointStatus = field(default_factory=CheckpointStatus)
    progress: Report | None = None
    phase: JobPhase = JobPhase.UNKNOWN
    headline: str = ""
    steps_per_s: float = 0.0

"""The events that members receive on their session, and the reports they send: values for state, servicer and client.

Invariant: a `Membership` of a given generation never changes; whatever would change it makes a new generation.
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
        lease_s: how long its silence is tolerated.
        world_size: workers the job starts with; 0 until the first worker has joined.
        num_shards: shard servers of the job.
        state_id: of the coordinator's durable state; another one than before means that it has lost its state.
        released: numbers of the models that the job has no more.
        build: which axon_ps the coordinator is.
    """

    rank: int
    lease_s: float
    world_size: int
    num_shards: int
    state_id: str = ""
    released: tuple[int, ...] = ()
    build: Build = field(default_factory=ours)


@dataclass(frozen=True, kw_only=True)
class JobState:
    """The parts of a model of the job.

    Attributes:
        model: its number.
        name: what it is called; empty until registered.
        spec: layout, dtypes and policy; None until registered. Only shard servers get it.
        optimizer: None until registered. Only shard servers get it.
        initialized: whether every shard server holds its parameters.
        version: committed steps.
        epoch: how often it was restored; a change makes every gathered copy stale.
        copied: the newest version of this epoch that took another model's values; 0 = none. Frozen units are of it.
        released: the job has it no more.
        placement: where its slices are; None until registered.
        no_room: why the shard servers cannot hold it, and what to do, as text; empty when they can.
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
    no_room: str = ""
    committed: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class SnapshotOrder:
    """To a shard server: write your slices of every model to the checkpoint `uri`.

    Attributes:
        id: number of the order.
        uri: where.
        version: of the first model, the current one; 0 if the job has it no more.
        models: of the other models.
        background: nobody waits for it.
    """

    id: int
    uri: str
    version: int
    models: tuple[ModelProgress, ...] = ()
    background: bool = False


UPLOADED = "worker:"
"""Instead of a checkpoint's URI: a worker uploads the values; optimizer state and version stay."""

FIRST_VALUES = "worker:first"
"""Instead of a checkpoint's URI: the next worker that registers the model uploads first values, as if it were new."""


@dataclass(frozen=True, kw_only=True)
class RestoreOrder:
    """To a shard server: load your slices of a model from the checkpoint `uri`, which holds `version`; see `UPLOADED`.

    Attributes:
        epoch: of the model, once it is loaded.
        uri: the checkpoint.
        version: the version it holds.
        model: which model is loaded.
        section: what the checkpoint calls it; empty = the only model in it.
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
    """To our own process: the stream broke; the client reconnects unless `final`."""

    error: AxonError
    final: bool = False


@dataclass(frozen=True, kw_only=True)
class SessionRestored:
    """To our own process: the stream is up again, and all missed events have been delivered."""


@dataclass(frozen=True, kw_only=True)
class RevokedNames:
    """Everything that is revoked: ids of tokens, certificates and processes, and why."""

    reasons: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class StepDue:
    """To a worker that has not voted: so many others have that it is asked to come to the step with what it has.

    Attributes:
        generation: in which.
        step: the attempt.
        model: whose step it is.
    """

    generation: int
    step: int
    model: int = 0


@dataclass(frozen=True, kw_only=True)
class KnowledgeRequest:
    """To a shard server that asks to join: say first what you know, which is more than this coordinator does."""


ServerEvent = (
    Welcome
    | KnowledgeRequest
    | Membership
    | JobState
    | Decision
    | StepDue
    | SnapshotOrder
    | RestoreOrder
    | TraceOrder
    | RevokedNames
)
"""What the coordinator pushes."""

Event = Membership | JobState | Decision | StepDue | SnapshotOrder | RestoreOrder | SessionLost | SessionRestored
"""What a client's `on_event` gets, in order."""


@dataclass(frozen=True, kw_only=True)
class KnownNames:
    """The optimizers and compressors that a shard server can make, by name."""

    optimizers: frozenset[str]
    compressors: frozenset[str]


@dataclass(frozen=True, kw_only=True)
class ServerMemory:
    """The memory that a shard server has for parameters.

    Attributes:
        available_bytes: what it could allocate now.
        resident_bytes: what it has in RAM.
        pool: servers with the same pool share the available bytes; empty = nobody does.
    """

    available_bytes: int
    resident_bytes: int = 0
    pool: str = ""


@dataclass(frozen=True, kw_only=True)
class ModelPosition:
    """The newest of a model that is known.

    Attributes:
        model: its number.
        epoch: how often it was restored.
        step: the step attempt under way.
        version: committed steps.
        placement: number of the newest placement.
        initialized: whether the shard servers have all its values, of that epoch.
    """

    model: int
    epoch: int
    initialized: bool
    step: int
    version: int
    placement: int


@dataclass(frozen=True, kw_only=True)
class Position:
    """The newest of a job that is known.

    Attributes:
        generation: the newest.
        models: of each model.
        released: the numbers of models that were released.
        snapshot_id: of the newest order of a checkpoint; 0 = there was none.
    """

    generation: int = 0
    models: tuple[ModelPosition, ...] = ()
    released: frozenset[int] = frozenset()
    snapshot_id: int = 0


@dataclass(frozen=True, kw_only=True)
class Connectivity:
    """A member's account of whom it reaches, by incarnation; see `core.connectivity.reachability`.

    Attributes:
        unreachable: all members that it cannot reach now.
        reached: members that have answered it, once for each is enough.
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
        address: where a shard server listens.
        requested_rank: wanted rank; -1 = any.
        world_size: worker: how many workers the job starts with; 0 = as the coordinator is configured.
        standby: worker: only to replace one that the job has lost.
        known: shard server: what it can make; None = it does not list it, and nothing is checked.
        memory: shard server: what it has for parameters; None = it does not say, and nothing is checked.
        state_id: of the durable state in which it was a member; empty = in none.
        position: how far what it knows of the job goes.
        build: which axon_ps it is.
        credentials: ids of the certificate and token that it has shown; by one of these it would be revoked.
        makes_itself: whether it holds the job's secret, and so can make itself other credentials.
        connectivity: whom it reaches; None = it never says.
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
    """A worker has pushed everything of a step.

    Attributes:
        generation: the generation it pushed in.
        step: the attempt; where replicas step asynchronously, the replica's clock.
        max_norm: global L2 norm to clip to; 0 = do not clip.
        hyper: per parameter group, this step's hyperparameters; empty = as registered.
        version: the oldest version that the gradients may come from.
        model: whose step it is.
        copy: what the step takes from another model; None = it takes gradients.
        blocked: whether the worker makes no step of another model before this one is decided.
        commit: values to commit with the step, by name; the same in all votes. See `committed`.
        traceparent: the worker's span of it; empty = the step is not traced.
        weight: what its gradients were multiplied by, to be divided by the sum over all votes; None = they are to be
            summed as they are. In all votes or in none.
        untouched: numbers in the layout of the trainable parameters that it has no gradient of, ascending.
        withdrawn: what it pushed must not count, so the step is aborted once all have voted.
        optimizer: takes the place of the model's with the step; the same in all votes. None = it stays.
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


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A shard server has the gradients of a step in every slice it owns: of every replica, or of one if asynchronous.

    Attributes:
        generation: the generation.
        step: the attempt; where replicas step asynchronously, the replica's clock.
        sums_of_squares: of the summed gradient of each slice whose primary it is; non-finite when that is.
        replica: whose gradients, where replicas step asynchronously.
        model: of which model.
        placement: number of the placement that it knows; a report of another than the current one does not count.
        digests: by number, of the slices that others hold, too, as the last commit left them.
    """

    generation: int
    step: int
    sums_of_squares: tuple[float, ...]
    replica: int = 0
    model: int = 0
    placement: int = 0
    digests: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Copied:
    """A shard server has got slices of a model that it was to copy.

    Attributes:
        model: of which model.
        epoch: how often it had been restored.
        slices: by number.
        placement: number of the placement that it knows.
    """

    model: int
    epoch: int
    slices: tuple[int, ...]
    placement: int = 0


MAX_BLOCKS: Final = 16
"""How many blocks of a slice a report names."""


@dataclass(frozen=True, kw_only=True)
class Corrupted:
    """Memory of a slice of a shard server does not hold what was written to it; see `shard.core.digests`.

    Attributes:
        model: of which model.
        epoch: how often it had been restored.
        slice: its number in the plan.
        placement: number of the placement that the server knew.
        generation: the generation that it knew.
        lost: whether values or moments are lost; else only what was summed for the step under way.
        version: that the server was at.
        blocks: (array, first element, one past the last) in the slice's unit; the first of them.
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
    """A file of a checkpoint: a shard server's, which has slices of `model`, or the own state of worker `model`."""

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
        first: whether this call gave the job what it lacked.
        initialized: whether the servers hold parameters already (a joiner must not upload).
        version: committed steps.
        upload: whether the caller is the one to upload the first values.
        generation: the generation it was answered in.
        model: the number that the model has everywhere else.
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
        uri: where it is.
        version: the version it holds.
        bytes: bytes of all its files.
        extra_json: what was saved with it, a JSON object.
        versions: where it has several models, the version of each by name.
        optimizer: name of the optimizer of the first model asked for; empty = it has none.
        hyper: per parameter group of that, the hyperparameters as of its version.
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
        name: what it is called.
        version: committed steps.
        step: current step attempt.
        epoch: how often it was restored.
        initialized: whether the servers hold its parameters.
        parameters: elements of its layout.
        slices: how many it is cut into.
        lacking: how many of them have too few copies.
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
    """The activity of a job; `core.history.phase` says which it is."""

    UNKNOWN = ""  # an older coordinator does not say it
    WAITING = "waiting"  # for members, or for a restore
    RUNNING = "running"  # every member is there, and without a model on the servers nobody sees its steps
    LOADING = "loading"  # its parameters are uploaded or restored
    READY = "ready"  # every member is there, and no step has committed since
    TRAINING = "training"  # steps commit
    STALLED = "stalled"  # every member is there, and no step commits any more
    FINISHED = "finished"  # its workers have done all there was to do


@dataclass(frozen=True, kw_only=True)
class CheckpointStatus:
    """A job's checkpoints, as far as they are known. Times are in seconds before the reply.

    Attributes:
        uri: the newest that was written, whoever asked for it; empty = none is known.
        version: of the first model in it.
        age_s: since when it is complete.
        took_s: how long writing it took; 0 = it was written before this coordinator started.
        bytes: bytes of all its files.
        failure: why the newest one that failed was not written, verified, removed or restored; empty = none failed.
        failure_age_s: since when.
        activity: what the job does about checkpoints by itself, now or next; empty = nothing.
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
        membership: who is there.
        version: committed steps of the first model.
        step: its current step attempt.
        registered: whether there is a layout.
        initialized: whether the servers hold the parameters of every model.
        parameters: elements of all layouts.
        lease_s: how long a silent member stays a member.
        uptime_s: of the coordinator.
        counters: steps committed, skipped, aborted; joins, losses; last gradient norm; members' own metrics.
        pending: what the current step, a barrier or a checkpoint waits for, as text.
        models: the job's models by number.
        replication: how many shard servers are to hold each slice.
        draining: ranks of the shard servers that give up what they hold.
        awaited: incarnations of the members that a restarted coordinator has not heard of: whether they live is not
            known.
        checkpoints: its checkpoints.
        progress: what the training script has reported last; None = nothing.
        phase: what the job is doing.
        headline: the same in words, and what is amiss.
        steps_per_s: the steps of the first model that commit, without a model the script's; 0 = unknown, or none.
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

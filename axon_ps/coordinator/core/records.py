"""The coordinator's durable state, as records by key in a `storage.state_store.StateStore`.

Values are messages of `wire.v1`, except for those of the key-value store, which are stored unchanged.

    job          JobRecord
    members      MembersRecord: the newest membership, and whether the job ever was complete
    models       ModelsRecord: names of the models by number, and the next number
    orders       SnapshotOrder: only the number of the newest
    revocations  RevocationsEvent: the revoked names, with reasons
    kv/KEY       the key-value store

    of the first model; of model K, each key begins with "model/K/":
    progress     ModelProgress
    committed    CommittedRecord: the values that were committed with its steps
    parameters   ParametersRecord: epoch, holders, uploader, the restore in progress
    spec         JobSpec          optimizer   OptimizerSpec
    decision/N   DecisionEvent: the newest `HISTORY`, N = step modulo HISTORY; of asynchronous steps, the newest of each
                 replica R, N = "rR"
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from axon_ps.errors import ConfigurationError, InvalidRequest
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.placement import Placement
from axon_ps.storage.state_store.base import Record
from axon_ps.types import Decision, Membership, ModelProgress, OptimizerSpec
from axon_ps.wire import codec
from axon_ps.wire.events import RestoreOrder
from axon_ps.wire.v1 import (
    checkpoint_pb2,
    common_pb2,
    layout_pb2,
    membership_pb2,
    revocation_pb2,
    session_pb2,
    state_pb2,
)

HISTORY = 16
"""Decisions retained for members that reconnect and may have missed some."""

_KV = "kv/"
_MODEL = "model/"
_DECISION = "decision/"
_NOBODY = Membership(generation=0, step=1, version=0, workers=(), shards=(), num_replicas=0, complete=False)
_MessageT = TypeVar("_MessageT", bound=Message)


@dataclass
class ParameterState:
    """The holders of a model's parameters.

    Attributes:
        epoch: the number of its restores.
        initialized: whether every shard server has held its parameters at some time in this epoch.
        holders: per shard server rank, the incarnation that holds its slices.
        uploader: incarnation of the worker that is to upload first values.
        restore: the restore in progress.
        failure: the reason why its values cannot be used, as text: a restore or memory failed.
        copied: the newest version of this epoch that took another model's values; 0 = none.
        placement: where its slices are; None until it is registered.
        replaced: whether its values ever came from another source than a worker's first values and steps from these.
        lost: by incarnation of a lost shard server, the slices that it held.
        lost_version: the version of these slices.
        corrupt: by slice without another copy, the incarnation of the shard server whose memory failed.
        run_began: the version with which the present run of the workers began, or the one restored in it.
    """

    epoch: int = 0
    initialized: bool = False
    holders: dict[int, str] = field(default_factory=dict)
    uploader: str = ""
    restore: RestoreOrder | None = None
    failure: str = ""
    copied: int = 0
    placement: Placement | None = None
    replaced: bool = False
    lost: dict[str, tuple[int, ...]] = field(default_factory=dict)
    lost_version: int = 0
    corrupt: dict[int, str] = field(default_factory=dict)
    run_began: int = 0


@dataclass
class DurableModel:
    """The durable state of one model."""

    name: str = ""
    step: int = 1
    version: int = 0
    parameters: ParameterState = field(default_factory=ParameterState)
    spec: JobSpec | None = None
    optimizer: OptimizerSpec | None = None
    decisions: tuple[Decision, ...] = ()
    committed: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Durable:
    """All durable state of the coordinator. `models` are by number."""

    state_id: str = ""
    job: str = ""
    world_size: int = 0
    num_shards: int = 0
    was_complete: bool = False
    membership: Membership = _NOBODY
    vacant: int = 0
    draining: frozenset[int] = frozenset()
    needed_shards: int = 0
    models: dict[int, DurableModel] = field(default_factory=lambda: {0: DurableModel()})
    next_model: int = 1
    snapshot_id: int = 0
    kv: dict[str, bytes] = field(default_factory=dict)
    revoked: dict[str, str] = field(default_factory=dict)


def check(durable: Durable, job: str, num_shards: int) -> None:
    """Check that a stored state is of a job with this name and number of shard servers."""
    if durable.job != job:
        raise ConfigurationError(f"the state store holds job {durable.job!r}, not {job!r}; give each job its own")
    if any(model.spec is not None for model in durable.models.values()) and durable.num_shards != num_shards:
        raise ConfigurationError(
            f"the job was cut over {durable.num_shards} shard servers, not {num_shards}; start the coordinator as "
            "before, or with a new state store and resume from a checkpoint"
        )


def job_record(state_id: str, job: str, world_size: int, num_shards: int) -> Record:
    """Return the record of the job's name and of the number of members it starts with."""
    message = state_pb2.JobRecord(state_id=state_id, job=job, world_size=world_size, num_shards=num_shards)
    return _record("job", message)


def members_record(
    membership: Membership, *, was_complete: bool, vacant: int, draining: Iterable[int], needed_shards: int
) -> Record:
    """Return the record of the members, with those that have finished or are drained.

    The membership has the progress at which its generation began.
    """
    message = state_pb2.MembersRecord(
        membership=codec.membership_to_proto(membership),
        was_complete=was_complete,
        vacant=vacant,
        draining=sorted(draining),
        needed_shards=needed_shards,
    )
    return _record("members", message)


def models_record(names: Mapping[int, str], next_model: int) -> Record:
    """Return the record of the names of the job's models, and of the number of the next one."""
    return _record("models", state_pb2.ModelsRecord(names=names, next=next_model))


def progress_record(progress: ModelProgress) -> Record:
    """Return the record of the step and version of a model."""
    return _record(_of(progress.model, "progress"), codec.progress_to_proto(progress))


def committed_record(model: int, values: Mapping[str, str]) -> Record:
    """Return the record of the values that were committed with a model's steps."""
    return _record(_of(model, "committed"), state_pb2.CommittedRecord(values=values))


def parameters_record(model: int, parameters: ParameterState) -> Record:
    """Return the record of the servers that hold a model's parameters."""
    message = state_pb2.ParametersRecord(
        epoch=parameters.epoch,
        initialized=parameters.initialized,
        holders=parameters.holders,
        uploader=parameters.uploader,
        restore=None if parameters.restore is None else codec.RESTORE.to_proto(parameters.restore),
        failure=parameters.failure,
        copied=parameters.copied,
        replaced=parameters.replaced,
        lost={incarnation: state_pb2.Slices(numbers=slices) for incarnation, slices in parameters.lost.items()},
        lost_version=parameters.lost_version,
        corrupt=parameters.corrupt,
        run_began=parameters.run_began,
        placement=None if parameters.placement is None else codec.placement_to_proto(parameters.placement),
    )
    return _record(_of(model, "parameters"), message)


def spec_record(model: int, spec: JobSpec) -> Record:
    """Return the record of layout, dtypes and policy."""
    return _record(_of(model, "spec"), codec.job_spec_to_proto(spec))


def optimizer_record(model: int, optimizer: OptimizerSpec) -> Record:
    """Return the record of the optimizer."""
    return _record(_of(model, "optimizer"), codec.optimizer_to_proto(optimizer))


def deletions(model: int, decisions: Sequence[Decision]) -> list[Record]:
    """Return the records that delete everything about a released model."""
    keys = [
        "progress",
        "committed",
        "parameters",
        "spec",
        "optimizer",
        *(_DECISION + _decision_key(d) for d in decisions),
    ]
    return [Record(_of(model, key), None) for key in keys]


def orders_record(snapshot_id: int) -> Record:
    """Return the record of the newest snapshot order's number."""
    return _record("orders", checkpoint_pb2.SnapshotOrder(id=snapshot_id))


def decision_record(decision: Decision) -> Record:
    """Return the record of a decision. It replaces the decision `HISTORY` steps earlier, or the replica's last."""
    return _record(_of(decision.model, _DECISION + _decision_key(decision)), codec.decision_to_proto(decision))


def _decision_key(decision: Decision) -> str:
    return str(decision.step % HISTORY) if decision.replica_clock is None else f"r{decision.replica_clock.replica}"


def _of(model: int, key: str) -> str:
    return f"{_MODEL}{model}/{key}" if model else key


def retained(decisions: Sequence[Decision], newest: Decision) -> list[Decision]:
    """Return the decisions to retain, `newest` among them.

    These are the `HISTORY` newest, and the newest asynchronous one of each replica. A replica's next step needs a
    report of every shard server, so a server can only have missed the newest decision of each replica. A worker can
    only have missed the newest decision of its own replica.
    """
    if newest.replica_clock is None:
        together = [d for d in decisions if d.replica_clock is None]
        dropped = together[: max(0, len(together) + 1 - HISTORY)]
        return [*(d for d in decisions if d not in dropped), newest]
    replica = newest.replica_clock.replica
    return [*(d for d in decisions if d.replica_clock is None or d.replica_clock.replica != replica), newest]


def revocations_record(reasons: Mapping[str, str]) -> Record:
    """Return the record of revoked names, with reasons."""
    return _record("revocations", revocation_pb2.RevocationsEvent(reasons=reasons))


def kv_record(key: str, value: bytes | None) -> Record:
    """Return the record of a value of the key-value store; None removes it."""
    return Record(_KV + key, value)


def load(records: Mapping[str, bytes]) -> Durable | None:
    """Return the state that the records describe; None when there are no records.

    Raises:
        ConfigurationError: they are not a coordinator's.
    """
    if not records:
        return None
    try:
        return _load(records)
    except (KeyError, ValueError, DecodeError) as error:
        raise ConfigurationError(
            f"the state store holds what no coordinator wrote: {error!r}; use another one"
        ) from error


def _load(records: Mapping[str, bytes]) -> Durable:
    job = _read(state_pb2.JobRecord, records["job"])
    members = _read(state_pb2.MembersRecord, records["members"])
    if not members.HasField("membership"):
        raise InvalidRequest("the record of the members has none")
    models = _read(state_pb2.ModelsRecord, records["models"]) if "models" in records else None
    names = {0: ""} if models is None else models.names
    return Durable(
        state_id=job.state_id,
        job=job.job,
        world_size=job.world_size,
        num_shards=job.num_shards,
        was_complete=members.was_complete,
        membership=codec.membership_from_proto(members.membership),
        vacant=members.vacant,
        draining=frozenset(members.draining),
        needed_shards=members.needed_shards,
        models={number: _model(records, number, name) for number, name in names.items()},
        next_model=1 if models is None else models.next,
        snapshot_id=_read(checkpoint_pb2.SnapshotOrder, records.get("orders", b"")).id,
        revoked=dict(_read(revocation_pb2.RevocationsEvent, records.get("revocations", b"")).reasons),
        kv={k.removeprefix(_KV): v for k, v in records.items() if k.startswith(_KV)},
    )


def _model(records: Mapping[str, bytes], number: int, name: str) -> DurableModel:
    progress = _read(membership_pb2.ModelProgress, records[_of(number, "progress")])
    if progress.model != number or progress.step < 1:
        raise InvalidRequest(f"the progress of model {number} is step {progress.step} of model {progress.model}")
    begins = _of(number, _DECISION)
    events = (_read(session_pb2.DecisionEvent, v) for k, v in records.items() if k.startswith(begins))
    spec, optimizer = records.get(_of(number, "spec")), records.get(_of(number, "optimizer"))
    return DurableModel(
        name=name,
        step=progress.step,
        version=progress.version,
        parameters=_parameters(_read(state_pb2.ParametersRecord, records.get(_of(number, "parameters"), b""))),
        spec=None if spec is None else codec.job_spec_from_proto(_read(layout_pb2.JobSpec, spec)),
        optimizer=None if optimizer is None else codec.optimizer_from_proto(_read(common_pb2.OptimizerSpec, optimizer)),
        decisions=tuple(sorted(map(codec.decision_from_proto, events), key=lambda d: d.step)),
        committed=dict(_read(state_pb2.CommittedRecord, records.get(_of(number, "committed"), b"")).values),
    )


def _parameters(message: state_pb2.ParametersRecord) -> ParameterState:
    return ParameterState(
        epoch=message.epoch,
        initialized=message.initialized,
        holders=dict(message.holders),
        uploader=message.uploader,
        restore=codec.RESTORE.from_proto(message.restore) if message.HasField("restore") else None,
        failure=message.failure,
        copied=message.copied,
        replaced=message.replaced,
        lost={incarnation: tuple(slices.numbers) for incarnation, slices in message.lost.items()},
        lost_version=message.lost_version,
        corrupt=dict(message.corrupt),
        run_began=message.run_began,
        placement=codec.placement_from_proto(message.placement) if message.HasField("placement") else None,
    )


def _record(key: str, message: Message) -> Record:
    return Record(key, message.SerializeToString(deterministic=True))


def _read(kind: type[_MessageT], value: bytes) -> _MessageT:
    message = kind.FromString(value)
    size_bytes = message.ByteSize()
    message.DiscardUnknownFields()  # type: ignore[attr-defined]  # the stubs lack it
    if message.ByteSize() != size_bytes:
        raise InvalidRequest(f"a {kind.__name__} has fields that this version does not know")
    return message

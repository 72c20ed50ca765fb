"""The coordinator's durable state, and how it is written: by key, in a `storage.state_store.StateStore`.

Values are JSON, except for those of the key-value store, which are stored unchanged.

    job          id of this state, name, world size, number of shard servers
    members      generation, step and version of each model it began with, members, whether the job is and ever was
                 complete
    models       names of the models by number, and the next number
    orders       number of the newest snapshot order
    kv/KEY       the key-value store

    of the first model; of model K, "model/K/" is before each:
    progress     step, version
    parameters   epoch, who holds them, who uploads them, the restore in progress
    spec         layout, dtypes and policy          optimizer   its groups
    decision/N   the newest `HISTORY` decisions, N = step modulo HISTORY; of asynchronous steps, the newest of each
                 replica R, N = "rR"
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from axon_ps.compress.compressor import Compressor
from axon_ps.compress.registry import compressor
from axon_ps.coordinator.core.events import RestoreOrder
from axon_ps.errors import ConfigurationError, InvalidRequest
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.layout import layout_from_json, layout_to_json
from axon_ps.sharding.plan import PlanOptions
from axon_ps.sharding.policy import policy_from_json, policy_to_json
from axon_ps.sharding.precision import WirePrecision
from axon_ps.storage.state_store import Record
from axon_ps.types import (
    CopyFrom,
    Decision,
    DType,
    Member,
    Membership,
    OptimizerSpec,
    Outcome,
    Role,
    Turn,
)

HISTORY = 16
"""How many decisions are retained for members that reconnect and may have missed some."""

FIRST_NAME = "model 0"
"""The name of the first model that is given none."""

_KV = "kv/"
_MODEL = "model/"
_DECISION = "decision/"


@dataclass
class Parameters:
    """Who holds a model's parameters.

    Attributes:
        epoch: how often it was restored.
        initialized: whether every shard server has held its parameters at some time in this epoch.
        holders: per shard server rank, the incarnation that holds its slices.
        uploader: incarnation of the worker that is to upload first values.
        restore: the restore in progress.
        failure: why the last restore failed, as text.
        copied: the newest version of this epoch that took another model's values; 0 = none.
    """

    epoch: int = 0
    initialized: bool = False
    holders: dict[int, str] = field(default_factory=dict)
    uploader: str = ""
    restore: RestoreOrder | None = None
    failure: str = ""
    copied: int = 0


@dataclass
class DurableModel:
    """The durable state of one model; the generation began with `first_step` and `first_version`."""

    name: str = ""
    first_step: int = 1
    first_version: int = 0
    step: int = 1
    version: int = 0
    parameters: Parameters = field(default_factory=Parameters)
    spec: JobSpec | None = None
    optimizer: OptimizerSpec | None = None
    decisions: tuple[Decision, ...] = ()


@dataclass
class Durable:
    """All durable state of the coordinator; `models` are by number."""

    state_id: str = ""
    job: str = ""
    world_size: int = 0
    num_shards: int = 0
    complete: bool = False
    was_complete: bool = False
    generation: int = 0
    members: tuple[Member, ...] = ()
    finished: tuple[Member, ...] = ()
    vacant: int = 0
    models: dict[int, DurableModel] = field(default_factory=lambda: {0: DurableModel()})
    next_model: int = 1
    snapshot_id: int = 0
    kv: dict[str, bytes] = field(default_factory=dict)


def job_record(state_id: str, job: str, world_size: int, num_shards: int) -> Record:
    """The name of the job, and how many members it starts with."""
    value = {"state_id": state_id, "job": job, "world_size": world_size, "num_shards": num_shards}
    return _record("job", value)


def members_record(membership: Membership, members: list[Member], *, was_complete: bool, vacant: int) -> Record:
    """The members, those that have finished, and the steps and versions at which the generation began."""
    value = {
        "generation": membership.generation,
        "step": membership.step,
        "version": membership.version,
        "complete": membership.complete,
        "was_complete": was_complete,
        "members": [_member_to_json(m) for m in members],
        "finished": [_member_to_json(m) for m in membership.finished],
        "models": [[p.model, p.step, p.version] for p in membership.models],
        "vacant": vacant,
    }
    return _record("members", value)


def models_record(names: Mapping[int, str], next_model: int) -> Record:
    """The names of the job's models, and the number of the next one."""
    return _record("models", {"names": [[number, name] for number, name in sorted(names.items())], "next": next_model})


def progress_record(model: int, step: int, version: int) -> Record:
    """The step and version of a model."""
    return _record(_of(model, "progress"), {"step": step, "version": version})


def parameters_record(model: int, parameters: Parameters) -> Record:
    """Which servers hold a model's parameters."""
    restore = parameters.restore
    value = {
        "epoch": parameters.epoch,
        "initialized": parameters.initialized,
        "holders": sorted(parameters.holders.items()),
        "uploader": parameters.uploader,
        "restore": None if restore is None else [restore.epoch, restore.uri, restore.version, restore.section],
        "failure": parameters.failure,
        "copied": parameters.copied,
    }
    return _record(_of(model, "parameters"), value)


def spec_record(model: int, spec: JobSpec) -> Record:
    """Layout, dtypes and policy."""
    value = {
        "layout": layout_to_json(spec.layout),
        "param": spec.precision.param.value,
        "grad": spec.precision.grad.value,
        "chunk_numel": spec.options.chunk_numel,
        "min_slice_numel": spec.options.min_slice_numel,
        "replica_is_node": spec.replica_is_node,
        "model": spec.model,
        "policy": policy_to_json(spec.policy),
        "param_compression": _compression_to_json(spec.precision.param_compression),
        "grad_compression": _compression_to_json(spec.precision.grad_compression),
    }
    return _record(_of(model, "spec"), value)


def optimizer_record(model: int, optimizer: OptimizerSpec) -> Record:
    """The optimizer's groups."""
    groups = [dict(g) for g in optimizer.groups]
    value = {"name": optimizer.name, "groups": groups, "group_of": list(optimizer.group_of)}
    return _record(_of(model, "optimizer"), value)


def deletions(model: int, decisions: Sequence[Decision]) -> list[Record]:
    """The records that delete everything about a released model."""
    keys = ["progress", "parameters", "spec", "optimizer", *(_DECISION + _decision_key(d) for d in decisions)]
    return [Record(_of(model, key), None) for key in keys]


def orders_record(snapshot_id: int) -> Record:
    """Number of the newest snapshot order."""
    return _record("orders", {"snapshot_id": snapshot_id})


def decision_record(decision: Decision) -> Record:
    """One decision; it replaces the one `HISTORY` steps before it, or the replica's last."""
    turn, copy = decision.turn, decision.copy
    value = {
        "step": decision.step,
        "generation": decision.generation,
        "outcome": decision.outcome.value,
        "version": decision.version,
        "grad_norm": decision.grad_norm,
        "clip_factor": decision.clip_factor,
        "hyper": [dict(h) for h in decision.hyper],
        "reason": decision.reason,
        "next_generation": decision.next_generation,
        "turn": None if turn is None else [turn.replica, turn.clock, turn.slowest_clock],
        "copy": None if copy is None else [copy.source, copy.weight, copy.version],
    }
    return _record(_of(decision.model, _DECISION + _decision_key(decision)), value)


def _decision_key(decision: Decision) -> str:
    return str(decision.step % HISTORY) if decision.turn is None else f"r{decision.turn.replica}"


def _of(model: int, key: str) -> str:
    return f"{_MODEL}{model}/{key}" if model else key


def retained(decisions: Sequence[Decision], newest: Decision) -> list[Decision]:
    """The decisions to retain, with `newest`: the `HISTORY` newest, and the newest asynchronous one of each replica.

    A replica's next step needs a report of every shard server, so a server can only have missed the newest decision of
    each replica; and a worker can only have missed the newest of its own.
    """
    if newest.turn is None:
        together = [d for d in decisions if d.turn is None]
        dropped = together[: max(0, len(together) + 1 - HISTORY)]
        return [*(d for d in decisions if d not in dropped), newest]
    turn = newest.turn
    return [*(d for d in decisions if d.turn is None or d.turn.replica != turn.replica), newest]


def kv_record(key: str, value: bytes | None) -> Record:
    """A value of the key-value store; None removes it."""
    return Record(_KV + key, value)


def load(records: Mapping[str, bytes]) -> Durable | None:
    """The state that the records describe; None when there are none.

    Raises:
        ConfigurationError: they are not a coordinator's.
    """
    if not records:
        return None
    try:
        return _load(records)
    except (KeyError, TypeError, ValueError, InvalidRequest) as error:
        raise ConfigurationError(
            f"the state store holds what no coordinator wrote: {error!r}; use another one"
        ) from error


def _load(records: Mapping[str, bytes]) -> Durable:
    def value(key: str, default: Any = None) -> Any:
        return json.loads(records[key]) if key in records else default

    job, members = value("job"), value("members")
    named = value("models", {"names": [[0, FIRST_NAME if "spec" in records else ""]], "next": 1})
    began = {0: (members["step"], members["version"])}
    began |= {number: (step, version) for number, step, version in members.get("models", [])}
    return Durable(
        state_id=job["state_id"],
        job=job["job"],
        world_size=job["world_size"],
        num_shards=job["num_shards"],
        complete=members["complete"],
        was_complete=members["was_complete"],
        generation=members["generation"],
        members=tuple(map(_member, members["members"])),
        finished=tuple(map(_member, members.get("finished", []))),
        vacant=members.get("vacant", 0),
        models={number: _model(records, number, name, *began.get(number, (1, 0))) for number, name in named["names"]},
        next_model=named["next"],
        snapshot_id=value("orders", {"snapshot_id": 0})["snapshot_id"],
        kv={k.removeprefix(_KV): v for k, v in records.items() if k.startswith(_KV)},
    )


def _model(records: Mapping[str, bytes], number: int, name: str, first_step: int, first_version: int) -> DurableModel:
    def value(key: str) -> Any:
        text = records.get(_of(number, key))
        return None if text is None else json.loads(text)

    begins = _of(number, _DECISION)
    decisions = [_decision(json.loads(v), number) for k, v in records.items() if k.startswith(begins)]
    progress, parameters = value("progress"), value("parameters")
    spec, optimizer = value("spec"), value("optimizer")
    return DurableModel(
        name=name,
        first_step=first_step,
        first_version=first_version,
        step=progress["step"],
        version=progress["version"],
        parameters=Parameters() if parameters is None else _parameters(parameters, number),
        spec=None if spec is None else _spec(spec),
        optimizer=None if optimizer is None else _optimizer(optimizer),
        decisions=tuple(sorted(decisions, key=lambda d: d.step)),
    )


def _record(key: str, value: Any) -> Record:
    return Record(key, json.dumps(value, separators=(",", ":")).encode())


def _member_to_json(member: Member) -> dict[str, Any]:
    names = ("rank", "incarnation", "node", "address", "joined")
    return {"role": member.role.value, **{name: getattr(member, name) for name in names}}


def _member(value: dict[str, Any]) -> Member:
    return Member(**{**value, "role": Role(value["role"])})


def _decision(value: dict[str, Any], model: int) -> Decision:
    turn, copy = value.get("turn"), value.get("copy")
    return Decision(
        **{
            **value,
            "outcome": Outcome(value["outcome"]),
            "hyper": tuple(value["hyper"]),
            "turn": None if turn is None else Turn(replica=turn[0], clock=turn[1], slowest_clock=turn[2]),
            "copy": None if copy is None else CopyFrom(source=copy[0], weight=copy[1], version=copy[2]),
            "model": model,
        }
    )


def _compression_to_json(compression: Compressor | None) -> dict[str, Any] | None:
    return None if compression is None else {"name": compression.name, "options": compression.options}


def _compression(value: dict[str, Any] | None) -> Compressor | None:
    return None if value is None else compressor(value["name"], **value["options"])


def _parameters(value: dict[str, Any], model: int) -> Parameters:
    restore = value["restore"]
    order = None
    if restore is not None:
        epoch, uri, version, *section = restore
        order = RestoreOrder(epoch=epoch, uri=uri, version=version, model=model, section="".join(section))
    return Parameters(**{**value, "holders": {int(r): i for r, i in value["holders"]}, "restore": order})


def _spec(value: dict[str, Any]) -> JobSpec:
    return JobSpec(
        layout=layout_from_json(value["layout"]),
        precision=WirePrecision(
            param=DType.parse(value["param"]),
            grad=DType.parse(value["grad"]),
            param_compression=_compression(value.get("param_compression")),
            grad_compression=_compression(value.get("grad_compression")),
        ),
        options=PlanOptions(chunk_numel=value["chunk_numel"], min_slice_numel=value["min_slice_numel"]),
        replica_is_node=value["replica_is_node"],
        policy=policy_from_json(value.get("policy", {"kind": "synchronous"})),
        model=value.get("model", ""),
    )


def _optimizer(value: dict[str, Any]) -> OptimizerSpec:
    return OptimizerSpec(name=value["name"], groups=tuple(value["groups"]), group_of=tuple(value["group_of"]))

"""What of the coordinator outlives it, and how that is written: by key, in a `storage.state_store.StateStore`.

Values are JSON, but for those of the key-value store, which are stored as they are.

    job          id of this state, name, world size, number of shard servers
    members      generation, step and version it began with, members, whether the job is and ever was complete
    progress     step, version
    parameters   epoch, who holds them, who uploads them, the restore under way
    spec         layout and how it travels          optimizer   its groups
    orders       number of the newest snapshot order
    decision/N   the newest `HISTORY` decisions, N = step modulo HISTORY; of steps of one replica alone, the newest of
                 each replica R, N = "rR"
    kv/KEY       the key-value store
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from axon_ps.coordinator.events import RestoreOrder
from axon_ps.errors import ConfigurationError, InvalidRequest
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.layout import layout_from_json, layout_to_json
from axon_ps.sharding.plan import PlanOptions
from axon_ps.sharding.policy import policy_from_json, policy_to_json
from axon_ps.storage.state_store import Record
from axon_ps.types import (
    Compression,
    Decision,
    DType,
    Int8,
    Member,
    Membership,
    OptimizerSpec,
    Outcome,
    Role,
    TopK,
    Turn,
    WirePrecision,
)

HISTORY = 16
"""How many decisions are kept for members that come back and may have missed some."""

_KV = "kv/"
_DECISION = "decision/"


@dataclass
class Parameters:
    """Who holds the job's parameters.

    Attributes:
        epoch: how often the job was restored.
        initialized: whether every shard server held its parameters at some moment of this epoch.
        holders: per shard server rank, the incarnation that holds its slices.
        uploader: incarnation of the worker that is to upload first values.
        restore: the restore under way.
        failure: why the last restore failed, in words.
    """

    epoch: int = 0
    initialized: bool = False
    holders: dict[int, str] = field(default_factory=dict)
    uploader: str = ""
    restore: RestoreOrder | None = None
    failure: str = ""


@dataclass
class Durable:
    """Everything that outlives the coordinator; its generation began with `first_step` and `first_version`."""

    state_id: str = ""
    job: str = ""
    world_size: int = 0
    num_shards: int = 0
    complete: bool = False
    was_complete: bool = False
    generation: int = 0
    first_step: int = 1
    first_version: int = 0
    step: int = 1
    version: int = 0
    members: tuple[Member, ...] = ()
    finished: tuple[Member, ...] = ()
    vacant: int = 0
    parameters: Parameters = field(default_factory=Parameters)
    spec: JobSpec | None = None
    optimizer: OptimizerSpec | None = None
    snapshot_id: int = 0
    decisions: tuple[Decision, ...] = ()
    kv: dict[str, bytes] = field(default_factory=dict)


def job_record(state_id: str, job: str, world_size: int, num_shards: int) -> Record:
    """What the job is called, and how many members it starts with."""
    value = {"state_id": state_id, "job": job, "world_size": world_size, "num_shards": num_shards}
    return _record("job", value)


def members_record(membership: Membership, members: list[Member], *, was_complete: bool, vacant: int) -> Record:
    """Who is a member, who has finished, and where their generation began."""
    value = {
        "generation": membership.generation,
        "step": membership.step,
        "version": membership.version,
        "complete": membership.complete,
        "was_complete": was_complete,
        "members": [_member_to_json(m) for m in members],
        "finished": [_member_to_json(m) for m in membership.finished],
        "vacant": vacant,
    }
    return _record("members", value)


def progress_record(step: int, version: int) -> Record:
    """Where the job is."""
    return _record("progress", {"step": step, "version": version})


def parameters_record(parameters: Parameters) -> Record:
    """Who holds the parameters."""
    restore = parameters.restore
    value = {
        "epoch": parameters.epoch,
        "initialized": parameters.initialized,
        "holders": sorted(parameters.holders.items()),
        "uploader": parameters.uploader,
        "restore": None if restore is None else [restore.epoch, restore.uri, restore.version],
        "failure": parameters.failure,
    }
    return _record("parameters", value)


def spec_record(spec: JobSpec) -> Record:
    """Layout and how it travels."""
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
    return _record("spec", value)


def optimizer_record(optimizer: OptimizerSpec) -> Record:
    """The optimizer's groups."""
    groups = [dict(g) for g in optimizer.groups]
    return _record("optimizer", {"name": optimizer.name, "groups": groups, "group_of": list(optimizer.group_of)})


def orders_record(snapshot_id: int) -> Record:
    """Number of the newest snapshot order."""
    return _record("orders", {"snapshot_id": snapshot_id})


def decision_record(decision: Decision) -> Record:
    """One decision; it takes the place of the one `HISTORY` steps before it, or of the replica's last."""
    turn = decision.turn
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
    }
    place = decision.step % HISTORY if turn is None else f"r{turn.replica}"
    return _record(f"{_DECISION}{place}", value)


def kept(decisions: Sequence[Decision], newest: Decision) -> list[Decision]:
    """The decisions to keep, `newest` among them: the `HISTORY` newest, and the newest of each replica alone.

    A replica's next step needs the word of every shard server on it, so a server can only have missed the newest of
    each; and of a worker's own only the newest can be unknown to it.
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
    """What the records say; None when there are none.

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
    def value(key: str) -> Any:
        return json.loads(records[key])

    job, members, progress = value("job"), value("members"), value("progress")
    decisions = [_decision(json.loads(v)) for k, v in records.items() if k.startswith(_DECISION)]
    return Durable(
        state_id=job["state_id"],
        job=job["job"],
        world_size=job["world_size"],
        num_shards=job["num_shards"],
        complete=members["complete"],
        was_complete=members["was_complete"],
        generation=members["generation"],
        first_step=members["step"],
        first_version=members["version"],
        members=tuple(map(_member, members["members"])),
        finished=tuple(map(_member, members.get("finished", []))),
        vacant=members.get("vacant", 0),
        step=progress["step"],
        version=progress["version"],
        parameters=_parameters(value("parameters")) if "parameters" in records else Parameters(),
        spec=_spec(value("spec")) if "spec" in records else None,
        optimizer=_optimizer(value("optimizer")) if "optimizer" in records else None,
        snapshot_id=value("orders")["snapshot_id"] if "orders" in records else 0,
        decisions=tuple(sorted(decisions, key=lambda d: d.step)),
        kv={k.removeprefix(_KV): v for k, v in records.items() if k.startswith(_KV)},
    )


def _record(key: str, value: Any) -> Record:
    return Record(key, json.dumps(value, separators=(",", ":")).encode())


def _member_to_json(member: Member) -> dict[str, Any]:
    names = ("rank", "incarnation", "node", "address", "joined")
    return {"role": member.role.value, **{name: getattr(member, name) for name in names}}


def _member(value: dict[str, Any]) -> Member:
    return Member(**{**value, "role": Role(value["role"])})


def _decision(value: dict[str, Any]) -> Decision:
    turn = value.get("turn")
    return Decision(
        **{
            **value,
            "outcome": Outcome(value["outcome"]),
            "hyper": tuple(value["hyper"]),
            "turn": None if turn is None else Turn(replica=turn[0], clock=turn[1], slowest_clock=turn[2]),
        }
    )


def _compression_to_json(compression: Compression | None) -> dict[str, Any] | None:
    return None if compression is None else vars(compression)


def _compression(value: dict[str, Any] | None) -> Any:
    if value is None:
        return None
    return Int8(**value) if "block_numel" in value else TopK(**value)


def _parameters(value: dict[str, Any]) -> Parameters:
    restore = value["restore"]
    order = None if restore is None else RestoreOrder(epoch=restore[0], uri=restore[1], version=restore[2])
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

"""Conversion between values and the messages of `v1`: for every value `x`, `x_to_proto` and `x_from_proto`.

Most are tables of fields (`wire.conversion`). Messages are validated: an enum must have a known value, a name must be
short and printable, counts must fit each other. `x_from_proto` raises `InvalidRequest` naming the field. Value types
that check themselves in their constructors (layouts, job specs) are not checked again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Final, TypeVar

from axon_ps.compress.compressor import Compressor
from axon_ps.compress.registry import compressor
from axon_ps.errors import InvalidRequest
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.layout import FullTensor, Layout, Parameter, Unit
from axon_ps.sharding.placement import Holders, Placement
from axon_ps.sharding.plan import PlanOptions
from axon_ps.sharding.policy import Asynchronous, BoundedStaleness, LocalSteps, Policy, Synchronous
from axon_ps.sharding.precision import WirePrecision
from axon_ps.types import (
    COLLECTIVE_DTYPES,
    EACH_NODE,
    EACH_WORKER,
    MAX_RANKS,
    CopyFrom,
    Decision,
    DType,
    Grouping,
    Hyper,
    Member,
    Membership,
    ModelProgress,
    OptimizerChange,
    OptimizerSpec,
    Outcome,
    ReplicaClock,
    Role,
)
from axon_ps.wire.conversion import Conversion, Field, checked
from axon_ps.wire.events import RestoreOrder
from axon_ps.wire.v1 import (
    checkpoint_pb2,
    common_pb2,
    layout_pb2,
    membership_pb2,
    placement_pb2,
    policy_pb2,
    session_pb2,
)

_T = TypeVar("_T")

MAX_NAME_CHARS: Final = 1024
"""Longest name accepted from the wire."""

MAX_DIMENSIONS: Final = 64
"""Most dimensions of a parameter (numpy's limit)."""

MAX_LAYOUT_NUMEL: Final = 1 << 45
"""Most elements of a layout: 35 trillion, far above any model and far below an overflow."""

MAX_CUTS: Final = 1 << 16
"""Most shard servers over which a plan cuts units, as many as there may be."""

_DTYPES: Final = {
    DType.F32: common_pb2.D_TYPE_F32,
    DType.BF16: common_pb2.D_TYPE_BF16,
    DType.F16: common_pb2.D_TYPE_F16,
    DType.F64: common_pb2.D_TYPE_F64,
    DType.I64: common_pb2.D_TYPE_I64,
    DType.I32: common_pb2.D_TYPE_I32,
    DType.U8: common_pb2.D_TYPE_U8,
    DType.BOOL: common_pb2.D_TYPE_BOOL,
    DType.INT8_BLOCK: common_pb2.D_TYPE_INT8_BLOCK,
    DType.F8_E4M3: common_pb2.D_TYPE_F8_E4M3,
    DType.F8_E5M2: common_pb2.D_TYPE_F8_E5M2,
    DType.F8_E4M3FNUZ: common_pb2.D_TYPE_F8_E4M3FNUZ,
    DType.F8_E5M2FNUZ: common_pb2.D_TYPE_F8_E5M2FNUZ,
    DType.F8_E8M0: common_pb2.D_TYPE_F8_E8M0,
    DType.F4_X2: common_pb2.D_TYPE_F4_X2,
    DType.I8: common_pb2.D_TYPE_I8,
    DType.I16: common_pb2.D_TYPE_I16,
    DType.U16: common_pb2.D_TYPE_U16,
    DType.U32: common_pb2.D_TYPE_U32,
    DType.U64: common_pb2.D_TYPE_U64,
    DType.C32: common_pb2.D_TYPE_C32,
    DType.C64: common_pb2.D_TYPE_C64,
    DType.C128: common_pb2.D_TYPE_C128,
}
_DTYPES_BACK: Final[dict[int, DType]] = {number: dtype for dtype, number in _DTYPES.items()}
_ROLES: Final = {Role.WORKER: common_pb2.ROLE_WORKER, Role.SHARD: common_pb2.ROLE_SHARD}
_ROLES_BACK: Final[dict[int, Role]] = {number: role for role, number in _ROLES.items()}
_OUTCOMES: Final = {
    Outcome.COMMIT: common_pb2.OUTCOME_COMMIT,
    Outcome.SKIP: common_pb2.OUTCOME_SKIP,
    Outcome.ABORT: common_pb2.OUTCOME_ABORT,
}
_OUTCOMES_BACK: Final[dict[int, Outcome]] = {number: outcome for outcome, number in _OUTCOMES.items()}
_POLICIES: Final[dict[type[Policy], policy_pb2.PolicyKind]] = {
    Synchronous: policy_pb2.POLICY_KIND_SYNCHRONOUS,
    Asynchronous: policy_pb2.POLICY_KIND_ASYNCHRONOUS,
    BoundedStaleness: policy_pb2.POLICY_KIND_BOUNDED_STALENESS,
    LocalSteps: policy_pb2.POLICY_KIND_LOCAL_STEPS,
}
_POLICIES_BACK: Final[dict[int, type[Policy]]] = {number: policy for policy, number in _POLICIES.items()}


def name_from_proto(name: str, what: str, *, empty: bool = False) -> str:
    """Return `name` itself, if it is valid (printable, not too long). `what` names it in the error.

    Raises:
        InvalidRequest: it is empty (unless `empty`), too long or not printable.
    """
    if not name and not empty:
        raise InvalidRequest(f"{what} is empty; give it a name")
    if len(name) > MAX_NAME_CHARS:
        raise InvalidRequest(f"{what} has {len(name)} characters; at most {MAX_NAME_CHARS} are allowed")
    if not name.isprintable():
        raise InvalidRequest(f"{what} is {name[:80]!r}; a name must be printable")
    return name


def name_of(what: str, *, empty: bool = False) -> Field:
    """Return the row of a name. `what` names it in errors."""
    return checked(lambda name: name_from_proto(name, what, empty=empty))


def dtype_to_proto(dtype: DType) -> common_pb2.DType:
    """Return the number of a dtype on the wire."""
    return _DTYPES[dtype]


def dtype_from_proto(number: int, *, blocks: bool = False, raw: bool = False) -> DType:
    """Return the dtype of a number from the wire.

    Args:
        number: the number.
        blocks: whether a dtype of blocks is allowed, as in collectives.
        raw: whether all dtypes of raw parameters are allowed.

    Raises:
        InvalidRequest: it is unset or unknown, or a dtype that is not allowed.
    """
    dtype = _known(_DTYPES_BACK, number, "dtype")
    if dtype is DType.INT8_BLOCK and not blocks:
        raise InvalidRequest(f"parameters and gradients cannot be {dtype.value}; that is for collectives")
    if dtype not in COLLECTIVE_DTYPES and not raw:
        raise InvalidRequest(f"values cannot be sent as {dtype.value}; only raw parameters are of that dtype")
    return dtype


def _check_full_tensor(tensor: FullTensor) -> None:
    for alias in tensor.aliases:
        name_from_proto(alias, "a tensor's alias")


FULL_TENSOR: Final = Conversion(
    FullTensor, layout_pb2.FullTensor, check=_check_full_tensor, name=name_of("a tensor's name")
)


def placement_to_proto(placement: Placement) -> placement_pb2.Placement:
    """Convert the placement of a model's slices to a message."""
    made = {h: placement_pb2.SliceHolders(complete=h.complete, copying=h.copying) for h in placement.counts}
    return placement_pb2.Placement(
        number=placement.number,
        num_cuts=placement.num_cuts,
        replication=placement.replication,
        slices=[made[h] for h in placement.holders],
    )


def placement_from_proto(message: placement_pb2.Placement) -> Placement:
    """Convert a message to the placement of a model's slices.

    Raises:
        InvalidRequest: a slice has no holder, or units are cut over no server, or over more than there may be.
    """
    if message.num_cuts > MAX_CUTS:
        raise InvalidRequest(f"a placement is cut over {message.num_cuts} servers; at most {MAX_CUTS} are allowed")
    if not message.num_cuts or not all(h.complete for h in message.slices):
        raise InvalidRequest("a placement names a slice that no shard server holds, or is cut over no server")
    made: dict[Holders, Holders] = {}  # equal ones become one object, which is faster as a key
    holders = (Holders(tuple(h.complete), tuple(h.copying)) for h in message.slices)
    return Placement(
        holders=tuple([made.setdefault(h, h) for h in holders]),
        num_cuts=message.num_cuts,
        number=message.number,
        replication=message.replication,
    )


def layout_to_proto(layout: Layout) -> layout_pb2.Layout:
    """Convert a layout to a message."""
    return layout_pb2.Layout(
        units=[
            layout_pb2.Unit(
                name=unit.name,
                trainable=unit.trainable,
                parameters=[
                    layout_pb2.Parameter(
                        name=p.name,
                        shape=p.shape,
                        offset=p.offset,
                        dtype=dtype_to_proto(p.dtype),
                        aliases=p.aliases,
                        full=None if p.full is None else FULL_TENSOR.to_proto(p.full),
                        raw=p.raw,
                        float8=p.float8,
                    )
                    for p in unit.parameters
                ],
            )
            for unit in layout.units
        ]
    )


def layout_from_proto(message: layout_pb2.Layout) -> Layout:
    """Convert a message to a layout.

    Raises:
        InvalidRequest: a name, shape or dtype is malformed, or the layout breaks one of its invariants.
    """
    layout = Layout(
        units=tuple(
            Unit(
                name=name_from_proto(unit.name, "a unit's name"),
                trainable=unit.trainable,
                parameters=tuple(_parameter(p) for p in unit.parameters),
            )
            for unit in message.units
        )
    )
    if layout.numel > MAX_LAYOUT_NUMEL:
        raise InvalidRequest(f"the layout has {layout.numel} elements; at most {MAX_LAYOUT_NUMEL} are allowed")
    return layout


def hypers_to_proto(hypers: Iterable[Hyper]) -> list[dict[str, Hyper]]:
    """Return the hyperparameters of every group as fields of their messages, which is faster than messages."""
    return [{"values": hyper} for hyper in hypers]


def hyper_from_proto(message: common_pb2.Hyper) -> dict[str, float]:
    """Convert a message to the hyperparameters of one group. The optimizer checks their values.

    Raises:
        InvalidRequest: a name is malformed.
    """
    return {name_from_proto(n, "a hyperparameter's name"): message.values[n] for n in sorted(message.values)}


def hypers_from_proto(messages: Iterable[common_pb2.Hyper]) -> tuple[Hyper, ...]:
    """Convert messages to the hyperparameters of every group.

    Raises:
        InvalidRequest: a name is malformed.
    """
    return tuple(hyper_from_proto(m) for m in messages)


def _known(values: dict[int, _T], number: int, what: str) -> _T:
    value = values.get(number)
    if value is None:
        given = "unset" if number == 0 else f"number {number}, which this version does not know"
        raise InvalidRequest(f"a {what} is {given}; the numbers known are {sorted(values)}")
    return value


ROLE: Final = Field(to_proto=_ROLES.__getitem__, from_proto=lambda number: _known(_ROLES_BACK, number, "role"))
role_to_proto, role_from_proto = ROLE.to_proto, ROLE.from_proto

OUTCOME: Final = Field(
    to_proto=_OUTCOMES.__getitem__, from_proto=lambda number: _known(_OUTCOMES_BACK, number, "outcome")
)
outcome_to_proto, outcome_from_proto = OUTCOME.to_proto, OUTCOME.from_proto

HYPERS: Final = Field(to_proto=hypers_to_proto, from_proto=hypers_from_proto)

MEMBER: Final = Conversion(
    Member,
    membership_pb2.Member,
    role=ROLE,
    incarnation=name_of("a member's incarnation"),
    node=name_of("a member's node", empty=True),
    address=name_of("a member's address", empty=True),
)
member_to_proto, member_from_proto = MEMBER.to_proto, MEMBER.from_proto

PROGRESS: Final = Conversion(ModelProgress, membership_pb2.ModelProgress)
progress_to_proto, progress_from_proto = PROGRESS.to_proto, PROGRESS.from_proto


def _members_of(role: Role) -> Field:
    """Return the row of all members of a role, by rank."""

    def from_proto(messages: Sequence[membership_pb2.Member]) -> tuple[Member, ...]:
        members = tuple([member_from_proto(m) for m in messages])
        for m in members:
            if m.role is not role:
                raise InvalidRequest(f"{m.role.value} {m.rank} is in the list of {role.value}s")
        ranks = [m.rank for m in members]
        if ranks != sorted(set(ranks)):
            raise InvalidRequest(f"the ranks of the {role.value}s are {ranks[:32]}; they must ascend")
        return members

    return Field(to_proto=MEMBER.field.each.to_proto, from_proto=from_proto)


def _rows_from_proto(messages: Sequence[layout_pb2.RankRow]) -> tuple[tuple[int, ...], ...]:
    if (ranks := sum(max(1, len(row.ranks)) for row in messages)) > MAX_RANKS:
        raise InvalidRequest(f"replicas of {ranks} workers in all are named; a job has at most {MAX_RANKS}")
    return tuple([tuple(row.ranks) for row in messages])


GROUPING: Final = Conversion(
    Grouping,
    layout_pb2.Grouping,
    rows=Field(
        to_proto=lambda rows: [layout_pb2.RankRow(ranks=row) for row in rows],
        from_proto=_rows_from_proto,
    ),
)
GROUPING_ROW: Final = Field(  # that of nodes has a field of its own: older processes know no other
    to_proto=lambda grouping: None if grouping in (EACH_WORKER, EACH_NODE) else GROUPING.to_proto(grouping),
    from_proto=GROUPING.from_proto,
)

_MEMBERSHIP: Final = Conversion(
    Membership,
    membership_pb2.MembershipEvent,
    unread=("by_node",),
    grouping=GROUPING_ROW,
    workers=_members_of(Role.WORKER),
    shards=_members_of(Role.SHARD),
    finished=MEMBER.field.each,
    models=PROGRESS.field.each,
)


def membership_to_proto(membership: Membership) -> membership_pb2.MembershipEvent:
    """Convert a membership to a message."""
    message = _MEMBERSHIP.to_proto(membership)
    message.by_node = membership.grouping == EACH_NODE
    return message


def membership_from_proto(message: membership_pb2.MembershipEvent) -> Membership:
    """Convert a message to a membership.

    Raises:
        InvalidRequest: a member is malformed or in the wrong list, or the grouping of workers is invalid.
    """
    membership = _MEMBERSHIP.from_proto(message)
    return dataclasses.replace(membership, grouping=EACH_NODE) if message.by_node else membership


MEMBERSHIP_ROW: Final = Field(to_proto=membership_to_proto, from_proto=membership_from_proto)
"""The row of a membership."""


def _weight(weight: float) -> float:
    if not 0.0 < weight <= 1.0:
        raise InvalidRequest(f"the weight of a copy is {weight}; it must be above 0 and at most 1")
    return weight


COPY: Final = Conversion(CopyFrom, membership_pb2.CopyFrom, weight=checked(_weight))
copy_to_proto, copy_from_proto = COPY.to_proto, COPY.from_proto


def _check_groups(optimizer: OptimizerSpec) -> None:
    for group in optimizer.group_of:
        if not -1 <= group < len(optimizer.groups):
            raise InvalidRequest(
                f"a parameter is in group {group}; the optimizer has {len(optimizer.groups)} (-1 is in none)"
            )


OPTIMIZER: Final = Conversion(
    OptimizerSpec,
    common_pb2.OptimizerSpec,
    check=_check_groups,
    name=name_of("the optimizer's name"),
    groups=HYPERS,
    moments=HYPERS,
)
optimizer_to_proto, optimizer_from_proto = OPTIMIZER.to_proto, OPTIMIZER.from_proto

CHANGE: Final = Conversion(OptimizerChange, common_pb2.OptimizerChange, spec=OPTIMIZER.field.named("optimizer"))
change_to_proto, change_from_proto = CHANGE.to_proto, CHANGE.from_proto

RESTORE: Final = Conversion(
    RestoreOrder,
    checkpoint_pb2.RestoreOrder,
    uri=name_of("the checkpoint's URI", empty=True),
    section=name_of("a model's name", empty=True),
    sha256=name_of("a manifest's hash", empty=True),
)

REPLICA_CLOCK: Final = Conversion(ReplicaClock, common_pb2.Turn)
replica_clock_to_proto, replica_clock_from_proto = REPLICA_CLOCK.to_proto, REPLICA_CLOCK.from_proto

DECISION: Final = Conversion(
    Decision,
    session_pb2.DecisionEvent,
    unwritten=("traceparent",),  # the stream sets it, for members whose steps are traced
    outcome=OUTCOME,
    hyper=HYPERS,
    replica_clock=REPLICA_CLOCK.field.named("turn").or_none,
    copy=COPY.field.or_none,
    optimizer=CHANGE.field.or_none,
)
decision_to_proto, decision_from_proto = DECISION.to_proto, DECISION.from_proto


def policy_to_proto(policy: Policy) -> policy_pb2.Policy:
    """Convert a policy to a message."""
    return policy_pb2.Policy(kind=_POLICIES[type(policy)], **vars(policy))


def policy_from_proto(message: policy_pb2.Policy) -> Policy:
    """Convert a message to a policy.

    Raises:
        InvalidRequest: it is unknown, or its setting is out of range.
    """
    policy = _known(_POLICIES_BACK, message.kind, "policy")
    return policy(**{setting.name: getattr(message, setting.name) for setting in dataclasses.fields(policy)})


def compression_to_proto(compression: Compressor) -> layout_pb2.Compression:
    """Convert a compression to a message."""
    return layout_pb2.Compression(name=compression.name, options=compression.options)


def compression_from_proto(message: layout_pb2.Compression) -> Compressor:
    """Convert a message to a compression.

    Raises:
        InvalidRequest: no compressor has its name, or it has no such option, or the option is out of range.
    """
    name = name_from_proto(message.name, "a compression's name")
    return compressor(name, **{name_from_proto(o, "an option's name"): message.options[o] for o in message.options})


def job_spec_to_proto(spec: JobSpec) -> layout_pb2.JobSpec:
    """Convert a job's spec to a message. It is encoded once, since that takes a while for a large layout."""
    if not spec.encoded:
        spec.encoded.append(_job_spec_to_proto(spec).SerializeToString(deterministic=True))
    return layout_pb2.JobSpec.FromString(spec.encoded[0])


def _job_spec_to_proto(spec: JobSpec) -> layout_pb2.JobSpec:
    param, grad = spec.precision.param_compression, spec.precision.grad_compression
    return layout_pb2.JobSpec(
        layout=layout_to_proto(spec.layout),
        param_dtype=dtype_to_proto(spec.precision.param),
        grad_dtype=dtype_to_proto(spec.precision.grad),
        chunk_numel=spec.options.chunk_numel,
        min_slice_numel=spec.options.min_slice_numel,
        replica_is_node=spec.grouping == EACH_NODE,
        grouping=GROUPING_ROW.to_proto(spec.grouping),
        policy=policy_to_proto(spec.policy),
        param_compression=None if param is None else compression_to_proto(param),
        grad_compression=None if grad is None else compression_to_proto(grad),
        model=spec.model,
    )


def job_spec_from_proto(message: layout_pb2.JobSpec) -> JobSpec:
    """Convert a message to a job's spec.

    Raises:
        InvalidRequest: the layout, a dtype, a compression or a size is invalid.
    """
    return JobSpec(
        layout=layout_from_proto(message.layout),
        precision=_precision(message),
        options=PlanOptions(chunk_numel=message.chunk_numel, min_slice_numel=message.min_slice_numel),
        grouping=EACH_NODE if message.replica_is_node else GROUPING_ROW.from_proto(message.grouping),
        policy=policy_from_proto(message.policy) if message.HasField("policy") else Synchronous(),
        model=name_from_proto(message.model, "the model's class", empty=True),
    )


def _precision(message: layout_pb2.JobSpec) -> WirePrecision:
    param = compression_from_proto(message.param_compression) if message.HasField("param_compression") else None
    grad = compression_from_proto(message.grad_compression) if message.HasField("grad_compression") else None
    return WirePrecision(
        param=dtype_from_proto(message.param_dtype),
        grad=dtype_from_proto(message.grad_dtype),
        param_compression=param,
        grad_compression=grad,
    )


def _parameter(message: layout_pb2.Parameter) -> Parameter:
    if len(message.shape) > MAX_DIMENSIONS:
        raise InvalidRequest(
            f"parameter {message.name[:80]!r} has {len(message.shape)} dimensions; at most {MAX_DIMENSIONS} are allowed"
        )
    return Parameter(
        name=name_from_proto(message.name, "a parameter's name"),
        shape=tuple(message.shape),
        offset=message.offset,
        dtype=dtype_from_proto(message.dtype, raw=message.raw),
        aliases=tuple(name_from_proto(a, "a parameter's alias") for a in message.aliases),
        full=FULL_TENSOR.from_proto(message.full) if message.HasField("full") else None,
        raw=message.raw,
        float8=message.float8,
    )

"""Every value goes to its message and comes back equal; what cannot be a value is refused by name."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from axon_ps.errors import InvalidRequest
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.layout import FullTensor, Layout, Parameter, Unit, build_unit
from axon_ps.sharding.plan import PlanOptions
from axon_ps.sharding.precision import WirePrecision
from axon_ps.types import (
    NUMBERS,
    WIRE_DTYPES,
    Decision,
    DType,
    Grouping,
    Member,
    Membership,
    OptimizerSpec,
    Outcome,
    Role,
)
from axon_ps.wire import codec
from axon_ps.wire.v1 import common_pb2, layout_pb2, membership_pb2, session_pb2

U64 = st.integers(0, 2**64 - 1)
U32 = st.integers(0, 2**32 - 1)
NAMES = st.text(st.characters(codec="utf-8", categories=["L", "N", "P"]), min_size=1, max_size=20)
FLOATS = st.floats(allow_nan=False)
HYPERS = st.dictionaries(NAMES, FLOATS, max_size=4)


def members(role: Role) -> st.SearchStrategy[Member]:
    return st.builds(
        Member,
        role=st.just(role),
        rank=U32,
        incarnation=st.text("0123456789abcdef", min_size=32, max_size=32),
        node=NAMES | st.just(""),
        address=NAMES | st.just(""),
        local_rank=U32,
        replica=st.integers(-1, 2**31 - 1),
    )


def by_rank(role: Role) -> st.SearchStrategy[tuple[Member, ...]]:
    lists = st.lists(members(role), max_size=4, unique_by=lambda m: m.rank)
    return lists.map(lambda found: tuple(sorted(found, key=lambda m: m.rank)))


GROUPINGS = st.sampled_from(
    [Grouping(), Grouping(by_node=True), Grouping(by_node=True, size=2), Grouping(rows=((0, 2), (3, 1)))]
)
MEMBERSHIPS = st.builds(
    Membership,
    generation=U64,
    step=U64,
    version=U64,
    workers=by_rank(Role.WORKER),
    shards=by_rank(Role.SHARD),
    num_replicas=U32,
    complete=st.booleans(),
    waiting_for=st.text(max_size=30),
    grouping=GROUPINGS,
)
DECISIONS = st.builds(
    Decision,
    step=U64,
    generation=U64,
    outcome=st.sampled_from(Outcome),
    version=U64,
    grad_norm=FLOATS,
    clip_factor=FLOATS,
    hyper=st.lists(HYPERS, max_size=3).map(tuple),
    reason=st.text(max_size=30),
)
SHAPES = st.lists(st.integers(1, 1000), max_size=4).map(tuple)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    stem = draw(NAMES)
    names = (f"{stem}.{i}" for i in itertools.count())
    units = []
    for i in range(draw(st.integers(0, 3))):
        wanted = draw(st.lists(st.tuples(SHAPES, st.sampled_from(NUMBERS)), min_size=1, max_size=4))
        unit = build_unit(f"unit{i}", [(next(names), s, d) for s, d in wanted], trainable=draw(st.booleans()))
        last = unit.parameters[-1]
        tied = Parameter(
            name=last.name, shape=last.shape, offset=last.offset, dtype=last.dtype, aliases=(next(names), next(names))
        )
        units.append(Unit(name=unit.name, parameters=(*unit.parameters[:-1], tied), trainable=unit.trainable))
    if draw(st.booleans()):
        rows, columns, name = draw(st.integers(1, 4)), draw(st.integers(1, 9)), next(names)
        for row in range(rows):
            whole = FullTensor(name=name, shape=(rows, columns), begin=(row, 0), aliases=(f"{name}'",))
            part = Parameter(name=f"{name}@{row}", shape=(1, columns), offset=0, full=whole)
            units.append(Unit(name=f"part{row}", parameters=(part,)))
    return Layout(units=tuple(units))


SPECS = st.builds(
    JobSpec,
    layout=layouts(),
    precision=st.builds(WirePrecision, param=st.sampled_from(WIRE_DTYPES), grad=st.sampled_from(WIRE_DTYPES)),
    options=st.builds(PlanOptions, chunk_numel=st.integers(1, 1 << 22), min_slice_numel=st.integers(1, 2**40)),
    grouping=GROUPINGS,
)


@st.composite
def optimizers(draw: st.DrawFn) -> OptimizerSpec:
    groups = tuple(draw(st.lists(HYPERS, max_size=3)))
    group_of = tuple(draw(st.lists(st.integers(-1, len(groups) - 1), max_size=6)))
    return OptimizerSpec(name=draw(NAMES), groups=groups, group_of=group_of)


@pytest.mark.parametrize(
    ("to_proto", "from_proto", "values"),
    [
        (codec.dtype_to_proto, partial(codec.dtype_from_proto, blocks=True, raw=True), DType),
        (codec.role_to_proto, codec.role_from_proto, Role),
        (codec.outcome_to_proto, codec.outcome_from_proto, Outcome),
    ],
)
def test_every_member_of_an_enum_round_trips(to_proto: Any, from_proto: Any, values: Any) -> None:
    numbers = [to_proto(v) for v in values]
    assert [from_proto(n) for n in numbers] == list(values)
    assert sorted(numbers) == list(range(1, len(values) + 1))
    for unknown in (0, len(values) + 1, -1):
        with pytest.raises(InvalidRequest, match="unset" if unknown == 0 else f"number {unknown}"):
            from_proto(unknown)


def test_rows_beyond_any_job_are_refused() -> None:
    rows = [layout_pb2.RankRow(ranks=range(1 << 10))] * 17
    with pytest.raises(InvalidRequest, match="replicas of 17408 workers in all"):
        codec.GROUPING.from_proto(layout_pb2.Grouping(rows=rows))
    with pytest.raises(InvalidRequest, match="replicas of 20000 workers in all"):
        codec.GROUPING.from_proto(layout_pb2.Grouping(rows=[layout_pb2.RankRow()] * 20000))
    with pytest.raises(InvalidRequest, match="each rank is in one of them"):
        codec.GROUPING.from_proto(layout_pb2.Grouping(rows=[layout_pb2.RankRow(ranks=[0, 1 << 31])]))


def test_parameters_are_numbers() -> None:
    assert [codec.dtype_from_proto(codec.dtype_to_proto(dtype)) for dtype in NUMBERS] == list(NUMBERS)
    with pytest.raises(InvalidRequest, match="int8_block; that is for collectives"):
        codec.dtype_from_proto(codec.dtype_to_proto(DType.INT8_BLOCK))


@given(members(Role.WORKER) | members(Role.SHARD))
def test_members_round_trip(value: Member) -> None:
    assert codec.member_from_proto(over_the_wire(codec.member_to_proto(value))) == value


@given(MEMBERSHIPS)
def test_memberships_round_trip(value: Membership) -> None:
    assert codec.membership_from_proto(over_the_wire(codec.membership_to_proto(value))) == value


@given(layouts())
def test_layouts_round_trip(value: Layout) -> None:
    assert codec.layout_from_proto(over_the_wire(codec.layout_to_proto(value))) == value


@given(HYPERS)
def test_hypers_round_trip(value: dict[str, float]) -> None:
    assert codec.hyper_from_proto(over_the_wire(common_pb2.Hyper(**codec.hypers_to_proto([value])[0]))) == value


@given(optimizers())
def test_optimizers_round_trip(value: OptimizerSpec) -> None:
    assert codec.optimizer_from_proto(over_the_wire(codec.optimizer_to_proto(value))) == value


@given(SPECS)
def test_job_specs_round_trip(value: JobSpec) -> None:
    assert codec.job_spec_from_proto(over_the_wire(codec.job_spec_to_proto(value))) == value


@given(DECISIONS)
def test_decisions_round_trip(value: Decision) -> None:
    assert codec.decision_from_proto(over_the_wire(codec.decision_to_proto(value))) == value


def over_the_wire(message: Any) -> Any:
    return type(message).FromString(message.SerializeToString())


def test_a_decision_may_carry_a_norm_that_is_not_finite() -> None:
    for norm in (float("inf"), float("nan")):
        skipped = Decision(step=1, generation=1, outcome=Outcome.SKIP, version=0, grad_norm=norm)
        assert repr(codec.decision_from_proto(codec.decision_to_proto(skipped)).grad_norm) == repr(norm)


WORKER = membership_pb2.Member(role=common_pb2.ROLE_WORKER, rank=1, incarnation="a" * 32)
SHARD = membership_pb2.Member(role=common_pb2.ROLE_SHARD, rank=1, incarnation="b" * 32)


def parameter(**fields: Any) -> layout_pb2.Layout:
    given = layout_pb2.Parameter(**{"name": "w", "shape": [2], "dtype": common_pb2.D_TYPE_F32, **fields})
    return layout_pb2.Layout(units=[layout_pb2.Unit(name="u", parameters=[given])])


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (membership_pb2.Member(rank=1, incarnation="a"), "role is unset"),
        (membership_pb2.Member(role=common_pb2.ROLE_WORKER), "incarnation is empty"),
        (membership_pb2.Member(role=common_pb2.ROLE_WORKER, incarnation="a", node="a\nb"), "printable"),
        (membership_pb2.Member(role=common_pb2.ROLE_WORKER, incarnation="a", address="x" * 5000), "5000 characters"),
        (membership_pb2.MembershipEvent(workers=[SHARD]), "shard 1 is in the list of workers"),
        (membership_pb2.MembershipEvent(shards=[WORKER]), "worker 1 is in the list of shards"),
        (membership_pb2.MembershipEvent(workers=[WORKER, WORKER]), "must ascend"),
        (parameter(name=""), "parameter's name is empty"),
        (parameter(name="a\x00"), "printable"),
        (parameter(shape=[0]), "at least 1"),
        (parameter(shape=[1] * 100), "100 dimensions"),
        (parameter(offset=5), "must be at 0"),
        (parameter(shape=[2**63, 2**63]), "elements; at most"),
        (parameter(dtype=0), "dtype is unset"),
        (parameter(aliases=["w"]), "twice"),
        (parameter(full=layout_pb2.FullTensor(shape=[2], begin=[0])), "a tensor's name is empty"),
        (
            parameter(full=layout_pb2.FullTensor(name="w", shape=[2], begin=[0], aliases=[""])),
            "a tensor's alias is empty",
        ),
        (parameter(full=layout_pb2.FullTensor(name="w", shape=[2], begin=[2**63])), "without gaps and overlaps"),
        (layout_pb2.Layout(units=[layout_pb2.Unit(name="u")]), "no parameters"),
        (common_pb2.Hyper(values={"": 1.0}), "hyperparameter's name is empty"),
        (common_pb2.OptimizerSpec(groups=[]), "optimizer's name is empty"),
        (common_pb2.OptimizerSpec(name="sgd", group_of=[0]), "group 0; the optimizer has 0"),
        (common_pb2.OptimizerSpec(name="sgd", groups=[common_pb2.Hyper()], group_of=[-2]), "group -2"),
        (layout_pb2.JobSpec(), "dtype is unset"),
        (layout_pb2.JobSpec(param_dtype=1, grad_dtype=5, chunk_numel=1, min_slice_numel=1), "of gradients is 'i64'"),
        (layout_pb2.JobSpec(param_dtype=1, grad_dtype=1, min_slice_numel=1), "chunk_numel is 0"),
        (layout_pb2.JobSpec(param_dtype=1, grad_dtype=1, chunk_numel=1), "min_slice_numel is 0"),
        (session_pb2.DecisionEvent(step=1), "outcome is unset"),
    ],
)
def test_what_cannot_be_a_value_is_refused(message: Any, words: str) -> None:
    from_proto = {
        membership_pb2.Member: codec.member_from_proto,
        membership_pb2.MembershipEvent: codec.membership_from_proto,
        layout_pb2.Layout: codec.layout_from_proto,
        common_pb2.Hyper: codec.hyper_from_proto,
        common_pb2.OptimizerSpec: codec.optimizer_from_proto,
        layout_pb2.JobSpec: codec.job_spec_from_proto,
        session_pb2.DecisionEvent: codec.decision_from_proto,
    }[type(message)]
    with pytest.raises(InvalidRequest, match=words):
        from_proto(message)

"""The durable records: what was written comes back equal, and what no coordinator wrote is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from axon_ps.coordinator.core import records
from axon_ps.errors import ConfigurationError
from axon_ps.sharding.placement import Holders, Placement
from axon_ps.types import CopyFrom, Decision, Member, Membership, ModelProgress, Outcome, ReplicaClock, Role
from axon_ps.wire.events import RestoreOrder
from axon_ps.wire.v1 import membership_pb2, session_pb2, state_pb2
from coordinator_driver import OPTIMIZER, SPEC

MEMBERSHIP = Membership(
    generation=7,
    step=30,
    version=28,
    workers=(Member(role=Role.WORKER, rank=2, incarnation="a" * 32, node="n", replica=0, joined=6),),
    shards=(Member(role=Role.SHARD, rank=0, incarnation="b" * 32, node="n", address="h:1", joined=1),),
    num_replicas=1,
    complete=True,
    finished=(Member(role=Role.WORKER, rank=1, incarnation="c" * 32, node="n"),),
    models=(ModelProgress(model=3, step=5, version=4),),
)
PARAMETERS = records.ParameterState(
    epoch=2,
    initialized=True,
    holders={0: "b" * 32, 1: "d" * 32},
    uploader="a" * 32,
    restore=RestoreOrder(epoch=2, uri="s3://there", version=4, model=3, section="policy"),
    failure="no space left",
    copied=4,
    placement=Placement(holders=(Holders((1, 0), (2,)), Holders((0,))), num_cuts=2, number=9),
)
DECISIONS = (
    Decision(step=28, generation=6, outcome=Outcome.SKIP, version=27, grad_norm=math.inf, reason="inf", model=3),
    Decision(
        step=29, generation=7, outcome=Outcome.COMMIT, version=28, clip_factor=1 / 3, hyper=({"lr": 0.1, "b": 5e-324},),
        replica_clock=ReplicaClock(replica=2, clock=9, slowest_clock=7), copy=CopyFrom(source=0, weight=0.5, version=3),
        model=3,
    ),
)  # fmt: skip


def written() -> dict[str, bytes]:
    """A job of two models, of which the first has nothing yet."""
    made = [
        records.job_record("id", "job", 4, 2),
        records.members_record(MEMBERSHIP, was_complete=True, vacant=1, draining=[4, 1], needed_shards=3),
        records.models_record({0: "first", 3: "policy"}, 5),
        records.orders_record(9),
        records.progress_record(ModelProgress(model=0, step=30, version=28)),
        records.progress_record(ModelProgress(model=3, step=6, version=4)),
        records.parameters_record(3, PARAMETERS),
        records.spec_record(3, SPEC),
        records.optimizer_record(3, OPTIMIZER),
        *map(records.decision_record, DECISIONS),
        records.committed_record(3, {"used": "30"}),
        records.kv_record("k", b"{"),
    ]
    return {record.key: record.value for record in made if record.value is not None}


def test_everything_comes_back() -> None:
    assert records.load(written()) == records.Durable(
        state_id="id",
        job="job",
        world_size=4,
        num_shards=2,
        was_complete=True,
        membership=MEMBERSHIP,
        vacant=1,
        draining=frozenset({1, 4}),
        needed_shards=3,
        models={
            0: records.DurableModel(name="first", step=30, version=28),
            3: records.DurableModel(
                name="policy", step=6, version=4, parameters=PARAMETERS, spec=SPEC, optimizer=OPTIMIZER,
                decisions=DECISIONS, committed={"used": "30"},
            ),
        },
        next_model=5,
        snapshot_id=9,
        kv={"k": b"{"},
    )  # fmt: skip


def test_before_a_model_is_registered() -> None:
    assert records.load({}) is None
    stored = {key: value for key, value in written().items() if key in ("job", "members", "progress")}
    durable = records.load(stored)
    assert durable is not None
    assert durable.models == {0: records.DurableModel(step=30, version=28)}
    assert (durable.next_model, durable.snapshot_id, durable.kv) == (1, 0, {})


def test_equal_values_are_equal_bytes() -> None:
    one, other = ({"lr": 0.1, "eps": 1e-8}, {"eps": 1e-8, "lr": 0.1})
    decision = DECISIONS[0]
    assert records.decision_record(replace(decision, hyper=(one,))) == records.decision_record(
        replace(decision, hyper=(other,))
    )


OLDER = json.dumps({"step": 30, "version": 28}, separators=(",", ":")).encode()
NEWER = written()["job"] + b"\xfa\x01\x01x"  # field 31, of one byte
NOBODY = state_pb2.MembersRecord(was_complete=True).SerializeToString()
MISPLACED = state_pb2.MembersRecord()
MISPLACED.membership.workers.add(role="ROLE_SHARD", incarnation="a" * 32)
UNDECIDED = session_pb2.DecisionEvent(step=28, model=3).SerializeToString()
ANOTHER = membership_pb2.ModelProgress(model=2, step=6, version=4).SerializeToString()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("job", None),
        ("members", None),
        ("progress", None),
        ("model/3/progress", None),
        ("job", NEWER),
        ("members", b""),
        ("members", NOBODY),
        ("members", MISPLACED.SerializeToString()),
        ("members", written()["members"][:-1]),
        ("progress", OLDER),
        ("progress", b""),
        ("model/3/progress", ANOTHER),
        ("models", b"\xff"),
        ("model/3/decision/r2", UNDECIDED),
        ("model/3/spec", b""),
        ("model/3/spec", written()["model/3/spec"][:-2]),
        ("model/3/optimizer", b""),
        ("model/3/parameters", b"\x10\x02\x10"),
        ("model/3/committed", b"\x0a"),
    ],
)
def test_what_no_coordinator_wrote_is_refused(key: str, value: bytes | None) -> None:
    stored = written()
    if value is None:
        del stored[key]
    else:
        stored[key] = value
    with pytest.raises(ConfigurationError, match=r"^the state store holds what no coordinator wrote: .*; use another"):
        records.load(stored)

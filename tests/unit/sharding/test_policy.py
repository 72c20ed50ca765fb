"""The policies: what they refuse, that they survive records and messages, and that a job has one."""

from __future__ import annotations

import pytest

from axon_ps.coordinator.core import records
from axon_ps.coordinator.messages import ready_from_proto, step_message_to_proto, vote_from_proto
from axon_ps.errors import InvalidRequest
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.layout import Layout, build_unit
from axon_ps.sharding.policy import (
    Asynchronous,
    BoundedStaleness,
    LocalSteps,
    Policy,
    Synchronous,
)
from axon_ps.types import Decision, DType, Membership, ModelProgress, Outcome, ReplicaClock
from axon_ps.wire import codec
from axon_ps.wire.events import Ready, Vote
from axon_ps.wire.v1 import policy_pb2

POLICIES = [
    Synchronous(),
    Asynchronous(),
    BoundedStaleness(max_staleness=3),
    LocalSteps(inner_steps=500, quorum=0.75, grace_s=2.5),
]
LAYOUT = Layout(units=(build_unit("u", [("w", (3,), DType.F32)]),))


def stored(*written: records.Record) -> records.DurableModel:
    """The first model, as a coordinator that is started again finds it."""
    membership = Membership(generation=1, step=1, version=0, workers=(), shards=(), num_replicas=0, complete=False)
    needed = (
        records.job_record("id", "test", 1, 1),
        records.members_record(membership, was_complete=False, vacant=0, draining=(), needed_shards=1),
        records.progress_record(ModelProgress(model=0, step=1, version=0)),
    )
    durable = records.load({r.key: r.value for r in (*needed, *written) if r.value is not None})
    assert durable is not None
    return durable.models[0]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_survives_records_and_messages(policy: Policy) -> None:
    assert codec.policy_from_proto(codec.policy_to_proto(policy)) == policy
    spec = JobSpec(layout=LAYOUT, policy=policy)
    assert codec.job_spec_from_proto(codec.job_spec_to_proto(spec)) == spec
    assert stored(records.spec_record(0, spec)).spec == spec


def test_a_spec_without_a_policy_is_synchronous() -> None:
    message = codec.job_spec_to_proto(JobSpec(layout=LAYOUT))
    message.ClearField("policy")
    assert codec.job_spec_from_proto(message).policy == Synchronous()


def test_what_each_policy_means() -> None:
    assert [p.asynchronous for p in POLICIES] == [False, True, True, False]
    assert [p.most_behind for p in POLICIES] == [None, None, 3, None]
    assert [str(p) for p in POLICIES] == [
        "Synchronous()",
        "Asynchronous()",
        "BoundedStaleness(max_staleness=3)",
        "LocalSteps(inner_steps=500, quorum=0.75, grace_s=2.5)",
    ]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(
        InvalidRequest, match=r"max_staleness is -1; it must be 0 to .* \(Asynchronous\(\) has no bound\)"
    ):
        BoundedStaleness(max_staleness=-1)
    with pytest.raises(InvalidRequest, match="inner_steps is 0; it must be 1 to"):
        LocalSteps(inner_steps=0)
    with pytest.raises(InvalidRequest, match=r"a policy is number 9, .*; the numbers known are \[1, 2, 3, 4\]"):
        codec.policy_from_proto(policy_pb2.Policy(kind=9))  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="a policy is unset"):
        codec.policy_from_proto(policy_pb2.Policy())
    with pytest.raises(InvalidRequest, match="inner_steps is 0"):
        codec.policy_from_proto(policy_pb2.Policy(kind=policy_pb2.POLICY_KIND_LOCAL_STEPS))


def test_replica_clocks_survive_records_and_messages() -> None:
    replica_clock = ReplicaClock(replica=2, clock=9, slowest_clock=7)
    decision = Decision(step=30, generation=4, outcome=Outcome.COMMIT, version=28, replica_clock=replica_clock)
    assert codec.decision_from_proto(codec.decision_to_proto(decision)) == decision
    record = records.decision_record(decision)
    assert record.key == "decision/r2"
    assert stored(record).decisions == (decision,)
    vote = Vote(generation=4, step=9, version=21)
    assert vote_from_proto(step_message_to_proto(vote).vote) == vote
    ready = Ready(generation=4, step=9, sums_of_squares=(2.0,), replica=2)
    assert ready_from_proto(step_message_to_proto(ready).ready) == ready


def test_decisions_of_one_replica_are_kept_however_many_others_there_were() -> None:
    kept: list[Decision] = []
    for step in range(1, 100):
        of = None if step % 3 == 0 else ReplicaClock(replica=int(step > 1), clock=step, slowest_clock=0)
        decision = Decision(step=step, generation=1, outcome=Outcome.COMMIT, version=step, replica_clock=of)
        kept = records.retained(kept, decision)
    assert [d.step for d in kept if d.replica_clock is not None] == [1, 98]
    assert [d.step for d in kept if d.replica_clock is None] == list(range(99 - 3 * 15, 100, 3))

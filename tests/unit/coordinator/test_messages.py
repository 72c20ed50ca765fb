"""What travels on a session, there and back."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from axon_ps.coordinator import messages as m
from axon_ps.errors import InvalidRequest, StorageFull
from axon_ps.types import CopyFrom, Decision, Grouping, Member, Membership, ModelProgress, Outcome, Role
from axon_ps.wire.events import (
    CheckpointStatus,
    Connectivity,
    Copied,
    JobState,
    JoinRequest,
    KnownNames,
    ModelStatus,
    Ready,
    RestoreOrder,
    SnapshotFile,
    SnapshotOrder,
    SnapshotReport,
    Status,
    Vote,
    VoteRequest,
    Welcome,
)
from axon_ps.wire.v1 import (
    checkpoint_pb2,
    common_pb2,
    layout_pb2,
    membership_pb2,
    placement_pb2,
    session_pb2,
    status_pb2,
)
from coordinator_driver import OPTIMIZER, SPEC

MEMBERSHIP = Membership(
    generation=3,
    step=5,
    version=4,
    workers=(Member(role=Role.WORKER, rank=1, incarnation="a" * 32, node="n", local_rank=1, replica=0),),
    shards=(Member(role=Role.SHARD, rank=0, incarnation="b" * 32, node="n", address="h:1"),),
    num_replicas=1,
    complete=True,
)


@pytest.mark.parametrize(
    "event",
    [
        Welcome(rank=3, lease_s=5.0, world_size=4, num_shards=2, state_id="x"),
        MEMBERSHIP,
        JobState(),
        JobState(spec=SPEC, optimizer=OPTIMIZER, initialized=True, version=7, epoch=2),
        Decision(step=1, generation=2, outcome=Outcome.SKIP, version=3, grad_norm=math.inf, reason="r"),
        SnapshotOrder(id=1, uri="u", version=2),
        RestoreOrder(epoch=1, uri="u", version=2),
        Welcome(rank=3, lease_s=5.0, world_size=4, num_shards=2, state_id="x", released=(0, 7)),
        dataclasses.replace(
            MEMBERSHIP, models=(ModelProgress(model=2, step=9, version=8),), grouping=Grouping(by_node=True)
        ),
        JobState(model=2, name="critic", version=7, copied=6),
        JobState(model=2, name="critic", released=True),
        JobState(model=2, name="critic", version=7, committed={"used": "7", "mine": ""}),
        Decision(step=1, generation=2, outcome=Outcome.COMMIT, version=3, commit={"used": "3"}, weight=2.5),
        Decision(
            step=1,
            generation=2,
            outcome=Outcome.COMMIT,
            version=3,
            model=2,
            copy=CopyFrom(source=1, weight=0.005, version=9),
        ),
        VoteRequest(generation=2, step=7, model=1),
        SnapshotOrder(id=1, uri="u", version=2, models=(ModelProgress(model=3, step=0, version=4),)),
        RestoreOrder(epoch=1, uri="u", version=2, model=3, section="critic"),
    ],
)
def test_events(event: Any) -> None:
    assert m.event_from_proto(m.event_to_proto(event)) == event


def test_an_event_of_a_newer_protocol_is_nothing() -> None:
    assert m.event_from_proto(session_pb2.SessionEvent()) is None


def test_whom_a_member_reaches_goes_there_and_back() -> None:
    connectivity = Connectivity(unreachable=frozenset({"a" * 32}), reached=frozenset({"b" * 32, "c" * 32}))
    beat = membership_pb2.Heartbeat(connectivity=m.connectivity_to_proto(connectivity))
    assert m.connectivity_from_proto(beat) == connectivity
    assert m.connectivity_from_proto(membership_pb2.Heartbeat()) is None
    request = JoinRequest(job="j", incarnation="c" * 32, node="n", connectivity=connectivity)
    assert m.join_from_proto(m.join_to_proto(request, Role.WORKER).join) == (Role.WORKER, request)
    assert m.join_from_proto(session_pb2.Join(job="j", role=1, incarnation="c" * 32, node="n"))[1].connectivity is None
    with pytest.raises(InvalidRequest, match="is not 32 hex digits"):
        m.connectivity_from_proto(membership_pb2.Heartbeat(connectivity={"unreachable": ["nobody"]}))
    with pytest.raises(InvalidRequest, match="a member names 40000 others"):
        m.connectivity_from_proto(membership_pb2.Heartbeat(connectivity={"reached": ["a" * 32] * 40_000}))


def test_what_goes_up() -> None:
    request = JoinRequest(job="j", incarnation="c" * 32, node="n", address="h:1", requested_rank=-1, world_size=2)
    assert m.join_from_proto(m.join_to_proto(request, Role.SHARD).join) == (Role.SHARD, request)
    known = KnownNames(optimizers=frozenset({"sgd", "mine"}), compressors=frozenset({"int8"}))
    knowing = dataclasses.replace(request, known=known)
    assert m.join_from_proto(m.join_to_proto(knowing, Role.SHARD).join) == (Role.SHARD, knowing)
    for names in (["bad\nname"], [""], [str(i) for i in range(m.MAX_KNOWN_NAMES + 1)]):
        message = m.join_to_proto(request, Role.SHARD).join
        message.compressors.extend(names)
        with pytest.raises(InvalidRequest, match="name"):
            m.join_from_proto(message)
    vote = Vote(generation=1, step=2, max_norm=0.5, hyper=({"lr": 0.1}, {}), commit={"used": "3"})
    assert m.vote_from_proto(m.step_message_to_proto(vote).vote) == vote
    copy = Vote(generation=1, step=2, model=3, copy=CopyFrom(source=1, weight=0.5), blocked=True)
    assert m.vote_from_proto(m.step_message_to_proto(copy).vote) == copy
    for weight in (0.0, 2.5):
        weighted = dataclasses.replace(vote, weight=weight)
        assert m.vote_from_proto(m.step_message_to_proto(weighted).vote) == weighted
    for weight in (-1.0, math.inf, math.nan, 1e-40, 1e40):
        with pytest.raises(InvalidRequest, match="a vote's weight is"):
            m.vote_from_proto(m.step_message_to_proto(dataclasses.replace(vote, weight=weight)).vote)
    for weight in (0.0, -1.0, 1.5, math.nan):
        message = m.step_message_to_proto(dataclasses.replace(copy, copy=CopyFrom(source=1, weight=weight))).vote
        with pytest.raises(InvalidRequest, match="weight of a copy"):
            m.vote_from_proto(message)
    ready = Ready(generation=1, step=2, sums_of_squares=(math.inf, 0.5), placement=7, digests={3: (1 << 64) - 1, 0: 0})
    assert m.ready_from_proto(m.step_message_to_proto(ready).ready) == ready
    nothing = Ready(generation=1, step=2, sums_of_squares=())
    assert m.ready_from_proto(m.step_message_to_proto(nothing).ready) == nothing
    copied = Copied(model=3, epoch=2, slices=(1, 5), placement=9)
    assert m.copied_from_proto(m.copied_to_proto(copied).copied) == copied
    report = SnapshotReport(id=4, files=(SnapshotFile(name="f", sha256="0" * 64, bytes=5, model=2),))
    assert m.snapshot_report_from_proto(m.snapshot_report_to_proto(report).snapshot) == report
    failed = m.snapshot_report_from_proto(
        m.snapshot_report_to_proto(SnapshotReport(id=4, error=StorageFull("full"))).snapshot
    )
    assert isinstance(failed.error, StorageFull)
    assert str(failed.error) == "full"


def test_status() -> None:
    status = Status(
        job="j",
        membership=MEMBERSHIP,
        version=4,
        step=6,
        registered=True,
        initialized=False,
        parameters=10,
        lease_s=5.0,
        uptime_s=1.5,
        counters={"joins": 2.0},
        pending=("votes of worker 0",),
        models=(
            ModelStatus(
                model=0, name="m", version=4, step=6, epoch=1, initialized=True, parameters=10, slices=4, lacking=2
            ),
        ),
        replication=2,
        draining=(1, 3),
        checkpoints=CheckpointStatus(
            uri="s3://b/step-7",
            version=7,
            age_s=1.5,
            took_s=0.5,
            bytes=10,
            failure="full",
            failure_age_s=3.0,
            activity="verifying s3://b/step-7",
        ),
    )
    assert m.status_from_proto(m.status_to_proto(status)) == status


def welcome(rank: int = 0, lease_s: float = 5.0) -> session_pb2.SessionEvent:
    return session_pb2.SessionEvent(welcome=membership_pb2.Welcome(rank=rank, lease_s=lease_s))


def reported(**values: float) -> status_pb2.StatusReply:
    return status_pb2.StatusReply(progress=status_pb2.ProgressReport(**values))


@pytest.mark.parametrize(
    ("parse", "message", "words"),
    [
        (m.join_from_proto, session_pb2.Join(role=common_pb2.ROLE_WORKER, incarnation="A" * 32), "32 hex digits"),
        (m.join_from_proto, session_pb2.Join(incarnation="a" * 32), "role is unset"),
        (m.join_from_proto, session_pb2.Join(role=common_pb2.ROLE_SHARD), "without an address"),
        (m.join_from_proto, session_pb2.Join(role=common_pb2.ROLE_WORKER, incarnation="a" * 32), "the node is empty"),
        (m.ready_from_proto, session_pb2.Ready(sums_of_squares=[1.0, -0.5]), "0 or more"),
        (m.event_from_proto, session_pb2.SessionEvent(snapshot=checkpoint_pb2.SnapshotOrder(uri="a\0b")), "printable"),
        (m.event_from_proto, welcome(rank=(1 << 32) - 2), "gives rank 4294967294"),
        (m.event_from_proto, welcome(lease_s=float("nan")), "lease of nan s"),
        (m.event_from_proto, welcome(lease_s=0.0), r"lease of 0\.0 s; at least 0\.01"),
        (m.status_from_proto, reported(step=float("nan")), "of step nan"),
        (m.status_from_proto, reported(step=1.0, steps=float("inf")), "of inf steps"),
        (
            m.snapshot_report_from_proto,
            checkpoint_pb2.SnapshotReport(files=[checkpoint_pb2.SnapshotFile(name="f", sha256="0")]),
            "must be 64 hex digits",
        ),
        (
            m.snapshot_report_from_proto,
            checkpoint_pb2.SnapshotReport(files=[checkpoint_pb2.SnapshotFile()]),
            "file's name is empty",
        ),
    ],
)
def test_what_cannot_be_is_refused(parse: Any, message: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        parse(message)


@pytest.mark.parametrize(
    ("placed", "num_cuts", "words"),
    [
        ([1, 2, 1, 2], 2, "4 slices are placed; the model, cut over 2 servers, has 2"),
        ([1], 2, "1 slices are placed"),
        ([1, 2], 1 << 31, "over 2147483648 servers; at most 65536"),
    ],
)
def test_a_placement_of_other_slices_is_refused(placed: list[int], num_cuts: int, words: str) -> None:
    parameter = layout_pb2.Parameter(name="w", shape=[64], dtype=common_pb2.D_TYPE_F32)
    layout = layout_pb2.Layout(units=[layout_pb2.Unit(name="u", parameters=[parameter], trainable=True)])
    f32 = common_pb2.D_TYPE_F32
    spec = layout_pb2.JobSpec(layout=layout, param_dtype=f32, grad_dtype=f32, chunk_numel=8, min_slice_numel=8)
    slices = [placement_pb2.SliceHolders(complete=[server]) for server in placed]
    placement = placement_pb2.Placement(number=1, num_cuts=num_cuts, replication=1, slices=slices)
    with pytest.raises(InvalidRequest, match=words):
        m.job_from_proto(session_pb2.JobEvent(spec=spec, placement=placement))

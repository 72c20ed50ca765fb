"""Registration, first values, checkpoints: what the job is made of, as the pure state machine sees it.

Tests of `coordinator/core/registrations.py`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from axon_ps.coordinator.core.access.callers import Caller
from axon_ps.coordinator.core.checkpoints.restores import Resume
from axon_ps.coordinator.core.checkpoints.snapshots import SavedModel, Snapshot
from axon_ps.errors import (
    Busy,
    CheckpointCorrupt,
    CheckpointError,
    GenerationChanged,
    InvalidRequest,
    LayoutMismatch,
    MemberLost,
    Misuse,
    StorageFull,
)
from axon_ps.optim.registry import create
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.layout import Layout, build_unit
from axon_ps.sharding.placement import Server, new_placement
from axon_ps.sharding.precision import WirePrecision
from axon_ps.types import Decision, DType, Grouping, Membership, OptimizerSpec, Outcome
from axon_ps.wire.events import (
    CheckpointReply,
    JobState,
    RestoreOrder,
    SnapshotFile,
    SnapshotOrder,
    SnapshotReport,
    Welcome,
)
from coordinator_driver import LAYOUT, OPTIMIZER, SPEC, Driver, Peer

OPERATOR = Caller(job="job")


def registered_optimizer(d: Driver) -> OptimizerSpec:
    groups = tuple(create(OPTIMIZER.name).validate(g) for g in OPTIMIZER.groups)
    return dataclasses.replace(OPTIMIZER, groups=groups)


# ---------------------------------------------------------------------- registration


def test_the_first_gives_and_uploads_the_others_agree() -> None:
    d = Driver()
    shard, a, b = d.shard(), d.worker(), d.worker()
    first = d.register(a)
    assert (first.first, first.upload, first.initialized, first.version) == (True, True, False, 0)
    second = d.register(b)
    assert (second.first, second.upload) == (False, False)
    placement = new_placement(SPEC.plan(1), [Server(0, "s")], 1)
    assert shard.last(JobState) == JobState(
        name="model 0", spec=SPEC, optimizer=registered_optimizer(d), placement=placement
    )
    assert a.last(JobState) == JobState(name="model 0", placement=placement), "a worker knows its layout"
    shard.initialized()
    assert a.last(JobState).initialized
    assert shard.last(JobState).initialized
    assert d.register(b).initialized


@pytest.mark.parametrize(
    ("spec", "difference"),
    [
        (
            JobSpec(layout=Layout(units=(build_unit("embed", [("embed.weight", (64, 128), DType.F32)]),))),
            r"parameter 'embed.weight' has shape \(64, 128\) here and \(64, 256\) in the job",
        ),
        (JobSpec(layout=LAYOUT, precision=WirePrecision(param=DType.BF16)), "wire dtype of parameters is bf16 here"),
    ],
)
def test_another_model_is_refused_naming_rank_and_difference(spec: JobSpec, difference: str) -> None:
    d = Driver()
    d.shard()
    a, b = d.worker(), d.worker()
    d.register(a)
    with pytest.raises(
        LayoutMismatch,
        match=f"worker 1 registers another model as 'model 0' than the job has from worker 0: {difference}",
    ):
        d.register(b, spec)


def test_models_of_one_layout_are_distinguished_by_their_class() -> None:
    d = Driver()
    d.shard()
    a, b = d.worker(), d.worker()
    d.register(a, dataclasses.replace(SPEC, model="Teacher"))
    with pytest.raises(LayoutMismatch, match=r"worker 1 registers Student \(\d+ param.*that is Teacher \(\d+ param"):
        d.register(b, dataclasses.replace(SPEC, model="Student"))
    assert not d.register(b, dataclasses.replace(SPEC, model="Teacher")).first
    assert not d.register(b, SPEC).first  # of a class that it does not say


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"name": "adam"}, "it is adam here and adamw in the job"),
        ({"groups": ({"lr": 0.2},)}, "lr is 0.2 here and 0.1 in the job, in the hyperparameters of group 0"),
        ({"groups": ({"lr": 0.1}, {"lr": 0.1})}, "it has 2 parameter groups here and 1 in the job"),
    ],
)
def test_another_optimizer_is_refused(change: dict[str, Any], difference: str) -> None:
    d = Driver()
    d.shard()
    a, b = d.worker(), d.worker()
    d.register(a)
    with pytest.raises(LayoutMismatch, match=f"worker 1 registers another optimizer .*: {difference}"):
        d.register(b, None, dataclasses.replace(OPTIMIZER, **change))


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (dataclasses.replace(OPTIMIZER, group_of=(0,)), "names the group of 1 parameters; the layout has 2"),
        (dataclasses.replace(OPTIMIZER, group_of=(0, 0)), "'head.weight' is frozen and in group 0"),
        (
            dataclasses.replace(OPTIMIZER, group_of=(1, -1)),
            "'embed.weight' is in group 1; the optimizer has groups 0 to 0",
        ),
        (dataclasses.replace(OPTIMIZER, name="magic"), "optimizer 'magic' is unknown"),
        (dataclasses.replace(OPTIMIZER, groups=({"lr": -1.0},)), "lr"),
    ],
)
def test_an_optimizer_that_cannot_be_is_refused_and_nothing_is_kept(optimizer: OptimizerSpec, message: str) -> None:
    d = Driver()
    a = d.worker()
    with pytest.raises(InvalidRequest, match=message):
        d.register(a, SPEC, optimizer)
    assert d.state.models.specs == {}
    assert d.state.flush() == []


def test_the_order_is_layout_then_optimizer() -> None:
    d = Driver()
    d.shard()
    a = d.worker()
    with pytest.raises(Misuse, match="registers an optimizer before a layout"):
        d.register(a, None)
    with pytest.raises(InvalidRequest, match="neither a layout nor an optimizer"):
        d.register(a, None, None)
    with pytest.raises(InvalidRequest, match="a layout without units"):
        d.register(a, JobSpec(layout=Layout(units=())), None)
    assert d.register(a, SPEC, None).first
    assert d.register(a, None).first
    assert not d.register(a).first


def test_only_worker_members_register() -> None:
    d = Driver()
    w, shard = d.worker(), d.shard()
    with pytest.raises(InvalidRequest, match="registers; only a worker may"):
        d.register(shard)
    w.lose()
    with pytest.raises(GenerationChanged):
        d.register(w)


def test_the_next_lowest_rank_uploads_when_the_uploader_dies_before_the_job_is_initialized() -> None:
    d = Driver(world_size=3)
    shard = d.shard()
    a, b, c = (d.worker() for _ in range(3))
    assert d.register(a).upload
    assert d.register(a).upload, "its answer may have been lost"
    assert not d.register(b).upload
    d.restart()
    for p in (shard, a, b, c):
        p.join()
    assert not d.register(c).upload
    a.lose()
    assert not d.register(b, None).upload, "an optimizer alone is no offer to upload"
    assert d.register(b).upload
    assert not d.register(c).upload
    shard.initialized()
    c.lose()
    assert not d.register(b).upload


def test_everything_registered_survives_a_restart() -> None:
    d = Driver()
    (a, _), (shard,) = d.assembled()
    before = shard.last(JobState)
    d.restart()
    shard.inbox.clear()
    shard.join()
    assert shard.last(JobState) == before
    assert d.state.status().initialized
    with pytest.raises(LayoutMismatch):
        d.register(a.join(), JobSpec(layout=LAYOUT, grouping=Grouping(by_node=True)))


# ---------------------------------------------------------------------- first values


def test_the_job_is_initialized_when_every_server_has_reported_it() -> None:
    d = Driver(num_shards=2)
    shards = [d.shard(), d.shard()]
    a, _ = d.worker(), d.worker()
    d.register(a)
    shards[0].initialized()
    shards[0].initialized()
    assert not a.last(JobState).initialized
    shards[0].lose()
    shards[0].join()
    shards[1].initialized()
    assert a.last(JobState).initialized, "the same life still holds what it held"


def test_a_server_that_died_before_the_others_had_theirs_is_waited_for() -> None:
    d = Driver(num_shards=2)
    shards = [d.shard(), d.shard()]
    a, _ = d.worker(), d.worker()
    d.register(a)
    shards[0].initialized()
    shards[0].lose()
    reborn = d.shard()
    shards[1].initialized()
    assert not a.last(JobState).initialized
    reborn.initialized()
    assert a.last(JobState).initialized


def test_a_server_that_was_away_while_the_last_one_reported_reports_again() -> None:
    d = Driver(num_shards=2)
    a, b, w, _ = d.shard(), d.shard(), d.worker(), d.worker()
    d.register(w)
    a.initialized()
    a.lose()
    b.initialized()  # the last one, and not all are there
    a.join()
    assert not a.last(JobState).initialized
    a.initialized()  # as a session does that is restored
    assert a.last(JobState).initialized
    assert w.last(JobState).initialized


def test_a_server_at_another_version_is_refused() -> None:
    d = Driver()
    shard, a = d.shard(), d.worker()
    d.register(a)
    with pytest.raises(InvalidRequest, match="holds version 3 of epoch 0 of 'model 0'; the job is at 0"):
        shard.initialized(version=3)
    with pytest.raises(InvalidRequest, match="only a shard may"):
        a.initialized()


# ---------------------------------------------------------------------- checkpoints


def save(d: Driver, uri: str = "/ckpt") -> Any:
    return d.call(lambda call: d.state.snapshots.save(call, uri))


def report(peer: Peer, order: SnapshotOrder, **fields: Any) -> None:
    report = SnapshotReport(id=order.id, **fields)
    peer.driver.perform(peer.driver.state.snapshot_report(peer.session, report, peer.driver.clock()))


def file(name: str) -> SnapshotFile:
    return SnapshotFile(name=name, sha256="0" * 64, bytes=10)


def test_a_checkpoint_is_ordered_from_all_servers_and_answered_with_their_files() -> None:
    d = Driver(num_shards=2)
    _, shards = d.assembled(shards=2)
    call = save(d)
    order = shards[0].last(SnapshotOrder)
    assert order == shards[1].last(SnapshotOrder) == SnapshotOrder(id=1, uri="/ckpt", version=0)
    report(shards[1], order, files=(file("b"),))
    report(shards[1], order, files=(file("again"),))
    assert d.state.status().pending == ("the checkpoint at /ckpt waits for shard server 0",)
    assert call not in d.replies
    report(shards[0], order, files=(file("a"),))
    assert d.replies[call] == Snapshot(
        uri="/ckpt",
        files=(file("a"), file("b")),
        ranks=(0, 1),
        models=(
            SavedModel(
                number=0,
                name="model 0",
                version=0,
                spec=SPEC,
                optimizer=registered_optimizer(d),
                placement=shards[0].placements[0],
            ),
        ),
    )


def test_one_checkpoint_at_a_time_and_numbers_are_never_used_twice() -> None:
    d = Driver()
    _, (shard,) = d.assembled()
    call = save(d)
    with pytest.raises(Busy, match="is being written to /ckpt already"):
        save(d)
    d.perform(d.state.cancel(call))
    save(d)
    d.restart()
    shard.join()
    save(d)
    assert [o.id for o in shard.received(SnapshotOrder)] == [1, 2, 3]


def test_a_server_that_cannot_write_fails_the_checkpoint() -> None:
    d = Driver()
    _, (shard,) = d.assembled()
    call = save(d)
    report(shard, shard.last(SnapshotOrder), error=StorageFull("no space left on device"))
    assert isinstance(d.replies[call].error, StorageFull)
    assert str(d.replies[call].error) == "shard server 0: no space left on device"
    assert isinstance(save(d), int), "the next may be tried"


def test_a_failed_checkpoint_names_what_others_wrote_so_that_it_can_be_removed() -> None:
    d = Driver(num_shards=2)
    _, shards = d.assembled(shards=2)
    call = save(d)
    report(shards[0], shards[0].last(SnapshotOrder), error=StorageFull("no space left on device"))
    assert call not in d.replies
    report(shards[1], shards[1].last(SnapshotOrder), files=(file("b"),))
    assert d.replies[call].files == (file("b"),)
    assert isinstance(d.replies[call].error, StorageFull)


def test_a_server_that_dies_fails_the_checkpoint() -> None:
    d = Driver(num_shards=2, replication=1)
    (a, _), shards = d.assembled(shards=2)
    call = save(d)
    a.lose()
    assert call not in d.replies
    shards[1].lose()
    assert call not in d.replies, "the other one still writes"
    report(shards[0], shards[0].last(SnapshotOrder), files=(file("a"),))
    assert isinstance(d.replies[call].error, MemberLost)
    with pytest.raises(MemberLost, match="waits for 1 of 2 workers and shard server 1 of 2"):
        save(d)


def test_there_must_be_something_to_save_and_to_restore_into() -> None:
    d = Driver()
    d.shard()
    with pytest.raises(Misuse, match="nothing to save"):
        save(d)
    with pytest.raises(Misuse, match="nothing to restore into"):
        restore(d)


def restore(d: Driver, uri: str = "/ckpt", version: int = 7) -> Any:
    return d.call(lambda call: d.state.restores.restore(call, [Resume(uri=uri, version=version)], d.clock()))


def test_a_restore_ends_the_step_and_makes_a_generation_at_the_version_restored() -> None:
    d = Driver()
    (a, _), (shard,) = d.assembled()
    a.vote()
    generation = a.membership.generation
    a.inbox.clear(), shard.inbox.clear()
    call = restore(d)
    assert [type(e) for e in shard.inbox] == [Decision, JobState, RestoreOrder, Membership]
    assert [type(e) for e in a.inbox] == [Decision, JobState, Membership]
    assert a.last(Decision).outcome is Outcome.ABORT
    placement = new_placement(SPEC.plan(1), [Server(0, "s")], 1, number=2)
    assert a.last(JobState) == JobState(name="model 0", initialized=False, version=7, epoch=1, placement=placement)
    assert shard.last(RestoreOrder) == RestoreOrder(epoch=1, uri="/ckpt", version=7)
    assert (a.membership.generation, a.membership.version, a.membership.step) == (generation + 1, 7, 2)
    assert d.state.status().pending == ("the restore of /ckpt waits for the shard servers",)
    shard.initialized(version=0, epoch=0)
    assert call not in d.replies, "that was about the values before"
    shard.initialized(version=7, epoch=1)
    assert d.replies[call] == CheckpointReply(uri="/ckpt", version=7)
    assert a.last(JobState).initialized


def test_a_restore_goes_on_after_restarts_of_the_coordinator_and_of_a_server() -> None:
    d = Driver(num_shards=2)
    (a, b), shards = d.assembled(shards=2)
    restore(d)
    shards[0].initialized(version=7, epoch=1)
    d.restart()
    for p in (a, b, shards[0]):
        p.inbox.clear()
        p.join()
    assert not shards[0].received(RestoreOrder), "it has loaded"
    d.advance(5.0, beat=True)
    reborn = d.shard()
    assert [type(e) for e in reborn.inbox if not isinstance(e, Decision)] == [
        Welcome,
        JobState,
        RestoreOrder,
        Membership,
    ]
    reborn.initialized(version=7, epoch=1)
    placement = new_placement(SPEC.plan(2), [Server(0, "s"), Server(1, "s")], 2, number=2)
    assert a.last(JobState) == JobState(name="model 0", initialized=True, version=7, epoch=1, placement=placement)
    assert a.membership.complete


def test_a_failed_restore_breaks_the_job_until_another_succeeds() -> None:
    d = Driver()
    (a, _), (shard,) = d.assembled()
    call = restore(d)
    error = CheckpointCorrupt("file x is truncated")
    d.perform(d.state.restore_report(shard.session, 0, error, d.clock()))
    assert call not in d.replies, "that was another order"
    d.perform(d.state.restore_report(shard.session, 1, error, d.clock()))
    assert isinstance(d.replies[call], CheckpointCorrupt)
    assert "shard server 0 could not restore /ckpt: file x is truncated" in str(d.replies[call])
    assert not a.membership.complete
    assert "restore a checkpoint (axon-ps checkpoint restore URI)" in a.membership.waiting_for
    d.restart()
    assert not d.state.status().membership.complete
    for p in (a, shard):
        p.join()
    restore(d, "/older", 3)
    shard.initialized(version=3, epoch=2)
    placement = new_placement(SPEC.plan(1), [Server(0, "s")], 1, number=3)
    assert a.last(JobState) == JobState(name="model 0", initialized=True, version=3, epoch=2, placement=placement)


def test_a_newer_restore_takes_the_place_of_an_older_one_and_of_a_save() -> None:
    d = Driver()
    _, (shard,) = d.assembled()
    saving = save(d)
    first = restore(d)
    assert isinstance(d.replies[saving], CheckpointError)
    restore(d, "/other", 3)
    assert isinstance(d.replies[first], CheckpointError)
    assert "/other" in str(d.replies[first])
    assert [o.epoch for o in shard.received(RestoreOrder)] == [1, 2]


def test_a_server_reborn_empty_breaks_the_job_until_a_restore_heals_it() -> None:
    d = Driver(num_shards=2, replication=1)
    (a, _), shards = d.assembled(shards=2)
    shards[1].lose()
    assert a.membership.waiting_for == "shard server 1 of 2"
    assert a.last(JobState).initialized, "it may come back"
    reborn = d.shard()
    assert reborn.last(Welcome).rank == 1
    assert a.membership.waiting_for == (
        "shard server 1 was lost with its parameters; restore a checkpoint (axon-ps checkpoint restore URI)"
    )
    assert not a.last(JobState).initialized
    assert not d.register(a).upload
    reborn.initialized()
    assert not a.last(JobState).initialized, "nobody uploads again"
    restore(d)
    assert a.membership.complete
    for s in (shards[0], reborn):
        s.initialized(version=7, epoch=1)
    placement = new_placement(SPEC.plan(2), [Server(0, "s"), Server(1, "s")], 1, number=a.placement_number())
    assert a.last(JobState) == JobState(name="model 0", initialized=True, version=7, epoch=1, placement=placement)


def test_a_job_without_its_servers_says_how_to_begin_anew() -> None:
    d = Driver(begin_anew="remove /its/state")
    (a, _), (server,) = d.assembled()
    server.lose()
    d.shard()
    assert a.membership.waiting_for == (
        "shard server 0 was lost with its parameters; restore a checkpoint (axon-ps checkpoint restore URI); or begin "
        "anew: remove /its/state"
    )


def test_a_job_that_resumes_is_restored_by_its_first_registration() -> None:
    d = Driver(resume="/ckpt")
    shard, a, b = d.shard(), d.worker(), d.worker()
    assert [d.state.registrations.wants_resume(w.caller, "model 0") for w in (a, b)] == [True, False]
    reply = d.register(a, resume=Resume(uri="/ckpt/v9", version=9))
    assert (reply.first, reply.upload, reply.initialized, reply.version) == (True, False, False, 9)
    assert reply.generation == a.membership.generation
    assert not d.state.registrations.wants_resume(a.caller, "model 0")
    assert shard.last(RestoreOrder) == RestoreOrder(epoch=1, uri="/ckpt/v9", version=9)
    assert shard.last(JobState).spec == SPEC
    assert not d.register(b).upload
    shard.initialized(version=9, epoch=1)
    assert a.last(JobState).initialized
    assert d.register(b).version == 9

"""Several models in one job: each has its layout, optimizer, version and steps; the members are the same.

Tests of `coordinator/core/steps/stepping.py`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from axon_ps.coordinator.core.access.callers import Caller
from axon_ps.coordinator.core.checkpoints.restores import Resume
from axon_ps.coordinator.core.checkpoints.snapshots import Snapshot
from axon_ps.coordinator.core.models import MAX_MODELS
from axon_ps.errors import Busy, CheckpointError, InvalidRequest, LayoutMismatch
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.layout import Layout, build_unit
from axon_ps.types import CopyFrom, Decision, DType, Grouping, Membership, ModelProgress, OptimizerSpec, Outcome
from axon_ps.wire.events import JobState, RestoreOrder, SnapshotFile, SnapshotOrder, SnapshotReport, Welcome
from coordinator_driver import OPTIMIZER, SPEC, Driver, Peer

OTHER = JobSpec(layout=Layout(units=(build_unit("net", [("net.weight", (64, 300), DType.F32)]),)))
OTHER_OPTIMIZER = OptimizerSpec(name="sgd", groups=({"lr": 0.1},), group_of=(0,))
FROZEN = JobSpec(layout=Layout(units=tuple(dataclasses.replace(u, trainable=False) for u in SPEC.layout.units)))
OPERATOR = Caller(job="job")


def several(workers: int = 2, shards: int = 1, **config: Any) -> tuple[Driver, list[Peer], list[Peer]]:
    """A job with models "policy" (0), "critic" (1) of another layout, and "target" (2), a frozen one like the first."""
    d = Driver(world_size=workers, num_shards=shards, **config)
    servers = [d.shard() for _ in range(shards)]
    members = [d.worker() for _ in range(workers)]
    for w in members:
        d.register(w, name="policy")
        d.register(w, OTHER, OTHER_OPTIMIZER, name="critic")
        d.register(w, FROZEN, None, name="target")
    for s in servers:
        for model in range(3):
            s.initialized(model=model)
    return d, members, servers


def step(workers: list[Peer], servers: list[Peer], model: int, **changes: Any) -> None:
    for s in servers:
        s.ready(model=model)
    for w in workers:
        w.vote(model=model, **changes)


def versions(d: Driver) -> dict[str, int]:
    return {m.name: m.version for m in d.state.status().models}


def decisions(peer: Peer, model: int) -> list[Decision]:
    return [x for x in peer.received(Decision) if x.model == model]


def copy_from(workers: list[Peer], target: int = 2, source: int = 0, weight: float = 0.005) -> None:
    for w in workers:
        w.vote(model=target, copy=CopyFrom(source=source, weight=weight))


def test_models_know_their_layouts_steps_and_versions() -> None:
    d, workers, servers = several()
    step(workers, servers, 1)
    models = d.state.models
    assert models.specs == {"policy": SPEC, "critic": OTHER, "target": FROZEN}
    assert models.position == ((0, 0, 0), (1, 0, 1), (2, 0, 0))
    assert (models.step_of("critic"), models.step_of("target")) == ((1, 2), (2, 1))
    assert [models.is_asynchronous(number) for number in (0, 9)] == [False, False]
    with pytest.raises(InvalidRequest, match="say which one"):
        models.step_of("")


def test_a_name_gets_a_number_once_whoever_registers_it_first() -> None:
    d = Driver()
    _, a, b = d.shard(), d.worker(), d.worker()
    assert [d.register(a, name=name).model for name in ("policy", "critic", "policy")] == [0, 1, 0]
    assert [d.register(b, name=name).model for name in ("critic", "policy")] == [1, 0]
    assert d.register(a, name="third").model == 2
    assert [(m.model, m.name) for m in d.state.status().models] == [(0, "policy"), (1, "critic"), (2, "third")]
    assert d.state.status().parameters == 3 * SPEC.layout.numel


def test_layouts_are_compared_per_model() -> None:
    d = Driver()
    _, a, b = d.shard(), d.worker(), d.worker()
    d.register(a, name="policy")
    d.register(a, OTHER, OTHER_OPTIMIZER, name="critic")
    with pytest.raises(
        LayoutMismatch, match="worker 1 registers another model as 'critic' than the job has from worker 0"
    ):
        d.register(b, SPEC, name="critic")
    with pytest.raises(LayoutMismatch, match="another optimizer of 'critic'"):
        d.register(b, OTHER, dataclasses.replace(OTHER_OPTIMIZER, name="adamw"), name="critic")
    assert d.register(b, OTHER, OTHER_OPTIMIZER, name="critic").model == 1
    with pytest.raises(InvalidRequest):
        d.register(a, JobSpec(layout=Layout(units=())), None, name="empty")
    assert len(d.state.status().models) == 2, "what was refused is none"


def test_each_model_makes_its_own_steps() -> None:
    d, workers, servers = several()
    step(workers, servers, 1)
    step(workers, servers, 1)
    step(workers, servers, 0)
    assert versions(d) == {"policy": 1, "critic": 2, "target": 0}
    assert [x.version for x in decisions(workers[0], 1)] == [1, 2]
    assert [x.version for x in decisions(servers[0], 0)] == [1]


def test_steps_of_two_models_are_under_way_at_once() -> None:
    d, (a, b), (shard,) = several()
    a.vote(model=0)
    a.vote(model=1)
    shard.ready(model=1)
    b.vote(model=1)
    assert versions(d) == {"policy": 0, "critic": 1, "target": 0}
    assert d.state.status().pending == (
        "model 'policy': votes of worker 1",
        "model 'policy': gradients at shard server 0",
    )
    b.vote(model=0)
    shard.ready(model=0)
    assert versions(d) == {"policy": 1, "critic": 1, "target": 0}


def test_a_death_aborts_the_step_of_every_model_and_changes_no_version() -> None:
    d, (a, b), (shard,) = several(min_workers=1)
    step([a, b], [shard], 1)
    a.vote(model=0)
    b.lose()
    assert decisions(a, 0)[-1].outcome is decisions(a, 1)[-1].outcome is Outcome.ABORT
    assert a.membership.models == (
        ModelProgress(model=1, step=3, version=1),
        ModelProgress(model=2, step=2, version=0),
    )
    step([a], [shard], 0)
    step([a], [shard], 1)
    assert versions(d) == {"policy": 1, "critic": 2, "target": 0}


@pytest.mark.parametrize("by_node", [False, True])
def test_a_restarted_coordinator_announces_the_generation_that_it_announced(*, by_node: bool) -> None:
    """Models that were registered after a generation had begun are none of what it announced, before or after."""
    d = Driver(num_shards=1)
    s, a, b = d.shard(), d.worker(), d.worker()
    for w in (a, b):
        d.register(w, dataclasses.replace(SPEC, grouping=Grouping(by_node=by_node)), name="first")
        d.register(w, OTHER, OTHER_OPTIMIZER, name="second")
    for model in range(2):
        s.initialized(model=model)
        step([a, b], [s], model)
    announced = a.last(Membership)
    d.restart()
    for peer in (s, a, b):
        peer.join()
    assert [peer.last(Membership) for peer in (s, a, b)] == [announced] * 3
    assert versions(d) == {"first": 1, "second": 1}


def test_a_restarted_coordinator_knows_every_model() -> None:
    d, workers, servers = several()
    step(workers, servers, 1)
    copy_from(workers)
    before = d.state.status().models
    d.restart()
    for peer in (*servers, *workers):
        peer.join()
    assert d.state.status().models == before
    assert {s.name: s.copied for s in workers[0].received(JobState)[-3:]} == {"policy": 0, "critic": 0, "target": 1}
    step(workers, servers, 1)
    step(workers, servers, 0)
    assert versions(d) == {"policy": 1, "critic": 2, "target": 1}
    assert d.register(workers[0], OTHER, OTHER_OPTIMIZER, name="critic").model == 1


def test_a_later_joiner_gets_the_state_of_every_model() -> None:
    d, workers, servers = several(min_workers=1)
    step(workers, servers, 1)
    workers[1].lose()
    late = d.worker()
    states = {s.name: s for s in late.received(JobState)}
    assert {name: s.version for name, s in states.items()} == {"policy": 0, "critic": 1, "target": 0}
    assert states["critic"].initialized
    assert states["critic"].spec is None
    assert late.membership.progress(1) == (4, 1)


# ---------------------------------------------------------------------- copies


def test_a_copy_is_decided_by_votes_alone_and_names_the_version_it_takes() -> None:
    d, workers, servers = several()
    step(workers, servers, 0)
    copy_from(workers[:1])
    assert not decisions(workers[0], 2)
    copy_from(workers[1:])
    (decision,) = decisions(servers[0], 2)
    assert decision.outcome is Outcome.COMMIT
    assert (decision.version, decision.copy) == (1, CopyFrom(source=0, weight=0.005, version=1))
    assert decisions(workers[0], 2) == [decision]
    assert d.state.status().counters["copies"] == 1


def test_a_copy_and_a_step_of_its_source_are_in_one_order_on_every_server() -> None:
    _, workers, servers = several(shards=2)
    for _ in range(3):
        step(workers, servers, 0)
        copy_from(workers)
    for server in servers:
        seen = [(x.model, x.version, x.copy and x.copy.version) for x in server.received(Decision)]
        assert seen == [(0, 1, None), (2, 1, 1), (0, 2, None), (2, 2, 2), (0, 3, None), (2, 3, 3)]


def test_votes_that_disagree_on_a_copy_are_an_abort_with_the_reason() -> None:
    _, (a, b), _ = several()
    copy_from([a])
    copy_from([b], weight=0.5)
    assert "what the step takes: rank 0: 0.005 of model number 0; rank 1: 0.5 of model number 0" in (
        decisions(a, 2)[-1].reason
    )
    copy_from([a], target=0, source=1)
    b.vote(model=0)
    assert "rank 0: 0.005 of model number 1; rank 1: gradients" in decisions(a, 0)[-1].reason
    copy_from([a], target=0, source=2)
    b.arrive(model=0)
    reason = decisions(a, 0)[-1].reason
    assert "worker 0 copies from another model and worker 1 pushes gradients in the same step" in reason


@pytest.mark.parametrize(
    ("target", "source", "why"),
    [(2, 1, "it has 2 units and the other 1"), (2, 9, "does not have"), (2, 2, "itself")],
)
def test_an_impossible_copy_is_an_abort_with_the_reason(target: int, source: int, why: str) -> None:
    d, workers, _ = several()
    copy_from(workers, target, source)
    decision = decisions(workers[0], target)[-1]
    assert decision.outcome is Outcome.ABORT
    assert why in decision.reason
    assert versions(d)["target"] == 0


def test_a_death_in_the_middle_of_a_copy_leaves_all_of_it_or_nothing() -> None:
    d, (a, b), servers = several(min_workers=1)
    copy_from([a])
    b.lose()
    assert decisions(a, 2)[-1].outcome is decisions(servers[0], 2)[-1].outcome is Outcome.ABORT
    copy_from([a])
    assert versions(d)["target"] == 1


# ---------------------------------------------------------------------- workers at different places of the program


def crossed(min_workers: int = 1, workers: int = 2) -> tuple[Driver, list[Peer], list[Peer]]:
    """A job whose members have changed, so that its workers may be anywhere."""
    d, members, servers = several(workers, min_workers=min_workers)
    late = d.worker()
    for name, spec, optimizer in (("policy", SPEC, OPTIMIZER), ("critic", OTHER, OTHER_OPTIMIZER)):
        d.register(late, spec, optimizer, name=name)
    return d, [*members, late], servers


def test_workers_that_wait_for_each_other_in_different_models_are_brought_together() -> None:
    d, (a, b, c), (shard,) = crossed()
    a.vote(model=0, blocked=True)
    c.vote(model=1, blocked=True)
    assert not [x for x in decisions(c, 1) if x.generation == c.membership.generation], "the others may come to either"
    b.vote(model=1, blocked=True)
    reason = decisions(a, 0)[-1].reason
    assert "worker 0 waits in a step of model 'policy' and worker 1, 2 in one of model 'critic'" in reason
    a.vote(model=1, blocked=True)
    shard.ready(model=1)
    assert versions(d)["critic"] == 1
    assert d.state.status().counters["steps_deadlocked"] == 1


def test_of_two_equal_crowds_the_one_in_the_lower_model_stays_and_pushing_counts_as_waiting() -> None:
    _, (a, b, c), _ = crossed()
    a.vote(model=2, blocked=True, copy=CopyFrom(source=0, weight=1.0))
    b.arrive(model=1, blocked=True)
    c.arrive(model=0, blocked=True)
    assert [decisions(a, m)[-1].generation == a.membership.generation for m in (1, 2)] == [True, True]
    assert decisions(a, 0)[-1].generation < a.membership.generation


def test_there_is_no_deadlock_before_a_change_or_with_threads_or_while_a_step_waits_for_servers() -> None:
    d, (a, b), _ = several()
    a.vote(model=0, blocked=True)
    b.vote(model=1, blocked=True)
    assert not decisions(a, 0)
    assert not decisions(a, 1)
    d, (a, b, c), _ = crossed()
    a.vote(model=0)
    b.vote(model=1, blocked=True)
    c.vote(model=1, blocked=True)
    assert decisions(a, 0)[-1].generation < a.membership.generation
    d, (a, b, c), (shard,) = crossed()
    for w in (a, b, c):
        w.vote(model=0, blocked=True)
    assert versions(d)["policy"] == 0
    shard.ready(model=0)
    assert versions(d)["policy"] == 1


# ---------------------------------------------------------------------- checkpoints and restores


def test_a_checkpoint_is_of_all_models_each_at_its_version() -> None:
    d, workers, servers = several()
    step(workers, servers, 1)
    call = d.call(lambda call: d.state.snapshots.save(call, "/ckpt"))
    order = servers[0].last(SnapshotOrder)
    assert (order.version, [(p.model, p.version) for p in order.models]) == (0, [(1, 1), (2, 0)])
    files = tuple(SnapshotFile(name=f"f{m}", sha256="0" * 64, bytes=1, model=m) for m in range(3))
    d.perform(d.state.snapshot_report(servers[0].session, SnapshotReport(id=order.id, files=files), d.clock()))
    snapshot = d.replies[call]
    assert isinstance(snapshot, Snapshot)
    assert [(m.name, m.version, m.spec) for m in snapshot.models] == [
        ("policy", 0, SPEC),
        ("critic", 1, OTHER),
        ("target", 0, FROZEN),
    ]


def restore(d: Driver, *resumes: Resume) -> Any:
    return d.call(lambda call: d.state.restores.restore(call, resumes, d.clock()))


def test_all_models_go_back_at_one_moment() -> None:
    d, workers, (shard,) = several()
    generation = d.state.status().membership.generation
    back = [Resume(uri="/c", version=v, model=name, section=name) for name, v in (("policy", 7), ("critic", 9))]
    call = restore(d, *back)
    membership = workers[0].last(Membership)
    assert membership.generation == generation + 1
    assert (membership.progress(0)[1], membership.progress(1)[1], membership.progress(2)[1]) == (7, 9, 0)
    assert shard.received(RestoreOrder) == [
        RestoreOrder(epoch=1, uri="/c", version=7, model=0, section="policy"),
        RestoreOrder(epoch=1, uri="/c", version=9, model=1, section="critic"),
    ]
    shard.initialized(version=7, epoch=1)
    assert call not in d.replies, "the other is not loaded yet"
    shard.initialized(version=9, epoch=1, model=1)
    assert d.replies[call].uri == "/c"
    assert versions(d) == {"policy": 7, "critic": 9, "target": 0}
    assert [m.epoch for m in d.state.status().models] == [1, 1, 0]


def test_when_one_model_cannot_be_loaded_the_job_waits_for_another_restore() -> None:
    d, workers, (shard,) = several()
    back = [Resume(uri="/c", version=7, model=name, section=name) for name in ("policy", "critic")]
    call = restore(d, *back)
    now = d.clock()
    d.perform(d.state.restore_report(shard.session, 1, CheckpointError("a file is missing"), now, model=1))
    assert isinstance(d.replies[call], CheckpointError)
    assert "model 'policy': shard server 0 could not restore" in workers[0].membership.waiting_for
    restore(d, *back)
    for model in (0, 1):
        shard.initialized(version=7, epoch=2, model=model)
    assert all(m.initialized for m in d.state.status().models)
    with pytest.raises(InvalidRequest, match="no model 'nobody'"):
        restore(d, Resume(uri="/c", version=1, model="nobody"))
    with pytest.raises(InvalidRequest, match="no model of this job"):
        restore(d)


# ---------------------------------------------------------------------- release


def release(d: Driver, number: int, name: str = "") -> Any:
    name = name or ("policy", "critic")[number]
    return d.call(lambda call: d.state.registrations.release(call, OPERATOR, number, name))


def test_a_released_model_is_gone_and_its_name_is_free() -> None:
    d, workers, servers = several()
    step(workers, servers, 1)
    release(d, 1)
    assert servers[0].last(JobState) == JobState(model=1, name="critic", released=True)
    assert versions(d) == {"policy": 0, "target": 0}
    assert not [key for key in d.store.load() if key.startswith("model/1/")]
    step(workers, servers, 1)
    step(workers, servers, 0)
    assert versions(d) == {"policy": 1, "target": 0}
    assert d.register(workers[0], OTHER, OTHER_OPTIMIZER, name="critic").model == 3
    late = servers[0].join()
    assert late.last(Welcome).released == (1,)


def test_a_release_takes_the_model_of_that_number_only_if_it_has_that_name() -> None:
    d, _, _ = several()
    with pytest.raises(InvalidRequest, match="model 0 is 'policy', not 'critic'; nothing is released"):
        release(d, 0, "critic")
    release(d, 1, "critic")
    assert not release(d, 1, "whatever it was called")
    assert versions(d) == {"policy": 0, "target": 0}


def test_the_first_model_can_be_released_and_a_checkpoint_under_way_keeps_all() -> None:
    d, workers, servers = several()
    d.call(lambda call: d.state.snapshots.save(call, "/ckpt"))
    with pytest.raises(Busy, match="is being written"):
        release(d, 0)
    order = servers[0].last(SnapshotOrder)
    d.perform(d.state.snapshot_report(servers[0].session, SnapshotReport(id=order.id), d.clock()))
    release(d, 0)
    d.restart()
    for peer in (*servers, *workers):
        peer.join()
    step(workers, servers, 1)
    assert versions(d) == {"critic": 1, "target": 0}
    assert d.state.status().version == 1, "that of the first there is"


def test_a_job_has_only_so_many_models() -> None:
    d = Driver(world_size=1)
    _, a = d.shard(), d.worker()
    for number in range(MAX_MODELS):
        assert d.register(a, OTHER, None, name=f"m{number}").model == number
    with pytest.raises(Busy, match="one too many"):
        d.register(a, OTHER, None, name="one more")

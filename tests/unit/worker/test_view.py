"""A worker's knowledge of one model follows the events of its session. Tests of `worker/steps/view.py`."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from axon_ps.errors import Broken, Busy, MemberLost, Misuse, Timeout
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.layout import Layout, build_unit
from axon_ps.sharding.policy import Asynchronous, Policy, Synchronous
from axon_ps.types import CopyFrom, Decision, DType, Grouping, Member, Membership, Outcome, ReplicaClock, Role
from axon_ps.wire.events import JobState, Registered
from axon_ps.worker.job_view import JobView
from axon_ps.worker.steps.view import ModelView
from deadlines import HANG_S

LAYOUT = Layout(
    units=(
        build_unit("frozen", [("frozen.weight", (8,), DType.F32)], trainable=False),
        build_unit("body", [("body.weight", (8,), DType.F32)]),
    )
)
FROZEN, TRAINED = 0, 1


def members(generation: int = 1, step: int = 1, version: int = 0) -> Membership:
    workers = tuple(
        Member(role=Role.WORKER, rank=rank, incarnation=name, node="n", replica=rank)
        for rank, name in enumerate(("other", "me"))
    )
    return Membership(
        generation=generation, step=step, version=version, workers=workers, shards=(), num_replicas=2, complete=True
    )


def view_of(policy: Policy | None = None, *, known: Membership | None = None) -> ModelView:
    """A view of a registered model of a job with two replicas."""
    job = JobView(lambda: "me", timeout_s=0.0)
    job.known = known or members()
    view = ModelView(job)
    spec = JobSpec(layout=LAYOUT, policy=policy or Synchronous())
    view.registered(spec, Registered(first=True, initialized=False, version=0, upload=True), "m")
    return view


def commit(version: int, generation: int = 1, **changes: object) -> Decision:
    made = Decision(step=version, generation=generation, outcome=Outcome.COMMIT, version=version)
    return replace(made, **changes)  # type: ignore[arg-type]


def test_the_version_moves_by_decisions_and_memberships() -> None:
    view = view_of(known=members(step=5, version=4))
    assert (view.version, view.epoch, view.me.rank) == (4, 0, 1)
    view.on_decision(commit(5))
    assert view.latest == (0, 5)
    view.on_decision(commit(5, step=6, outcome=Outcome.ABORT))
    assert view.latest_version == 5
    view.job.known = members(2, step=9, version=8)
    view.begin(view.job.known)
    assert (view.version, view.stepping.attempt) == (8, 9)


def test_a_registration_tells_a_version_that_is_newer_than_known() -> None:
    view = view_of()
    spec = JobSpec(layout=LAYOUT, policy=Asynchronous())
    view.registered(spec, Registered(first=False, initialized=True, version=7, upload=False), "m")
    assert view.version == 7
    assert view.spec is not spec, "the first one counts"
    view.registered(spec, Registered(first=False, initialized=True, version=6, upload=False), "m")
    assert view.version == 7


def test_a_restore_goes_back_to_its_version_and_the_first_state_does_not() -> None:
    view = view_of(known=members(version=4))
    view.on_state(JobState(version=3, committed={"epoch": "1"}))
    assert (view.latest, view.committed) == ((0, 4), {"epoch": "1"}), "decisions may have come before"
    view.on_state(JobState(version=3))
    assert view.latest == (0, 4)
    view.on_state(JobState(epoch=1, version=2, copied=1))
    assert (view.latest, view.copied) == ((1, 2), 1)


def test_frozen_units_are_at_the_version_that_last_copied_another_model() -> None:
    view = view_of()
    view.on_state(JobState())
    view.on_decision(commit(1))
    view.on_decision(commit(2, copy=CopyFrom(source=1, weight=0.5)))
    view.on_decision(commit(3))
    assert [view.version_of(unit) for unit in (TRAINED, FROZEN, 7)] == [3, 2, 3], "servers refuse an unknown unit"
    view.on_decision(commit(3, step=4, outcome=Outcome.ABORT, copy=CopyFrom(source=1, weight=0.5)))
    view.on_state(JobState(copied=1))
    assert view.copied == 2, "states and decisions of an epoch never take it back"


def test_values_that_are_committed_with_steps_are_the_newest_of_each_name() -> None:
    view = view_of()
    view.on_state(JobState(committed={"epoch": "1", "seed": "7"}))
    view.on_decision(commit(1, commit={"epoch": "2"}))
    assert view.committed == {"epoch": "2", "seed": "7"}


def test_only_a_commit_of_all_replicas_shows_that_workers_took_part() -> None:
    view = view_of()
    assert [m.rank for m in view.job.newcomers()] == [0, 1]
    view.job.acknowledged = frozenset()
    view.on_decision(commit(0, step=1, outcome=Outcome.ABORT))
    assert not view.job.acknowledged
    view.on_decision(commit(1))
    assert view.job.acknowledged == {"me", "other"}


def test_an_asynchronous_step_is_computed_from_the_version_at_its_begin() -> None:
    view = view_of(Asynchronous())
    assert view.version == 0
    view.on_decision(commit(1, replica_clock=ReplicaClock(replica=0, clock=0, slowest_clock=0)))
    assert (view.version, view.latest_version) == (0, 1)
    assert [view.version_of(TRAINED, exact=exact) for exact in (False, True)] == [0, 1]
    view.on_state(JobState())
    view.on_state(JobState(epoch=1, version=1))
    assert view.version == 1, "a restore ends the step"


def test_the_clock_of_an_asynchronous_replica_counts_decisions_on_its_own_steps() -> None:
    view = view_of(Asynchronous())
    for replica, clock in ((0, 0), (0, 1), (1, 0)):
        view.on_decision(commit(1, replica_clock=ReplicaClock(replica=replica, clock=clock, slowest_clock=0)))
    assert (view.stepping.replica, view.stepping.attempt) == (1, 1)
    view.job.known = members(2)
    view.begin(view.job.known)
    assert view.stepping.attempt == 0


def test_a_ticket_is_valid_in_its_generation() -> None:
    view = view_of()
    ticket = view.stepping.ticket(0, view.membership, 1)
    assert view.valid(ticket)
    view.job.known = members(2)
    assert not view.valid(ticket)


def test_a_released_model_is_refused() -> None:
    view = view_of()
    view.check_released()
    view.on_state(JobState(released=True))
    with pytest.raises(Misuse, match="model 'm' was released"):
        view.check_released()


def test_an_epoch_is_waited_for_until_the_servers_hold_it() -> None:
    view = view_of()
    with pytest.raises(Timeout, match=r"the parameters were not replaced for the 1\. time after 0 s"):
        view.wait_epoch(1)
    view.on_state(JobState(epoch=1))
    view.wait_epoch(1, initialized=False)
    with pytest.raises(Timeout):
        view.wait_epoch(1)
    view.on_state(JobState(epoch=2, initialized=True))
    view.wait_epoch(1)
    assert view.asked_epoch == 1
    view.wait_epoch_or_generation(2, 9, 0.0)
    view.wait_epoch_or_generation(9, 1, 0.0)
    with pytest.raises(Timeout):
        view.wait_epoch_or_generation(9, 9, 0.0)


def test_a_version_is_waited_for_until_its_commit_is_received() -> None:
    view = view_of()
    view.on_decision(commit(1))
    view.wait_version(1)
    view.wait_latest((0, 1))
    with pytest.raises(Timeout, match="version 2 was not committed, the newest known is 1"):
        view.wait_version(2)
    with pytest.raises(Timeout, match="version 0 of epoch 1 has not been announced"):
        view.wait_latest((1, 0))


def test_first_values_are_waited_for_as_long_as_they_can_come() -> None:
    registered = Registered(first=True, initialized=False, version=0, upload=False, generation=1)
    view = view_of()
    with pytest.raises(Timeout, match=r"still lack first values of model 'm', which rank 0 gives them"):
        view.wait_initialized(registered)
    view.on_state(JobState(out_of_memory="too large"))
    with pytest.raises(Busy, match="too large"):
        view.wait_initialized(registered)
    view.on_state(JobState())
    view.job.known = members(2)
    assert not view.wait_initialized(registered)
    view.on_state(JobState(initialized=True))
    assert view.wait_initialized(registered)
    view.job.failure = Broken("the session is over")
    with pytest.raises(Broken, match="the session is over"):
        view.wait_initialized(registered)


MESH = Grouping(rows=((0, 1), (2, 3)))


def mesh_members(*ranks: int, generation: int = 1, finished: tuple[int, ...] = ()) -> Membership:
    """Workers by rank; rank 2 is this one."""
    workers = tuple(worker(rank) for rank in ranks)
    bare = replace(members(generation), workers=workers, finished=tuple(worker(rank) for rank in finished))
    return bare.numbered(MESH)


def worker(rank: int) -> Member:
    return Member(role=Role.WORKER, rank=rank, incarnation="me" if rank == 2 else f"w{rank}", node=f"n{rank}")


def mesh_view(known: Membership, timeout_s: float = 0.0) -> ModelView:
    job = JobView(lambda: "me", timeout_s=timeout_s)
    job.known = known
    view = ModelView(job)
    spec = JobSpec(layout=LAYOUT, grouping=MESH)
    view.registered(spec, Registered(first=True, initialized=False, version=0, upload=True), "m")
    return view


def test_a_worker_waits_until_its_replica_is_complete() -> None:
    assert mesh_view(mesh_members(0, 1, 2, 3)).wait_in_replica().num_replicas == 2
    assert mesh_view(mesh_members(0, 2, 3)).wait_in_replica().num_replicas == 1
    view = mesh_view(mesh_members(0, 1, 2), timeout_s=HANG_S)
    found: list[Membership] = []
    waits = threading.Thread(target=lambda: found.append(view.wait_in_replica()))
    waits.start()
    with view.job.changed:
        view.job.known = mesh_members(0, 2, generation=2)
        view.job.changed.notify_all()
    with view.job.changed:
        view.job.known = mesh_members(0, 2, 3, generation=3)
        view.job.changed.notify_all()
    waits.join(HANG_S)
    assert [m.generation for m in found] == [3]


def test_a_worker_of_an_incomplete_replica_is_told_what_is_missing() -> None:
    with pytest.raises(
        Timeout,
        match=r"worker 2 is in no replica: rank 3 of ranks \(2, 3\), which make a replica together, is missing; start "
        r"a worker in its place, or the job anew: none came after 0 s",
    ):
        mesh_view(mesh_members(0, 1, 2)).wait_in_replica()
    with pytest.raises(MemberLost, match=r"rank 3 of ranks \(2, 3\).* is missing: worker 3 has finished its part"):
        mesh_view(mesh_members(0, 1, 2, finished=(3,))).wait_in_replica()
    with pytest.raises(Timeout, match="none came"):
        mesh_view(mesh_members(0, 1, 2, finished=(0,))).wait_in_replica()
    outside = replace(members(), workers=(worker(2),)).numbered(Grouping(rows=((0, 1), (3, 4))))
    view = mesh_view(outside)
    view.spec = JobSpec(layout=LAYOUT, grouping=outside.grouping)
    with pytest.raises(MemberLost, match="worker 2 is in no replica: these are the workers of ranks .* in no step"):
        view.wait_in_replica()

"""Ranks, generations, leases, restarts: who is a member, as the pure state machine sees it.

Tests of `coordinator/core/members.py`.
"""

from __future__ import annotations

import re

import pytest

from axon_ps.coordinator.config import CoordinatorConfig
from axon_ps.coordinator.core.handover import LEAST_PATIENCE_S
from axon_ps.errors import (
    Broken,
    Busy,
    ConfigurationError,
    InvalidRequest,
    PermissionDenied,
)
from axon_ps.sharding.job import JobSpec
from axon_ps.storage.state_store import MemoryStateStore
from axon_ps.types import Decision, Grouping, Membership, Outcome, Role
from axon_ps.wire import build
from axon_ps.wire.build import Build
from axon_ps.wire.events import JobState, JoinRequest, Welcome
from coordinator_driver import SPEC, Driver, Peer


def test_a_joiner_gets_the_welcome_then_the_job_then_the_members() -> None:
    d = Driver()
    w = d.worker()
    assert [type(e) for e in w.inbox] == [Welcome, JobState, Membership]
    assert w.last(Welcome) == Welcome(rank=0, lease_s=5.0, world_size=2, num_shards=1, state_id=d.state.id)
    assert w.membership.generation == 1
    assert not w.membership.complete
    assert w.membership.waiting_for == "1 of 2 workers and shard server 0 of 1"


def test_every_join_makes_a_generation_and_is_pushed_to_everybody() -> None:
    d = Driver()
    first, second, shard = d.worker(), d.worker(), d.shard()
    assert {p.membership.generation for p in (first, second, shard)} == {3}
    assert first.membership == second.membership == shard.membership
    assert first.membership.complete
    assert [m.generation for m in first.received(Membership)] == [1, 2, 3]
    assert not first.received(Decision), "nothing was under way while the job assembled"


def test_the_lowest_free_rank_or_the_wanted_one() -> None:
    d = Driver(world_size=4)
    ranks = [d.worker(rank=r).last(Welcome).rank for r in (2, -1, -1, -1)]
    assert ranks == [2, 0, 1, 3]


def test_a_rank_that_is_held_is_refused_naming_who_holds_it() -> None:
    d = Driver()
    first = d.worker(node="host-a", rank=1)
    with pytest.raises(Busy, match=r"rank 1 is held by worker 1 .*; if it is dead, that shows within 5 s"):
        d.worker(rank=1)
    d.advance(1.0, beat=True)
    with pytest.raises(InvalidRequest, match=rf"rank 1 is held by worker 1 \(node host-a\), .*{first.incarnation}"):
        d.worker(rank=1)
    assert first.membership.generation == 1


def test_a_successor_that_joins_before_a_death_is_noticed_waits_for_it() -> None:
    d = Driver()
    d.worker(rank=0)
    first = d.worker(rank=1)
    successor = d.peer(rank=1)
    with pytest.raises(Busy):
        successor.join()
    first.lose()
    assert successor.join().last(Welcome).rank == 1
    with pytest.raises(InvalidRequest, match="rank 1 is held"):  # who was given up and comes back ends at once
        first.join(rank=1)


def test_a_standby_fills_the_gap_that_a_death_leaves_and_no_other() -> None:
    d = Driver()
    standby = d.peer()
    with pytest.raises(Busy, match="still assembles"):
        standby.join(standby=True)
    (_, second), _ = d.assembled()
    with pytest.raises(Busy, match="has all its 2 workers"):
        standby.join(standby=True)
    second.lose()
    assert standby.join(standby=True).last(Welcome).rank == 1
    assert d.worker().last(Welcome).rank == 2, "who is no standby may be one more"


def test_a_rank_beyond_the_world_size_is_refused_while_the_job_assembles() -> None:
    d = Driver()
    with pytest.raises(InvalidRequest, match="rank 2 was asked for; the job has ranks 0 to 1 of workers"):
        d.worker(rank=2)


def test_one_worker_too_many_has_to_wait_until_the_job_was_complete() -> None:
    d = Driver()
    d.worker(), d.worker()
    with pytest.raises(Busy, match="has all its 2 workers"):
        d.worker()
    d.shard()
    assert d.worker().last(Welcome).rank == 2


def test_another_job_is_refused() -> None:
    d = Driver()
    with pytest.raises(PermissionDenied, match="runs job 'job', not 'other'"):
        d.peer().join(job="other")


def test_the_first_worker_may_set_the_world_size() -> None:
    d = Driver(world_size=0)
    assert d.shard().membership.waiting_for == "a first worker, which says how many there will be"
    with pytest.raises(InvalidRequest, match="it is not known how many workers"):
        d.worker()
    w = d.worker(world_size=3)
    assert w.last(Welcome).world_size == 3
    with pytest.raises(InvalidRequest, match="was started for 2 workers; the job starts with 3"):
        d.worker(world_size=2)
    d.restart()
    assert d.state.status().membership.waiting_for == "2 of 3 workers"


def test_an_extra_shard_server_has_to_wait() -> None:
    d = Driver()
    d.shard()
    with pytest.raises(Busy, match="has all its 1 shard servers"):
        d.shard()


def test_the_same_incarnation_keeps_its_rank_and_its_generation_when_its_stream_is_replaced() -> None:
    d = Driver()
    (w, other), (_,) = d.assembled()
    generation, old = w.membership.generation, w.session
    w.inbox.clear()
    received = len(other.inbox)
    w.join()
    assert [type(e) for e in w.inbox] == [Welcome, JobState, Membership]
    assert w.last(Welcome).rank == 0
    assert w.membership.generation == generation
    assert len(other.inbox) == received
    d.perform(d.state.streams_lost([old], d.clock()))
    assert d.state.status().membership.generation == generation, "the old stream is nobody's any more"


def test_a_lost_stream_is_a_lost_member_at_once_and_the_step_aborts() -> None:
    d = Driver()
    (w, other), (shard,) = d.assembled()
    generation, step = w.membership.generation, d.state.status().step
    other.inbox.clear()
    w.lose()
    aborted, members = other.inbox
    assert aborted == Decision(
        step=step,
        generation=generation,
        outcome=Outcome.ABORT,
        version=0,
        reason="worker 0 (node a) was lost: its connection broke",
        next_generation=generation + 1,
    )
    assert (members.generation, members.step, members.complete) == (generation + 1, step + 1, False)
    assert members.waiting_for == "1 of 2 workers"
    assert [m.rank for m in members.workers] == [1]
    assert shard.membership == members


def test_leaving_closes_the_session_without_an_error() -> None:
    d = Driver()
    (w, other), _ = d.assembled()
    w.leave()
    assert not w.open
    assert w.error is None
    assert other.last(Decision).reason == "worker 0 (node a) left"


def test_after_completeness_the_job_goes_on_with_min_workers() -> None:
    d = Driver(min_workers=1)
    first = d.worker()
    d.shard()
    assert not first.membership.complete, "it starts with world_size"
    second = d.worker()
    assert first.membership.complete
    second.lose()
    assert first.membership.complete
    first.lose()
    assert d.state.status().membership.waiting_for == "1 of 1 workers"


def test_after_a_restart_members_have_one_lease_to_come_back_without_a_new_generation() -> None:
    d = Driver()
    (w, other), (shard,) = d.assembled()
    before = w.membership
    d.restart()
    d.advance(1.0)
    for p in (shard, w):
        p.join()
        assert p.membership == before
    d.advance(4.0, beat=True)
    assert [m.rank for m in w.membership.workers] == [0]
    assert w.membership.generation == before.generation + 1
    assert "worker 1 (node a) did not come back within 5 s after the coordinator's restart" in w.last(Decision).reason
    assert other.join().last(Welcome).rank == 1


def test_after_a_restart_nobody_is_let_in_before_all_shard_servers_are_back_and_status_says_so() -> None:
    """Killed together with the coordinator, a server counts neither as there nor as a copy."""
    d = Driver(num_shards=3)
    (w, other), servers = d.assembled(shards=3)
    assert d.state.status(d.clock()).models[0].lacking == 0
    d.restart()
    back = [w, servers[2], servers[0]]
    before = [len(peer.inbox) for peer in back]
    for peer in back:
        peer.join()
    assert [len(peer.inbox) for peer in back] == before
    status = d.state.status(d.clock())
    (model,) = status.models
    assert status.awaited == {servers[1].incarnation, other.incarnation}
    assert model.lacking == len(servers[1].last(JobState).placement.slices_of(1)) > 0
    assert status.headline.startswith(
        "waiting for shard server 1 (node s), worker 1 (node a) to come back after the coordinator's restart, "
        f"{model.lacking} of {model.slices} slices lack copies"
    )
    servers[1].join()
    assert all(type(peer.inbox[count]) is Welcome for peer, count in zip(back, before, strict=True))
    assert other.join().open
    assert d.state.status(d.clock()).awaited == frozenset()
    assert "lack" not in d.state.status(d.clock()).headline


def test_after_a_restart_shard_servers_have_one_lease_to_come_back_and_the_others_wait_as_long() -> None:
    d = Driver(num_shards=3)
    (w, other), servers = d.assembled(shards=3)
    generation = w.membership.generation
    d.restart()
    servers[0].join()
    w.join()
    other.join()
    servers[0].lose()
    servers[2].join()
    d.advance(4.5)
    assert w.membership.generation == generation
    d.advance(1.0)
    assert [m.rank for m in w.membership.shards] == [2]
    assert [m.rank for m in w.membership.workers] == [0, 1]
    assert servers[0].join().membership.generation > generation + 1


@pytest.mark.parametrize("theirs", [Build(), Build(version="0.1.9", protocol=build.OLDEST - 1)], ids=str)
def test_members_of_protocols_that_do_not_go_together_are_refused_by_the_names_of_both(theirs: Build) -> None:
    d = Driver()
    for role, what in ((Role.WORKER, "worker"), (Role.SHARD, "shard server")):
        request = JoinRequest(job="job", incarnation="a" * 32, node="b", address="c:1", build=theirs)
        with pytest.raises(
            InvalidRequest, match=re.escape(f"the {what} at node b is {theirs}, and this coordinator is")
        ):
            d.state.join(1, role, request, d.clock())
    with pytest.raises(InvalidRequest, match=re.escape(f"the coordinator is {theirs}, and this worker is")):
        build.check(theirs, "the coordinator", "this worker")
    for newer in (0, 1):
        build.check(Build(version="9", protocol=build.PROTOCOL + newer), "the coordinator", "this worker")


def test_after_a_restart_a_replacement_waits_until_it_is_known_that_the_member_does_not_come_back() -> None:
    d = Driver()
    _, (shard,) = d.assembled()
    d.restart()
    shard.join()
    with pytest.raises(Busy, match=r"rank 1 is kept for worker 1 \(node a\)"):
        d.worker(rank=1)
    d.advance(5.0)
    assert d.worker(rank=1).last(Welcome).rank == 1


def test_restarting_with_other_options_is_a_new_generation_or_refused() -> None:
    d = Driver()
    (w, _), (shard,) = d.assembled()
    generation = w.membership.generation
    d.restart(world_size=3, min_workers=3)
    assert shard.join().membership.generation == generation + 1
    assert not shard.membership.complete
    with pytest.raises(ConfigurationError, match="cut over 1 shard servers, not 2"):
        d.restart(num_shards=2)
    with pytest.raises(ConfigurationError, match="holds job 'job', not 'other'"):
        d.restart(job="other", num_shards=1)


def test_replicas_and_local_ranks_are_dense() -> None:
    d = Driver(world_size=4)
    for node in ("a", "b", "a", "b"):
        d.worker(node=node)
    m = d.state.status().membership
    assert [(w.rank, w.local_rank, w.replica) for w in m.workers] == [(0, 0, 0), (1, 0, 1), (2, 1, 2), (3, 1, 3)]
    assert m.num_replicas == 4


def test_a_node_is_a_replica_if_the_job_is_registered_so() -> None:
    d = Driver(world_size=4)
    d.shard()
    workers = [d.worker(node=node) for node in ("a", "b", "a", "b")]
    generation = workers[0].membership.generation
    reply = d.register(workers[0], JobSpec(layout=SPEC.layout, grouping=Grouping(by_node=True)))
    m = workers[0].membership
    assert reply.generation == m.generation == generation + 1
    assert [(w.rank, w.replica) for w in m.workers] == [(0, 0), (1, 1), (2, 0), (3, 1)]
    assert m.num_replicas == 2


def test_an_incarnation_has_one_role() -> None:
    d = Driver()
    w = d.worker()
    impostor = d.peer(Role.SHARD)
    impostor.incarnation = w.incarnation
    with pytest.raises(InvalidRequest, match="is a member already, worker 0"):
        impostor.join()


def test_a_shard_server_that_comes_back_to_its_parameters_displaces_an_empty_one() -> None:
    d = Driver()
    (w, _), (shard,) = d.assembled()
    shard.lose()
    assert w.membership.waiting_for == "shard server 0 of 1"
    newcomer = d.shard()
    assert not w.membership.complete
    assert w.membership.waiting_for.startswith("shard server 0 was lost with its parameters; restore a checkpoint")
    assert not w.last(JobState).initialized
    shard.join()
    assert isinstance(newcomer.error, Broken)
    assert w.membership.complete
    assert w.last(JobState).initialized
    assert [s.incarnation for s in w.membership.shards] == [shard.incarnation]


def test_a_shard_server_started_again_while_the_coordinator_was_away_takes_its_predecessors_place() -> None:
    """Two members at one address would get each other's calls."""
    d = Driver(num_shards=2)
    _, (first, second) = d.assembled(shards=2)
    d.restart()
    second.join()
    again = d.peer(Role.SHARD)
    again.address = first.address
    again.join()
    shards = again.membership.shards
    assert [(s.rank, s.address, s.incarnation) for s in shards] == [
        (0, first.address, again.incarnation),
        (1, second.address, second.incarnation),
    ]
    assert again.membership.complete, "the second holds everything, too"


def test_a_member_of_another_state_is_refused_and_never_becomes_a_member() -> None:
    """Others would reach it, while it does not know yet that it has to end."""
    d = Driver()
    (w, _), (shard,) = d.assembled()
    w.state_id = shard.state_id = d.state.id
    d.store = MemoryStateStore()
    d.restart()
    for peer in (w, shard):
        with pytest.raises(InvalidRequest, match="came back without the state it had"):
            peer.join()
    assert d.state.status().membership.generation == 0
    newcomer = d.worker()
    newcomer.state_id = newcomer.last(Welcome).state_id
    newcomer.lose()
    assert newcomer.join().membership.workers[0].incarnation == newcomer.incarnation


def test_two_shard_servers_cannot_have_one_address() -> None:
    d = Driver(num_shards=1)
    _, (shard,) = d.assembled()
    other = d.peer(Role.SHARD)
    other.address = shard.address
    with pytest.raises(Busy, match=rf"shard server 0 \(node .\) is at {shard.address} already; .* 5 s, .*--advertise"):
        other.join()
    assert shard.open
    shard.lose()
    assert other.join().membership.shards[0].incarnation == other.incarnation


def step(workers: list[Peer], server: Peer) -> None:
    server.ready()
    for worker in workers:
        worker.vote()


def test_of_two_servers_that_wait_for_one_rank_the_second_is_refused() -> None:
    d = Driver()
    workers, (server,) = d.assembled()
    step(workers, server)
    first, second = d.shard(rank=1), d.shard(rank=1)
    assert (first.open, second.open, len(workers[0].membership.shards)) == (True, True, 1)
    step(workers, server)
    assert [m.incarnation for m in workers[0].membership.shards] == [server.incarnation, first.incarnation]
    assert isinstance(second.error, Busy)
    assert "rank 1 is held by shard server 1" in str(second.error)
    decided = next(e for e in workers[0].received(Decision) if e.version == 2)
    assert decided.next_generation == workers[0].membership.generation


def test_a_server_does_not_wait_for_ever_for_the_end_of_a_step() -> None:
    d = Driver()
    workers, (server,) = d.assembled()
    step(workers, server)
    d.shard()
    workers[0].vote()
    d.advance(LEAST_PATIENCE_S - 1.0, beat=True)
    assert len(workers[0].membership.shards) == 1
    d.advance(1.0, beat=True)
    assert len(workers[0].membership.shards) == 2
    assert workers[0].last(Decision).outcome is Outcome.ABORT


def test_a_config_that_cannot_work_is_refused() -> None:
    for wrong in (
        {"world_size": -1},
        {"num_shards": 0},
        {"min_workers": 0},
        {"world_size": 2, "min_workers": 3},
        {"lease_s": 0.0},
        {"lease_s": float("nan")},
        {"lease_s": float("inf")},
        {"join_timeout_s": 0.0},
        {"job": ""},
    ):
        with pytest.raises(ConfigurationError):
            CoordinatorConfig(**wrong)  # type: ignore[arg-type]


def test_the_status_has_the_members_and_what_is_waited_for() -> None:
    d = Driver()
    (w, other), (shard,) = d.assembled()
    d.perform(d.state.heartbeat(w.session, {"tokens_per_s": 12.0}, d.clock()))
    other.vote()
    status = d.state.status()
    assert (status.registered, status.initialized, status.parameters) == (True, True, 2 * 64 * 256)
    assert status.pending == ("votes of worker 0", "gradients at shard server 0")
    assert status.counters["joins"] == 3
    assert status.counters["worker/0/tokens_per_s"] == 12.0
    assert shard.open

"""A replica by rows of ranks needs all its workers: while one is missing, the other replicas go on without it.

Tests of `assembly.py`, `steps/attempts.py` and `steps/stragglers.py` in `coordinator/core/`.
"""

from __future__ import annotations

import dataclasses

import pytest

from axon_ps.coordinator.core.steps.attempts import Attempts
from axon_ps.errors import Busy, InvalidRequest, Timeout
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.policy import Asynchronous, LocalSteps, Policy
from axon_ps.types import Decision, Grouping, Member, Membership, Outcome, Role
from axon_ps.wire.events import VoteRequest
from coordinator_driver import LAYOUT, OPTIMIZER, Driver, Peer

ROWS = ((0, 1), (2, 3))
MESH = Grouping(rows=ROWS)


def assembled(policy: Policy | None = None, **config: object) -> tuple[Driver, list[Peer], Peer]:
    """Two replicas of two workers each, and a server that holds first values."""
    d = Driver(**{"world_size": 4, "min_workers": 1, **config})
    server = d.shard()
    workers = [d.worker(node=f"n{rank}") for rank in range(4)]
    spec = JobSpec(layout=LAYOUT, grouping=MESH, **({} if policy is None else {"policy": policy}))
    for w in workers:
        d.register(w, spec)
    server.initialized()
    return d, workers, server


def replicas(peer: Peer) -> list[int]:
    return [w.replica for w in peer.membership.workers]


def committed(workers: list[Peer], server: Peer) -> Decision:
    for w in workers:
        w.vote()
    server.ready()
    return workers[0].last(Decision)


def test_all_workers_of_all_replicas_vote() -> None:
    d, workers, server = assembled()
    assert replicas(workers[0]) == [0, 0, 1, 1]
    assert workers[0].membership.num_replicas == 2
    for w in workers[:3]:
        w.vote()
    server.ready()
    assert list(d.state.status().pending) == ["votes of worker 3"]
    workers[3].vote()
    assert workers[0].last(Decision).outcome is Outcome.COMMIT


def test_the_other_replica_goes_on_and_a_replacement_completes_the_first() -> None:
    d, [a, b, c, e], server = assembled()
    assert committed([a, b, c, e], server).version == 1
    e.lose()
    m = a.membership
    assert m.complete
    assert (replicas(a), m.num_replicas) == ([0, 0, -1], 1)
    assert "worker 2 is in no replica: rank 3 of ranks (2, 3)" in d.state.status(d.clock()).headline
    a.vote()
    c.vote()  # of no replica: it does not count
    server.ready()
    assert a.last(Decision).version == 1
    b.vote()
    assert a.last(Decision).version == 2
    replacement = d.worker(node="n3")
    assert replacement.given_rank == 3
    assert (replicas(a), a.membership.num_replicas) == ([0, 0, 1, 1], 2)
    assert committed([a, b, c, replacement], server).version == 3
    assert "no replica" not in d.state.status(d.clock()).headline


def test_a_joiner_gets_a_rank_of_a_row_or_waits_for_one() -> None:
    d, [a, _, _, e], _ = assembled()
    with pytest.raises(Busy, match="the job has all its 4 workers"):
        d.worker()
    e.lose()
    assert d.worker().given_rank == 3
    assert replicas(a) == [0, 0, 1, 1]


def test_workers_in_no_row_complete_none() -> None:
    """They joined before the rows were registered."""
    d = Driver(world_size=4, min_workers=1)
    d.shard()
    workers = [d.worker(node=f"n{rank}") for rank in range(4)]
    workers += [d.worker(), d.worker()]
    for w in (workers[1], workers[3]):
        w.lose()
    d.register(workers[0], JobSpec(layout=LAYOUT, grouping=MESH))
    assert replicas(workers[0]) == [-1, -1, -1, -1]
    assert "no replica is complete: rank 1 of ranks (0, 1)" in workers[0].membership.waiting_for
    d.worker()
    assert replicas(workers[0]) == [0, 0, -1, -1, -1]
    assert workers[0].membership.complete


def test_without_a_complete_replica_the_job_waits_and_gives_up() -> None:
    d, [a, b, c, e], server = assembled(join_timeout_s=60.0)
    assert committed([a, b, c, e], server).version == 1
    e.lose()
    b.lose()
    assert not a.membership.complete
    assert (replicas(a), a.membership.num_replicas) == ([-1, -1], 0)
    assert a.membership.waiting_for == (
        "a worker, since no replica is complete: rank 1 of ranks (0, 1), which make a replica together, is missing"
    )
    a.vote()
    c.vote()
    server.ready()
    assert a.last(Decision).outcome is Outcome.ABORT
    d.advance(61.0, beat=True)
    assert isinstance(a.error, Timeout)
    assert "no replica is complete" in str(a.error)


def test_the_row_that_lacks_the_fewest_is_named() -> None:
    _, [a, b, c, e], _ = assembled()
    a.lose()
    b.lose()
    e.lose()
    assert "rank 3 of ranks (2, 3)" in c.membership.waiting_for


def test_the_job_is_complete_again_with_one_replica() -> None:
    d, [a, b, c, e], server = assembled()
    e.lose()
    b.lose()
    again = d.worker(node="n1")
    assert again.given_rank == 1
    assert a.membership.complete
    assert replicas(a) == [0, 0, -1]
    assert committed([a, again], server).outcome is Outcome.COMMIT
    assert c.open


def test_finished_workers_leave_a_job_that_is_complete() -> None:
    """Each replica lacks a worker that has finished, so none is waited for, and no step is made."""
    d, [a, b, c, e], server = assembled()
    assert committed([a, b, c, e], server).version == 1
    for w in (b, c):
        w.leave(finished=True)
        assert a.membership.complete
    assert replicas(a) == [-1, -1]
    for w in (a, e):
        w.vote()
    server.ready()
    assert a.last(Decision).outcome is not Outcome.COMMIT or a.last(Decision).version == 1
    for w in (a, e):
        w.leave(finished=True)
    assert d.state.status().membership.is_over


def test_a_dead_worker_beside_finished_ones_is_waited_for() -> None:
    _, [a, b, c, e], _ = assembled()
    c.leave(finished=True)
    b.lose()
    assert "rank 1 of ranks (0, 1)" in a.membership.waiting_for
    assert "rank 1 of ranks (0, 1)" in e.membership.waiting_for


def test_stragglers_are_those_that_take_part() -> None:
    d, [a, b, c, e], _ = assembled(step_timeout_s=30.0)
    a.vote()
    c.vote()
    d.advance(31.0, beat=True)
    assert [w.rank for w in a.membership.workers] == [0, 1, 2, 3], "without them no replica would be left"
    c.lose()
    e.lose()
    a.vote()
    d.advance(31.0, beat=True)
    assert b.open, "nor without this one"


def test_a_straggler_is_set_aside_where_another_replica_is_left() -> None:
    d, [a, b, c, e], server = assembled(step_timeout_s=30.0)
    for w in (a, b, c):
        w.vote()
    d.advance(31.0, beat=True)
    assert not e.open
    assert replicas(a) == [0, 0, -1]
    assert committed([a, b], server).outcome is Outcome.COMMIT
    d.advance(100.0, beat=True)
    assert c.open, "nothing is waited for from a worker in no replica"


def test_votes_are_requested_of_those_that_take_part() -> None:
    d, [a, b, c, e], _ = assembled(LocalSteps(inner_steps=4, quorum=0.5, grace_s=2.0))
    e.lose()
    a.vote()  # half of the two that take part
    d.advance(2.5, beat=True)
    assert b.received(VoteRequest)
    assert not c.received(VoteRequest)


def test_asynchronous_replicas_without_the_incomplete_one() -> None:
    _, [a, b, c, e], server = assembled(Asynchronous())
    b.lose()
    assert replicas(c) == [-1, 0, 0]
    a.vote(step=0)
    c.vote(step=0)
    e.vote(step=0)
    server.ready(step=0)
    of = c.last(Decision).replica_clock
    assert of is not None
    assert (of.replica, of.clock) == (0, 0)


def test_a_restarted_coordinator_knows_the_rows() -> None:
    d, [a, b, c, e], server = assembled()
    committed([a, b, c, e], server)
    e.lose()
    generation = a.membership.generation
    d.restart()
    for peer in (server, a, b, c):
        peer.join()
    assert (a.membership.generation, replicas(a)) == (generation, [0, 0, -1])
    assert committed([a, b], server).version == 2


def test_the_first_row_uploads_each_its_part() -> None:
    d = Driver(world_size=4, min_workers=1)
    d.shard()
    workers = [d.worker(node=f"n{rank}") for rank in range(4)]
    spec = JobSpec(layout=LAYOUT, grouping=Grouping(rows=((1, 3), (0, 2))))
    assert [d.register(w, spec).upload for w in workers] == [True, False, True, False]
    workers[2].lose()  # the first row is incomplete now
    there = [workers[0], workers[1], workers[3]]
    assert [d.register(w, spec).upload for w in there] == [False, True, True]


def test_rows_of_ranks_that_the_job_does_not_have_are_refused() -> None:
    d = Driver(world_size=2)
    d.shard()
    a, _ = d.worker(), d.worker()
    with pytest.raises(InvalidRequest, match="replicas that name rank 3; the job has 2 workers"):
        d.register(a, JobSpec(layout=LAYOUT, grouping=MESH))


def test_a_weight_counts_once_for_each_replica() -> None:
    _, workers, server = assembled()
    for w, weight in zip(workers, (3.0, 3.0, 1.0, 1.0), strict=True):
        w.vote(weight=weight)
    server.ready(16.0)
    decision = workers[0].last(Decision)
    assert (decision.weight, decision.grad_norm, decision.clip_factor) == (4.0, 1.0, 0.25)


def test_a_parameter_is_untouched_if_no_part_has_a_gradient_of_it() -> None:
    _, workers, server = assembled()
    for w in workers[::2]:  # the head is frozen; the embedding is another part's
        w.vote(untouched=(0,))
    for w in workers[1::2]:
        w.vote()
    server.ready()
    assert workers[0].last(Decision).untouched == ()
    assert OPTIMIZER.group_of == (0, -1)


def membership(ranks: list[int], grouping: Grouping) -> Membership:
    workers = [Member(role=Role.WORKER, rank=r, incarnation=f"{r:032x}", node="n") for r in ranks]
    bare = Membership(generation=1, step=1, version=0, workers=tuple(workers), shards=(), num_replicas=0, complete=True)
    return dataclasses.replace(bare, grouping=Grouping(by_node=not grouping.by_node)).numbered(grouping)


def test_workers_left_without_some() -> None:
    attempts = Attempts()
    attempts.begin(None, membership([0, 1, 2, 3, 4], Grouping(rows=((0, 1), (2, 3), (4, 5)))))
    assert sorted(attempts.participants) == [0, 1, 2, 3]
    assert attempts.per_replica == 2
    assert [attempts.left_without(gone) for gone in ((), (0,), (0, 1), (1, 2))] == [4, 2, 2, 0]
    attempts.begin(None, membership([0, 1, 2], Grouping()))
    assert [attempts.left_without(gone) for gone in ((), (0,), (0, 1))] == [3, 2, 1]
    assert attempts.per_replica == 1


def test_the_worker_that_saves_is_in_a_replica() -> None:
    there = membership([0, 2, 3], MESH)
    assert there.first_worker is not None
    assert there.first_worker.rank == 2
    assert "rank 1 of ranks (0, 1)" in there.why_no_replica(0)
    nobody = membership([0, 2], MESH)
    assert nobody.first_worker is not None
    assert nobody.first_worker.rank == 0
    outside = membership([0, 1, 4], MESH)
    assert outside.why_no_replica(4) == "worker 4 is in no replica: these are the workers of ranks (0, 1), (2, 3)"

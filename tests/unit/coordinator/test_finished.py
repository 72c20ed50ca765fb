"""A worker that finishes is not one that died: nobody waits for it, or for another in its place.

Tests of `coordinator/core/members.py`.
"""

from __future__ import annotations

import pytest

from axon_ps.coordinator.core.checkpoints.restores import Resume
from axon_ps.errors import GenerationChanged, MemberLost
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.policy import BoundedStaleness
from axon_ps.types import Decision, Outcome
from coordinator_driver import LAYOUT, Driver, Peer


def step(workers: list[Peer], servers: list[Peer]) -> Decision:
    for w in workers:
        w.vote()
    for s in servers:
        s.ready()
    return workers[0].last(Decision)


def test_the_others_go_on_at_once() -> None:
    d = Driver(world_size=3)
    [a, b, c], servers = d.assembled(workers=3)
    assert step([a, b, c], servers).outcome is Outcome.COMMIT
    c.leave(finished=True)
    assert c.error is None
    m = a.membership
    assert m.complete
    assert [w.rank for w in m.workers] == [0, 1]
    assert [w.incarnation for w in m.finished] == [c.incarnation]
    assert m.num_replicas == 2
    assert step([a, b], servers).version == 2
    b.leave(finished=True)
    assert a.membership.complete
    assert step([a], servers).version == 3


def test_who_leaves_without_having_finished_is_waited_for() -> None:
    d = Driver(world_size=2)
    [a, b], _ = d.assembled()
    b.leave()
    assert a.membership.waiting_for == "1 of 2 workers"
    assert a.membership.finished == ()


def test_a_step_that_needs_it_aborts_once_and_is_made_by_the_others() -> None:
    d = Driver(world_size=3)
    [a, b, c], servers = d.assembled(workers=3)
    a.vote()
    servers[0].ready()
    c.leave(finished=True)
    abort = a.last(Decision)
    assert (abort.outcome, abort.next_generation) == (Outcome.ABORT, a.membership.generation)
    assert "worker 2 (node a) has finished" in abort.reason
    assert step([a, b], servers).outcome is Outcome.COMMIT


@pytest.mark.parametrize("min_workers", [None, 1, 2, 3])
def test_all_end_one_after_the_other(min_workers: int | None) -> None:
    """The end of every script: nobody waits, nothing is undone, and the job can be begun anew."""
    d = Driver(world_size=3, min_workers=min_workers)
    workers, servers = d.assembled(workers=3)
    step(workers, servers)
    for i, w in enumerate(workers):
        w.leave(finished=True)
        for other in workers[i + 1 :]:
            assert other.open
            assert other.membership.complete
    m = d.state.status().membership
    assert not m.complete
    assert m.waiting_for == "new workers, since all have finished"
    assert len(m.finished) == 3
    assert d.state.status().version == 1
    assert d.call(lambda call: d.state.snapshots.save(call, "/c")), "it can still be saved"
    d.advance(10_000.0, beat=True)
    assert servers[0].open
    first = d.worker()
    assert first.membership.finished == ()
    assert first.membership.complete is (min_workers == 1), "another script's workers are waited for as ever"


def test_a_replacement_of_a_dead_worker_does_not_fill_its_place() -> None:
    d = Driver(world_size=3)
    [a, b, c], _ = d.assembled(workers=3)
    c.leave(finished=True)
    b.lose()
    assert a.membership.waiting_for == "1 of 2 workers"
    d.worker()
    assert a.membership.complete
    d.worker()
    assert a.membership.complete, "a third may come"


def test_who_came_beside_the_others_lowers_nothing() -> None:
    d = Driver(world_size=2)
    [a, b], _ = d.assembled()
    d.worker().leave(finished=True)
    assert a.membership.complete
    b.lose()
    assert a.membership.waiting_for == "1 of 2 workers"


def test_before_the_job_was_complete_it_is_a_worker_that_left() -> None:
    d = Driver(world_size=2)
    d.shard()
    a = d.worker()
    a.leave(finished=True)
    b = d.worker()
    assert not b.membership.complete
    assert b.membership.waiting_for == "1 of 2 workers"


def test_it_is_known_after_the_coordinator_restarts() -> None:
    d = Driver(world_size=3)
    [a, b, c], servers = d.assembled(workers=3)
    c.leave(finished=True)
    before = a.membership
    d.restart()
    for peer in (*servers, a, b):
        peer.join()
    assert a.membership == before
    assert step([a, b], servers).outcome is Outcome.COMMIT


def test_nobody_waits_for_the_clock_of_one_that_has_finished() -> None:
    d = Driver(world_size=3)
    servers, [a, b, c] = [d.shard()], [d.worker() for _ in range(3)]
    for w in (a, b, c):
        d.register(w, JobSpec(layout=LAYOUT, policy=BoundedStaleness(max_staleness=1)))
    servers[0].initialized()

    def own(worker: Peer, replica: int, clock: int) -> Outcome:
        generation = worker.membership.generation
        worker.vote(step=clock, generation=generation)
        servers[0].ready(step=clock, replica=replica, generation=generation)
        return worker.last(Decision).outcome

    for clock in range(2):
        assert own(a, 0, clock) is own(b, 1, clock) is Outcome.COMMIT
    c.leave(finished=True)
    for clock in range(5):
        assert own(a, 0, clock) is own(b, 1, clock) is Outcome.COMMIT
    assert d.state.status().version == 14


def test_barriers_go_on_without_it() -> None:
    d = Driver(world_size=3)
    [a, b, c], _ = d.assembled(workers=3)

    def arrive(w: Peer, name: str, ranks: tuple[int, ...] = ()) -> object:
        return d.call(lambda call: d.state.barrier(call, w.caller, name, ranks, d.clock(), 60.0))

    waits, names_it, others = arrive(a, "all"), arrive(a, "it", (0, 2)), arrive(a, "others", (0, 1))
    assert arrive(b, "all") not in d.replies
    c.leave(finished=True)
    assert d.replies[waits] == a.membership.generation  # type: ignore[index]
    with pytest.raises(MemberLost, match=r"barrier 'it' needs rank 2: worker 2 \(node a\) has finished"):
        raise d.replies[names_it]  # type: ignore[index]
    assert others not in d.replies
    later = arrive(a, "later")
    d.call(lambda call: d.state.restores.restore(call, [Resume(uri="/c", version=0)], d.clock()))
    assert isinstance(d.replies[later], GenerationChanged)  # type: ignore[index]


def test_the_last_worker_that_dies_is_replaced_by_one_and_the_job_is_not_over() -> None:
    d = Driver(world_size=3)
    [a, b, c], servers = d.assembled(workers=3)
    step([a, b, c], servers)
    b.leave(finished=True)
    c.leave(finished=True)
    a.lose()
    m = d.state.status().membership
    assert (m.waiting_for, m.is_over) == ("1 of 1 workers", False)
    d.restart()
    servers[0].join()
    again = d.worker()
    assert again.membership.complete
    assert len(again.membership.finished) == 2
    assert step([again], servers).version == 2
    again.leave(finished=True)
    assert d.state.status().membership.is_over


def test_a_job_is_over_when_the_last_has_finished_though_others_died_before() -> None:
    d = Driver(world_size=3, min_workers=2)
    [a, b, c], _ = d.assembled(workers=3)
    a.lose()
    b.leave(finished=True)
    c.leave(finished=True)
    m = d.state.status().membership
    assert (m.waiting_for, m.is_over) == ("new workers, since all have finished", True)
    assert not d.worker().membership.complete, "another script's workers are waited for as ever"

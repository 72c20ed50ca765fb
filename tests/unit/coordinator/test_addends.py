"""Steps of several addends: a step commits with the sums of as many as all votes name, or aborts if these differ."""

from __future__ import annotations

import pytest

from axon_ps.types import Decision, Outcome
from axon_ps.wire.events import Welcome
from coordinator_driver import Driver, Peer


def made() -> tuple[list[Peer], list[Peer]]:
    return Driver(num_shards=2).assembled(shards=2)


def decision(peer: Peer) -> Decision | None:
    received = peer.received(Decision)
    return received[-1] if received else None


def test_a_step_commits_when_all_servers_have_the_last_addend() -> None:
    workers, shards = made()
    shards[0].ready(4.0)
    shards[1].ready(5.0)
    for worker in workers:
        worker.vote(last_addend=2)
    shards[0].ready(9.0, last_addend=1)
    assert decision(workers[0]) is None
    shards[0].ready(16.0, last_addend=2)
    assert decision(workers[0]) is None, "the other server has the sum of one addend"
    shards[1].ready(9.0, last_addend=2)
    done = decision(workers[0])
    assert done is not None
    assert (done.outcome, done.grad_norm) == (Outcome.COMMIT, 5.0), "the norm is that of the newest sums"


def test_a_late_report_of_fewer_addends_does_not_count() -> None:
    workers, shards = made()
    shards[0].ready(16.0, last_addend=1)
    shards[0].ready(4.0)
    shards[0].ready(4.0, last_addend=1)
    shards[1].ready(9.0, last_addend=1)
    for worker in workers:
        worker.vote(last_addend=1)
    done = decision(workers[0])
    assert done is not None
    assert done.grad_norm == 5.0


def test_the_next_step_begins_with_the_first_addend() -> None:
    workers, shards = made()
    for last in (1, 0):
        for shard in shards:
            shard.ready(last_addend=last)
        for worker in workers:
            worker.vote(last_addend=last)
        done = decision(workers[0])
        assert done is not None
        assert done.version == 2 - last


def test_different_numbers_of_addends_abort_the_step_and_name_the_workers() -> None:
    workers, shards = made()
    for shard in shards:
        shard.ready()
    workers[0].vote(last_addend=1)
    assert decision(workers[0]) is None
    workers[1].vote()
    done = decision(workers[0])
    assert done is not None
    assert (done.outcome, done.refused) == (Outcome.ABORT, 1)
    assert "different numbers of backwards in the step: worker 1: 1; worker 0: 2" in done.reason


def test_a_worker_whose_addend_others_do_not_push_is_not_awaited() -> None:
    """The servers may not take its gradients before those of a worker that has voted, and will push no more."""
    workers, _ = made()
    workers[0].vote()
    workers[1].arrive(addend=0)
    assert decision(workers[0]) is None, "it may be about to vote"
    workers[1].arrive(addend=1)
    done = decision(workers[1])
    assert done is not None
    assert done.outcome is Outcome.ABORT
    assert "worker 0: 1; worker 1: 2" in done.reason


def test_a_worker_that_is_behind_is_awaited() -> None:
    workers, shards = made()
    workers[0].vote(last_addend=2)
    workers[1].arrive(addend=1)
    assert decision(workers[0]) is None
    for shard in shards:
        shard.ready(last_addend=2)
    workers[1].vote(last_addend=2)
    done = decision(workers[0])
    assert done is not None
    assert done.outcome is Outcome.COMMIT


@pytest.mark.parametrize("further", [False, True])
def test_a_withdrawal_waits_for_votes_of_workers_that_can_go_on(further: bool) -> None:
    workers, _ = made()
    workers[0].vote(withdrawn=True, last_addend=1)
    workers[1].arrive(addend=1 + further)
    done = decision(workers[0])
    assert (done is not None) == further
    workers[1].vote(last_addend=1 + further)
    done = decision(workers[0])
    assert done is not None
    assert done.reason == "worker 0 withdrew its gradients of this step"


def test_the_coordinator_says_that_it_takes_several() -> None:
    workers, _ = made()
    assert workers[0].last(Welcome).addends

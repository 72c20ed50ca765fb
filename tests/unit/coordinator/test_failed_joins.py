"""Workers that join and leave to abort the others' steps are made to wait; those that train are not."""

from __future__ import annotations

import pytest

from axon_ps.coordinator.core.admission import MAX_OF_JOB, MAX_OF_NODE, WINDOW_S
from axon_ps.errors import Busy
from axon_ps.types import Decision, Outcome
from coordinator_driver import Driver, Peer


def trained(d: Driver, workers: list[Peer], server: Peer) -> None:
    """Everybody makes a step."""
    for w in workers:
        w.vote()
    server.ready()
    assert workers[0].last(Decision).outcome is Outcome.COMMIT


def job() -> tuple[Driver, list[Peer], Peer]:
    d = Driver(world_size=2, min_workers=1)
    workers, (server,) = d.assembled()
    trained(d, workers, server)
    return d, workers, server


def test_who_joins_and_leaves_in_vain_waits_and_the_others_train() -> None:
    d, workers, server = job()
    for _ in range(MAX_OF_NODE):
        d.worker(node="b").leave(finished=True)
    with pytest.raises(Busy, match=rf"{MAX_OF_NODE} workers of node b have joined and left within 60 s .* in 60 s"):
        d.worker(node="b")
    aborted = d.state.status().counters["steps_aborted"]
    trained(d, workers, server)
    assert d.state.status().counters["steps_aborted"] == aborted
    d.worker(node="c").leave()  # another node is not meant
    d.advance(WINDOW_S + 1, beat=True)
    d.worker(node="b")


def test_a_node_is_called_what_its_worker_says_so_the_job_has_a_limit_too() -> None:
    d, workers, server = job()
    for i in range(MAX_OF_JOB):
        d.worker(node=f"n{i}").lose()
    with pytest.raises(Busy, match=f"{MAX_OF_JOB} workers of the job have joined and left"):
        d.worker(node="another")
    trained(d, workers, server)


def test_preemptible_workers_that_train_come_and_go_as_they_like() -> None:
    d, workers, server = job()
    for _ in range(3 * MAX_OF_NODE):
        guest = d.worker(node="spot")
        trained(d, [*workers, guest], server)
        guest.lose()


def test_nothing_counts_while_nobody_trains() -> None:
    d = Driver(world_size=2)
    d.worker()
    for _ in range(2 * MAX_OF_NODE):
        d.worker(node="b").lose()


def test_a_worker_that_is_needed_is_let_in_however_often_its_connection_broke() -> None:
    d = Driver(world_size=2)
    [first, again], (server,) = d.assembled()
    trained(d, [first, again], server)
    for _ in range(2 * MAX_OF_NODE):
        again.lose()
        again = d.worker(node="b")
        assert first.membership.complete
    trained(d, [first, again], server)

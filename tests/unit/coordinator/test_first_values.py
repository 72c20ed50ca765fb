"""First values are those of the worker of lowest rank, whichever registers first, and of exactly one worker."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from axon_ps.coordinator.core.events import FIRST_VALUES, RestoreOrder
from coordinator_driver import Driver, Peer


def joined() -> tuple[Driver, Any, list[Peer]]:
    d = Driver(world_size=3)
    shard = d.shard()
    return d, shard, [d.worker() for _ in range(3)]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_rank_0_uploads_in_every_order_of_registration(order: tuple[int, ...]) -> None:
    d, shard, workers = joined()
    for rank in order:
        assert d.register(workers[rank]).upload == (rank == 0)
    for rank in order:
        assert d.register(workers[rank]).upload == (rank == 0), "also when it registers again"
    shard.initialized()
    assert not any(d.register(w).upload for w in workers)


@pytest.mark.parametrize("registered_before", [False, True])
@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_when_rank_0_dies_before_it_has_uploaded_the_next_lowest_does(
    registered_before: bool, order: tuple[int, int]
) -> None:
    d, shard, workers = joined()
    for rank in order:
        assert not d.register(workers[rank]).upload
    if registered_before:
        assert d.register(workers[0]).upload
    workers[0].lose()
    for rank in order:
        assert d.register(workers[rank]).upload == (rank == 1)
    shard.initialized()
    assert d.register(workers[1]).initialized


def test_one_that_comes_in_its_place_does_not_mix_its_values_with_those_of_the_uploader() -> None:
    d, shard, workers = joined()
    workers[0].lose()
    assert d.register(workers[1]).upload
    again = d.worker(rank=0)
    assert not d.register(again).upload, "the servers may have some of rank 1's"
    assert d.register(workers[1]).upload
    shard.initialized()
    assert not d.register(again).upload


def test_a_worker_that_joins_after_commits_does_not_upload() -> None:
    d = Driver(world_size=3)
    workers, (shard,) = d.assembled(workers=3)
    for worker in workers:
        worker.vote()
    shard.ready()
    assert d.state.status().version == 1
    workers[0].lose()
    late = d.worker(rank=0)
    reply = d.register(late)
    assert (reply.upload, reply.initialized) == (False, True)


def test_another_model_has_an_uploader_of_its_own() -> None:
    d, shard, workers = joined()
    for w in workers:
        d.register(w)
    shard.initialized()
    assert not d.register(workers[2], name="second").upload
    assert d.register(workers[0], name="second").upload


def test_in_a_job_that_begins_again_the_lowest_rank_counts_of_those_that_wait() -> None:
    d = Driver(world_size=3)
    d.assembled(workers=3)
    d.restart()
    d.advance(d.config.lease_s + 1)
    shard, trained, a, b = d.shard(), d.worker(), d.worker(), d.worker()
    assert not d.register(b).upload
    assert not d.register(a).upload
    d.perform(d.state.begin_again(d.clock()))
    assert shard.last(RestoreOrder).uri == FIRST_VALUES
    assert not d.register(b).upload, "rank 1 waits, too; rank 0 has trained, and registers no more"
    assert d.register(a).upload
    a.lose()
    assert d.register(b).upload
    shard.initialized(version=0, epoch=1)
    assert not d.register(trained).upload

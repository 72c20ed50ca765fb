"""Layout and first values are those of the worker of lowest rank, whichever comes first, and of exactly one worker.

Tests of `coordinator/core/registrations.py`.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

from axon_ps.coordinator.core.checkpoints.restores import Resume
from axon_ps.coordinator.core.first_values import FirstValues
from axon_ps.coordinator.core.placement.holders import SliceHolders
from axon_ps.coordinator.core.records import ParameterState
from axon_ps.coordinator.core.registration import Registration
from axon_ps.errors import Busy, GenerationChanged, InvalidRequest, LayoutMismatch, Timeout
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.layout import Layout
from axon_ps.wire.events import FIRST_VALUES, RestoreOrder
from coordinator_driver import SPEC, Driver, Peer

OTHER = dataclasses.replace(SPEC, model="Other")
OURS = dataclasses.replace(SPEC, model="Ours")
EMPTY = JobSpec(layout=Layout(units=()))


def joined() -> tuple[Driver, Any, list[Peer]]:
    d = Driver(world_size=3)
    shard = d.shard()
    return d, shard, [d.worker() for _ in range(3)]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_rank_0_uploads_in_every_order_of_registration(order: tuple[int, ...]) -> None:
    d, shard, workers = joined()
    early = order[: order.index(0)]
    waiting = [d.await_registration(workers[rank]) for rank in early if d.register(workers[rank]) is None]
    assert (len(waiting), d.state.models.specs) == (len(early), {})
    assert d.register(workers[0]).upload
    assert [d.replies[call] for call in waiting] == [None] * len(waiting)
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
    waiting = [d.await_registration(workers[rank]) for rank in order if d.register(workers[rank]) is None]
    assert len(waiting) == 2
    if registered_before:
        assert d.register(workers[0]).upload
        assert not any(d.register(workers[rank]).upload for rank in order)
    workers[0].lose()
    replies = [d.register(workers[rank]) for rank in order]
    assert [reply is not None and reply.upload for reply in replies] == [rank == 1 for rank in order]
    assert not d.register(workers[2]).upload
    assert all(call in d.replies for call in waiting)
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
    assert d.register(workers[2], name="second") is None
    assert d.register(workers[0], name="second").upload


def test_in_a_job_that_begins_again_the_lowest_rank_counts_of_those_that_wait() -> None:
    d = Driver(world_size=3)
    d.assembled(workers=3)
    d.restart()
    d.advance(d.config.lease_s + 1)
    shard, trained, a, b = d.shard(), d.worker(), d.worker(), d.worker()
    assert not d.register(b).upload
    assert not d.register(a).upload
    d.perform(d.state.restores.begin_again(d.clock()))
    assert shard.last(RestoreOrder).uri == FIRST_VALUES
    assert not d.register(b).upload, "rank 1 waits, too; rank 0 has trained, and registers no more"
    assert d.register(a).upload
    a.lose()
    assert d.register(b).upload
    shard.initialized(version=0, epoch=1)
    assert not d.register(trained).upload


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_layout_of_rank_0_counts_and_nobody_waits_for_one_that_was_refused(order: tuple[int, ...]) -> None:
    d, shard, workers = joined()
    specs, waiting = (OURS, OTHER, OURS), {}
    told: dict[int, str] = {}

    def register(rank: int) -> None:
        try:
            if d.register(workers[rank], specs[rank]) is None:
                waiting[rank] = d.await_registration(workers[rank])
        except LayoutMismatch as error:
            told[rank] = str(error)

    for rank in order:
        register(rank)
    for rank, call in list(waiting.items()):
        assert d.replies[call] is None
        register(rank)
    assert list(told) == [1], "the one that differs"
    assert "worker 1 registers Other" in told[1]
    assert "from worker 0" in told[1]
    workers[0].lose()  # before it has uploaded
    assert d.register(workers[2], OURS).upload, "rank 1 was refused"
    shard.initialized()


def test_one_that_is_refused_when_others_wait_for_its_values_lets_them_go_on() -> None:
    d, _, workers = joined()
    assert d.register(workers[0], OURS).upload
    workers[0].lose()
    assert d.register(workers[2], OURS) is None
    call = d.await_registration(workers[2])
    assert call not in d.replies, "rank 1 may have the right layout"
    with pytest.raises(LayoutMismatch):
        d.register(workers[1], OTHER)
    assert d.replies[call] is None
    assert d.register(workers[2], OURS).upload
    assert not d.register(workers[1], OURS).upload, "it has mended its module"


def test_one_that_cannot_register_counts_no_more() -> None:
    d, _, workers = joined()
    assert d.register(workers[1]) is None
    call = d.await_registration(workers[1])
    with pytest.raises(InvalidRequest, match="a layout without units"):
        d.register(workers[0], EMPTY, None)
    assert d.replies[call] is None
    assert d.register(workers[1]).upload


@pytest.mark.parametrize("way", ["it is lost", "it is late", "it gives up", "the first one leaves"])
def test_a_registration_that_waits_for_rank_0_ends(way: str) -> None:
    d, _, workers = joined()
    assert d.register(workers[1]) is None
    assert d.state.status().pending == (), "nobody waits yet"
    call = d.await_registration(workers[1], timeout_s=3.0)
    assert d.state.status().pending[0].startswith("model 'model 0' still waits for worker 0 (node a)")
    if way == "it is lost":
        workers[1].lose()
        assert isinstance(d.replies[call], GenerationChanged)
    elif way == "it is late":
        for worker in workers:
            worker.beat()
        d.advance(3.0)
        assert isinstance(d.replies[call], Timeout)
        assert "waits for worker 0 (node a), whose layout and values it begins with" in str(d.replies[call])
        assert str(d.replies[call]).endswith("after 3 s")
    elif way == "it gives up":
        d.perform(d.state.cancel(call))
    else:
        workers[0].lose()
        assert d.replies[call] is None
    d.state.next_deadline()
    assert not any("still waits" in text for text in d.state.status().pending)


def test_the_first_to_register_resumes_and_the_others_wait_for_no_values() -> None:
    d = Driver(world_size=3, resume="/ckpt")
    d.shard()
    a, b, _ = (d.worker() for _ in range(3))
    assert d.register(b) is None
    call = d.await_registration(b)
    d.register(a, resume=Resume(uri="/ckpt", version=9))
    assert d.replies[call] is None
    assert d.register(b).version == 9


def test_too_many_that_wait_are_refused() -> None:
    d, _, workers = joined()
    with pytest.raises(Busy, match="of this process wait for registrations already"):
        for number in range(1000):
            d.await_registration(workers[1], name=f"model {number}")


def model_of(uri: str = "") -> tuple[Registration, FirstValues]:
    """A model without layout; with `uri`, its values are ordered anew."""
    registration = Registration(None, None, number=0, name="m")
    order = RestoreOrder(epoch=1, uri=uri, version=0, model=0) if uri else None
    holders = SliceHolders(registration, ParameterState(epoch=bool(uri), restore=order), 1)
    return registration, FirstValues(registration, holders)


def test_the_lowest_rank_comes_before_the_others_until_one_uploads() -> None:
    registration, first = model_of()
    assert [first.comes_before(worker, [*"abc"]) for worker in "abc"] == ["", "a", "a"]
    registration.set_spec(SPEC, 0)
    assert [first.claim_upload(worker, [*"abc"]) for worker in "cab"] == [False, True, False]
    assert first.comes_before("b", [*"abc"]) == ""
    assert first.claim_upload("b", [*"bc"]), "the uploader is not a member any more"


def test_when_a_job_begins_again_only_waiting_workers_count() -> None:
    registration, first = model_of(FIRST_VALUES)
    registration.set_spec(SPEC, 0)
    assert not first.claim_upload("a", [*"abc"])
    first.waiting |= {"b", "gone"}
    assert [first.claim_upload(worker, [*"abc"]) for worker in "ab"] == [False, True]
    assert first.waiting == {"b"}


def test_values_of_a_checkpoint_need_no_worker() -> None:
    registration, first = model_of("/checkpoint")
    registration.set_spec(SPEC, 0)
    assert (first.claim_upload("a", [*"ab"]), first.comes_before("b", [*"ab"])) == (False, "")

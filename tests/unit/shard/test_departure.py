"""A shard server that leaves hands over its slices first, if it can. Tests of `shard/server/departure.py`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import pytest

from axon_ps.errors import Broken, Drained, InvalidRequest
from axon_ps.shard.server import departure
from axon_ps.shard.server.departure import JobWatch, hand_over
from axon_ps.sharding.placement import Holders, Placement
from axon_ps.types import Member, Membership, Role
from axon_ps.wire.events import JobState, SessionLost, SessionRestored

MOST_S = 60.0
DRAINED = Drained("shard server 0 was drained; it holds nothing any more")


def members(*, workers: int, shards: int = 2) -> Membership:
    of = {
        role: tuple(Member(role=role, rank=rank, incarnation=f"{role.value}{rank}", node="n") for rank in range(count))
        for role, count in ((Role.WORKER, workers), (Role.SHARD, shards))
    }
    return Membership(
        generation=1,
        step=1,
        version=0,
        workers=of[Role.WORKER],
        shards=of[Role.SHARD],
        num_replicas=workers,
        complete=True,
    )


def state(*holders: Holders, model: int = 0) -> JobState:
    return JobState(model=model, placement=Placement(holders=holders, num_cuts=2, number=1, replication=2))


class Coordinator:
    """A session on which a drain gets an answer, or an error."""

    rank = 0

    def __init__(self, answer: int | Exception = 3) -> None:
        self.answer = answer
        self.drained: list[int] = []

    async def drain(self, rank: int, timeout_s: float | None = None) -> int:
        self.drained.append(rank)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def run(body: Callable[[JobWatch, asyncio.Future[None]], Awaitable[None]], workers: int = 1) -> None:
    async def test() -> None:
        watch, failure = JobWatch(), asyncio.get_running_loop().create_future()
        watch.on_event(members(workers=workers))
        await asyncio.wait_for(body(watch, failure), MOST_S)

    asyncio.run(test())


async def settled(task: asyncio.Task[None]) -> bool:
    """True if a task ends without another event."""
    for _ in range(5):
        await asyncio.sleep(0)
    return task.done()


def test_it_is_safe_to_leave_when_no_slice_lacks_a_copy() -> None:
    watch = JobWatch()
    assert not watch.safe, "nothing is known yet"
    watch.on_event(members(workers=0, shards=2))
    assert (watch.trains, watch.lacking, watch.safe) == (False, 0, True)
    watch.on_event(state(Holders((0, 1)), Holders((1,)), Holders((1,), (0,))))
    assert (watch.lacking, watch.safe) == (2, False)
    watch.on_event(state(Holders((0,)), model=4))
    assert watch.lacking == 3
    watch.on_event(JobState(model=4, released=True))
    assert watch.lacking == 2
    watch.on_event(members(workers=0, shards=1))
    assert watch.lacking == 2, "server 0 has one slice alone, and lacks the others"
    watch.on_event(state(Holders((0,))))
    assert watch.safe, "there is no second server to have a copy"
    watch.on_event(SessionLost(error=Broken("gone")))
    assert not watch.safe


def test_a_server_leaves_once_the_others_have_everything() -> None:
    async def body(watch: JobWatch, failure: asyncio.Future[None]) -> None:
        session = Coordinator()
        leaving = asyncio.create_task(hand_over(session, watch, failure, MOST_S))
        assert not await settled(leaving)
        assert session.drained == [0]
        failure.set_exception(DRAINED)
        watch.on_event(members(workers=1))
        with pytest.raises(Drained):
            await leaving

    run(body)


def test_nothing_is_handed_over_in_a_job_without_workers() -> None:
    async def body(watch: JobWatch, failure: asyncio.Future[None]) -> None:
        session = Coordinator()
        await hand_over(session, watch, failure, MOST_S)
        assert not session.drained

    run(body, workers=0)


@pytest.mark.parametrize(
    ("answer", "why"),
    [(InvalidRequest("shard server 0 is the last one"), "is the last one"), (TimeoutError(), "in 60 s")],
)
def test_a_server_that_may_not_hand_over_leaves_with_its_slices(
    answer: Exception, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(watch: JobWatch, failure: asyncio.Future[None]) -> None:
        await hand_over(Coordinator(answer), watch, failure, MOST_S)

    with caplog.at_level(logging.WARNING, departure.__name__):
        run(body)
    assert "leaving with what this server holds" in caplog.text
    assert why in caplog.text


def test_a_server_leaves_when_the_last_worker_has_left(caplog: pytest.LogCaptureFixture) -> None:
    async def body(watch: JobWatch, failure: asyncio.Future[None]) -> None:
        leaving = asyncio.create_task(hand_over(Coordinator(), watch, failure, MOST_S))
        assert not await settled(leaving)
        watch.on_event(members(workers=0))
        await leaving

    with caplog.at_level(logging.WARNING, departure.__name__):
        run(body)
    assert "no worker trains any more" in caplog.text


def test_a_coordinator_that_comes_back_in_time_is_waited_for() -> None:
    async def body(watch: JobWatch, failure: asyncio.Future[None]) -> None:
        leaving = asyncio.create_task(hand_over(Coordinator(), watch, failure, MOST_S))
        assert not await settled(leaving)
        watch.on_event(SessionLost(error=Broken("gone")))
        assert not await settled(leaving)
        watch.on_event(SessionRestored())
        assert not await settled(leaving)
        failure.set_exception(DRAINED)
        watch.on_event(members(workers=1))
        with pytest.raises(Drained):
            await leaving

    run(body)


def test_a_coordinator_that_stays_away_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(departure, "AWAY_S", 0.001)

    async def body(watch: JobWatch, failure: asyncio.Future[None]) -> None:
        watch.on_event(SessionLost(error=Broken("gone")))
        await hand_over(Coordinator(), watch, failure, MOST_S)

    with caplog.at_level(logging.WARNING, departure.__name__):
        run(body)
    assert "the coordinator is away for 0.001 s" in caplog.text

"""Workers meet at barriers, and those that have just joined make a step first. Tests of `worker/rendezvous.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

import pytest

from axon_ps.errors import GenerationChanged, Timeout
from axon_ps.types import Member, Membership, Role
from axon_ps.worker.job_view import JobView
from axon_ps.worker.rendezvous import Rendezvous


def members(generation: int, *names: str) -> Membership:
    workers = tuple(
        Member(role=Role.WORKER, rank=rank, incarnation=name, node="n", replica=rank) for rank, name in enumerate(names)
    )
    return Membership(
        generation=generation, step=1, version=0, workers=workers, shards=(), num_replicas=len(names), complete=True
    )


class Coordinator:
    """The session of worker 1, whose barriers end as given."""

    rank = 1

    def __init__(self, view: JobView) -> None:
        self.view = view
        self.outcomes: list[tuple[Membership, GenerationChanged] | None] = []
        self.entered: list[tuple[str, tuple[int, ...]]] = []
        self.values = {"x/0": b"zero"}

    async def barrier(self, name: str, ranks: Sequence[int], timeout_s: float) -> None:
        assert timeout_s <= 5.0
        self.entered.append((name, tuple(ranks)))
        if self.outcomes and (outcome := self.outcomes.pop(0)) is not None:
            self.view.known, error = outcome
            raise error

    async def kv_put(self, key: str, value: bytes, *, timeout_s: float) -> None:
        self.values[key] = value

    async def kv_wait(self, key: str, *, timeout_s: float) -> bytes:
        return self.values[key]


class Loop:
    def run(self, call: Coroutine[Any, Any, Any], timeout_s: float | None = None) -> Any:
        return asyncio.run(call)


def made(*names: str) -> tuple[Rendezvous, Coordinator, JobView]:
    view = JobView(lambda: "me", 0.0)
    view.known = members(1, *names)
    view.acknowledge()
    coordinator = Coordinator(view)
    loop: Any = Loop()
    session: Any = coordinator
    return Rendezvous(loop, session, view), coordinator, view


def test_a_barrier_is_entered_again_after_a_change_that_no_worker_caused() -> None:
    rendezvous, coordinator, _ = made("other", "me")
    coordinator.outcomes = [(members(2, "other", "me"), GenerationChanged("restored", 2)), None]
    rendezvous.barrier("b", 5.0, (0, 1))
    assert coordinator.entered == [("b", (0, 1)), ("b", (0, 1))]


def test_a_barrier_ends_when_the_workers_have_changed() -> None:
    rendezvous, coordinator, _ = made("other", "me")
    coordinator.outcomes = [(members(2, "another", "me"), GenerationChanged("worker 0 was lost", 2))]
    with pytest.raises(GenerationChanged, match="worker 0 was lost"):
        rendezvous.barrier("b", 5.0)
    assert len(coordinator.entered) == 1


def test_the_generation_that_ended_a_barrier_is_waited_for() -> None:
    rendezvous, coordinator, view = made("other", "me")
    assert view.known is not None
    coordinator.outcomes = [(view.known, GenerationChanged("not announced yet", 2))]
    with pytest.raises(Timeout, match="generation 2 has not been announced to this worker"):
        rendezvous.barrier("b", 0.0)


def test_a_barrier_is_not_entered_beside_a_worker_that_has_just_come() -> None:
    rendezvous, coordinator, view = made("other", "me")
    view.known = members(2, "other", "me", "new")
    with pytest.raises(GenerationChanged, match=r"worker 2 \(node n\) came since this worker's last step") as raised:
        rendezvous.barrier("b", 5.0)
    assert raised.value.generation == 2
    assert not coordinator.entered
    rendezvous.barrier("b", 5.0)
    assert coordinator.entered == [("b", ())], "the second time it is known"


def test_values_of_all_workers_come_in_rank_order_between_two_barriers() -> None:
    rendezvous, coordinator, _ = made("other", "me")
    assert rendezvous.all_gather("x", b"one", 5.0) == [b"zero", b"one"]
    assert coordinator.entered == [("x/put", (0, 1)), ("x/got", (0, 1))]

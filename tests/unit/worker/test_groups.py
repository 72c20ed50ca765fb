"""The default groups of a world as its workers come and go."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from axon_ps.collectives.backends.base import Backend, GroupContext
from axon_ps.collectives.backends.request import Request
from axon_ps.collectives.flight_recorder import Recorder
from axon_ps.collectives.store import MemoryStore
from axon_ps.errors import Closed, MemberLost
from axon_ps.reduction.call import Operation
from axon_ps.types import Member, Membership, Role
from axon_ps.worker.groups import Groups
from deadlines import HANG_S


class FakeBackend:
    """Counts what happens to it."""

    name = "fake"
    buffers_messages = False

    def __init__(self, context: GroupContext) -> None:
        self.context = context
        self.aborted: list[Exception] = []
        self.closed = 0

    def run(self, request: Request, timeout_s: float) -> None:
        """In an all-gather every rank gives what this one gives: enough to agree on a sub-group."""
        assert request.call.operation is Operation.ALL_GATHER
        assert request.output is not None
        assert request.data is not None
        request.output[:] = np.tile(request.data, len(request.call.counts))

    def abort(self, error: Exception) -> None:
        self.aborted.append(error)

    def close(self) -> None:
        self.closed += 1

    def statistics(self) -> dict[str, float]:
        return {}


class Workers:
    """The groups of the worker "a", and the backends they made."""

    def __init__(self) -> None:
        self.backends: list[FakeBackend] = []
        world: Any = None
        self.groups = Groups(
            world,
            self._make,
            MemoryStore(),
            backend="fake",
            timeout_s=HANG_S,
            recorder=Recorder(),
            incarnation=lambda: "a",
        )
        self.workers: tuple[Member, ...] = ()
        self._generation = 0
        self._joined: dict[str, int] = {}

    def _make(self, context: GroupContext, name: str) -> Backend:
        self.backends.append(FakeBackend(context))
        return cast(Backend, self.backends[-1])

    def are(self, *incarnations: str, finished: str = "") -> None:
        """The workers change; who is new, or was not there before, joins now; one may have finished."""
        ended = [m for m in self.workers if m.incarnation == finished]
        self._generation += 1
        self._joined = {x: self._joined.get(x, self._generation) for x in incarnations}
        workers = tuple(
            Member(role=Role.WORKER, rank=i, incarnation=x, node=x, joined=self._joined[x])
            for i, x in enumerate(incarnations)
        )
        membership = Membership(
            generation=self._generation,
            step=0,
            version=0,
            workers=workers,
            shards=(),
            num_replicas=len(workers),
            complete=True,
            finished=tuple(ended),
        )
        self.workers = workers
        self.groups.end_with(self.groups.set_members(membership), membership)


@pytest.fixture
def workers() -> Workers:
    return Workers()


def test_the_group_is_the_same_while_the_workers_are(workers: Workers) -> None:
    workers.are("a", "b")
    group = workers.groups.default()
    workers.are("a", "b")
    assert workers.groups.default() is group


def test_a_death_ends_the_group_and_the_next_one_frees_what_it_held(workers: Workers) -> None:
    workers.are("a", "b")
    old = workers.groups.default()
    old.backend_of()
    workers.are("a")
    assert [type(e) for e in workers.backends[0].aborted] == [MemberLost]
    with pytest.raises(MemberLost, match=r"rank 1 \(node b\)"):
        old.backend_of()
    new = workers.groups.default()
    assert new is not old
    assert workers.backends[0].closed == 1
    assert new.backend_of() is not None
    for async_op in (False, True):
        with pytest.raises(MemberLost):
            old.barrier(async_op=async_op)


def test_a_worker_that_was_lost_and_came_back_gives_everybody_a_new_group(workers: Workers) -> None:
    workers.are("a", "b")
    old = workers.groups.default()
    old.backend_of()
    workers.are("a")
    workers.are("a", "b")
    new = workers.groups.default()
    assert new is not old
    assert new.name != old.name
    assert new.backend_of() is not None


def test_who_was_lost_itself_gets_a_new_group(workers: Workers) -> None:
    workers.are("a", "b")
    old = workers.groups.default()
    workers.are("b")
    with pytest.raises(MemberLost):
        workers.groups.default()
    workers.are("a", "b")
    assert workers.groups.default().name != old.name
    assert workers.groups.default().backend_of() is not None


def test_members_that_missed_a_loss_agree_with_those_who_saw_it(workers: Workers) -> None:
    others = Workers()
    for seen in (workers, others):
        seen.are("a", "b")
    workers.are("a")
    workers.are("a", "b")
    others._joined["b"] = 3  # it has received the newest membership only
    others._generation = 2
    others.are("a", "b")
    assert workers.groups.default().name == others.groups.default().name


@pytest.mark.parametrize("buffers_messages", [True, False])
def test_one_that_has_finished_ends_collectives_and_leaves_what_it_sent(
    workers: Workers, monkeypatch: pytest.MonkeyPatch, buffers_messages: bool
) -> None:
    monkeypatch.setattr(FakeBackend, "buffers_messages", buffers_messages)
    workers.are("a", "b", "c")
    group = workers.groups.default()
    group.backend_of()
    pair = group.named_group("pair", [0, 2])
    workers.are("a", "b", finished="c")
    (backend,) = workers.backends
    assert bool(backend.aborted) is not buffers_messages
    for old in (group, pair):
        with pytest.raises(MemberLost, match=r"rank 2 \(node c\) has finished"):
            old.barrier()
    assert group.backend_of() is backend
    assert workers.groups.default() is not group
    assert backend.closed == 0, "its messages may still be received"
    workers.groups.close()
    assert backend.closed == 1


def test_a_group_is_closed_without_ending_what_others_do(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeBackend, "buffers_messages", True)
    workers.are("a", "b")
    group = workers.groups.default()
    group.backend_of()
    workers.groups.close()
    assert workers.backends[0].aborted == []
    assert workers.backends[0].closed == 1
    with pytest.raises(Closed):
        group.barrier()


def test_a_sub_group_without_the_dead_member_goes_on(workers: Workers) -> None:
    workers.are("a", "b", "c")
    old = workers.groups.default()
    old.backend_of()
    survivors = old.new_group([0, 1])
    survivors.backend_of()
    workers.are("a", "b")
    workers.groups.default().backend_of()
    parents, of_survivors = workers.backends[0], workers.backends[1]
    assert parents.closed == 1
    assert (of_survivors.closed, of_survivors.aborted) == (0, [])
    assert survivors.backend_of() is not None
    workers.are("a")
    workers.groups.default()
    assert of_survivors.closed == 1
    assert parents.closed == 1, "what is free is not freed again"


def test_close_frees_all(workers: Workers) -> None:
    workers.are("a", "b")
    workers.groups.default().backend_of()
    workers.groups.close()
    assert workers.backends[0].closed == 1

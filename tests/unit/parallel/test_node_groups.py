"""The groups of a node's workers, made once all are there, and made again after a loss.

Tests of `parallel/fsdp/hybrid/node_groups.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from axon_ps.errors import Broken, MemberLost, Timeout
from axon_ps.parallel.fsdp.hybrid.node_groups import GRACE_S, WorldNodeGroups
from axon_ps.types import EACH_NODE, Grouping, Member, Role, replica_of

LEASE_S = 5.0


def worker(rank: int, incarnation: str = "", node: str = "here") -> Member:
    return Member(role=Role.WORKER, rank=rank, incarnation=(incarnation or str(rank)) * 32, node=node)


ELSEWHERE = worker(9, node="there")


@dataclass
class Group:
    """A group that was made of these members."""

    members: tuple[Member, ...]


@dataclass
class Workers:
    """The members of a job at a moment."""

    workers: tuple[Member, ...]
    complete: bool = True


class World:
    """The world of rank 0 in a job whose members change by a list, one change for each wait that needs one."""

    lease_s = LEASE_S

    def __init__(self, *moments: Workers, change_after_group: int = 0) -> None:
        self._later = iter(moments)
        self.membership = next(self._later)
        self.view = self
        self.made = 0
        self.waits: list[tuple[str, float]] = []
        self._change_after_group = change_after_group

    def wait_complete(self) -> None:
        if not self.membership.complete:
            raise Timeout("the job is not complete")

    def wait_members(self, ready: Callable[[Any], bool], timeout_s: float, what: str) -> None:
        while not ready(self.membership):
            self.waits.append((what, timeout_s))
            if (after := next(self._later, None)) is None:
                raise Timeout(what)
            self.membership = after

    def me(self) -> Member:
        mine = next((m for m in self.membership.workers if m.rank == 0), None)
        if mine is None:
            raise MemberLost("this worker is not a member")
        return mine

    def node_group(self, grouping: Grouping) -> Group:
        group = Group(replica_of(self.me(), self.membership.workers, grouping))
        self.made += 1
        if self.made == self._change_after_group:
            self.membership = next(self._later)
        return group


def formed(world: World, size: int = 2, grouping: Grouping = EACH_NODE) -> WorldNodeGroups:
    return WorldNodeGroups(world, size, grouping)  # type: ignore[arg-type]


def ranks(group: Any) -> Sequence[int]:
    return [member.rank for member in group.members]


def test_both_groups_have_the_workers_of_this_node() -> None:
    world = World(Workers((worker(0), worker(1), ELSEWHERE)))
    groups = formed(world)
    assert ranks(groups.data) == ranks(groups.control) == [0, 1]
    assert groups.data is not groups.control
    assert world.waits == []


def test_they_are_made_once_all_workers_of_the_node_are_there() -> None:
    world = World(Workers((worker(0), ELSEWHERE)), Workers((worker(0), ELSEWHERE, worker(1))))
    assert ranks(formed(world).data) == [0, 1]
    assert [timeout_s for _, timeout_s in world.waits] == [LEASE_S + GRACE_S]


def test_a_part_of_a_host_is_a_node_if_the_grouping_says_so() -> None:
    four = tuple(worker(rank) for rank in range(4))
    halves = Grouping(by_node=True, size=2)
    assert ranks(formed(World(Workers(four)), grouping=halves).data) == [0, 1]
    later = Workers((four[0], worker(1, "b"), *four[2:]))
    groups = formed(World(Workers(four), Workers((four[0], *four[2:])), later), grouping=halves)
    groups.form(MemberLost("rank 1 is gone"))
    assert [member.incarnation[0] for member in groups.data.members] == ["0", "b"]


def test_groups_of_different_members_are_made_again() -> None:
    """A worker is replaced between the two."""
    world = World(Workers((worker(0), worker(1))), Workers((worker(0), worker(1, "b"))), change_after_group=1)
    groups = formed(world)
    assert groups.data.members == groups.control.members
    assert groups.data.members[1].incarnation == "b" * 32
    assert world.made == 4


def test_after_a_loss_they_are_made_of_the_worker_that_came_back() -> None:
    world = World(
        Workers((worker(0), worker(1))), Workers((worker(0),)), Workers((worker(0), worker(1, "b"), ELSEWHERE))
    )
    groups = formed(world)
    groups.form(MemberLost("rank 1 is gone"))
    assert [member.incarnation[0] for member in groups.data.members] == ["0", "b"]


def test_an_error_without_a_loss_is_raised_as_it_is() -> None:
    groups = formed(World(Workers((worker(0), worker(1)))))
    error = Broken("the switch is on fire")
    with pytest.raises(Broken) as raised:
        groups.form(error)
    assert raised.value is error


def test_a_node_that_stays_incomplete_in_a_job_that_goes_on_is_told_to_end() -> None:
    groups = formed(World(Workers((worker(0), worker(1), ELSEWHERE)), Workers((worker(0), ELSEWHERE))))
    with pytest.raises(MemberLost) as raised:
        groups.form(MemberLost("rank 1 is gone"))
    text = str(raised.value)
    assert text.startswith("of the 2 workers of this node only rank 0 is there, and the job goes on without the node")
    assert text.endswith("; rank 1 is gone")


def test_a_job_that_is_not_complete_says_so() -> None:
    with pytest.raises(Timeout, match="the job is not complete"):
        formed(World(Workers((worker(0),), complete=False)))

"""`GroupMembers`: ranks, sub-groups, and the job they are in."""

from __future__ import annotations

import pytest

from axon_ps.collectives.backends.mock import mock_contexts
from axon_ps.collectives.group_members import WORLD_PREFIX, GroupMembers
from axon_ps.errors import InvalidRequest, Misuse


class FakeWorld:
    """A world that counts how often it was closed."""

    closed = 0

    def close(self) -> None:
        self.closed += 1


def four(rank: int = 2, **options: object) -> GroupMembers:
    """The members of a group whose world ranks are 4 to 7."""
    contexts = mock_contexts(4, name=f"{WORLD_PREFIX}1", ranks=range(4, 8))
    return GroupMembers(contexts[rank], **options)  # type: ignore[arg-type]


def test_ranks_are_positions() -> None:
    members = four()
    assert (members.rank, members.world_size, members.ranks) == (2, 4, (4, 5, 6, 7))
    assert members.checked_rank(3, "root") == 3
    for wrong in (-1, 4):
        with pytest.raises(InvalidRequest, match=rf"root is {wrong}; ranks of group 'world@1' go from 0 to 3"):
            members.checked_rank(wrong, "root")


def test_a_sub_group_has_ranks_of_its_own() -> None:
    members = four()
    pair = members.subset("0", [2, 0], timeout_s=5.0)
    assert (pair.name, pair.ranks, pair.rank) == ("world@1/0", (6, 4), 0)
    assert [m.rank for m in pair.context.members] == [6, 4]
    assert pair.context.timeout_s == 5.0
    assert members.is_world
    assert not pair.is_world
    last = pair.subset("0", [1], timeout_s=500.0)
    assert (last.name, last.ranks, last.context.timeout_s) == ("world@1/0/0", (4,), 5.0)


def test_a_worker_outside_has_no_rank() -> None:
    others = four().subset("0", [0, 1], timeout_s=5.0)
    assert not others.joined
    for ask in (lambda: others.rank, lambda: others.checked_rank(0, "root"), others.check_joined):
        with pytest.raises(Misuse, match=r"not a member of group 'world@1/0', which has the world ranks \(4, 5\)"):
            ask()


def test_lost_members_are_found_by_their_ids() -> None:
    members = four()
    pair = members.subset("0", [0, 1], timeout_s=5.0)
    lost = {members.context.members[2].id}
    assert members.have(lost)
    assert not pair.have(lost)


def test_a_started_world_is_shared_with_sub_groups_and_ends_with_the_group() -> None:
    started: list[FakeWorld] = []

    def start() -> FakeWorld:
        started.append(FakeWorld())
        return started[-1]

    members = four(start_world=start)
    members.end_world()
    assert started == []
    pair = members.subset("0", [2, 0], timeout_s=5.0)
    assert pair.world is members.world is started[0]
    pair.end_world()
    assert started[0].closed == 0
    members.end_world()
    assert [world.closed for world in started] == [1]


def test_a_given_world_is_not_closed() -> None:
    world = FakeWorld()
    members = four(world=world)
    assert members.subset("0", [0], timeout_s=5.0).world is world
    members.end_world()
    assert world.closed == 0


def test_members_in_no_job_say_which_group_it_is() -> None:
    with pytest.raises(Misuse, match="group 'world@1/0' was made of a backend and is in no job"):
        assert four().subset("0", [2], timeout_s=5.0).world

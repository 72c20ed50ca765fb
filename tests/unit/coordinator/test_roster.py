"""Members by session, by incarnation and by rank."""

from __future__ import annotations

from axon_ps.coordinator.core.roster import Roster
from axon_ps.types import Member, Role


def test_members_are_found_by_session_and_by_incarnation() -> None:
    roster = Roster()
    for session, (role, rank) in enumerate([(Role.SHARD, 0), (Role.WORKER, 3), (Role.WORKER, 4)]):
        member = Member(role=role, rank=rank, incarnation=f"{role.value} {rank}", node="a", address="")
        roster.add(member, session if rank != 4 else None, 5.0)
    assert {session: m.incarnation for session, m in roster.by_session().items()} == {0: "shard 0", 1: "worker 3"}
    assert [roster.rank_of(session) for session in (0, 1, 2)] == [0, 3, -1]
    assert [roster.is_worker(session) for session in (0, 1, 2)] == [False, True, True], "or of no member any more"
    assert [roster.rank_held_by(incarnation) for incarnation in ("worker 4", "stranger")] == [4, None]
    assert [m.rank for m in roster.awaited(Role.WORKER)] == [4]

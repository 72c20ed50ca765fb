"""A large job forms: those who join together make one generation. See Note: [Joining together]."""

from __future__ import annotations

from axon_ps.coordinator.core.assembly import ANNOUNCE_S, FEW, TOGETHER_A_MEMBER_S, TOGETHER_S, Forming
from axon_ps.types import Membership, Role
from axon_ps.wire.events import Welcome
from coordinator_driver import Driver, Peer

WORKERS = 3 * FEW


def forming() -> tuple[Driver, list[Peer]]:
    """A job of so many members that further joins wait for others."""
    d = Driver(world_size=WORKERS, num_shards=1)
    return d, [d.shard(), *(d.worker() for _ in range(FEW - 1))]


def test_a_joiner_of_a_large_job_is_told_soon_with_those_who_joined_meanwhile_and_it_alone() -> None:
    d, first = forming()
    joined = [d.worker() for _ in range(10)]
    assert [w.last(Welcome).rank for w in joined] == list(range(FEW - 1, FEW + 9))
    assert not any(w.received(Membership) for w in joined)
    assert d.state.next_deadline() <= d.clock() + TOGETHER_S
    before = first[0].membership.generation
    d.advance(TOGETHER_S)
    assert {w.membership.generation for w in joined} == {before + 1}
    assert len(joined[0].membership.workers) == FEW + 9
    assert {m.joined for m in joined[0].membership.workers[FEW - 1 :]} == {before + 1}
    told = {w.membership.generation for w in first}
    assert told in ({before}, {before + 1}), "all of them, or none"


def test_everybody_is_told_at_once_when_the_job_is_complete() -> None:
    d, first = forming()
    others = [d.worker() for _ in range(WORKERS - FEW)]
    assert not any(m.membership.complete for m in first)
    everybody = [*first, *others, d.worker()]
    assert len({m.membership.generation for m in everybody}) == 1
    assert all(m.membership.complete for m in everybody)
    assert len(everybody[0].membership.workers) == WORKERS
    assert d.state.status().membership == everybody[0].membership


def test_a_loss_is_told_to_everybody_with_those_who_wait() -> None:
    d, first = forming()
    waiting = [d.worker() for _ in range(3)]
    first[1].lose()
    told = [first[0], *first[2:], *waiting]
    assert {len(m.membership.workers) for m in told} == {FEW - 2 + 3}
    waiting[0].lose()  # known by now
    another = d.worker()
    another.lose()  # not yet
    assert another.incarnation not in {m.incarnation for m in first[0].membership.workers}
    d.advance(1.0, beat=True)
    assert d.state.membership == first[0].membership


def test_one_that_reconnects_before_it_is_told_has_the_generation_it_is_in() -> None:
    d, _ = forming()
    w = d.worker()
    w.join()
    assert w.incarnation in {m.incarnation for m in w.membership.workers}


def test_what_is_durable_are_the_members_that_were_told() -> None:
    d, first = forming()
    waiting = d.worker()
    d.restart()
    assert waiting.incarnation not in {m.incarnation for m in d.state.membership.workers}
    assert {m.incarnation for m in d.state.membership.workers} == {
        m.incarnation for m in first if m.role is Role.WORKER
    }
    assert waiting.join().last(Welcome).rank == FEW - 1


def test_all_are_told_ever_more_rarely_as_it_costs_more() -> None:
    f, told = Forming(), []
    for step in range(100):
        now = step * TOGETHER_S
        f.join(step, now)
        assert f.deadline == now + (TOGETHER_A_MEMBER_S * 10_000 if step else TOGETHER_S), "who joins waits for more"
        told.append(f.take(10_000, now + TOGETHER_S) is None)
        assert not f.joined
    assert sum(told) == 1 == told[0], f"{ANNOUNCE_S * 1e6:g} s between two"

"""Asynchronous steps: which is decided when, how far a clock may be ahead, and the state after a restart.

Tests of `coordinator/core/steps/attempts.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axon_ps.errors import LayoutMismatch
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.policy import Asynchronous, BoundedStaleness, LocalSteps, Policy, Synchronous
from axon_ps.types import Decision, Membership, Outcome
from axon_ps.wire.events import Vote
from coordinator_driver import LAYOUT, Driver, Peer


def assembled(
    policy: Policy, workers: int = 2, shards: int = 1, **config: Any
) -> tuple[Driver, list[Peer], list[Peer]]:
    """A complete job under a policy."""
    d = Driver(world_size=workers, num_shards=shards, **config)
    servers = [d.shard() for _ in range(shards)]
    members = [d.worker() for _ in range(workers)]
    for w in members:
        d.register(w, JobSpec(layout=LAYOUT, policy=policy))
    for s in servers:
        s.initialized()
    return d, members, servers


def step(d: Driver, worker: Peer, servers: list[Peer], clock: int, replica: int, **vote: Any) -> None:
    """A worker's gradient is everywhere, and it votes."""
    generation = d.state.status().membership.generation
    for s in servers:
        s.ready(4.0, generation=generation, step=clock, replica=replica)
    d.perform(d.state.vote([worker.session], Vote(generation=generation, step=clock, **vote), d.clock()))


def replica_clocks(peer: Peer) -> list[tuple[int, int, int]]:
    """The asynchronous decisions: (replica, clock, slowest clock)."""
    decided = [x.replica_clock for x in peer.received(Decision) if x.replica_clock is not None]
    return [(t.replica, t.clock, t.slowest_clock) for t in decided]


def test_a_replica_commits_without_the_others_and_all_get_the_decision() -> None:
    d, (a, b), servers = assembled(Asynchronous())
    for clock in range(3):
        step(d, b, servers, clock, replica=1)
    assert replica_clocks(a) == replica_clocks(b) == replica_clocks(servers[0]) == [(1, 0, 0), (1, 1, 0), (1, 2, 0)]
    assert [x.version for x in a.received(Decision)] == [1, 2, 3]
    assert [x.step for x in a.received(Decision)] == [1, 2, 3]
    step(d, a, servers, 0, replica=0)
    assert replica_clocks(a)[-1] == (0, 0, 1)
    assert d.state.status().version == 4
    assert d.state.models.is_asynchronous(0)


def test_a_message_on_another_clock_or_a_second_one_changes_nothing() -> None:
    d, (a, _), servers = assembled(Asynchronous())
    step(d, a, servers, 1, replica=0)  # it is at clock 0
    assert replica_clocks(a) == []
    step(d, a, servers, 0, replica=0)
    step(d, a, servers, 0, replica=0)
    assert replica_clocks(a) == [(0, 0, 0)]
    servers[0].ready(1.0, step=1, replica=9)
    assert d.state.status().version == 1


def test_a_skipped_step_moves_the_clock_and_not_the_version() -> None:
    d, (a, _), servers = assembled(Asynchronous())
    generation = d.state.status().membership.generation
    servers[0].ready(float("nan"), generation=generation, step=0, replica=0)
    d.perform(d.state.vote([a.session], Vote(generation=generation, step=0), d.clock()))
    assert a.last(Decision).outcome is Outcome.SKIP
    step(d, a, servers, 1, replica=0)
    assert a.last(Decision).outcome is Outcome.COMMIT
    assert (d.state.status().version, replica_clocks(a)) == (1, [(0, 0, 0), (0, 1, 0)])


def test_votes_of_different_replicas_need_not_agree() -> None:
    d, (a, b), servers = assembled(Asynchronous())
    step(d, a, servers, 0, replica=0, hyper=({"lr": 0.5},), max_norm=1.0)
    step(d, b, servers, 0, replica=1, hyper=({"lr": 0.25},))
    first, second = a.received(Decision)[-2:]
    assert first.hyper[0]["lr"] == 0.5
    assert first.clip_factor == pytest.approx(0.5, rel=1e-5)
    assert second.hyper[0]["lr"] == 0.25
    assert second.clip_factor == 1.0


def test_with_a_bound_the_fastest_waits_and_is_decided_when_the_slowest_has_come() -> None:
    d, (a, b), servers = assembled(BoundedStaleness(max_staleness=1))
    step(d, b, servers, 0, replica=1)
    step(d, b, servers, 1, replica=1)
    step(d, b, servers, 2, replica=1)  # a worker that did not wait
    assert replica_clocks(a) == [(1, 0, 0), (1, 1, 0)]
    assert d.state.status().pending == ("replica 1 at clock 2 waits for replica 0 at 0",)
    step(d, a, servers, 0, replica=0)
    assert replica_clocks(a)[2:] == [(0, 0, 1), (1, 2, 1)]


def test_a_death_voids_every_attempt_and_starts_the_clocks_again() -> None:
    d, (a, b, c), servers = assembled(BoundedStaleness(max_staleness=2), workers=3, min_workers=2)
    for clock in range(2):
        step(d, a, servers, clock, replica=0)
    c.lose()
    end, now = a.last(Decision), a.last(Membership)
    assert (end.outcome, end.replica_clock, end.next_generation) == (Outcome.ABORT, None, now.generation)
    assert (now.num_replicas, now.version) == (2, 2)
    step(d, a, servers, 2, replica=0)  # of the old generation's clocks
    assert d.state.status().version == 2
    step(d, a, servers, 0, replica=0)
    step(d, b, servers, 0, replica=1)
    assert replica_clocks(a)[-2:] == [(0, 0, 0), (1, 0, 1)]


def test_a_restarted_coordinator_goes_on_with_the_same_clocks_and_resends_the_last_decisions() -> None:
    d, (a, b), servers = assembled(Asynchronous())
    for clock in range(40):  # more than the decisions that are kept of steps of all
        step(d, b, servers, clock, replica=1)
    step(d, a, servers, 0, replica=0)
    b_first = a.received(Decision)[0]
    d.restart()
    for peer in (*servers, a, b):
        peer.inbox.clear()
        peer.join()
    assert replica_clocks(a) == [(1, 39, 0), (0, 0, 1)]
    assert b_first not in a.received(Decision)
    step(d, a, servers, 0, replica=0)
    assert d.state.status().version == 41
    step(d, a, servers, 1, replica=0)
    step(d, b, servers, 40, replica=1)
    assert (d.state.status().version, replica_clocks(b)[-2:]) == (43, [(0, 1, 2), (1, 40, 2)])


@pytest.mark.parametrize("ours", [Asynchronous(), BoundedStaleness(max_staleness=2), LocalSteps(inner_steps=3)])
def test_a_worker_with_another_policy_is_refused(ours: Policy) -> None:
    d, (a, _), _ = assembled(Synchronous())
    with pytest.raises(LayoutMismatch, match="policy is .* here and Synchronous\\(\\) in the job"):
        d.register(a, JobSpec(layout=LAYOUT, policy=ours))


@given(bound=st.integers(0, 3), replicas=st.integers(1, 4), data=st.data())
@settings(max_examples=25)
def test_whatever_the_order_the_bound_holds_and_somebody_can_always_go_on(
    bound: int, replicas: int, data: st.DataObject
) -> None:
    """Workers that begin a step only when they may, and say at any moment; Note: [Clocks] of `attempts`."""
    d, workers, servers = assembled(BoundedStaleness(max_staleness=bound), workers=replicas, shards=2)
    clocks, read = [0] * replicas, [0] * replicas
    busy = [False] * replicas
    for _ in range(30):
        slowest = min(clocks)
        may = [r for r in range(replicas) if busy[r] or clocks[r] - slowest <= bound]
        assert may, "somebody may always go on"
        r = data.draw(st.sampled_from(may))
        if not busy[r]:  # it begins a step: it gathers the version that it knows of
            busy[r], read[r] = True, d.state.status().version
            continue
        before = d.state.status().version
        step(d, workers[r], servers, clocks[r], replica=r, version=read[r])
        assert d.state.status().version == before + 1, "who may go on is admitted at once"
        busy[r] = False
        clocks[r] += 1
        assert max(clocks) - min(clocks) <= bound + 1
        assert replica_clocks(workers[0])[-1] == (r, clocks[r] - 1, min(clocks))
    worst = d.state.status().counters.get("staleness_max", 0.0)
    assert worst <= (replicas - 1) * (2 * bound + 1)

"""With a quorum of local steps the workers that the others wait for are asked to come with what they have.

Tests of `coordinator/core/steps/stragglers.py`.
"""

from __future__ import annotations

import math

from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.policy import LocalSteps, Policy, Synchronous
from axon_ps.types import Decision, Outcome
from axon_ps.wire.events import VoteRequest
from coordinator_driver import LAYOUT, Driver, Peer


def job(policy: Policy, workers: int = 4) -> tuple[Driver, list[Peer], Peer]:
    d = Driver(world_size=workers, min_workers=2)
    server, peers = d.shard(), [d.worker() for _ in range(workers)]
    for peer in peers:
        d.register(peer, JobSpec(layout=LAYOUT, policy=policy))
    server.initialized()
    return d, peers, server


def test_those_who_have_not_voted_are_asked_after_the_grace_window() -> None:
    d, [a, b, c, e], server = job(LocalSteps(inner_steps=9, quorum=0.5, grace_s=3.0))
    a.vote()
    d.advance(60.0, beat=True)
    assert not b.received(VoteRequest), "one of four is no quorum"
    b.vote()
    d.advance(2.0, beat=True)
    assert not c.received(VoteRequest)
    assert d.state.next_deadline() - d.clock() <= 1.0
    c.vote()
    d.advance(1.5, beat=True)
    assert e.received(VoteRequest) == [VoteRequest(generation=e.membership.generation, step=1)]
    assert not any(w.received(VoteRequest) for w in (a, b, c)), "who has voted is not asked"
    d.advance(60.0, beat=True)
    assert len(e.received(VoteRequest)) == 1
    e.vote(weight=None)
    server.ready()
    assert a.last(Decision).outcome is Outcome.COMMIT
    d.advance(60.0, beat=True)
    assert len(e.received(VoteRequest)) == 1, "in the next step nobody waits"


def test_without_a_window_they_are_asked_at_once_and_in_every_step() -> None:
    d, [a, b, c, e], server = job(LocalSteps(inner_steps=9, quorum=0.75))
    for step in range(1, 4):
        for peer in (a, b, c):
            assert len(e.received(VoteRequest)) == step - 1
            peer.vote()
        d.advance(0.01)
        assert [request.step for request in e.received(VoteRequest)] == list(range(1, step + 1))
        e.vote()
        server.ready()


def test_one_that_comes_back_is_asked_again() -> None:
    d, [a, b, c, e], _ = job(LocalSteps(inner_steps=9, quorum=0.5))
    a.vote()
    b.vote()
    d.advance(0.01)
    assert [len(peer.received(VoteRequest)) for peer in (c, e)] == [1, 1]
    e.join()
    d.advance(0.01)
    assert e.received(VoteRequest)[-1].step == 1
    assert len(a.membership.workers) == 4


def test_a_quorum_is_of_those_who_are_there() -> None:
    d, [a, b, c, e], _ = job(LocalSteps(inner_steps=9, quorum=0.75))
    c.lose()
    e.lose()
    a.vote()
    d.advance(0.01)
    assert not b.received(VoteRequest)
    d, [a, b, c, e], _ = job(LocalSteps(inner_steps=9, quorum=0.5))
    c.lose()
    e.lose()
    a.vote()
    d.advance(0.01)
    assert b.received(VoteRequest)


def test_nobody_is_asked_otherwise() -> None:
    for policy in (Synchronous(), LocalSteps(inner_steps=9)):
        d, [a, b, c, e], _ = job(policy)
        for peer in (a, b, c):
            peer.vote()
        d.advance(60.0, beat=True)
        assert not e.received(VoteRequest)
        assert math.isfinite(d.state.next_deadline())

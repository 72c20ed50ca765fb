"""A worker that lives and takes no part: it is named, and after the time that the user set the others go on.

Tests of `coordinator/core/steps/stragglers.py`.
"""

from __future__ import annotations

import math

import pytest

from axon_ps.coordinator.config import CoordinatorConfig
from axon_ps.errors import ConfigurationError, InvalidRequest, Timeout
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.policy import BoundedStaleness
from axon_ps.types import Decision, Outcome
from coordinator_driver import LAYOUT, Driver


def test_it_is_named_in_the_status() -> None:
    d = Driver(world_size=3)
    [a, _, _], _ = d.assembled(workers=3)
    assert d.state.stragglers.longest_wait(d.clock()) == (0.0, "")
    a.vote()
    d.advance(12.0, beat=True)
    assert d.state.stragglers.longest_wait(d.clock()) == (12.0, "the step to version 1 has waited 12 s for worker 1, 2")
    assert d.state.status(d.clock()).pending[-1] == "the step to version 1 has waited 12 s for worker 1, 2"
    d.advance(10_000.0, beat=True)
    assert len(a.membership.workers) == 3, "without a time it is waited for"


def test_it_is_set_aside_and_the_others_go_on() -> None:
    d = Driver(world_size=3, min_workers=2, step_timeout_s=30.0)
    [a, b, c], servers = d.assembled(workers=3)
    d.advance(100.0, beat=True)
    assert len(a.membership.workers) == 3, "nobody waits yet"
    a.vote()
    d.advance(20.0, beat=True)
    b.vote()
    servers[0].ready()
    assert "they are set aside after 30 s" in d.state.stragglers.longest_wait(d.clock())[1]
    d.advance(9.0, beat=True)
    assert c.open
    d.advance(1.5, beat=True)
    assert not c.open
    assert isinstance(c.error, Timeout)
    assert str(c.error) == (
        "worker 2 (node a) was set aside: the step to version 1 waited 30 s for it (--step-timeout-s) while 2 other "
        "workers took part; start it again to take part"
    )
    assert a.last(Decision).outcome is Outcome.ABORT
    assert [w.replica for w in a.membership.workers] == [0, 1]
    for w in (a, b):
        w.vote()
    servers[0].ready()
    assert a.last(Decision).outcome is Outcome.COMMIT
    assert d.state.status().counters["set_aside"] == 1
    d.advance(100.0, beat=True)
    assert a.open
    assert b.open
    c.join(rank=-1)
    assert len(a.membership.workers) == 3, "started again it takes part"


def test_who_waits_behind_it_is_no_straggler() -> None:
    """Servers sum in replica order: who comes after the idle one cannot push, and so cannot vote."""
    d = Driver(world_size=3, min_workers=2, step_timeout_s=5.0)
    [a, b, c], _ = d.assembled(workers=3)
    a.vote()
    c.arrive()
    c.arrive(step=7)
    assert d.state.status().pending[0] == "votes of worker 1"
    d.advance(5.5, beat=True)
    assert (a.open, b.open, c.open) == (True, False, True)


def test_one_arrival_begins_the_wait() -> None:
    d = Driver(world_size=2, min_workers=1, step_timeout_s=5.0)
    [a, b], servers = d.assembled()
    b.arrive()
    d.advance(5.5, beat=True)
    assert (a.open, b.open) == (False, True)
    with pytest.raises(InvalidRequest, match="shard server 0"):
        servers[0].arrive()


def test_too_few_others_wait_on() -> None:
    d = Driver(world_size=3, min_workers=2, step_timeout_s=5.0)
    [a, b, c], _ = d.assembled(workers=3)
    a.vote()
    d.advance(60.0, beat=True)
    assert b.open
    assert c.open
    assert d.state.next_deadline() > d.clock(), "it is not asked without end"
    b.vote()
    d.advance(1.5, beat=True)
    assert not c.open
    assert a.membership.complete


def test_a_slow_server_is_nobodys_fault() -> None:
    d = Driver(world_size=2, min_workers=1, step_timeout_s=5.0)
    [a, b], servers = d.assembled()
    a.vote()
    b.vote()
    d.advance(60.0, beat=True)
    assert a.open
    assert b.open
    assert d.state.stragglers.longest_wait(d.clock()) == (0.0, "")
    servers[0].ready()
    assert a.last(Decision).outcome is Outcome.COMMIT


def test_each_step_has_its_own_time() -> None:
    d = Driver(world_size=2, min_workers=1, step_timeout_s=5.0)
    [a, b], servers = d.assembled()
    for _ in range(5):
        a.vote()
        d.advance(4.0, beat=True)
        b.vote()
        servers[0].ready()
        assert a.last(Decision).outcome is Outcome.COMMIT
        assert d.state.next_deadline() - d.clock() <= d.config.lease_s


def test_the_slowest_clock_is_not_waited_for_either() -> None:
    d = Driver(world_size=2, min_workers=1, step_timeout_s=5.0)
    servers, [a, b] = [d.shard()], [d.worker() for _ in range(2)]
    for w in (a, b):
        d.register(w, JobSpec(layout=LAYOUT, policy=BoundedStaleness(max_staleness=1)))
    servers[0].initialized()
    for clock in range(2):
        a.vote(step=clock)
        servers[0].ready(step=clock, replica=0)
        d.advance(4.0, beat=True)
    assert d.state.stragglers.longest_wait(d.clock()) == (
        4.0,
        "clock 0 has waited 4 s for worker 1; they are set aside after 5 s",
    )
    d.advance(1.5, beat=True)
    assert (a.open, b.open) == (True, False)


def test_the_time_must_be_one() -> None:
    assert CoordinatorConfig().step_timeout_s == math.inf
    with pytest.raises(ConfigurationError, match="step_timeout_s is 0"):
        CoordinatorConfig(step_timeout_s=0)

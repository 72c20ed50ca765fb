"""Deadlines and retries on a clock of the test's own."""

from __future__ import annotations

import math
import random

import pytest

from axon_ps.errors import InvalidRequest, Timeout, Unreachable
from axon_ps.rpc.deadlines import Deadline, retry
from rpc_fakes import run


class Clock:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


class Flaky:
    """Fails `failures` times, then answers; `cost_s` passes with each attempt."""

    def __init__(self, clock: Clock, failures: int, error: type[Exception] = Unreachable, cost_s: float = 0) -> None:
        self.clock, self.failures, self.error, self.cost_s, self.attempts = clock, failures, error, cost_s, 0

    async def __call__(self) -> str:
        self.attempts += 1
        self.clock.now += self.cost_s
        if self.attempts <= self.failures:
            raise self.error(f"attempt {self.attempts}")
        return "done"


def test_a_deadline_counts_down() -> None:
    clock = Clock()
    deadline = Deadline(3, clock)
    assert deadline.remaining() == 3
    clock.now += 2
    assert deadline.remaining() == 1
    assert not deadline.expired
    deadline.check("the gather")
    clock.now += 2
    assert deadline.remaining() == 0
    assert deadline.expired
    with pytest.raises(Timeout, match="the gather was not done within 3 s"):
        deadline.check("the gather")


def test_no_deadline() -> None:
    deadline = Deadline(None)
    assert deadline.remaining() == math.inf
    assert not deadline.expired


def test_zero_has_passed() -> None:
    assert Deadline(0, Clock()).expired


@pytest.mark.parametrize("timeout_s", [-1, math.nan])
def test_what_is_not_a_time(timeout_s: float) -> None:
    with pytest.raises(InvalidRequest, match="timeout_s is"):
        Deadline(timeout_s)


def test_retry_until_it_works() -> None:
    clock = Clock()
    flaky = Flaky(clock, failures=8)
    done = run(retry(flaky, until=Deadline(60, clock), on=(Unreachable,), rng=random.Random(1), sleep=clock.sleep))
    assert done == "done"
    assert flaky.attempts == 9
    longest = [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    assert all(most / 2 <= slept <= most for slept, most in zip(clock.slept, longest, strict=True))
    assert len({slept / most for slept, most in zip(clock.slept, longest, strict=True)}) == 8, "no jitter"


def test_retry_gives_up_at_the_deadline_with_the_last_error() -> None:
    clock = Clock()
    flaky = Flaky(clock, failures=1000)
    with pytest.raises(Unreachable) as caught:
        run(retry(flaky, until=Deadline(5, clock), on=(Unreachable,), rng=random.Random(1), sleep=clock.sleep))
    assert clock.now == pytest.approx(105)  # the last attempt is made at the deadline
    assert str(caught.value) == f"attempt {flaky.attempts}"
    assert caught.value.__notes__ == [f"gave up after {flaky.attempts} attempts in 5 s"]


def test_retry_tries_once_when_there_is_no_time() -> None:
    clock = Clock()
    flaky = Flaky(clock, failures=1)
    with pytest.raises(Unreachable):
        run(retry(flaky, until=Deadline(0, clock), on=(Unreachable,), sleep=clock.sleep))
    assert flaky.attempts == 1
    assert clock.slept == []


def test_retry_does_not_wait_beyond_the_deadline() -> None:
    clock = Clock()
    flaky = Flaky(clock, failures=1000, cost_s=0.9)
    with pytest.raises(Unreachable):
        run(retry(flaky, until=Deadline(1, clock), on=(Unreachable,), first_s=10, max_s=10, sleep=clock.sleep))
    assert clock.slept == [pytest.approx(0.1)]


def test_other_errors_pass() -> None:
    clock = Clock()
    flaky = Flaky(clock, failures=1, error=InvalidRequest)
    with pytest.raises(InvalidRequest, match="attempt 1"):
        run(retry(flaky, until=Deadline(60, clock), on=(Unreachable,), sleep=clock.sleep))
    assert flaky.attempts == 1

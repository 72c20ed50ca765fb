"""When checkpoints are written by themselves."""

from __future__ import annotations

import math

import pytest

from axon_ps.coordinator.checkpoint_schedule import (
    FIRST_RETRY_S,
    LONGEST_RETRY_S,
    CheckpointPolicy,
    CheckpointSchedule,
    parse_every,
)
from axon_ps.errors import ConfigurationError


@pytest.mark.parametrize(
    ("text", "every"),
    [("1", (1, 0.0)), ("500", (500, 0.0)), ("90s", (0, 90.0)), ("1.5m", (0, 90.0)), ("2h", (0, 7200.0))],
)
def test_a_period_is_steps_or_a_time(text: str, every: tuple[int, float]) -> None:
    assert parse_every(text) == every


@pytest.mark.parametrize("text", ["", "0", "0s", "-1", "1.5", "10d", "ten", "5 m", "1e3", "infs"])
def test_what_is_no_period_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="give steps, as 500, or a time, as 90s, 10m or 2h"):
        parse_every(text)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"every_steps": 1}, "add --checkpoint-dir"),
        ({"every_s": 1.0}, "add --checkpoint-dir"),
        ({"directory": "a", "every_steps": -1}, "negative"),
        ({"directory": "a", "every_s": math.inf}, "infinite"),
        ({"directory": "a", "every_s": math.nan}, "infinite"),
        ({"directory": "a", "limit": 0}, "at least one"),
    ],
)
def test_a_policy_that_cannot_be_is_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        CheckpointPolicy(**given)  # type: ignore[arg-type]


def schedule(version: int = 0, **policy: float) -> CheckpointSchedule:
    return CheckpointSchedule(CheckpointPolicy(directory="a", **policy), version, 100.0)  # type: ignore[arg-type]


def test_by_steps() -> None:
    s = schedule(7, every_steps=3)
    assert [s.should_write(version, 1e9) for version in (7, 8, 9, 10, 11)] == [False, False, False, True, True]
    assert s.wait_s(1e9) == math.inf
    s.written(11, 200.0)
    assert [s.should_write(version, 1e9) for version in (11, 13, 14)] == [False, False, True]


def test_by_time_and_only_if_a_step_has_committed() -> None:
    s = schedule(7, every_s=60.0)
    assert s.wait_s(100.0) == 60.0
    assert not s.should_write(8, 159.0)
    assert s.should_write(8, 160.0)
    assert not s.should_write(7, 1e9)
    assert s.wait_s(1e9) == math.inf, "the next step is the next change"
    s.written(8, 170.0)
    assert s.wait_s(170.0) == 60.0


def test_an_older_version_that_was_restored_is_counted_from() -> None:
    s = schedule(100, every_steps=10)
    s.restart(50)
    assert not s.should_write(50, 100.0)
    assert not s.should_write(59, 100.0)
    assert s.should_write(60, 100.0)


def test_a_failure_is_tried_again_ever_more_rarely() -> None:
    s, now, pauses = schedule(every_steps=1), 100.0, []
    for _ in range(12):
        pauses.append(s.failed(now))
        assert not s.may_try(now)
        assert s.wait_s(now) == pauses[-1]
        now += pauses[-1]
        assert s.may_try(now)
        assert s.should_write(1, now)
    assert pauses[:3] == [FIRST_RETRY_S, 2 * FIRST_RETRY_S, 4 * FIRST_RETRY_S]
    assert pauses[-1] == LONGEST_RETRY_S
    s.written(1, now)
    assert s.failed(now) == FIRST_RETRY_S


def test_when_the_next_one_is_due_as_text() -> None:
    assert schedule().next(7, 100.0) == ""
    steps = schedule(7, every_steps=10)
    assert steps.next(9, 100.0) == "the next one is due in 8 steps"
    assert schedule(7, every_s=60.0).next(9, 110.0) == "the next one is due in 50 s"
    steps.failed(100.0)
    steps.failed(100.0)
    assert steps.next(9, 100.0) == "trying again in 2 s"

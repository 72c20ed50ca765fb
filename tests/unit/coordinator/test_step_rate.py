"""A rate of steps is counted over whole steps. Tests of `coordinator/core/history/step_rate.py`."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from axon_ps.coordinator.core.history.step_rate import MAX_STEPS, STEPS_AMISS, Rhythm, StepRate


def stepped(times_s: Iterable[float], model: int = 0) -> StepRate:
    rate = StepRate(model)
    for time_s in times_s:
        rate.made(time_s)
    return rate


def test_a_rate_is_known_from_the_second_step_on() -> None:
    rate = StepRate()
    assert (rate.steps_per_s(5.0), rate.step_s, rate.rhythm(5.0)) == (0.0, 0.0, None)
    rate.made(5.0)
    assert (rate.steps_per_s(6.0), rate.step_s) == (0.0, 0.0)
    rate.made(5.25)
    assert (rate.steps_per_s(5.25), rate.step_s) == (4.0, 0.25)


def test_only_the_newest_second_counts() -> None:
    rate = stepped([0.0, 10.0, 20.0, 20.75, 21.0])
    assert (rate.steps_per_s(21.0), rate.step_s) == (2.0, 0.5)


def test_a_step_that_is_longer_than_the_window_counts_whole() -> None:
    rate = stepped([0.0, 1.0, 5.0])
    assert (rate.steps_per_s(5.0), rate.step_s) == (0.25, 4.0)


def test_the_rate_of_a_job_that_stands_still_approaches_zero() -> None:
    rate = stepped([0.0, 0.5, 1.0])
    assert rate.steps_per_s(1.4) == 2.0, "the step under way is no longer than those before"
    assert rate.steps_per_s(4.5) == pytest.approx(0.5), "the window is the newest step and the one under way"
    assert rate.steps_per_s(1000.5) == pytest.approx(0.002)


def test_steps_at_the_same_moment_have_a_rate_once_time_goes_on() -> None:
    rate = stepped([3.0, 3.0])
    assert rate.steps_per_s(3.0) == 0.0
    assert rate.steps_per_s(3.5) == 4.0


def test_a_model_that_misses_several_steps_has_no_rhythm() -> None:
    rate = stepped([0.0, 2.0, 4.0], model=3)
    assert rate.rhythm(5.0) == Rhythm(model=3, steps=3, since_s=1.0, step_s=2.0)
    assert rate.rhythm(4.0 + STEPS_AMISS * 2.0) is not None
    assert rate.rhythm(4.1 + STEPS_AMISS * 2.0) is None
    assert stepped([0.0, 0.01]).rhythm(1.0) is not None, "less than a second is no sign"


def test_a_window_of_many_steps_is_bounded() -> None:
    rate = stepped(i / 4096 for i in range(4 * MAX_STEPS))
    assert rate.steps_per_s((4 * MAX_STEPS - 1) / 4096) == 4096.0

"""Rates are max-min fair, and activities end when they should."""

from __future__ import annotations

import math

import pytest
import simpy
from hypothesis import given
from hypothesis import strategies as st

from axon_ps_lab.simulate.fluid import Fluid, Process, Resource, fair_rates

capacities = st.lists(st.floats(0.5, 100.0), min_size=1, max_size=4)
uses = st.dictionaries(st.integers(0, 3), st.floats(0.1, 10.0), max_size=4)
activities = st.lists(st.tuples(uses, st.floats(0.1, 50.0), st.floats(0.1, 5.0)), min_size=1, max_size=8)


@given(capacities, activities)
def test_rates_are_feasible_and_each_activity_has_a_bottleneck(
    given_capacities: list[float], given_activities: list[tuple[dict[int, float], float, float]]
) -> None:
    """What defines max-min fairness (Bertsekas & Gallager, Data Networks, 6.5.2)."""
    resources = [Resource(str(i), capacity) for i, capacity in enumerate(given_capacities)]
    wanted = [
        ({resources[i]: by_unit for i, by_unit in used.items() if i < len(resources)}, most, weight)
        for used, most, weight in given_activities
    ]
    rates = fair_rates(wanted)
    load = {
        r: sum(rate * used.get(r, 0.0) for rate, (used, _, _) in zip(rates, wanted, strict=True)) for r in resources
    }
    assert all(load[r] <= r.capacity * (1 + 1e-6) for r in resources)
    for rate, (used, most, weight) in zip(rates, wanted, strict=True):
        full = [r for r in used if load[r] >= r.capacity * (1 - 1e-6)]
        fastest_of = [
            all(
                rate / weight >= other / w * (1 - 1e-6)
                for other, (u, _, w) in zip(rates, wanted, strict=True)
                if r in u
            )
            for r in full
        ]
        assert rate >= most * (1 - 1e-6) or any(fastest_of), "it could be faster at the cost of none that is slower"


def ends(*given_activities: tuple[float, dict[Resource, float], float]) -> list[float]:
    """When activities end that begin at 0: amount, uses and highest rate of each."""
    env = simpy.Environment()
    fluid, times = Fluid(env), [math.nan] * len(given_activities)

    def run(number: int, amount: float, used: dict[Resource, float], most: float) -> Process:
        yield fluid.run(amount, used, most=most)
        times[number] = env.now

    for number, one in enumerate(given_activities):
        env.process(run(number, *one))
    env.run()
    return times


def test_who_ends_leaves_its_room_to_the_others() -> None:
    line = Resource("line", 10.0)
    assert ends((10.0, {line: 1.0}, math.inf), (30.0, {line: 1.0}, math.inf)) == pytest.approx([2.0, 4.0])


def test_what_is_slow_elsewhere_leaves_room() -> None:
    line, processor = Resource("line", 10.0), Resource("processor", 2.0)
    assert ends((16.0, {line: 1.0}, math.inf), (4.0, {line: 1.0, processor: 1.0}, math.inf)) == pytest.approx(
        [2.0, 2.0]
    )


def test_a_highest_rate_bounds_it_and_nothing_takes_no_time() -> None:
    assert ends((3.0, {}, 1.5), (0.0, {}, 1.0)) == pytest.approx([2.0, 0.0])


def test_what_begins_later_slows_what_is_there() -> None:
    env = simpy.Environment()
    fluid, line, times = Fluid(env), Resource("line", 1.0), {}

    def run(name: str, begin_s: float, amount: float) -> Process:
        yield env.timeout(begin_s)
        yield fluid.run(amount, {line: 1.0})
        times[name] = env.now

    env.process(run("first", 0.0, 2.0))
    env.process(run("second", 1.0, 2.0))
    env.run()
    assert times == pytest.approx({"first": 3.0, "second": 4.0})


def test_time_goes_on_however_long_it_has_been() -> None:
    """So late that what is left of an activity is less than the next number after now."""
    line, slow = Resource("line", 1e9), Resource("slow", 1e-3)
    assert ends((1e6, {slow: 1.0}, math.inf), (1.0, {line: 1.0, slow: 1e-3}, math.inf))[0] > 1e8

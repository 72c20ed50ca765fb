"""What is said of a scenario as a whole: prices, hours, and which number of servers to rent."""

from __future__ import annotations

from typing import Any

import pytest

from axon_ps_lab.simulate.estimate import best, estimate, sweep
from axon_ps_lab.simulate.profile import DEFAULT
from axon_ps_lab.simulate.scenario import Scenario


def scenario(**tables: Any) -> Scenario:
    workers = {"count": 4, "compute_s": 0.5, "per_hour": 2.0, **tables.pop("workers", {})}
    return Scenario.of(
        {
            "model": {"blocks": 8, "block_numel": 1 << 21, "root_numel": 1 << 16},
            "job": {
                "tokens": 1000,
                "steps": 3600,
                "strategy": "shard_grad_op",
                "wire": "float32",
                "compute": "float32",
            },
            "workers": [workers],
            "servers": {"count": 2, "per_hour": 0.5, "rate_mbit": 500.0},
            **tables,
        }
    )


def test_prices_follow_from_time() -> None:
    found = estimate(scenario(), DEFAULT)
    assert found.per_hour == 4 * 2.0 + 2 * 0.5
    assert found.tokens_per_s == pytest.approx(4 * 1000 / found.step.step_s)
    assert found.hours(3600) == pytest.approx(found.step.step_s)
    tokens_an_hour = found.useful_tokens_per_s * 3600
    assert found.per_million_tokens == pytest.approx(found.per_hour / tokens_an_hour * 1e6)


def test_deaths_make_it_longer_and_dearer() -> None:
    whole = estimate(scenario(), DEFAULT)
    mortal = estimate(scenario(failures={"worker_mtbf_h": 1.0, "worker_away_s": 600.0, "min_workers": 1}), DEFAULT)
    assert mortal.goodput.throughput < 0.9
    assert mortal.hours(100) == pytest.approx(whole.hours(100) / mortal.goodput.throughput)
    assert mortal.per_million_tokens == pytest.approx(whole.per_million_tokens / mortal.goodput.throughput)


def test_the_number_of_servers_to_rent_is_the_cheapest_by_token() -> None:
    found = sweep(scenario(), DEFAULT, [1, 2, 4, 64])
    assert [each.servers for each in found] == [1, 2, 4, 64]
    assert best(found).per_million_tokens == min(each.per_million_tokens for each in found)
    assert best(found).servers in (2, 4), "one is slow, and 64 cost more than they bring"


def test_without_prices_it_is_the_smallest_that_is_nearly_the_fastest() -> None:
    free = scenario(workers={"per_hour": 0.0}, servers={"count": 1, "rate_mbit": 500.0})
    found = sweep(free, DEFAULT, [1, 2, 4, 8, 16])
    fastest = max(each.useful_tokens_per_s for each in found)
    chosen = best(found)
    assert chosen.useful_tokens_per_s >= 0.95 * fastest
    assert all(each.useful_tokens_per_s < 0.95 * fastest for each in found if each.servers < chosen.servers)

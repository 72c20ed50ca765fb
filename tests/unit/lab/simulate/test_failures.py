"""What deaths leave: by formulas of renewal where there are some, and by what a job that was struck did."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from axon_ps_lab.simulate.failures import Goodput, goodput
from axon_ps_lab.simulate.scenario import Scenario

GOODPUT = Path(__file__).parents[4] / "benchmarks" / "results" / "goodput.json"


def left(
    step_s: float = 1e-3,
    *,
    horizon_s: float = 0.0,
    job: dict[str, Any] | None = None,
    hosts: int = 8,
    servers: int = 2,
    **failures: Any,
) -> Goodput:
    """Of eight workers and two servers, unless told otherwise."""
    return goodput(
        Scenario.of(
            {
                "model": {"blocks": 4, "block_numel": 4160},
                "job": {"replication": 1, **(job or {})},
                "workers": [{"count": hosts, "compute_s": 0.1}],
                "servers": {"count": servers},
                "failures": {"notice_s": 0.0, "checkpoint_every_s": 600.0, **failures},
            }
        ),
        step_s,
        horizon_s=horizon_s,
    )


def test_nothing_dies_nothing_is_lost() -> None:
    assert left() == Goodput(useful=1.0, throughput=1.0)


def test_a_job_that_goes_on_loses_only_who_is_away() -> None:
    """Each worker is there for MTBF / (MTBF + away) of the time, if the others' deaths do not count."""
    found = left(worker_mtbf_h=1.0, worker_away_s=360.0, min_workers=1)
    assert found.useful == pytest.approx(1.0, abs=1e-3)
    assert found.throughput == pytest.approx(1 - 0.1, abs=0.01)  # deaths come at the same rate whoever is away


def test_a_job_that_needs_all_has_them_rarely() -> None:
    """Of independent outages none is under way with probability exp(-rate * length): an M/D/infinity queue is empty."""
    found = left(worker_mtbf_h=1.0, worker_away_s=360.0)
    assert found.throughput == pytest.approx(math.exp(-8 * 0.1), rel=0.05)


def test_a_step_that_is_disturbed_is_made_again() -> None:
    found = left(60.0, worker_mtbf_h=8.0, worker_away_s=930.0, min_workers=1)
    assert found.useful == pytest.approx(1 - 2 * 30.0 / 3600, abs=3e-3), "half a step for each death and each return"


@pytest.mark.parametrize(("mtbf_h", "step_s"), [(1.0, 30.0), (0.5, 60.0), (0.1, 60.0)])
def test_steps_that_are_longer_than_the_time_between_deaths_rarely_end(mtbf_h: float, step_s: float) -> None:
    """Of a Poisson process with rate r, floor(life / T) T of a life counts: r T / (exp(r T) - 1) of the time."""
    product = 8 * step_s / (mtbf_h * 3600)
    found = left(step_s, worker_mtbf_h=mtbf_h, worker_away_s=0.0, min_workers=1)
    assert found.useful == pytest.approx(product / (math.exp(product) - 1), rel=0.06)


@pytest.mark.parametrize("hosts", [1, 2, 8, 100])
def test_a_host_that_is_away_does_not_die(hosts: int) -> None:
    """Each is there for MTBF / (MTBF + away) of the time, however many there are."""
    found = left(worker_mtbf_h=1.0, worker_away_s=3600.0, min_workers=1, hosts=hosts)
    assert found.throughput == pytest.approx(0.5, abs=0.03)


def test_where_servers_are_on_the_workers_hosts_a_death_is_both() -> None:
    deaths = {"worker_mtbf_h": 8.0, "worker_away_s": 60.0, "restore_s": 30.0, "min_workers": 1}
    own = left(servers=0, checkpoint_every_s=600.0, **deaths)
    assert own.useful == pytest.approx(1 - (60.0 + 30.0 + 300.0) / 3600, abs=0.02)
    assert left(servers=0, job={"replication": 2}, **deaths).useful > 0.99


def test_a_rare_kind_of_death_counts_beside_a_frequent_one() -> None:
    rare = {"server_mtbf_h": 200.0, "checkpoint_every_s": 7200.0}
    frequent = {"worker_mtbf_h": 1.0, "worker_away_s": 60.0, "min_workers": 1}
    both, one, other = left(**rare, **frequent), left(**rare), left(**frequent)
    assert one.useful < 0.995
    assert both.useful == pytest.approx(one.useful * other.useful, rel=1e-6)


def test_local_steps_lose_the_progress_of_who_dies() -> None:
    local = {"strategy": "local_steps", "inner_steps": 100, "fragments": 1}
    found = left(1.0, job=local, worker_mtbf_h=1.0, worker_away_s=60.0, min_workers=1)
    assert found.useful == pytest.approx(100.0 / 3600 / (math.exp(100.0 / 3600) - 1), abs=3e-3)


def test_the_death_of_a_server_costs_a_pause_or_what_came_since_the_checkpoint() -> None:
    servers = {"server_mtbf_h": 2.0, "server_away_s": 60.0, "restore_s": 30.0, "checkpoint_every_s": 300.0}
    assert left(job={"replication": 2}, promote_s=3.6, **servers).throughput == pytest.approx(0.999, abs=1e-3)
    alone = left(**servers).throughput
    assert alone == pytest.approx(1 - (60.0 + 30.0 + 150.0) / 3600, abs=0.01)
    never = left(**{**servers, "checkpoint_every_s": 0.0})
    assert never.throughput < 0.01, "without checkpoints all is lost with the first slice, each time"


def test_it_is_near_what_jobs_did_whose_workers_were_killed() -> None:
    """`benchmarks/local_steps.py goodput`: one every ten seconds, back after twenty and its start."""
    rows = {row["how"]: row["goodput"] for row in json.loads(GOODPUT.read_text())["rows"]}
    struck = {"worker_mtbf_h": 80 / 3600, "worker_away_s": 23.0, "notice_s": 0.2, "regular": True}
    local = {"strategy": "local_steps", "inner_steps": 20, "fragments": 4, "overlap_steps": 2}
    for how, found in {
        "DiLoCo streamed": left(0.1, horizon_s=120.0, job=local, min_workers=1, **struck),
        "synchronous, all needed": left(0.1, horizon_s=120.0, **struck),
        "synchronous, goes on": left(0.1, horizon_s=120.0, min_workers=1, **struck),
    }.items():
        assert found.useful == pytest.approx(rows[how], abs=0.03), how

"""Bits of a shard server's memory change while it trains; `make lab NAME=flips` changes a thousand."""

from __future__ import annotations

from pathlib import Path

from axon_ps_lab.campaigns.flips import run


def test_each_is_found_and_named_and_the_values_are_those_of_a_job_without(tmp_path: Path) -> None:
    done = run(12, 30, 7, tmp_path)
    assert done["which"] == []
    assert done["found in them"] == 0
    assert set(done["by array"]) >= {"param", "exp_avg", "exp_avg_sq"}

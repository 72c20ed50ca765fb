"""How `benchmarks/observability.py` makes shares and intervals of what it measured."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    spec = importlib.util.spec_from_file_location("observability", ROOT / "benchmarks" / "observability.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "observability", module)
    spec.loader.exec_module(module)
    return module


def test_an_interval_is_students(benchmark: ModuleType) -> None:
    mean, within = benchmark.interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert mean == 3.0
    assert within == pytest.approx(1.963, abs=1e-3)  # scipy.stats.t.interval(0.95, 4, 3, sem)
    assert benchmark.interval([7.0]) == (7.0, math.inf)


def test_a_cause_that_was_made_larger_is_divided_again(benchmark: ModuleType) -> None:
    quiet = benchmark.Turn(cpu_s=20.0, wall_s=10.0)
    traced = benchmark.Difference(quiet, benchmark.Turn(cpu_s=24.0, wall_s=11.0))
    scraped = benchmark.Difference(quiet, benchmark.Turn(cpu_s=21.0, wall_s=10.5, scrapes=100))
    same = benchmark.Difference(quiet, benchmark.Turn(cpu_s=20.2, wall_s=10.0, scrapes=10))
    rounds = [{"traces": traced, "traces as they are": same, "metrics": scraped, "metrics as they are": same}] * 2
    found = {(row["what"], row["measured"]): row for row in benchmark.rows_of(rounds)}
    traces = found["traces, 1 step in 100", "every step, / 100"]
    assert (traces["cpu_percent"], traces["time_percent"]) == (0.2, 0.1)
    # 1 s of processor time for 100 scrapes is 10 ms each, of a job that takes 2 s of it a second
    assert found["metrics, each 1 s", "10 scrapes a second, / 10"]["cpu_percent"] == 0.5
    assert found["metrics, each 15 s", "10 scrapes a second, / 150"]["cpu_percent"] == round(0.5 / 15, 3)
    assert found["metrics, each 1 s", "as it is"]["cpu_percent"] == 1.0

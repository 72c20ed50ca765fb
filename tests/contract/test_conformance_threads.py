"""The conformance suite over backends whose ranks are threads: mock, hierarchical over mock, gloo; and over liars.

Tests of `collectives/backends/hierarchical/staged.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from axon_ps.collectives.backends.base import Backend, GroupContext, Operation, Request
from axon_ps.collectives.backends.hierarchical.backend import HierarchicalBackend
from axon_ps.collectives.backends.mock import MockBackend
from axon_ps_lab.conformance import ConformanceReport, run_conformance, run_in_threads


def failures(reports: Sequence[ConformanceReport]) -> list[str]:
    return [failure for report in reports for failure in report.failures]


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7])
def test_mock(n: int) -> None:
    reports = run_in_threads(n, MockBackend)
    assert failures(reports) == []
    assert {(report.passed, len(report.skipped)) for report in reports} == {{1: (15, 14), 2: (28, 1)}.get(n, (29, 0))}


@pytest.mark.parametrize("nodes", ["a", "ab", "abb", "abba", "aaabbbb"])
def test_hierarchical_over_mock(nodes: str) -> None:
    def make(context: GroupContext) -> Backend:
        return HierarchicalBackend.create(context, intra=MockBackend, inter=MockBackend, small_bytes=0)

    assert failures(run_in_threads(len(nodes), make, nodes=list(nodes), exact_order=False)) == []


def test_hierarchical_takes_small_calls_through_one_stage() -> None:
    def make(context: GroupContext) -> Backend:
        return HierarchicalBackend.create(context, intra=MockBackend, inter=MockBackend)

    assert failures(run_in_threads(4, make, nodes=list("aabb"), exact_order=False)) == []


@pytest.mark.parametrize("n", [1, 7])
def test_gloo(n: int) -> None:
    from axon_ps.collectives.backends.gloo import GlooBackend

    assert failures(run_in_threads(n, GlooBackend, exact_order=False)) == []


class OffByABit(MockBackend):
    """Adds one unit in the last place to large results on one rank."""

    def run(self, request: Request, timeout_s: float) -> None:
        super().run(request, timeout_s)
        if self.rank != 1 or request.call.operation is not Operation.ALL_REDUCE or request.data is None:
            return
        data = request.data
        if data.dtype == np.float32 and data.size > 1000:
            data[-1] = np.nextafter(data[-1], np.float32(np.inf))


class Eager(MockBackend):
    """Changes the array although the ranks disagree."""

    def run(self, request: Request, timeout_s: float) -> None:
        data = request.data
        if request.call.operation is not Operation.ALL_REDUCE or data is None:
            super().run(request, timeout_s)
            return
        contribution = data.copy()
        data.fill(0)
        super().run(Request(call=request.call, data=contribution), timeout_s)
        np.copyto(data, contribution)


class Scribbler(MockBackend):
    """Writes to what should only be read."""

    def run(self, request: Request, timeout_s: float) -> None:
        super().run(request, timeout_s)
        if request.call.operation is Operation.REDUCE and request.data is not None:
            request.data[-1:] = 0


@pytest.mark.parametrize(
    ("backend", "case"),
    [
        (OffByABit, "large_arrays"),
        (Eager, "one_rank_disagrees"),
        (Scribbler, "reduce_to_every_root"),
    ],
)
def test_the_suite_finds_what_is_wrong(backend: type[MockBackend], case: str) -> None:
    assert any(failure.startswith(case) for failure in failures(run_in_threads(2, backend)))


def test_without_spare_groups_the_cases_that_end_one_are_reported_as_skipped() -> None:
    (backend,) = MockBackend.create_world(1)
    report = run_conformance(backend)
    assert report.ok
    assert sum("no spare group" in skipped for skipped in report.skipped) == 3

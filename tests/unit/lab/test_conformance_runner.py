"""The conformance suite itself."""

from __future__ import annotations

from axon_ps.collectives.backends.base import Backend, GroupContext
from axon_ps_lab.conformance.runner import run_in_threads


def test_a_rank_whose_backend_cannot_be_made_does_not_leave_the_others_waiting() -> None:
    def make(context: GroupContext) -> Backend:
        raise RuntimeError("no such library")

    for report in run_in_threads(3, make):
        assert report.failures == ["the backend cannot be made: no such library"]

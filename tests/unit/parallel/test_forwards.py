"""The version of what a forward reads; actions inside a forward are refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from axon_ps.errors import Misuse, StepAborted
from axon_ps.parallel.fsdp.forwards import OneVersion, check_idle
from axon_ps.parallel.fsdp.stats import Counters


class Job:
    """A model of one unit in a job, and what is done with the unit."""

    def __init__(self) -> None:
        self.now = (0, 1)
        self.rewritten = False
        self.resharded = self.renewed = 0
        self.counters = Counters()
        flat = SimpleNamespace(source=SimpleNamespace(torn=lambda _: self.rewritten), renew=self.renew)
        self.units: Any = [SimpleNamespace(flats=[flat], uses=0, depth=0)]
        gathering: Any = self
        self.version = OneVersion(self.units, lambda: self.now, gathering, self.counters)

    def reshard(self, unit: Any) -> None:
        self.resharded += 1

    def renew(self) -> None:
        self.renewed += 1


def test_a_forward_of_one_version_is_made_once() -> None:
    job = Job()
    assert not job.version.begin(), "it is the first attempt"
    assert not job.version.torn
    assert not job.version.again()
    assert (job.version.at, job.resharded, job.renewed) == ((0, 1), 0, 1)


@pytest.mark.parametrize("change", ["version", "memory"])
def test_it_is_made_again_if_the_values_changed_meanwhile(change: str) -> None:
    job = Job()
    job.version.begin()
    job.units[0].uses = 1
    if change == "version":
        job.now = (0, 2)
    else:
        job.rewritten = True
    assert job.version.again()
    assert (job.resharded, job.units[0].uses, job.counters.forwards_repeated) == (1, 0, 1)
    job.rewritten = False
    assert job.version.begin(), "an attempt more"
    assert not job.version.again()
    assert not job.version.begin()


def test_it_ends_if_they_always_change() -> None:
    job = Job()
    with pytest.raises(StepAborted, match="during each of 8 forwards"):
        for version in range(2, 20):
            job.version.begin()
            job.now = (0, version)
            job.version.again()
    assert job.counters.forwards_repeated == 7
    assert not job.version.begin(), "the next one begins anew"


def test_what_changes_parameters_is_refused_inside_a_forward() -> None:
    units: Any = [SimpleNamespace(depth=0), SimpleNamespace(depth=0)]
    check_idle(units, "load_state_dict")
    units[1].depth = 1
    with pytest.raises(Misuse, match=r"load_state_dict\(\) was called inside a forward"):
        check_idle(units, "load_state_dict")

"""The clock for tests."""

from __future__ import annotations

import math

import pytest

from axon_ps.errors import InvalidRequest, Timeout
from axon_ps.rpc.deadlines import Deadline
from axon_ps_lab.clock import ManualClock


def test_its_time_changes_only_by_advance() -> None:
    clock = ManualClock(5.0)
    deadline = Deadline(2.0, clock)
    assert clock() == clock() == 5.0
    assert clock.advance(1.5) == 6.5
    assert deadline.remaining() == 0.5
    clock.advance(0.5)
    with pytest.raises(Timeout):
        deadline.check("it")


@pytest.mark.parametrize("seconds", [-1.0, math.nan])
def test_time_does_not_run_backwards(seconds: float) -> None:
    with pytest.raises(InvalidRequest, match="time does not run backwards"):
        ManualClock().advance(seconds)

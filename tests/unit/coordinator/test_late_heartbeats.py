"""A member says why its heartbeats come late: its processors are busy with others, or it is busy itself."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from axon_ps.coordinator.client import heartbeat


@pytest.mark.parametrize(
    ("waited_s", "said"),
    [
        (2.5, "heartbeats come 3.0 s late; its processors were busy with others for 2.5 s"),
        (0.1, "heartbeats come 3.0 s late; this process was busy with something else, or was stopped"),
    ],
)
def test_a_late_heartbeat_says_whose_fault_that_is(
    waited_s: float, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    times, waits = _from(10.0, 14.0), _from(0.0, waited_s)
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: next(times))
    monkeypatch.setattr(heartbeat, "_not_scheduled_s", lambda: next(waits))
    punctuality = heartbeat.Punctuality()
    with caplog.at_level(logging.WARNING, heartbeat.__name__), punctuality.expected(1.0):
        pass
    assert next(r.getMessage() for r in caplog.records if r.name == heartbeat.__name__).startswith(said)


def test_nothing_is_said_of_what_is_in_time(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    times = _from(10.0, 11.5)
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: next(times))
    with heartbeat.Punctuality().expected(1.0):
        pass
    assert not caplog.records
    assert heartbeat._not_scheduled_s() >= 0.0


def _from(*values: float) -> Iterator[float]:
    yield from values
    while True:
        yield values[-1]

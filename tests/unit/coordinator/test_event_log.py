"""What a coordinator logs about its job: each event once, and stragglers when they are waited for long enough."""

from __future__ import annotations

import logging

import pytest

from axon_ps.coordinator.server.event_log import LOG_STRAGGLERS_AFTER_S, EventLog
from axon_ps.types import Decision, Membership, Outcome


def membership(generation: int) -> Membership:
    return Membership(generation=generation, step=1, version=0, workers=(), shards=(), num_replicas=0, complete=True)


def skipped(step: int, model: int = 0) -> Decision:
    return Decision(step=step, generation=1, outcome=Outcome.SKIP, version=0, reason="not finite", model=model)


def test_an_event_that_is_repeated_for_a_member_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log = EventLog()
    for event in (membership(2), skipped(1), membership(2), skipped(1), skipped(1, model=1)):
        log.published(event)
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "generation 2",
        "step 1",
        "step 1 of model 1",
    ]


def test_a_straggler_is_logged_once_a_wait(caplog: pytest.LogCaptureFixture) -> None:
    log, long_s = EventLog(), LOG_STRAGGLERS_AFTER_S
    for wait_s in (long_s / 2, long_s, 2 * long_s, 0.0, long_s):
        log.waited(wait_s, "worker 1 is waited for")
    assert [record.getMessage() for record in caplog.records] == ["worker 1 is waited for"] * 2

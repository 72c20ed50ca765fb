"""shard.client.subscriber: how long it waits for a coordinator, and for a model."""

from __future__ import annotations

import asyncio
import logging

import pytest

import axon_ps
from axon_ps.errors import AxonError, InvalidRequest, Timeout, Unreachable
from axon_ps.host.ports import free_ports
from axon_ps.rpc.deadlines import Deadline
from axon_ps.rpc.security import Security
from axon_ps.shard.client import subscriber
from axon_ps.shard.client.subscriber import ModelSubscriber
from axon_ps.types import Membership
from axon_ps.wire.events import JobState


def test_a_wrong_address_is_known_long_before_a_pull_times_out() -> None:
    address = f"127.0.0.1:{free_ports()}"
    with (
        axon_ps.subscribe(coordinator=address, security=Security(), connect_timeout_s=0.3) as subscription,
        pytest.raises(Unreachable, match=f"nobody answers at {address}.*within 0.3 s"),
    ):
        subscription.latest()


@pytest.mark.parametrize(
    ("answers", "raised"),
    [
        ([Unreachable("nobody answers at h:1")], Unreachable),
        ([Timeout("it is silent")], Unreachable),
        ([InvalidRequest("the job has no model 'policy' yet")], Timeout),
        ([InvalidRequest("the job has no model 'policy' yet"), Unreachable("nobody answers at h:1")], Timeout),
    ],
)
def test_only_a_coordinator_that_never_answered_is_given_up(
    answers: list[AxonError], raised: type[AxonError], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(subscriber, "reminder_pauses", lambda: iter([0.0, 60.0]))
    asked = iter(answers)

    async def describe() -> tuple[JobState, Membership]:
        raise next(asked, answers[-1])

    one = ModelSubscriber(describe, job="j", security=Security(), connect_timeout_s=0.05)
    with pytest.raises(raised, match=str(answers[-1])), caplog.at_level(logging.WARNING):
        asyncio.run(one.pull(-1, 1, Deadline(0.5)))
    assert ("no coordinator has answered yet" in caplog.text) == (raised is Unreachable)

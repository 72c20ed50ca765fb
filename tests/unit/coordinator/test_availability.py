"""Whether a session is up: those that wait for it learn that it is, that it has failed, or that their time is over."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from axon_ps.coordinator.client.availability import Availability, in_time
from axon_ps.errors import MemberLost, Timeout
from axon_ps.rpc.deadlines import Deadline

LOST = MemberLost("the coordinator gave up this worker")


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 10.0))


def test_a_session_that_is_down_again_is_waited_for() -> None:
    async def test() -> None:
        availability = Availability()
        availability.up()
        await availability.until_up()
        availability.down()
        waiting = asyncio.ensure_future(availability.until_up())
        await asyncio.sleep(0)
        assert not waiting.done()
        availability.up()
        await waiting

    run(test())


def test_a_failure_ends_all_waits_and_the_first_one_counts() -> None:
    async def test() -> None:
        availability = Availability()
        waiting = [availability.until_up(), availability.until(lambda: False)]
        tasks = [asyncio.ensure_future(each) for each in waiting]
        await asyncio.sleep(0)
        assert availability.fail(LOST)
        assert not availability.fail(MemberLost("another reason"))
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, MemberLost)
            assert str(result) == str(LOST)
        assert not availability.is_up

    run(test())


def test_a_condition_is_looked_at_when_something_has_changed() -> None:
    async def test() -> None:
        availability, reached = Availability(), list[int]()
        waiting = asyncio.ensure_future(availability.until(lambda: len(reached) == 2))
        for number in range(2):
            await asyncio.sleep(0)
            assert not waiting.done()
            reached.append(number)
            availability.changed()
        await waiting

    run(test())


def test_a_wait_ends_at_its_deadline_with_a_text_or_with_the_error_of_the_session() -> None:
    async def test() -> None:
        availability = Availability()
        with pytest.raises(Timeout, match="was not restored"):
            await in_time(availability.until_up(), Deadline(0.0), "it was not restored in time")
        availability.fail(Timeout("the others waited for it"))
        with pytest.raises(Timeout, match="the others waited"):
            await in_time(availability.until_up(), Deadline(60.0), "it was not restored in time")

    run(test())

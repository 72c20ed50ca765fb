"""Events about a model are taken in order, and calls between them."""

from __future__ import annotations

import asyncio

import pytest

from axon_ps.shard.server.waiters import EventOrder


@pytest.mark.parametrize("ends", [False, True], ids=["a call ends", "the server ends"])
def test_events_that_wait_for_cancelled_work_are_taken_unless_the_server_ends(ends: bool) -> None:
    async def test() -> None:
        taken: list[int] = []
        order: EventOrder[int] = EventOrder(taken.append, lambda event: False)

        async def work() -> None:
            async with order.begin_work():
                await asyncio.Event().wait()

        tasks = [asyncio.create_task(work()) for _ in range(2)]
        await asyncio.sleep(0)
        order.on_event(1)
        order.call(lambda: order.on_event(2))
        tasks[1].cancel()
        await asyncio.wait([tasks[1]])
        assert not taken, "the first one works on"
        if ends:
            order.stop()
        tasks[0].cancel()
        await asyncio.wait([tasks[0]])
        assert order.idle.is_set()
        order.on_event(3)
        assert taken == ([] if ends else [1, 2, 3])

    asyncio.run(test())


def test_a_call_waits_for_events_before_it_but_not_for_a_step_however_long_it_was_queued() -> None:
    """A snapshot's pin is of the version that a step leads to, and the next event may not come before the pin."""

    async def test() -> None:
        taken: list[int] = []
        applying = False
        order: EventOrder[int] = EventOrder(taken.append, lambda event: applying)

        applying = True
        order.begin()
        order.call(lambda: taken.append(0))
        assert taken == [0], "no event is before it"
        work = asyncio.Event()

        async def works() -> None:
            async with order.begin_work():
                await work.wait()

        working = asyncio.create_task(works())
        await asyncio.sleep(0)
        order.call(lambda: taken.append(1))
        order.on_event(2)
        order.call(lambda: taken.append(3))
        assert taken == [0], "they wait for the work"
        work.set()
        await working
        assert taken == [0, 1], "an event waits for the step, and so does the call behind it"
        applying = False
        order.end()
        assert taken == [0, 1, 2, 3]
        assert order.idle.is_set()

    asyncio.run(test())

"""Equal calls at the same time are one."""

from __future__ import annotations

import asyncio

import pytest

from axon_ps.coordinator.server.checkpoint_calls import SharedCalls
from axon_ps.errors import StorageFull


class Work:
    """Something that is asked for; it is done when `let` is set."""

    def __init__(self) -> None:
        self.begun = self.cancelled = 0
        self.let = asyncio.Event()
        self.error: Exception | None = None

    async def __call__(self) -> int:
        self.begun += 1
        number = self.begun
        try:
            await self.let.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.error is not None:
            raise self.error
        return number


async def under_way(calls: SharedCalls[int], work: Work, *keys: str) -> list[asyncio.Task[int]]:
    tasks = [asyncio.create_task(calls.run(key, work)) for key in keys]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return tasks


def test_equal_calls_are_one_and_others_are_not() -> None:
    async def test() -> None:
        calls, work = SharedCalls[int](), Work()
        tasks = await under_way(calls, work, "a", "a", "b")
        work.let.set()
        assert await asyncio.gather(*tasks) == [1, 1, 2]
        assert await calls.run("a", work) == 3  # those before are over
        assert work.cancelled == 0

    asyncio.run(test())


def test_all_get_its_error() -> None:
    async def test() -> None:
        calls, work = SharedCalls[int](), Work()
        work.error = StorageFull("full")
        tasks = await under_way(calls, work, "a", "a")
        work.let.set()
        for task in tasks:
            with pytest.raises(StorageFull):
                await task

    asyncio.run(test())


def test_it_goes_on_while_anybody_waits_for_it() -> None:
    async def test() -> None:
        calls, work = SharedCalls[int](), Work()
        first, second = await under_way(calls, work, "a", "a")
        first.cancel()
        await asyncio.wait([first])
        assert (first.cancelled(), work.cancelled) == (True, 0)
        second.cancel()
        await asyncio.wait([second])
        await asyncio.sleep(0)
        assert work.cancelled == 1

    asyncio.run(test())

"""A long line: how much fills it, and transfers that take their turns on it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine
from typing import Any

import pytest
import torch

from axon_ps.parallel.fsdp.memory import BufferPool, Meter
from axon_ps.shard.client.line import QUEUE_S, SHORT_RTT_S, WINDOW_S, Permits, Rate, filling_s

UNIT_BYTES = 4 << 20


def receive(rate: Rate, line_rate: float, rtt_s: float, extra_bytes: int, *, seconds: float, begin_s: float) -> None:
    """What a worker receives that has two units under way, as FULL_SHARD, and so many more as `extra_bytes` hold."""
    now, came = begin_s, 0.0
    units = 2 + extra_bytes // UNIT_BYTES
    while now < begin_s + seconds:
        cycle_s = max(rtt_s + UNIT_BYTES / line_rate, units * UNIT_BYTES / line_rate)
        for _ in range(units * 16):
            now, came = now + cycle_s / units / 16, came + UNIT_BYTES / 16
            rate.received(UNIT_BYTES // 16, now)


@pytest.mark.parametrize("rtt_s", [0.01, 0.05, 0.1, 0.3])
def test_what_is_under_way_grows_until_the_line_is_full(rtt_s: float) -> None:
    line_rate, rate, now = 62.5e6, Rate(), 100.0
    for _ in range(8):
        receive(rate, line_rate, rtt_s, rate.in_flight_bytes(rtt_s), seconds=2.0, begin_s=now)
        now += 2.5
    product = line_rate * rtt_s
    assert product <= rate.in_flight_bytes(rtt_s) <= 1.05 * line_rate * filling_s(rtt_s) + 1


def test_the_queue_before_a_long_line_stays_short() -> None:
    for rtt_s in (0.005, 0.01, QUEUE_S):
        assert filling_s(rtt_s) == 2 * rtt_s
    assert filling_s(0.08) == pytest.approx(0.08 + QUEUE_S)
    assert filling_s(0.3) == pytest.approx(0.45), "what is measured is too little at first, and must grow"


def test_what_had_waited_in_the_kernel_does_not_count_as_fast() -> None:
    """Who was busy reads at once what came meanwhile: such a window has more than a line carries."""
    rate, now = Rate(), 0.0
    for number in range(60):
        now += 0.1
        rate.received(30_000_000 if number % 12 == 0 else 5_000_000, now)
    assert rate.in_flight_bytes(0.1) <= filling_s(0.1) * 70e6


def test_near_servers_are_asked_for_nothing_ahead() -> None:
    rate = Rate()
    receive(rate, 1e9, 0.0001, 0, seconds=1.0, begin_s=0.0)
    assert rate.in_flight_bytes(SHORT_RTT_S) == 0
    assert rate.in_flight_bytes(2 * SHORT_RTT_S) > 0


def test_a_pause_counts_neither_as_slow_nor_as_fast() -> None:
    rate = Rate()
    for now in (0.0, 10 * WINDOW_S, 20 * WINDOW_S):
        rate.received(1 << 30, now)
    assert rate.in_flight_bytes(1.0) == 0


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, 10.0))


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_transfers_begin_in_order_as_the_line_has_capacity() -> None:
    async def main() -> None:
        permits = Permits()
        begun: list[int] = []
        ends: list[asyncio.Future[None]] = [asyncio.get_running_loop().create_future() for _ in range(4)]

        async def transfer(i: int) -> None:
            async with permits.request(10, 4):
                begun.append(i)
                await ends[i]

        tasks = [asyncio.create_task(transfer(i)) for i in range(4)]
        await settle()
        assert begun == [0]
        tasks[1].cancel()  # while it waits
        ends[0].set_exception(ConnectionError())  # it fails: what is left of it is not under way
        await settle()
        assert begun == [0, 2]
        tasks[2].cancel()  # while it is under way
        await settle()
        assert begun == [0, 2, 3]
        ends[3].set_result(None)
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(o).__name__ for o in outcomes] == [
            "ConnectionError",
            "CancelledError",
            "CancelledError",
            "NoneType",
        ]
        async with permits.request(1, 0):
            pass

    run(main())


def test_the_next_begins_once_what_is_left_is_little() -> None:
    async def main() -> None:
        permits, begun = Permits(), asyncio.Event()

        async def second() -> None:
            async with permits.request(10, 4):
                begun.set()

        async with permits.request(10, 4) as permit:
            task = asyncio.create_task(second())
            permit.moved(5)
            await settle()
            assert not begun.is_set()
            permit.moved(1)
            await settle()
            assert begun.is_set()
            permit.moved(100)  # sent again after a failure: more than it has
        await task
        async with permits.request(1, 0):
            pass

    run(main())


def test_of_those_that_wait_the_first_in_order_is_next_whenever_it_came() -> None:
    async def main() -> None:
        permits, begun = Permits(), list[int]()

        async def transfer(order: int) -> None:
            async with permits.request(10, 0, order):
                begun.append(order)

        async with permits.request(10, 0, 9):
            tasks = [asyncio.create_task(transfer(order)) for order in (8, 3, 5, 3)]
            await settle()
            async with permits.request(10, math.inf, -1):  # before all of them, and at once
                assert not begun
            tasks.append(asyncio.create_task(transfer(4)))
            await settle()
            tasks[2].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert begun == [3, 3, 4, 8]

    run(main())


def test_without_a_limit_nobody_waits() -> None:
    async def main() -> None:
        permits = Permits()
        async with permits.request(10, math.inf), permits.request(10, math.inf), permits.request(10, math.inf):
            pass

    run(main())


def test_a_pool_of_buffers_is_extended_and_shrinks_again() -> None:
    pool = BufferPool(100, Meter())
    assert pool.has_capacity(1000)  # one always does
    buffer = pool.take(100, torch.uint8)
    assert not pool.has_capacity(1)
    pool.extend(50)
    assert pool.has_capacity(50)
    assert not pool.has_capacity(51)
    pool.extend(0)
    assert not pool.has_capacity(1)
    pool.give(buffer)

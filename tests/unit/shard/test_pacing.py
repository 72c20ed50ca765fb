"""Subscribers give way to gathers, keep to their rate, and lose what they do not read."""

from __future__ import annotations

import asyncio
import time

import pytest

from axon_ps.errors import Timeout
from axon_ps.shard.server import subscriptions
from axon_ps.shard.server.subscriptions import GIVE_WAY_S, Pacer, SubscriberLimits
from deadlines import HANG_S


async def written(_: bytes) -> None:
    await asyncio.sleep(0)


def test_the_rate_is_that_of_all_together() -> None:
    async def main() -> float:
        pacer = Pacer(SubscriberLimits(rate_bytes_s=20_000))
        began = time.monotonic()
        for _ in range(4):
            await pacer.write(written, bytes(500))
        return time.monotonic() - began

    assert asyncio.run(main()) >= 3 * 500 / 20_000


def test_a_gather_goes_first_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        monkeypatch.setattr(subscriptions, "GIVE_WAY_S", HANG_S)  # a busy machine may take longer than what it is
        pacer, order = Pacer(SubscriberLimits()), []

        async def write(_: bytes) -> None:
            order.append("subscriber")

        pacer.gathers = 1
        waiting = asyncio.ensure_future(pacer.write(write, b"x"))
        await asyncio.sleep(0)
        order.append("gather")
        pacer.gathers = 0
        await waiting
        assert order == ["gather", "subscriber"]
        monkeypatch.setattr(subscriptions, "GIVE_WAY_S", GIVE_WAY_S)
        pacer.gathers = 1
        await asyncio.wait_for(pacer.write(write, b"x"), 20 * GIVE_WAY_S)

    asyncio.run(main())


def test_one_that_does_not_read_is_given_up() -> None:
    async def main() -> None:
        async def stuck(_: bytes) -> None:
            await asyncio.get_running_loop().create_future()

        with pytest.raises(Timeout, match="a subscriber did not read for 0.01 s"):
            await Pacer(SubscriberLimits(retain_s=0.01)).write(stuck, b"x")

    asyncio.run(main())

"""Handles on what goes on in the background."""

from __future__ import annotations

import asyncio

import pytest

from axon_ps.collectives import work as work_module
from axon_ps.collectives.work import LoopWork
from axon_ps.errors import Closed, Timeout
from axon_ps.rpc.background_loop import BackgroundLoop


def test_cancelling_waits_until_it_has_stopped() -> None:
    left = []

    async def wait() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            left.append(True)

    with BackgroundLoop() as loop:
        work = LoopWork(loop, wait(), "waiting")
        loop.run(asyncio.sleep(0))  # it has begun
        work.cancel()
        assert left
        with pytest.raises(Closed):
            work.wait()


def test_what_ignores_its_cancellation_is_an_error_since_its_buffers_are_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(work_module, "CANCEL_WAIT_S", 0.05)
    go_on = True

    async def ignore() -> int:
        while go_on:
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                continue
        return 3

    with BackgroundLoop() as loop:
        work = LoopWork(loop, ignore(), "gathering unit 7")
        loop.run(asyncio.sleep(0))
        with pytest.raises(Timeout, match="gathering unit 7 ignores its cancellation .* its buffers are still in use"):
            work.cancel()
        go_on = False
        assert work.wait(10.0) == 3

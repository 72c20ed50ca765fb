"""What is awaited to its end whoever is cancelled meanwhile, and that gRPC then leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
from typing import Any

import pytest

from axon_ps.rpc import shielded
from axon_ps.rpc.calls.protocol import ServerCall
from axon_ps.rpc.shielded import Shielded
from rpc_fakes import run, serving

MESSAGE = bytes(1 << 20)
ROUNDS = 80


async def turn() -> None:
    """Let every other task go on."""
    await asyncio.sleep(0)


@pytest.mark.parametrize("times", [1, 3])
def test_a_cancelled_task_ends_after_what_it_awaits(times: int) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        first, second, ended, stopped = loop.create_future(), loop.create_future(), [], []

        async def work() -> int:
            await first
            await asyncio.sleep(0)
            ended.append(await second)
            return 7

        async def user() -> int:
            return await Shielded(work(), lambda: stopped.append(1))

        task = asyncio.ensure_future(user())
        await turn()
        for _ in range(times):
            task.cancel("enough")
        await turn()
        assert not task.done()
        assert stopped == [1]
        assert not first.cancelled()
        first.set_result(None)
        await turn()
        second.set_result(5)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended == [5]
        assert task.cancelling() == times

    run(main())


def test_results_and_errors_pass() -> None:
    async def give(value: Any) -> Any:
        await asyncio.sleep(0)
        if isinstance(value, BaseException):
            raise value
        return value

    async def recover(failing: asyncio.Future[None]) -> str:
        with contextlib.suppress(ConnectionError):
            await failing
        return "recovered"

    async def main() -> None:
        assert await Shielded(give(3)) == 3
        with pytest.raises(KeyError):
            await Shielded(give(KeyError("x")))
        with pytest.raises(asyncio.CancelledError):
            await Shielded(give(asyncio.CancelledError()))
        failed = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(failed.set_exception, ConnectionError())
        assert await Shielded(recover(failed)) == "recovered"

    run(main())


def test_an_error_of_what_was_stopped_gives_way_to_the_cancellation() -> None:
    async def main() -> None:
        broken = asyncio.get_running_loop().create_future()

        async def work() -> None:
            await broken

        async def user() -> None:
            async with asyncio.timeout(0):
                await Shielded(work(), lambda: broken.set_exception(ConnectionError()))

        with pytest.raises(TimeoutError):
            await user()

    run(main())


def test_what_does_not_end_is_cancelled_after_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shielded, "CANCEL_WAIT_S", 0.01)

    async def main() -> None:
        never = asyncio.get_running_loop().create_future()

        async def work() -> None:
            await never

        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await Shielded(work())
        assert never.cancelled()

    run(main())


def test_what_is_dropped_ends_without_its_task() -> None:
    async def main() -> None:
        async def work() -> None:
            await asyncio.get_running_loop().create_future()

        async def user() -> str:
            with contextlib.suppress(asyncio.CancelledError):
                await waiting
            return "went on"

        waiting = Shielded(work())
        task = asyncio.ensure_future(user())
        await turn()
        waiting.drop()
        assert await task == "went on"
        assert task.cancelling() == 0

    run(main())


class _Malloc(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", *"abc", "hblkhd", *"de", "uordblks", *"fg")]


def used_bytes() -> int:
    """What malloc has given out in this process."""
    gc.collect()
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _Malloc
    info = libc.mallinfo2()
    return int(info.uordblks + info.hblkhd)


@pytest.mark.parametrize("who", ["client reads", "client writes"])
def test_calls_that_are_cancelled_leave_no_memory_behind(who: str) -> None:
    """Messages are on their way at every cancellation; a client that goes cancels the other end as well."""

    async def sends(context: ServerCall) -> None:
        try:
            while True:
                await context.write(MESSAGE)
        finally:
            ended.set()

    async def takes(context: ServerCall) -> None:
        try:
            while True:
                await context.read()
        finally:
            ended.set()

    async def once(s: Any) -> None:
        ended.clear()
        stream = s.stub.open("AllGather" if who == "client reads" else "Collective")
        moved = asyncio.Event()

        async def use() -> None:
            while True:
                await (stream.read() if who == "client reads" else stream.write(MESSAGE))
                moved.set()

        using = asyncio.ensure_future(use())
        await moved.wait()
        await turn()
        using.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await using
        await ended.wait()

    async def main() -> None:
        async with serving(all_gather=sends, collective=takes) as s:
            for _ in range(10):
                await once(s)
            before = used_bytes()
            for _ in range(ROUNDS):
                await once(s)
            assert used_bytes() - before < ROUNDS / 2 * len(MESSAGE)

    ended = asyncio.Event()
    run(main())

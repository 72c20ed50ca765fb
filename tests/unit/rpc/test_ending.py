"""The end of a call: the first status counts, and everyone who waits for it gets it."""

from __future__ import annotations

import asyncio

import grpc

from axon_ps.rpc.calls.ending import Ending
from axon_ps.rpc.calls.status import CANCELLED, OK, CallStatus


def test_the_first_status_counts_and_callbacks_run_once() -> None:
    called: list[str] = []
    ending = Ending("the call")
    ending.add_callback(called.append)
    assert ending.status is None
    assert ending.set(OK)
    assert not ending.set(CANCELLED)
    assert ending.status is OK
    assert called == ["the call"]
    ending.add_callback(called.append)
    assert called == ["the call", "the call"], "at once, since the call has ended"


def test_those_who_wait_get_the_status() -> None:
    async def main() -> None:
        ending = Ending("the call")
        first, second, third = (asyncio.ensure_future(ending.wait()) for _ in range(3))
        await asyncio.sleep(0)
        third.cancel()
        await asyncio.wait([third])
        ending.set(CANCELLED)
        assert await asyncio.gather(first, second, ending.wait()) == [CANCELLED] * 3

    asyncio.run(main())


def test_a_status_has_the_number_of_its_code() -> None:
    for code in grpc.StatusCode:
        assert CallStatus.numbered(CallStatus(code).number, "why", b"error") == CallStatus(code, "why", b"error")
    assert CallStatus.numbered(99, "", b"").code is grpc.StatusCode.UNKNOWN
    assert CallStatus(grpc.StatusCode.OK).trailing == ()

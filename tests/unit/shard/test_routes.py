"""Calls go to the servers that hold a range now, once layout and placement are known."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from axon_ps.errors import InvalidRequest, Timeout
from axon_ps.shard.client.routes import Routes
from axon_ps.shard.same_host.access import SameHostServers
from axon_ps.sharding.placement import Holders, Placement
from axon_ps.types import DType
from axon_ps.wire.v1.common_pb2 import CallContext
from engine_driver import job_of, layout_of

SPEC = job_of(layout_of([100], [40]), chunk_numel=16, min_slice_numel=16)
PLACEMENT = Placement((Holders((1, 0)), Holders((0,)), Holders((1,)), Holders((0,))), num_cuts=2, number=3)


class Peers:
    """Servers that do not change by themselves."""

    def __init__(self) -> None:
        self.changed = asyncio.Event()

    def wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    async def wait(self, timeout_s: float) -> None:
        assert timeout_s > 0
        await self.changed.wait()


def run(body: Callable[[Routes], Awaitable[None]]) -> None:
    async def main() -> None:
        await body(Routes(Peers(), SameHostServers("")))  # type: ignore[arg-type]

    asyncio.run(main())


def context() -> CallContext:
    return CallContext(job="j", generation=1, incarnation="w")


def test_a_transfer_waits_for_the_layout_and_the_placement() -> None:
    async def body(routes: Routes) -> None:
        waiting = asyncio.ensure_future(routes.transfer(0, 40, 60, np.zeros(20, np.float32), context, None))
        await asyncio.sleep(0)
        routes.set_spec(SPEC)
        await asyncio.sleep(0)
        assert not waiting.done()
        routes.set_placement(PLACEMENT)
        spec, slices, transfer = await waiting
        assert spec is SPEC
        assert [(s.begin, s.end) for s in slices] == [(0, 48), (48, 100)]
        made = transfer(dtype=DType.F32)
        assert (made.begin, made.end, made.context().placement) == (40, 60, 3)

    run(body)


def test_a_layout_that_does_not_come_is_not_waited_for() -> None:
    async def body(routes: Routes) -> None:
        with pytest.raises(Timeout, match="the model's layout did not become known within 0 s"):
            await routes.transfer(0, 0, None, None, context, 0.0)

    run(body)


@pytest.mark.parametrize(
    ("unit", "begin", "end", "numel", "wrong"),
    [
        (2, 0, None, None, "there is no unit 2; the layout has 2"),
        (0, 60, 60, None, "elements 60 to 60 are not a range of unit 0, which has 100"),
        (0, 0, 101, None, "elements 0 to 101 are not a range of unit 0"),
        (0, 0, None, 99, r"the array for elements 0 to 100 of unit 0 has shape \[99\]"),
    ],
)
def test_a_range_that_is_not_there_is_refused(
    unit: int, begin: int, end: int | None, numel: int | None, wrong: str
) -> None:
    async def body(routes: Routes) -> None:
        routes.set_spec(SPEC)
        routes.set_placement(PLACEMENT)
        array = None if numel is None else np.zeros(numel, np.float32)
        with pytest.raises(InvalidRequest, match=wrong):
            await routes.transfer(unit, begin, end, array, context, None)

    run(body)


def test_a_slice_is_with_its_newest_holders() -> None:
    async def body(routes: Routes) -> None:
        routes.set_spec(SPEC)
        routes.set_placement(PLACEMENT)
        first = SPEC.plan(2).numbered[0]
        assert routes.copies == 2
        assert [routes.holder(first, index).server for index in range(3)] == [1, 0, 0], (
            "the last one if there are fewer"
        )
        routes.set_placement(PLACEMENT.changed({0: Holders((0,))}))
        assert routes.holder(first).server == 0
        assert routes.copies == 1
        assert not routes.is_near(0)

    run(body)

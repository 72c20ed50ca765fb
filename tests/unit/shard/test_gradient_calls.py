"""Streams of gradients wait for the chunks before theirs, and end with their generation."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from axon_ps.errors import GenerationChanged
from axon_ps.shard.core.engine import ShardEngine
from axon_ps.shard.core.slices import OwnedSlice
from axon_ps.shard.server.calls.gradients import GradientCalls
from axon_ps.shard.server.waiters import Waiters
from axon_ps.types import DType
from axon_ps.wire.v1.common_pb2 import Chunk
from engine_driver import Servers, job_of, layout_of

LAYOUT = layout_of([100])
ONES = np.ones(64, np.float32)


@dataclass
class Calls:
    """The calls of a model with two replicas, and what they have told its shell."""

    engine: ShardEngine
    waiters: Waiters = field(default_factory=Waiters)
    summed: list[tuple[int, int, int]] = field(default_factory=list)
    followed: int = 0
    generation: int = 1

    def __post_init__(self) -> None:
        self.calls = GradientCalls(
            self.engine, self.waiters, lambda owned: None, self.check, self.on_summed, self.on_followed
        )

    def check(self, generation: int) -> None:
        if generation != self.generation:
            raise GenerationChanged(f"generation {generation} is over", self.generation)

    def on_summed(self, owned: OwnedSlice, index: int, accumulator: int) -> None:
        self.summed.append((owned.number, index, accumulator))

    def on_followed(self) -> None:
        self.followed += 1

    async def push(self, replica: int) -> bool:
        return await self.calls.push((1, 0, 0, replica), DType.F32, ONES)


def run(body: Callable[[Calls], Awaitable[None]]) -> None:
    async def main() -> None:
        servers = Servers(job_of(LAYOUT), replicas=2)
        servers.upload([np.zeros(100, np.float32)])
        await body(Calls(servers.engines[0]))

    asyncio.run(main())


def test_a_chunk_waits_for_the_replica_before_it_and_is_summed_once() -> None:
    async def body(made: Calls) -> None:
        second = asyncio.ensure_future(made.push(1))
        await asyncio.sleep(0)
        assert not second.done()
        assert await made.push(0)
        assert not await made.push(0), "it is a duplicate"
        assert made.summed == []
        assert await second
        assert made.summed == [(0, 0, 0)]

    run(body)


def test_a_replica_without_a_gradient_has_a_part_in_every_chunk() -> None:
    async def body(made: Calls) -> None:
        assert await made.calls.push_absent(1, 0, 0, 100, 0) == 2
        assert await made.calls.push_absent(1, 0, 0, 100, 1) == 2
        assert made.summed == [(0, 0, 0), (0, 1, 0)]

    run(body)


def test_a_sum_of_the_primary_counts_once_for_a_backup() -> None:
    async def body(made: Calls) -> None:
        made.engine.slices[0].primary = False
        header = Chunk(step=1, unit=0, offset=0, numel=64)
        assert await made.calls.push_sum(header, ONES, placement=0)
        assert not await made.calls.push_sum(header, ONES, placement=0)
        header.step = 0
        assert not await made.calls.push_sum(header, ONES, placement=0), "that step is over"
        assert made.followed == 1

    run(body)


@pytest.mark.parametrize("over", [True, False], ids=["its generation is over", "its caller has left"])
def test_a_stream_that_is_cancelled_says_why_if_its_generation_is_over(over: bool) -> None:
    async def body(made: Calls) -> None:
        async def stream() -> None:
            with made.calls.under_way(1):
                await made.push(1)

        streaming = asyncio.ensure_future(stream())
        await asyncio.sleep(0)
        if over:
            made.generation = 2
            made.calls.end()
        else:
            streaming.cancel()
        with pytest.raises(GenerationChanged if over else asyncio.CancelledError):
            await streaming
        made.calls.end()  # there is nothing left to end

    run(body)

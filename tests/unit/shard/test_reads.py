"""Reads wait for the version and epoch that their callers ask for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from axon_ps.errors import GenerationChanged, InvalidRequest, SliceMoved, StepAborted
from axon_ps.shard.core.slices import OwnedSlice
from axon_ps.shard.server.calls.reads import Reads
from axon_ps.shard.server.waiters import EventOrder, Waiters
from axon_ps.wire.frames import decode_chunk
from axon_ps.wire.v1 import common_pb2, shard_pb2
from engine_driver import Servers, job_of, layout_of, one_group

LAYOUT = layout_of([100], [40], frozen=(1,))


class Values:
    """The epoch of the values."""

    served = 1


class Intact:
    """Memory that does not fail."""

    def report(self, owned: OwnedSlice) -> bool:
        return False

    async def verify(self, owned: OwnedSlice) -> None:
        pass


class Model:
    """A model and its server, as reads see them."""

    name = "m"

    def __init__(self) -> None:
        self.servers = Servers(job_of(LAYOUT), optimizer=one_group(LAYOUT, "adamw", lr=0.1))
        self.servers.upload([np.zeros(100, np.float32), np.zeros(40, np.float32)])
        (self.engine,) = self.servers.engines
        self.values: Any = Values()
        self.corruptions: Any = Intact()
        self.order: EventOrder[Any] = EventOrder(lambda event: None, lambda event: False)
        self.waiters = Waiters()
        self.generation = 1
        self.reads = Reads(self, self, self.waiters)  # type: ignore[arg-type]

    def check_generation(self, generation: int) -> None:
        if generation != self.generation:
            raise GenerationChanged(f"generation {generation} is over", self.generation)

    async def off_loop(self, work: Callable[[], Any]) -> Any:
        return work()

    def step(self) -> None:
        """Commit a step with a gradient for the trainable unit."""
        self.servers.push(0, 0, np.ones(100, np.float32))
        self.servers.commit()


def run(body: Callable[[Model], Awaitable[None]]) -> None:
    async def main() -> None:
        await body(Model())

    asyncio.run(main())


def test_a_gather_waits_for_its_version() -> None:
    async def body(model: Model) -> None:
        waiting = asyncio.ensure_future(model.reads.available(0, 0, 1, 1, 1))
        await asyncio.sleep(0)
        assert not waiting.done()
        model.step()
        model.waiters.wake_unit(0)
        await waiting
        with pytest.raises(InvalidRequest, match=f"version {1 << 62} of model 'm' was asked for; it is at 1"):
            await model.reads.available(0, 0, 1, 1 << 62, 1)

    run(body)


def test_a_gather_waits_for_its_epoch_and_a_past_one_is_over() -> None:
    async def body(model: Model) -> None:
        waiting = asyncio.ensure_future(model.reads.available(0, 0, 2, 0, 1))
        await asyncio.sleep(0)
        assert not waiting.done()
        model.values.served = 2
        model.waiters.wake_all()
        await waiting
        with pytest.raises(StepAborted, match="the parameters are of epoch 2, no longer 1"):
            await model.reads.available(0, 0, 1, 0, 1)

    run(body)


def test_a_read_that_waits_ends_with_its_generation() -> None:
    async def body(model: Model) -> None:
        waiting = asyncio.ensure_future(model.reads.unchanging(0, 0, 1, version=1))
        await asyncio.sleep(0)
        model.generation = 2
        model.waiters.wake_all()
        with pytest.raises(GenerationChanged):
            await waiting

    run(body)


def test_frames_are_made_when_they_are_asked_for() -> None:
    async def body(model: Model) -> None:
        owned, encoded = model.engine.slices[0], model.engine.counters["encodings"]
        owned.wire.drop_frames()
        assert len(await model.reads.frames(0, 0, 100, 1)) == 2
        assert await model.reads.frames(0, 64, 100, 1) == owned.wire.frames[1:]
        assert model.engine.counters["encodings"] == encoded + 2

    run(body)


def test_a_moment_is_of_its_version_and_absent_if_the_optimizer_does_not_have_it() -> None:
    async def body(model: Model) -> None:
        def request(unit: int, moment: str) -> shard_pb2.AllGatherRequest:
            return shard_pb2.AllGatherRequest(context={"generation": 1}, unit=unit, end=100, moment=moment)

        async def chunks(moment: str) -> list[tuple[common_pb2.Chunk, memoryview]]:
            return [decode_chunk(await model.reads.moment(request(0, moment), index)) for index in range(2)]

        model.step()
        owned = model.engine.slices[0]
        (name, array), _ = owned.master.state.items()
        (first, begin), (second, rest) = await chunks(name)
        assert bytes(begin) + bytes(rest) == array.tobytes()
        assert (first.version, second.version, second.offset + second.numel) == (1, 1, 100)
        assert [list(header.updates) for header in (first, second)] == [[1], []]
        assert [(header.absent, len(payload)) for header, payload in await chunks("unknown")] == [(True, 0)] * 2
        with pytest.raises(InvalidRequest, match="unit 1 is frozen; it has no moment 'momentum'"):
            await model.reads.moment(request(1, "momentum"), 0)
        array[0] += 1.0
        with pytest.raises(SliceMoved, match="are corrupt"):
            await chunks(name)

    run(body)


def test_a_copy_is_of_the_version_that_its_caller_is_at() -> None:
    async def body(model: Model) -> None:
        assert await model.reads.copy_of(0, 0, 1, 1) is model.engine.slices[0]
        model.step()
        with pytest.raises(StepAborted, match="slice 0 is at version 1; version 0 was asked for"):
            await model.reads.copy_of(0, 0, 1, 1)
        assert await model.reads.copy_of(1, 1, 1, 1) is model.engine.slices[1], "it is frozen, at every version"
        with pytest.raises(InvalidRequest, match="there is no slice 2; the model has 2"):
            await model.reads.copy_of(2, 1, 1, 1)

    run(body)

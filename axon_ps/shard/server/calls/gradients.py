"""The calls that bring a model's gradients: workers push their own, and primaries forward sums to their backups.

A call belongs to a generation and ends with it. A chunk that can neither be summed nor queued is held back.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from axon_ps.errors import AxonError, SliceMoved, StepAborted
from axon_ps.shard.core.engine import ShardEngine
from axon_ps.shard.core.gradients import Push, PushedAt
from axon_ps.shard.core.slices import OwnedSlice
from axon_ps.shard.server.waiters import Waiters
from axon_ps.types import Array, DType
from axon_ps.wire.v1.common_pb2 import Chunk


class GradientCalls:
    """The streams of gradients of one model. It runs on one event loop.

    Args:
        engine: the model's engine, which sums.
        waiters: the waiting streams.
        corrupt: called with a slice in which corruption may have been found.
        check_generation: raises if a generation is over, or the model was released.
        summed: called with a slice, the index of a chunk whose sum is complete here, and that of its accumulator.
        followed: called when a sum has come from a primary.
    """

    def __init__(
        self,
        engine: ShardEngine,
        waiters: Waiters,
        corrupt: Callable[[OwnedSlice], object],
        check_generation: Callable[[int], None],
        summed: Callable[[OwnedSlice, int, int], None],
        followed: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._waiters = waiters
        self._corrupt = corrupt
        self._check_generation = check_generation
        self._summed = summed
        self._followed = followed
        self._tasks: set[asyncio.Task[Any]] = set()

    @contextlib.contextmanager
    def under_way(self, generation: int) -> Iterator[None]:
        """Have the calling task end with a generation, as long as the context lasts.

        Raises:
            GenerationChanged: the generation ended.
            Misuse: the model was released.
        """
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            yield
        except asyncio.CancelledError:
            try:
                self._check_generation(generation)
            except AxonError:
                task.uncancel()
                raise
            raise
        finally:
            self._tasks.discard(task)

    def end(self) -> None:
        """End the streams under way, whose generation is over."""
        for task in self._tasks:
            task.cancel()

    async def push(
        self, at: PushedAt, dtype: DType, grad: Array | None, *, addend: int = 0, borrowed: bool = False
    ) -> bool:
        """Add a gradient chunk in order, or queue it; False for a duplicate. See `GradientSums.push`."""
        gradients, (_, unit, offset, replica) = self._engine.gradients, at
        while (done := gradients.push(*at, dtype, grad, addend=addend, borrowed=borrowed)) is Push.WAIT:
            self._corrupt(self._engine.slices.of(unit, offset))
            await self._waiters.wait(unit, offset, gradients.order_of(replica, addend))
        if done is Push.SUMMED:
            owned, order, complete = gradients.next_in_order(unit, offset, replica)
            self._waiters.wake_next(unit, offset, order)
            self._corrupt(owned)
            if complete:
                self._summed(owned, owned.chunks.index_of(offset), gradients.accumulator_of(replica))
        return done is not Push.DUPLICATE

    async def push_sum(self, header: Chunk, total: Array | None, placement: int) -> bool:
        """Take a chunk of a sum from the primary; returns False if it is a duplicate or useless by now.

        Raises:
            Broken: its digest does not match.
            SliceMoved: this server is not a backup by `placement`, the number of the primary's placement.
        """
        at = header.step, header.unit, header.offset, header.replica
        digest = header.digest if header.HasField("digest") else None
        try:
            while (done := self._engine.gradients.push_sum(*at, total, digest, addend=header.addend)) is Push.WAIT:
                await self._waiters.wait(header.unit)
        except StepAborted:
            return False
        except SliceMoved:
            assert self._engine.placement is not None
            if placement < self._engine.placement.number:
                return False
            raise
        if done is Push.DUPLICATE:
            return False
        self._followed()
        return True

    async def push_absent(self, step: int, unit: int, offset: int, numel: int, replica: int, *, addend: int = 0) -> int:
        """Record that a replica has no gradient for some chunks of a unit; returns the number of new ones."""
        chunks = self._engine.slices.of(unit, offset).chunks
        first, last = chunks.range_of(offset, offset + numel)
        dtype, new = self._engine.gradients.dtype, 0
        for at, _ in chunks.bounds[first:last]:
            new += await self.push((step, unit, at, replica), dtype, None, addend=addend)
            await asyncio.sleep(0)  # each chunk may complete a sum
        return new

"""Forwards the summed gradients of one model from the primary of a slice to its backups, chunk by chunk.

Each backup has a stream and a queue; a chunk is queued when its sum is complete, and looked up again when it is its
turn, so what the decision has made pointless is dropped. A backup's `ready` is the acknowledgement: no step commits
before it has every chunk. After a broken stream, everything complete is queued again; the backup drops duplicates.
On one host a chunk is not sent but leased, and the backup reads it from the accumulator (`host.leases`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from axon_ps.compress import cast
from axon_ps.errors import AxonError
from axon_ps.host.leases import ReadLeases, address_of
from axon_ps.host.process_memory import grant
from axon_ps.rpc.stream import Stream
from axon_ps.shard.core.engine import ShardEngine
from axon_ps.shard.core.slices import OwnedSlice
from axon_ps.shard.same_host.access import MIN_LEASED_BYTES
from axon_ps.shard.server.links import Links
from axon_ps.types import Array, DType
from axon_ps.wire.codec import dtype_to_proto
from axon_ps.wire.frames import encode_chunk
from axon_ps.wire.v1 import common_pb2

_RETRY_S = 0.05
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Sum:
    """A chunk whose sum is complete: of which slice, which chunk, which attempt and step."""

    slice: int
    index: int
    number: int
    step: int


class _Follower:
    """What is yet to be sent to one server."""

    def __init__(self) -> None:
        self.queue: deque[_Sum] = deque()
        self.filled = asyncio.Event()
        self.slices: frozenset[int] = frozenset()
        self.task: asyncio.Task[None] | None = None

    def put(self, item: _Sum) -> None:
        self.queue.append(item)
        self.filled.set()


class Forwarding:
    """The streams to the backups of one model's slices.

    Args:
        model: its number.
        engine: has the sums.
        links: to the other servers.
    """

    def __init__(self, model: int, engine: ShardEngine, links: Links) -> None:
        self._model = model
        self._engine = engine
        self._links = links
        self._followers: dict[int, _Follower] = {}
        self._followers_of: dict[int, tuple[int, ...]] = {}  # by slice
        self._leases = ReadLeases()

    def place(self) -> None:
        """The placement has changed: end the streams to servers that follow no more, and catch up new ones."""
        placement, slices = self._engine.placement, self._engine.slices
        assert placement is not None
        primaries = [s for s in slices.values() if s.primary and s.trainable]
        self._followers_of = {s.number: placement.holders[s.number].followers for s in primaries}
        wanted: dict[int, set[int]] = {}
        for number, ranks in self._followers_of.items():
            for rank in ranks:
                wanted.setdefault(rank, set()).add(number)
        for rank in set(self._followers).difference(wanted):
            self._end(rank)
        for rank, numbers in wanted.items():
            follower = self._followers.setdefault(rank, _Follower())
            new, follower.slices = numbers - follower.slices, frozenset(numbers)
            for item in self._complete(new):
                self._put(rank, follower, item)

    def restart(self) -> None:
        """Another generation: the streams of the one before end."""
        for rank in list(self._followers):
            self._end(rank)
        if self._engine.placement is not None:
            self.place()

    def close(self) -> None:
        """End all streams."""
        self._followers_of = {}
        for rank in list(self._followers):
            self._end(rank)

    def completed(self, owned: OwnedSlice, index: int, number: int) -> None:
        """The sum of a chunk is complete."""
        if ranks := self._followers_of.get(owned.number):
            item = _Sum(owned.number, index, number, self._engine.gradients.attempts[number].step)
            for rank in ranks:
                self._put(rank, self._followers[rank], item)

    def settled(self) -> None:
        """A step is decided: its sums are about to be used or dropped."""
        self._leases.revoke()

    # ------------------------------------------------------------------ inside

    def _put(self, rank: int, follower: _Follower, item: _Sum) -> None:
        follower.put(item)
        if follower.task is None:
            follower.task = asyncio.get_running_loop().create_task(self._run(rank, follower))

    def _end(self, rank: int) -> None:
        task = self._followers.pop(rank).task
        if task is not None:
            task.cancel()

    def _complete(self, numbers: set[int]) -> Iterator[_Sum]:
        gradients = self._engine.gradients
        for number, attempt in enumerate(gradients.attempts):
            for owned in map(self._engine.slices.__getitem__, sorted(numbers)):
                for index in gradients.sums_of(number, owned):
                    yield _Sum(owned.number, index, number, attempt.step)

    async def _run(self, rank: int, follower: _Follower) -> None:
        """Send what is queued until cancelled."""
        leases = True
        while True:
            try:
                stub = await self._links.stub(rank)
                readable = leases and await self._links.reads_us(rank, stub, self._model)
                async with stub.open("Replicate") as stream:
                    await self._send(stream, follower, readable)
            except AxonError as error:
                _logger.info("forwarding gradients to shard server %d: %s; trying again", rank, error)
                self._links.forget(rank)
                leases = not leases  # what failed is not tried the same way again
                await asyncio.sleep(_RETRY_S)
                follower.queue.clear()
                follower.queue.extend(self._complete(set(follower.slices)))

    async def _send(self, stream: Stream, follower: _Follower, readable: bool) -> None:
        engine, wire = self._engine, self._engine.precision.grad
        header = common_pb2.Chunk(context=self._links.context(self._model))
        while True:
            while follower.queue:
                item = follower.queue.popleft()
                owned = engine.slices.get(item.slice)
                attempts = engine.gradients.attempts
                if owned is None or item.number >= len(attempts) or attempts[item.number].step != item.step:
                    continue
                accumulator = owned.accumulators[item.number]
                if not accumulator.is_complete(item.index, attempts[item.number].replicas):
                    continue
                elements = owned.chunks.ranges[item.index]
                header.step, header.unit, header.replica = item.step, owned.chunks.unit, item.number
                header.offset, header.numel = owned.chunks.begin + elements.start, elements.stop - elements.start
                header.absent, header.dtype = not accumulator.present[item.index], dtype_to_proto(DType.F32)
                total = None if header.absent else accumulator.array[elements]
                nbytes = 0 if total is None else total.nbytes
                if total is not None and readable and nbytes >= MIN_LEASED_BYTES:
                    header.leases.append(grant(self._leases, address_of(total), nbytes))
                    await stream.write(encode_chunk(header, None))
                    header.ClearField("leases")
                    engine.counters["leased_bytes_forwarded"] += nbytes
                else:
                    if total is not None and accumulator.rounds and wire is not DType.F32:
                        header.dtype = dtype_to_proto(wire)
                        total = rounded(total, wire)
                        nbytes = total.nbytes
                    await stream.write(encode_chunk(header, total))
                header.ClearField("context")
                engine.counters["bytes_forwarded"] += nbytes
            follower.filled.clear()
            await follower.filled.wait()


def rounded(values: Array, dtype: DType) -> Array:
    """f32 values that are some of `dtype` already, in that."""
    out = np.empty(values.size, dtype.numpy)
    cast.encode(values, out, dtype)
    return out

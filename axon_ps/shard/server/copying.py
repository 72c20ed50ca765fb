"""Copies of slices: a server receives all of a slice from its primary, at one version, while training goes on.

Note: [A copy misses no step]
    A server that receives a copy is a holder of the slice from the placement on. The primary forwards it the sums of
    the step under way. That step cannot commit before the server is `ready`, and it is not `ready` before it has the
    values. So the slice does not change while it is copied, and from its first step on the server takes part like any
    backup. All members see the placement at the same position among the decisions, so both servers mean the same
    version. A slice is sent at `BANDWIDTH_FRACTION` of the connection's bandwidth. The coordinator has only a few
    slices copied at a time, so that steps are hardly delayed.

Note: [Slices are reported together]
    Every report of copied slices makes a placement, which costs all members time proportional to the model's slices. So
    a server reports slices when all have arrived, or `REPORT_S` after the first.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Final

import numpy as np

from axon_ps.aggregation.client.probes import Wait
from axon_ps.errors import AxonError, Broken, InvalidRequest
from axon_ps.observe.work import LongWork
from axon_ps.rpc.stream import EOF
from axon_ps.shard.core.digests import PARAM, SliceDigests
from axon_ps.shard.core.engine import ShardEngine
from axon_ps.shard.core.slices import OwnedSlice
from axon_ps.shard.server.links import Links
from axon_ps.shard.server.reports import Reports
from axon_ps.types import Array, DType
from axon_ps.wire.events import Copied
from axon_ps.wire.frames import elements
from axon_ps.wire.v1 import shard_pb2

BANDWIDTH_FRACTION = 0.5
"""The fraction of a copy's time spent sending. The rest is left to training."""

BLOCK_NUMEL = 1 << 18
"""Elements in a message."""

FRAME = "frame"
MAX_TENSORS: Final = 16
"""The most tensors of a slice: its values, a residual (or `sent`), and the optimizer's moments."""

REPORT_S: Final = 0.25
"""Most seconds between the arrival of a slice and its report."""

_RETRY_S = 0.05
_logger = logging.getLogger(__name__)


async def chunks(engine: ShardEngine, owned: OwnedSlice) -> AsyncIterator[shard_pb2.SliceChunk]:
    """Yield all of a slice in messages. The slice must not change meanwhile."""
    blocks = [
        (name, begin, array[begin : begin + BLOCK_NUMEL])
        for name, array in _tensors(owned).items()
        for begin in range(0, array.size, BLOCK_NUMEL)
    ]
    if owned.wire.compressed:
        blocks += [(FRAME, index, np.frombuffer(frame, np.uint8)) for index, frame in enumerate(owned.wire.frames)]
    for name, begin, block in blocks:
        began = time.perf_counter()
        yield shard_pb2.SliceChunk(tensor=name, begin=begin, payload=block.tobytes())
        engine.counters["bytes_copied_out"] += block.nbytes
        spent_s = time.perf_counter() - began
        await asyncio.sleep(spent_s * (1 / BANDWIDTH_FRACTION - 1))
    yield shard_pb2.SliceChunk(
        complete=True,
        changed=owned.changed,
        copied=owned.copied,
        updates=owned.master.moments.updates,
        digest=owned.master.moments.digest,
    )


def _tensors(owned: OwnedSlice) -> dict[str, Array]:
    return {PARAM: owned.master.values, **owned.wire.feedback, **owned.master.moments.arrays}


class Copying:
    """The copies of one model's slices that this server is receiving, one after the other.

    Args:
        model: its number.
        engine: gets them.
        links: to the other servers.
        epoch: returns the number of restores of the model.
        copied: called with each slice that has arrived.
        reports: the way to the coordinator.
        off_loop: runs long work in a thread.
    """

    def __init__(
        self,
        model: int,
        engine: ShardEngine,
        links: Links,
        epoch: Callable[[], int],
        copied: Callable[[OwnedSlice], None],
        reports: Reports,
        off_loop: Callable[[Callable[[], SliceDigests]], Awaitable[SliceDigests]],
    ) -> None:
        self._model = model
        self._engine = engine
        self._links = links
        self._epoch = epoch
        self._copied = copied
        self._reports = reports
        self._off_loop = off_loop
        self._came: list[tuple[OwnedSlice, int]] = []  # not reported yet, each with the epoch of its values
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._got_bytes = 0  # since there was nothing left to copy
        self._slice_bytes = 0  # of the slice that is coming

    def works(self) -> Iterator[LongWork]:
        """Yield the bytes to copy while a copy is under way. The number of moments is taken from other slices here."""
        slices = self._engine.slices.values()
        if not (copying := [s for s in slices if s.copying]):
            self._got_bytes = 0
            return
        arrays = 1 + max((len(s.master.state) for s in slices), default=0)
        left = sum(4 * arrays * s.chunks.numel for s in copying)
        yield LongWork("copy", self._got_bytes + max(0, left - self._slice_bytes), self._got_bytes)

    def on_placement(self) -> None:
        """Copy the slices that a new placement gives to this server and that it does not have yet."""
        if (self._task is None or self._task.done()) and self._pending():
            self._task = asyncio.get_running_loop().create_task(self._run())

    def restart(self) -> None:
        """Restart the copy under way, in a new generation."""
        self._report_all()
        self._end()
        self.on_placement()

    def close(self) -> None:
        """Stop copying and reporting."""
        self._end()
        self._came.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _end(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None

    def _pending(self) -> list[OwnedSlice]:
        return [s for s in self._engine.slices.values() if s.copying]

    async def _run(self) -> None:
        with self._links.waiting() as waiting:
            while pending := self._pending():
                for owned in pending:
                    if owned.copying and self._engine.slices.get(owned.number) is owned:
                        await self._try(owned, waiting)
                self._report_all()

    async def _try(self, owned: OwnedSlice, waiting: Wait) -> None:
        try:
            await self._copy(owned, waiting)
        except Exception as error:
            unforeseen = not isinstance(error, AxonError)
            level = logging.ERROR if unforeseen else logging.INFO
            _logger.log(level, "copying slice %d: %s; trying again", owned.number, error, exc_info=unforeseen)
            await asyncio.sleep(_RETRY_S)

    def _has_come(self, owned: OwnedSlice) -> None:
        self._came.append((owned, self._epoch()))
        if not any(s.copying for s in self._engine.slices.values()):
            self._report_all()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(REPORT_S, self._report_all)
        self._copied(owned)

    def _report_all(self) -> None:
        """Report all slices that have arrived. See Note: [Slices are reported together]."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer, came, self._came = None, self._came, []
        slices, placement, epoch = self._engine.slices, self._engine.placement, self._epoch()
        still = tuple(s.number for s, of in came if slices.get(s.number) is s and not s.copying and of == epoch)
        if still:
            assert placement is not None
            report = Copied(model=self._model, epoch=epoch, slices=still, placement=placement.number)
            self._reports.copied(report)

    async def _copy(self, owned: OwnedSlice, waiting: Wait) -> None:
        engine, placement, epoch = self._engine, self._engine.placement, self._epoch()
        assert placement is not None
        primary = placement.holders[owned.number].primary
        waiting.on(primary)
        stub = await self._links.stub(primary)
        request = shard_pb2.CopyRequest(
            context=self._links.context(self._model, generation=engine.generation, placement=placement.number),
            slice=owned.number,
            version=engine.version,
            epoch=epoch,
        )
        arrays, frames, self._slice_bytes = _tensors(owned), [], 0
        async with await stub.open_bulk("Copy") as stream:
            await stream.write(request)
            while (chunk := await stream.read()) is not EOF and not chunk.complete:
                engine.counters["bytes_copied_in"] += len(chunk.payload)
                self._got_bytes += len(chunk.payload)
                self._slice_bytes += len(chunk.payload)
                if chunk.tensor == FRAME:
                    frames.append(chunk.payload)
                    continue
                values = elements(memoryview(chunk.payload), DType.F32)
                if chunk.tensor not in arrays and len(arrays) >= MAX_TENSORS:
                    raise InvalidRequest(f"a slice was sent with more than {MAX_TENSORS} tensors")
                array = arrays.setdefault(chunk.tensor, np.zeros(0, np.float32))
                if not array.size:  # a moment that the hyperparameters have required since
                    array = arrays[chunk.tensor] = np.zeros(owned.chunks.numel, np.float32)
                if chunk.begin + values.size > array.size:
                    raise InvalidRequest(f"a slice of {array.size} elements was sent elements behind its end")
                array[chunk.begin : chunk.begin + values.size] = values
        if chunk is EOF:
            raise Broken("the primary ended the stream before the slice was complete")
        moments = {name: array for name, array in arrays.items() if name not in (PARAM, *owned.wire.feedback)}
        digests = await self._off_loop(lambda: owned.digests_of_copy({PARAM: arrays[PARAM], **moments}))
        if engine.slices.get(owned.number) is owned and owned.copying and epoch == self._epoch():
            if chunk.HasField("digest") and chunk.digest != digests.total:
                raise Broken("what has come is not what the primary has written")
            engine.copied(owned, moments, chunk.updates, chunk.changed, chunk.copied, frames, digests)
            self._has_come(owned)

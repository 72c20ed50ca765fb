"""The calls that read a model's values: workers gather them, and servers copy slices.

A call is answered once the values are those that its caller asks for. It ends with the caller's generation.
"""

from __future__ import annotations

from typing import Any, Protocol

from axon_ps.errors import InvalidRequest, StepAborted
from axon_ps.rpc.limits import MAX_NEWER
from axon_ps.shard.core.engine import ShardEngine
from axon_ps.shard.core.slices import OwnedSlice
from axon_ps.shard.server.corruption import Corruptions
from axon_ps.shard.server.model_values import ModelValues
from axon_ps.shard.server.reports import ServerShell
from axon_ps.shard.server.waiters import EventOrder, Waiters
from axon_ps.types import DType, Hyper
from axon_ps.wire.codec import dtype_to_proto
from axon_ps.wire.frames import encode_chunk
from axon_ps.wire.v1 import common_pb2, shard_pb2


class ReadModel(Protocol):
    """The part of a model's shell that reads need.

    Attributes:
        name: its name in the job.
        engine: its slices.
        values: the sources of its values.
        corruptions: the handling of corrupt memory.
        order: the queue of events about it.
    """

    name: str
    engine: ShardEngine
    values: ModelValues
    corruptions: Corruptions
    order: EventOrder[Any]

    def check_generation(self, generation: int) -> None:
        """Check that a generation is the current one, and that the model was not released."""


class Reads:
    """The reads of one model. It runs on one event loop.

    Args:
        model: the model.
        server: the server that it belongs to.
        waiters: the waiting calls.
    """

    def __init__(self, model: ReadModel, server: ServerShell, waiters: Waiters) -> None:
        self._model = model
        self._engine = model.engine
        self._server = server
        self._waiters = waiters

    async def available(self, unit: int, begin: int, epoch: int, min_version: int, generation: int) -> None:
        """Wait until the slice with an element can be served at `min_version` of `epoch` or later.

        Versions grow only within an epoch. The caller may learn of a restore before or after this server.

        Raises:
            InvalidRequest: the version is too far ahead of the model's.
            GenerationChanged: the generation ended meanwhile.
            Misuse: the model was released meanwhile.
            StepAborted: the parameters are of a later epoch.
            SliceMoved: the slice is not here.
        """
        if min_version > self._engine.version + MAX_NEWER:
            raise InvalidRequest(
                f"version {min_version} of model {self._model.name!r} was asked for; it is at {self._engine.version}"
            )
        values = self._model.values
        while True:
            if epoch < values.served:
                raise StepAborted(
                    f"the model was restored: the parameters are of epoch {values.served}, no longer {epoch}"
                )
            if epoch == values.served and self._engine.parameters.available(unit, begin, min_version):
                return
            await self._waiters.wait(unit)
            self._model.check_generation(generation)

    async def frames(self, unit: int, begin: int, end: int, generation: int) -> tuple[bytes, ...]:
        """Return the frames of a range that is `available`, if parameters are not sent as differences.

        They are made now if they do not exist yet.

        Raises:
            InvalidRequest: the range does not begin and end where chunks of this server do.
            GenerationChanged: the generation ended meanwhile.
            Misuse: the model was released meanwhile.
            SliceMoved: the slice is not here, or is corrupt.
        """
        parameters = self._engine.parameters
        if self._engine.slices.of(unit, begin).wire.frames:
            return parameters.frames(unit, begin, end)
        owned = await self.unchanging(unit, begin, generation)
        async with self._model.order.begin_work():
            self._engine.counters["encodings"] += await self._server.off_loop(owned.ensure_frames)
            owned.refuse_corrupt()  # another check may have found corruption meanwhile
            return parameters.frames(unit, begin, end)

    async def prepared(
        self, step: int, owned: OwnedSlice, index: int, hypers: tuple[Hyper, ...], generation: int, addend: int = 0
    ) -> bytes:
        """Return the speculative frame of one chunk, once it can be made. See `ExpectedStep.prepare_chunk`.

        Raises:
            GenerationChanged: the generation ended meanwhile.
            Misuse: the model was released meanwhile.
            SliceMoved: the slice is not here any more.
        """
        engine = self._engine
        scratch = engine.scratch()
        offset = owned.chunks.bounds[index][0]
        try:
            if step < engine.step and owned.lacks_frames:
                await self.frames(owned.chunks.unit, owned.chunks.begin, owned.chunks.end, generation)
            while (frame := engine.expected.prepare_chunk(step, owned, index, hypers, scratch, addend)) is None:
                await self._waiters.wait(owned.chunks.unit, offset, engine.gradients.num_replicas * (addend + 1))
                self._model.check_generation(generation)
                engine.slices.of(owned.chunks.unit, offset)
        finally:
            self._model.corruptions.report(owned)
        return frame

    async def unchanging(self, unit: int, begin: int, generation: int, version: int = 0) -> OwnedSlice:
        """Wait until a slice has values at `version` or later, and no step is being applied to it.

        Its frames may be served earlier.

        Raises:
            GenerationChanged: the generation ended meanwhile.
            Misuse: the model was released meanwhile.
            SliceMoved: the slice is not here.
        """
        while (owned := self._engine.slices.of(unit, begin)).applying or not self._engine.parameters.available(
            unit, begin, version
        ):
            await self._waiters.wait(unit)
            self._model.check_generation(generation)
        return owned

    async def moment(self, request: shard_pb2.AllGatherRequest, index: int) -> bytes:
        """Return chunk `index` of a moment, f32, at the values' version; absent if the optimizer does not have it.

        The first chunk of a request has the updates of each parameter.

        Raises:
            InvalidRequest: the unit is frozen.
            GenerationChanged: the generation ended meanwhile.
            Misuse: the model was released meanwhile.
            SliceMoved: the slice is not here, or is corrupt.
        """
        owned = await self.unchanging(request.unit, request.begin, request.context.generation)
        if not owned.trainable:
            raise InvalidRequest(f"unit {request.unit} is frozen; it has no moment {request.moment!r}")
        owned.check(index, index + 1)
        owned.refuse_corrupt()
        (offset, end), moments = owned.chunks.bounds[index], owned.master.moments
        array = moments.arrays.get(request.moment)
        header = common_pb2.Chunk(
            unit=request.unit,
            offset=offset,
            numel=end - offset,
            dtype=dtype_to_proto(DType.F32),
            version=owned.changed,
            absent=array is None,
            updates=moments.updates if offset == request.begin else (),
        )
        return encode_chunk(header, None if array is None else array[owned.chunks.ranges[index]])

    async def copy_of(self, number: int, version: int, epoch: int, generation: int) -> OwnedSlice:
        """Return the slice with a number, once it is at the version that another server wants to copy.

        Raises:
            InvalidRequest: there is no such slice.
            GenerationChanged: the generation ended meanwhile.
            Misuse: the model was released meanwhile.
            SliceMoved: it is not here, or is corrupt.
            StepAborted: it is past that version or epoch.
        """
        spec, placement = self._engine.spec, self._engine.placement
        assert spec is not None
        assert placement is not None
        slices = spec.plan(placement.num_cuts).numbered
        if number >= len(slices):
            raise InvalidRequest(f"there is no slice {number}; the model has {len(slices)}")
        wanted = slices[number]
        await self.available(wanted.unit, wanted.begin, epoch, 0, generation)
        frozen = not spec.layout.units[wanted.unit].trainable
        owned = await self.unchanging(wanted.unit, wanted.begin, generation, 0 if frozen else version)
        await self._model.corruptions.verify(owned)
        if owned.reached != version and not frozen:
            raise StepAborted(f"slice {number} is at version {owned.reached}; version {version} was asked for")
        return owned

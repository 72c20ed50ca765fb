"""One version of a model, assembled from several servers: all of it or nothing. Pure.

Values are immutable. Unchanged units are the arrays of the previous version, changed units are new arrays. So later
versions do not affect a version that the caller keeps.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np

from axon_ps.errors import InvalidRequest
from axon_ps.sharding.job import JobSpec
from axon_ps.sharding.plan import Plan
from axon_ps.sharding.raw import tensor_of
from axon_ps.types import Array, DType
from axon_ps.wire.changes import apply_changes
from axon_ps.wire.codec import dtype_from_proto
from axon_ps.wire.frames import payload_array
from axon_ps.wire.v1 import common_pb2


@dataclass(frozen=True, kw_only=True)
class Values:
    """All parameters of a model at one version.

    Attributes:
        spec: the model's layout.
        epoch: number of restores of the model before it.
        version: version of the model.
        dtype: of the elements, except of raw parameters.
        units: wire[unit_numel] of every unit, read-only; bf16 as uint16; words of raw parameters as f32.
    """

    spec: JobSpec
    epoch: int
    version: int
    dtype: DType
    units: tuple[Array, ...]

    def parameters(self) -> dict[str, Array]:
        """Return every tensor by its first name, in layout order: a read-only view in its shape, or a copy of boxes.

        A raw one has its own dtype, bf16 and float8 as unsigned integers.
        """
        layout = self.spec.layout
        found: dict[str, Array] = {}
        for u, p in layout.parameters():
            values = tensor_of(self.units[u], p)
            if p.full is None:
                found[p.name] = values
                continue
            if p.full.name not in found:
                found[p.full.name] = np.empty(p.full.shape, values.dtype)
            found[p.full.name][p.box] = values
        for array in found.values():
            array.flags.writeable = False
        return {tensor.name: found[tensor.name] for tensor in layout.tensors}

    def dtypes(self) -> dict[str, DType]:
        """Return the dtype of every tensor by its first name, in layout order."""
        return {tensor.name: tensor.dtype if tensor.raw else self.dtype for tensor in self.spec.layout.tensors}


class ArrivingVersion:
    """A version that is arriving.

    Args:
        spec: the model's layout.
        num_cuts: number of servers that its plan cuts units over.
        dtype: of the elements.
        epoch, version: the version that is arriving.
        base: an older version of the same epoch, layout and dtype, for the unchanged values; None = none.

    Attributes:
        spec, num_cuts, epoch, version, base: as given.
        missing: numbers of the slices that have not arrived, or not completely.
    """

    def __init__(
        self, spec: JobSpec, num_cuts: int, dtype: DType, epoch: int, version: int, base: Values | None = None
    ) -> None:
        self.spec, self.num_cuts = spec, num_cuts
        self.epoch, self.version, self.base = epoch, version, base
        self.missing = set(range(len(self._plan.numbered)))
        self._dtype = dtype
        self._arrays: dict[int, Array] = {}
        self._position: dict[int, int] = {}  # by slice that has begun to arrive, the first element of the next chunk

    @property
    def _plan(self) -> Plan:
        return self.spec.plan(self.num_cuts)

    def begin(self, numbers: Iterable[int]) -> None:
        """Expect slices from their start."""
        for number in numbers:
            self._position.pop(number, None)

    def put(self, header: common_pb2.Chunk, payload: memoryview, expected: Collection[int]) -> int:
        """Take a chunk; returns the size of its payload, in elements.

        Args:
            header: of the chunk.
            payload: its elements, or their changes.
            expected: the slices that may arrive.

        Raises:
            InvalidRequest: it is not of these slices, not the next one, not as requested, or malformed.
        """
        unit, begin, end = header.unit, header.offset, header.offset + header.numel
        number = self._number(unit, begin)
        s = self._plan.numbered[number]
        if number not in expected or begin != self._position.get(number, s.begin) or end > s.end or begin == end:
            raise InvalidRequest(f"a chunk with elements {begin} to {end} of unit {unit} came, which is not its turn")
        if dtype_from_proto(header.dtype) is not self._dtype_of(unit) or header.version > self.version:
            raise InvalidRequest(f"a chunk came as {header.dtype} of version {header.version}, which was not asked for")
        if unit not in self._arrays:
            self._arrays[unit] = np.empty(self.spec.layout.units[unit].numel, self._dtype_of(unit).numpy)
        out = self._arrays[unit][begin:end]
        if header.compressed:
            if self.base is None:
                raise InvalidRequest("a chunk came with changes, and there is nothing that they could be to")
            out[:] = self.base.units[unit][begin:end]
            apply_changes(payload, out)
        else:
            out[:] = payload_array(header, payload, header.numel)
        self._position[number] = end
        return payload.nbytes // self._dtype_of(unit).itemsize

    def arrived(self, numbers: Iterable[int]) -> None:
        """Record that a server has sent all of each of these slices, or nothing of an unchanged one.

        Raises:
            InvalidRequest: a slice is incomplete, or nothing arrived and there is no base.
        """
        numbers = tuple(numbers)
        for number in numbers:
            s = self._plan.numbered[number]
            position = self._position.get(number)
            if position != s.end and not (position is None and self.base is not None):
                raise InvalidRequest(f"of slice {number} came elements {s.begin} to {position}; it ends at {s.end}")
        self.missing.difference_update(numbers)

    def finish(self) -> Values:
        """Return all of the version, once nothing is missing."""
        assert not self.missing
        units: list[Array] = []
        for unit, slices in enumerate(self._plan.slices):
            array = self._arrays.get(unit)
            if array is None:
                assert self.base is not None
                units.append(self.base.units[unit])
                continue
            for number, s in enumerate(slices, self._plan.first_of[unit]):
                if number not in self._position and self.base is not None:
                    array[s.begin : s.end] = self.base.units[unit][s.begin : s.end]
            array.flags.writeable = False
            units.append(array)
        return Values(spec=self.spec, epoch=self.epoch, version=self.version, dtype=self._dtype, units=tuple(units))

    def _dtype_of(self, unit: int) -> DType:
        return DType.F32 if self.spec.layout.units[unit].raw else self._dtype

    def _number(self, unit: int, offset: int) -> int:
        if unit >= len(self._plan.slices) or offset >= self.spec.layout.units[unit].numel:
            raise InvalidRequest(f"element {offset} of unit {unit} came; the layout has none")
        return self._plan.first_of[unit] + bisect_right(self._plan.ends_of[unit], offset)

"""This worker's values of parameters that are sent as differences. The next differences are added to them. Pure.

    shape legend: unit_numel = elements of a unit, c = numel of one chunk

See `shard.core.differences`, Note: [Parameters as differences].

Owns: a copy of each unit, f32[unit_numel], of which only gathered chunks take host memory; the version of each chunk;
and differences of an undecided step. Refuses: sending and waiting.

Invariant: a known chunk holds the bits that the servers had at its version, as far as its digest can tell. A chunk that
is being overwritten is not known. It runs on one event loop, except `settle` and `nbytes`.

Note: [Differences of an undecided step]
    A speculative gather does not change the copy, since the step may end in another way. Its payloads are retained, and
    added to the copy in the next gather of the unit, if the step committed as expected (`settle`).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np

from axon_ps.compress.compressor import Compressor
from axon_ps.errors import Broken, InvalidRequest, StepAborted
from axon_ps.sharding.plan import Slice
from axon_ps.types import Array, DType, Hyper
from axon_ps.wire.codec import dtype_from_proto
from axon_ps.wire.frames import payload_array
from axon_ps.wire.v1 import common_pb2

_logger = logging.getLogger(__name__)

_REMEMBERED_STEPS = 16
"""Number of decided steps whose retained differences can be added. A unit is usually gathered in the next step."""


@dataclass(slots=True)
class _Chunk:
    """A chunk up to element `end`, at a version of an epoch. It is unchanged up to the job's version `current`."""

    end: int
    epoch: int
    version: int
    current: int
    digest: int


@dataclass(frozen=True, slots=True)
class _Retained:
    """A difference of an undecided step."""

    step: int
    hyper: tuple[Hyper, ...]
    header: common_pb2.Chunk
    payload: Array
    compressor: Compressor


class Received:
    """The copies of one model's units.

    Args:
        mismatches: initial count.

    Attributes:
        mismatches: number of digests that did not match.
    """

    def __init__(self, mismatches: int = 0) -> None:
        self.mismatches = mismatches
        self._arrays: dict[int, Array] = {}
        self._chunks: dict[int, dict[int, _Chunk]] = {}  # by unit and first element
        self._retained: dict[int, dict[int, _Retained]] = {}
        self._decided: dict[int, tuple[Hyper, ...] | None] = {}

    @property
    def nbytes(self) -> int:
        """Memory of gathered chunks and retained differences."""
        chunks = [item for unit in list(self._chunks.values()) for item in list(unit.items())]
        retained = [r for unit in list(self._retained.values()) for r in list(unit.values())]
        return sum(4 * (chunk.end - begin) for begin, chunk in chunks) + sum(r.payload.nbytes for r in retained)

    def renewed(self) -> Received:
        """Return an empty replacement, after parameters were replaced. Gathers under way go on with this one."""
        return Received(self.mismatches)

    def settle(self, step: int, hyper: tuple[Hyper, ...] | None) -> None:
        """Take a step's decision: committed unclipped with these hyperparameters, or ended in another way (None)."""
        latest = sorted({*self._decided, step})[-_REMEMBERED_STEPS:]
        self._decided = {s: hyper if s == step else self._decided[s] for s in latest}

    def open(self, unit: int, numel: int) -> None:
        """Prepare a gather of a unit of `numel` elements: add its retained differences."""
        if unit not in self._arrays:
            self._arrays[unit] = np.empty(numel, np.float32)
            self._chunks[unit] = {}
        if unit not in self._retained:
            return
        decided = self._decided
        for begin, retained in list(self._retained[unit].items()):
            if retained.step not in decided and retained.step > max(decided, default=-1):
                continue
            del self._retained[unit][begin]
            if decided.get(retained.step) == retained.hyper:
                header, chunk = retained.header, self.find(unit, begin, begin + retained.header.numel)
                if chunk is not None and chunk.version == header.base:
                    self.add(unit, header, retained.payload, retained.compressor, chunk.epoch, header.version)

    def version(self, unit: int, begin: int, end: int, epoch: int | None) -> int | None:
        """Return the oldest version of elements [begin, end); None if some are not known, or of another epoch.

        Args:
            unit: number of an open unit.
            begin: first element; the first of a chunk.
            end: one past the last; the end of a chunk.
            epoch: the wanted epoch; None = any, the same for all.
        """
        chunks = self._within(unit, begin, end)
        if not chunks or {c.epoch for c in chunks} != {chunks[0].epoch if epoch is None else epoch}:
            return None
        return min(c.version for c in chunks)

    def current(self, unit: int, begin: int, end: int, epoch: int, min_version: int) -> int | None:
        """Return the version of elements [begin, end), if a gather can use it; None if they must be requested.

        Their digests are compared first.

        Args:
            unit, begin, end: as for `version`.
            epoch: the wanted epoch.
            min_version: the oldest version of the job accepted.
        """
        version, chunks = self.version(unit, begin, end, epoch), self._within(unit, begin, end)
        if version is None or any(c.version != version or c.current < min_version for c in chunks):
            return None
        fits = True
        for chunk in chunks:
            fits &= self._is_intact(unit, begin, chunk)
            begin = chunk.end
        return version if fits else None

    def _is_intact(self, unit: int, begin: int, chunk: _Chunk) -> bool:
        """Return True if a chunk is intact; else forget it."""
        if self._has_digest(unit, begin, self.values(unit, begin, chunk.end), chunk.version, chunk.digest):
            return True
        self.forget(unit, begin, chunk.end)
        return False

    def values(self, unit: int, begin: int, end: int) -> Array:
        """Return elements of an open unit, f32[end - begin]. Those of unknown chunks are arbitrary."""
        return self._arrays[unit][begin:end]

    def find(self, unit: int, begin: int, end: int) -> _Chunk | None:
        """Return the known state of a chunk."""
        chunk = self._chunks[unit].get(begin)
        return chunk if chunk is not None and chunk.end == end else None

    def put(self, unit: int, header: common_pb2.Chunk, values: Array, epoch: int, current: int) -> bool:
        """Take a chunk's values, f32[c]; returns False, and forgets the chunk, if they are not those sent."""
        begin, end = header.offset, header.offset + header.numel
        self._chunks[unit].pop(begin, None)
        np.copyto(self.values(unit, begin, end), values)
        return self._known(unit, header, epoch, current)

    def add(
        self, unit: int, header: common_pb2.Chunk, payload: Array, compressor: Compressor, epoch: int, current: int
    ) -> bool:
        """Add a difference to a chunk at its base; returns False, and forgets the chunk, if the sum does not match.

        Raises:
            InvalidRequest: it is not a difference. Nothing is changed.
        """
        begin, end = header.offset, header.offset + header.numel
        compressor.accumulate(payload, self.values(unit, begin, end))
        self._chunks[unit].pop(begin, None)
        return self._known(unit, header, epoch, current)

    def confirm(self, unit: int, header: common_pb2.Chunk, current: int) -> bool:
        """Return True if chunks equal the server's, which did not change up to the job's version `current`.

        Otherwise they are forgotten.
        """
        begin, end = header.offset, header.offset + header.numel
        chunks = self._within(unit, begin, end)
        fits = all(c.version == header.version for c in chunks) and bool(chunks)
        if fits and self._fits(unit, header):
            for chunk in chunks:
                chunk.current = max(chunk.current, current)
            return True
        self.forget(unit, begin, end)
        return False

    def retain(
        self,
        unit: int,
        header: common_pb2.Chunk,
        payload: Array,
        compressor: Compressor,
        step: int,
        hyper: tuple[Hyper, ...],
    ) -> Array | None:
        """Retain a difference; returns f32[c], the values if the step commits as expected; None if they mismatch.

        See Note: [Differences of an undecided step].

        Raises:
            InvalidRequest: it is not a difference. Nothing is changed.
        """
        begin, end = header.offset, header.offset + header.numel
        values = self.values(unit, begin, end).copy()
        compressor.accumulate(payload, values)
        if not self._has_digest(unit, begin, values, header.version, header.digest):
            self.forget(unit, begin, end)
            return None
        retained = _Retained(step, hyper, header, payload.copy(), compressor)
        self._retained.setdefault(unit, {})[begin] = retained
        return values

    def forget(self, unit: int, begin: int, end: int) -> None:
        """Forget elements."""
        for first in [first for first in self._chunks[unit] if begin <= first < end]:
            del self._chunks[unit][first]

    def _within(self, unit: int, begin: int, end: int) -> list[_Chunk]:
        """Return the chunks that are exactly elements [begin, end); empty if one is not known."""
        chunks, known = self._chunks.get(unit, {}), []
        while begin < end:
            chunk = chunks.get(begin)
            if chunk is None or chunk.end > end:
                return []
            known.append(chunk)
            begin = chunk.end
        return known

    def _known(self, unit: int, header: common_pb2.Chunk, epoch: int, current: int) -> bool:
        if not self._fits(unit, header):
            return False
        version = header.version
        chunk = _Chunk(header.offset + header.numel, epoch, version, max(version, current), header.digest)
        self._chunks[unit][header.offset] = chunk
        return True

    def _fits(self, unit: int, header: common_pb2.Chunk) -> bool:
        begin, end = header.offset, header.offset + header.numel
        return self._has_digest(unit, begin, self.values(unit, begin, end), header.version, header.digest)

    def _has_digest(self, unit: int, begin: int, values: Array, version: int, expected: int) -> bool:
        from axon_ps.kernels.digest import digest  # imports numba, so only if needed

        if digest(values.view(np.uint32), 0, values.size) == expected:
            return True
        self.mismatches += 1
        _logger.warning(
            "elements %d to %d of unit %d are not what the shard server has of version %d: memory of this host or of "
            "the server's does not hold what was written; they are gathered in full",
            begin,
            begin + values.size,
            unit,
            version,
        )
        return False


@dataclass(kw_only=True)
class Gathering:
    """One gather of a range of a slice, message by message.

    Attributes:
        received: the values received before.
        s: the slice.
        begin: first element requested; the first of a chunk.
        end: one past the last; the end of a chunk.
        chunk_numel: elements of a chunk.
        compressor: of differences.
        epoch: number of restores of the job.
        min_version: the oldest version accepted.
        out: wire[...], gets the elements in its range.
        out_begin: first element of `out` in the unit.
        dtype: of `out`.
        step: speculative: the step.
        expected: speculative: the hyperparameters that it is expected to commit with; empty = not speculative.
        since: the version that differences can be added to; None = all values must be sent.
        refused: whether a message could not be added. Its chunk was forgotten, and must be gathered again.

    Raises:
        StepAborted: it is speculative, and there are no values that differences could be added to.
    """

    received: Received
    s: Slice
    begin: int
    end: int
    chunk_numel: int
    compressor: Compressor
    epoch: int
    min_version: int
    out: Array
    out_begin: int
    dtype: DType
    step: int = 0
    expected: tuple[Hyper, ...] = ()
    refused: bool = False

    def __post_init__(self) -> None:
        epoch = None if self.expected else self.epoch
        self.since = self.received.version(self.s.unit, self.begin, self.end, epoch)
        if self.expected and self.since is None:
            raise StepAborted(
                f"this worker has no version of all of unit {self.s.unit} that what step {self.step} changes could "
                "be added to; it is gathered once the step is decided"
            )

    def finished(self) -> int | None:
        """Copy the known values to `out` and return their version, if nothing has to be requested; else None."""
        unit = self.s.unit
        version = self.received.current(unit, self.begin, self.end, self.epoch, self.min_version)
        if version is not None:
            self._copy(self.begin, self.received.values(unit, self.begin, self.end))
        return version

    def take(self, header: common_pb2.Chunk, payload: memoryview) -> None:
        """Take a message. Its range must have been checked.

        Raises:
            InvalidRequest: it was not requested. The known values stay.
            Broken: its values differ from those sent.
            StepAborted: the gather is speculative, and the message cannot be added to the known values.
        """
        unit, begin, end = self.s.unit, header.offset, header.offset + header.numel
        self._check(header)
        if header.absent:
            taken = self.received.confirm(unit, header, self.min_version)
        elif self.expected:
            self._take_speculative(header, payload)
            return
        elif header.compressed:
            taken = self._add(header, self._payload(header, payload))
        else:
            values = payload_array(header, payload, header.numel)
            if not self.received.put(unit, header, values, self.epoch, self.min_version):
                raise Broken(f"elements {begin} to {end} of unit {unit} did not arrive as they were sent")
            taken = True
        self.refused |= not taken
        if taken:
            self._copy(begin, self.received.values(unit, begin, end))

    def _check(self, header: common_pb2.Chunk) -> None:
        """Check that a message was requested."""
        numel = min(self.chunk_numel, self.s.end - header.offset)
        is_difference = header.HasField("base")
        against = header.base if is_difference else header.version
        wrong = (
            header.unit != self.s.unit
            or not header.HasField("digest")
            or dtype_from_proto(header.dtype) is not DType.F32
            or is_difference != header.compressed
            or (header.absent and (is_difference or bool(self.expected)))
            or (not header.absent and header.numel != numel)
            or ((header.absent or is_difference) and against != self.since and not self.expected)
            or (is_difference and header.version <= header.base)
        )
        if wrong:
            raise InvalidRequest(
                f"elements {header.offset} to {header.offset + header.numel} of unit {header.unit} came as a "
                f"{'difference' if is_difference else 'message'} from version {against} to {header.version}; asked for "
                f"was what leads from version {self.since} on, in chunks of {self.chunk_numel} elements with digests"
            )

    def _payload(self, header: common_pb2.Chunk, payload: memoryview) -> Array:
        return payload_array(header, payload, self.chunk_numel, self.compressor.compressed_bytes)

    def _add(self, header: common_pb2.Chunk, payload: Array) -> bool:
        """Add a difference, unless another gather has added it; returns True if the values are those after it."""
        received, unit = self.received, self.s.unit
        chunk = received.find(unit, header.offset, header.offset + header.numel)
        if chunk is not None and chunk.epoch == self.epoch:
            if chunk.version == header.base:
                return received.add(unit, header, payload, self.compressor, self.epoch, self.min_version)
            if chunk.version == header.version:
                return received.confirm(unit, header, self.min_version)
        received.forget(unit, header.offset, header.offset + header.numel)
        return False

    def _take_speculative(self, header: common_pb2.Chunk, payload: memoryview) -> None:
        """Take a difference of an undecided step, if its base is the known version."""
        received, unit = self.received, self.s.unit
        chunk = received.find(unit, header.offset, header.offset + header.numel)
        if header.compressed and chunk is not None and chunk.version == header.base:
            data = self._payload(header, payload)
            values = received.retain(unit, header, data, self.compressor, self.step, self.expected)
            if values is not None:
                self._copy(header.offset, values)
                return
        raise StepAborted(
            f"this worker does not have version {header.base} of unit {unit}, which a difference of step {self.step} "
            "must be added to; it is gathered once the step is decided"
        )

    def _copy(self, begin: int, values: Array) -> None:
        """Copy values, f32[...] from element `begin` on, to `out` where they overlap."""
        first, last = max(begin, self.out_begin), min(begin + values.size, self.out_begin + self.out.size)
        if first >= last:
            return
        target, values = self.out[first - self.out_begin : last - self.out_begin], values[first - begin : last - begin]
        if self.dtype is DType.F32:
            np.copyto(target, values)
            return
        from axon_ps.compress import cast  # imports numba, so only if needed

        cast.encode(values, target, self.dtype)

"""The parameters of one model on one shard server: their completeness, and their frames to serve. Pure.

First values come from a worker, chunk by chunk. Later they may be replaced, from a checkpoint or by a worker. Nothing
is served meanwhile.
"""

from __future__ import annotations

from collections import Counter

from axon_ps.errors import InvalidRequest, Misuse
from axon_ps.shard.core.slices import OwnedSlice, OwnedSlices
from axon_ps.types import Array, DType


class ServedParameters:
    """The values in all slices of a model.

    Args:
        slices: of the model.
        counters: counters of duplicates, encodings and restores.

    Attributes:
        lacking: chunks that lack values, except of slices that come from another holder.
    """

    def __init__(self, slices: OwnedSlices, counters: Counter[str]) -> None:
        self.lacking = 0
        self._slices = slices
        self._counters = counters
        self._restoring = False
        self._replacing = False

    @property
    def initialized(self) -> bool:
        """True if every slice here has values, or gets them from another holder."""
        return self._slices.num_units is not None and self.lacking == 0

    @property
    def replacing(self) -> bool:
        """True while a worker uploads other values and the previous ones are gone."""
        return self._replacing and self.lacking > 0

    @property
    def serving(self) -> bool:
        """True if the values here are those of the model's version, or will be once every unit has been applied."""
        return self.initialized and not self._restoring

    def count(self) -> None:
        """Count the chunks that lack values, after slices were made or withdrawn."""
        self.lacking = sum(s.lacking for s in self._slices.values() if not (s.copying or s.corrupt))

    # ------------------------------------------------------------------ values that replace others

    def upload(self, unit: int, offset: int, values: Array, version: int) -> bool:
        """Store, and publish the slice if it is full; returns True if every slice here now has its values."""
        owned = self.store(unit, offset, values, version)
        if owned is not None:
            self.published(owned.publish(version))
        return self.lacking == 0

    def store(self, unit: int, offset: int, values: Array, version: int) -> OwnedSlice | None:
        """Store the first values of one chunk; returns its slice, to be published, once it has all of its values.

        Once all values are stored, further values are acknowledged and dropped, so that a retry does no harm.

        Args:
            unit: number of the unit.
            offset: first element of the chunk in it.
            values: f32[c].
            version: of the model.

        Raises:
            Misuse: the layout is not known yet, or steps were committed already.
            InvalidRequest: that slice is not here, no chunk begins there, or the length is wrong.
        """
        owned = self._slices.of(unit, offset)
        index = owned.chunks.index_of(offset)
        if version and not self._replacing:
            raise Misuse(f"first values came at version {version}; restore a checkpoint to replace parameters")
        if not owned.lacking or owned.arriving.complete:
            self._counters["duplicates"] += 1
            return None
        before = owned.lacking
        owned.arriving.store(index, values, owned.master.values)
        self.lacking += owned.lacking - before
        return owned if owned.arriving.complete else None

    def published(self, frames: int) -> None:
        """Count a slice that was published, and the frames made for it."""
        self._counters["encodings"] += frames
        self.lacking -= 1

    def begin_restore(self, *, uploaded: bool = False) -> None:
        """Serve nothing until `restored` or `cancel_restore`, since other values are coming.

        Args:
            uploaded: whether a worker uploads them.
        """
        self._restoring = True
        self._replacing = uploaded

    def withdraw(self) -> None:
        """Withdraw the values, which will be overwritten. `restored` must follow. Not while a unit is being applied."""
        for owned in self._slices.values():
            assert not owned.applying
            owned.withdraw()
        self.count()

    def cancel_restore(self) -> None:
        """Serve the previous values again after a failed restore, unless they were withdrawn."""
        self._restoring = False

    def restored(self) -> None:
        """Serve the new values, which every slice has published."""
        self.lacking = 0
        self._restoring = self._replacing = False
        self._counters["restores"] += 1

    # ------------------------------------------------------------------ what is served

    def available(self, unit: int, begin: int, min_version: int) -> bool:
        """Return True if the slice of `unit` with element `begin` can be served at `min_version` or later.

        Steps advance the version of a frozen unit, too.

        Raises:
            Misuse: the layout is not known.
            SliceMoved: that slice is not here.
        """
        owned = self._slices.of(unit, begin)
        has_values = bool(owned.wire.frames) or not (owned.lacking or owned.applying)
        return has_values and not self._restoring and owned.reached >= min_version

    def frames(self, unit: int, begin: int, end: int) -> tuple[bytes, ...]:
        """Return the encoded chunks of elements [begin, end) of a unit in the job's wire dtype, all of one version.

        Raises:
            InvalidRequest: the range does not begin and end where chunks of this server do.
            SliceMoved: that slice is not here, or is corrupt.
        """
        owned = self._slices.of(unit, begin)
        first, last = owned.chunks.range_of(begin, end)
        self._counters["encodings"] += owned.ensure_frames()
        frames = owned.wire.frames
        return frames if last - first == len(frames) else frames[first:last]

    def since(self, unit: int, begin: int, end: int, version: int | None) -> tuple[bytes, ...]:
        """Return the messages that update a worker to a slice's version, if parameters are sent as differences.

        Args:
            unit: number of the unit.
            begin: first element; the first of a chunk.
            end: one past the last; the end of a chunk.
            version: the version that the caller has; None = none.

        Returns:
            Differences, or one message without values if the worker is up to date. Empty if the caller needs all values
            (`full`), or a step is being applied.

        Raises:
            InvalidRequest: the range does not begin and end where chunks of this server do.
            SliceMoved: that slice is not here.
        """
        owned = self._slices.of(unit, begin)
        first, last = owned.chunks.range_of(begin, end)
        if frames := owned.wire.frames_since(version, first, last):
            return frames
        if owned.applying or version != owned.changed:
            return ()
        return (owned.full_frame(first, last, absent=True),)

    def full(self, owned: OwnedSlice, index: int) -> bytes:
        """Return all values of a chunk if parameters are sent as differences. Only while the slice is not `applying`.

        Raises:
            SliceMoved: its values are corrupt.
        """
        self._counters["encodings"] += 1
        return owned.full_frame(index, index + 1, absent=False)

    def encode(self, owned: OwnedSlice, index: int, dtype: DType) -> bytes:
        """Encode one chunk in another dtype. It is called only while the slice is not `applying`.

        Raises:
            SliceMoved: its values are corrupt.
            InvalidRequest: they are words of raw parameters, and the dtype is not F32.
        """
        if owned.raw and dtype is not DType.F32:
            raise InvalidRequest(
                f"unit {owned.chunks.unit} consists of raw parameters, and was requested as {dtype.value}; its words "
                "are sent as f32"
            )
        self._counters["encodings"] += 1
        return owned.encode(index, dtype)

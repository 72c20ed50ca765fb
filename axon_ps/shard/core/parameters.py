"""The parameters of one model on one shard server: whether they are all there, and their frames to serve. Pure.

Values come first from a worker, chunk by chunk. Later others may take their place, from a checkpoint or again from a
worker; nothing is served meanwhile.
"""

from __future__ import annotations

from collections import Counter

from axon_ps.errors import Misuse
from axon_ps.shard.core.slices import OwnedSlice, OwnedSlices
from axon_ps.types import Array, DType


class ServedParameters:
    """The values in all slices of a model.

    Args:
        slices: of the model.
        counters: where duplicates, encodings and restores are counted.

    Attributes:
        lacking: chunks that lack first values.
    """

    def __init__(self, slices: OwnedSlices, counters: Counter[str]) -> None:
        self.lacking = 0
        self._slices = slices
        self._counters = counters
        self._restoring = False
        self._replacing = False

    @property
    def initialized(self) -> bool:
        """Whether every owned slice has values."""
        return self._slices.num_units is not None and self.lacking == 0

    @property
    def replacing(self) -> bool:
        """Whether a worker is bringing other values, and those from before are gone."""
        return self._replacing and self.lacking > 0

    @property
    def serving(self) -> bool:
        """Whether the values here are those of the model's version, or will be when every unit has been applied."""
        return self.initialized and not self._restoring

    def count(self) -> None:
        """The slices were made, or their values withdrawn: count the chunks that lack values."""
        self.lacking = sum(s.lacking for s in self._slices.values() if not (s.copying or s.corrupt))

    # ------------------------------------------------------------------ values that replace others

    def upload(self, unit: int, offset: int, values: Array, version: int) -> bool:
        """As `store`, `OwnedSlice.publish` and `published`; returns whether every slice here now has its values."""
        owned = self.store(unit, offset, values, version)
        if owned is not None:
            self.published(owned.publish(version))
        return self.lacking == 0

    def store(self, unit: int, offset: int, values: Array, version: int) -> OwnedSlice | None:
        """Store the first values of one chunk; returns its slice once that has all of its values: publish them.

        Once all are there, further values are acknowledged and dropped, so that a retry does no harm.

        Args:
            unit: which unit.
            offset: where the chunk begins in it.
            values: f32[c].
            version: of the model.

        Raises:
            Misuse: no layout yet, or steps were committed already.
            InvalidRequest: that slice is not here, no chunk begins there, or the length is wrong.
        """
        owned = self._slices.of(unit, offset)
        index = owned.chunks.index_of(offset)
        if version and not self._replacing:
            raise Misuse(f"first values came at version {version}; restore a checkpoint to replace parameters")
        if not owned.lacking or owned.stored:
            self._counters["duplicates"] += 1
            return None
        before = owned.lacking
        owned.store(index, values)
        self.lacking += owned.lacking - before
        return owned if owned.stored else None

    def published(self, frames: int) -> None:
        """A slice with all of its values was published, which made so many frames."""
        self._counters["encodings"] += frames
        self.lacking -= 1

    def begin_restore(self, *, uploaded: bool = False) -> None:
        """Other values are on their way: nothing is served until `restored` or `cancel_restore`.

        Args:
            uploaded: a worker brings them.
        """
        self._restoring = True
        self._replacing = uploaded

    def withdraw(self) -> None:
        """The values are being overwritten: without `restored` there are none. Not while a unit is being applied."""
        for owned in self._slices.values():
            assert not owned.applying
            owned.withdraw()
        self.count()

    def cancel_restore(self) -> None:
        """The restore failed: serve what is there, if it was not withdrawn."""
        self._restoring = False

    def restored(self) -> None:
        """Every slice has published other values: serve them."""
        self.lacking = 0
        self._restoring = self._replacing = False
        self._counters["restores"] += 1

    # ------------------------------------------------------------------ what is served

    def available(self, unit: int, begin: int, min_version: int) -> bool:
        """Whether the slice of `unit` with element `begin` can be served at `min_version` or later.

        A frozen unit's version is that of its last copy.

        Raises:
            Misuse: the layout is not known.
            SliceMoved: that slice is not here.
        """
        owned = self._slices.of(unit, begin)
        has_values = bool(owned.wire.frames) or not (owned.lacking or owned.applying)
        return has_values and not self._restoring and owned.reached >= min_version

    def frames(self, unit: int, begin: int, end: int) -> tuple[bytes, ...]:
        """The encoded chunks of elements [begin, end) of a unit in the job's wire dtype, all of one version.

        Raises:
            InvalidRequest: the range does not begin and end where chunks of this server do.
        """
        owned = self._slices.of(unit, begin)
        first, last = owned.chunks.range_of(begin, end)
        self._counters["encodings"] += owned.ensure_frames()
        frames = owned.wire.frames
        return frames if last - first == len(frames) else frames[first:last]

    def since(self, unit: int, begin: int, end: int, version: int | None) -> tuple[bytes, ...]:
        """The messages that lead from a version to that of a slice, where parameters travel as differences.

        Args:
            unit: which unit.
            begin: first element; the first of a chunk.
            end: one past the last; the end of a chunk.
            version: the version that the caller has; None = none.

        Returns:
            Differences, or one message that says that there are none. Empty where the caller must have all values
            (`full`), or a step is being applied.

        Raises:
            InvalidRequest: the range does not begin and end where chunks of this server do.
        """
        owned = self._slices.of(unit, begin)
        first, last = owned.chunks.range_of(begin, end)
        if frames := owned.wire.frames_since(version, first, last):
            return frames
        if owned.applying or version != owned.changed:
            return ()
        return (owned.full_frame(first, last, absent=True),)

    def full(self, owned: OwnedSlice, index: int) -> bytes:
        """All values of one chunk where parameters travel as differences. Only while the slice is not `applying`."""
        self._counters["encodings"] += 1
        return owned.full_frame(index, index + 1, absent=False)

    def encode(self, owned: OwnedSlice, index: int, dtype: DType) -> bytes:
        """One chunk in another dtype, encoded now. Only while the slice is not `applying`."""
        self._counters["encodings"] += 1
        return owned.encode(index, dtype)

"""The versions of a model that a server retains for subscribers, and the order in which it drops them. Pure.

Note: [A version that all servers have]
    A subscriber needs the same version from every server, while steps go on and servers do not know each other's
    versions. So it first sends each server a *reserve*: the server names its version, and retains that and all later
    ones for the subscriber. The subscriber chooses the newest version named. Every server has it, or will have it,
    because steps commit on all servers. Then the subscriber *pulls* that version, which releases the others. With
    `multiple_of`, only multiples are retained. So subscribers with the same interval pull the same versions, and each
    version is encoded once.

Note: [What a publication is made of]
    Frames are replaced and never changed (`shard.core.wire_copy`). So if a slice has frames in the dtype wanted, its
    version is retained by a reference to them, without encoding or copying. A slice without them (workers map it, or
    another dtype is wanted) is encoded once from the master, before the next step may change it.

Note: [Memory limit]
    All retained versions together take at most `max_bytes`. One is always retained. Beyond that the oldest is dropped,
    first among those that are only a base for comparisons. If a subscriber has not pulled a version within `retain_s`
    of its first one, all of its versions are released, too. A request for a dropped version gets `Busy`. The subscriber
    then takes a newer version.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from axon_ps.errors import Busy
from axon_ps.shard.core.slices import OwnedSlice
from axon_ps.types import Array, DType
from axon_ps.wire.changes import encode_changes
from axon_ps.wire.codec import dtype_from_proto
from axon_ps.wire.frames import decode_chunk, encode_chunk

Key = tuple[int, int, DType]
"""Epoch, version and dtype."""


class Publication:
    """One version of a server's slices in one dtype.

    Args:
        key: epoch, version and dtype.

    Attributes:
        key: as given.
        changed: the version that last changed each slice, by its number.
        frames: the encoded chunks of each slice that is encoded already, by its number.
        dropped: whether `drop` was called.
    """

    def __init__(self, key: Key) -> None:
        self.key = key
        self.changed: dict[int, int] = {}
        self.frames: dict[int, tuple[bytes, ...]] = {}
        self.dropped = False
        self._changes: dict[int, dict[int, tuple[bytes, ...]]] = {}
        self._bytes = 0

    def add(self, slices: Iterable[OwnedSlice], *, shared: bool) -> list[OwnedSlice]:
        """Add slices at this version, none of them `applying`; returns those that must be encoded, ascending.

        Args:
            slices: the slices. Those that it has already stay as they are.
            shared: whether the slices' own frames have this dtype.
        """
        lacking: list[OwnedSlice] = []
        for owned in slices:
            if owned.number in self.changed:
                continue
            self.changed[owned.number] = owned.changed
            self._bytes += owned.chunks.numel * self._dtype_of(owned).itemsize
            if shared and owned.wire.frames:
                self.frames[owned.number] = owned.wire.frames
            else:
                lacking.append(owned)
        return lacking

    @property
    def complete(self) -> bool:
        """True if all of it is encoded."""
        return len(self.frames) == len(self.changed)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes."""
        differences = sum(len(frame) for each in self._changes.values() for some in each.values() for frame in some)
        return self._bytes + differences

    def encode(self, owned: OwnedSlice) -> int:
        """Encode a missing slice, which is still at this version; returns the number of chunks. Any thread may call it.

        Raises:
            SliceMoved: its values are corrupt.
        """
        values, chunks = owned.master.values, enumerate(owned.chunks.ranges)
        version, dtype = self.changed[owned.number], self._dtype_of(owned)
        owned.check_values(0, len(owned.chunks.bounds))
        frames = tuple(owned.wire.encode_as(dtype, index, version, values[elements]) for index, elements in chunks)
        self.frames[owned.number] = frames
        return len(frames)

    def _dtype_of(self, owned: OwnedSlice) -> DType:
        """Return the dtype in which a slice is encoded: words of raw parameters are never cast."""
        return owned.precision.param if owned.raw else self.key[2]

    def has_changes(self, base: Publication) -> bool:
        """Return True if `encode_changes` was called with this older publication."""
        return base.key[1] in self._changes

    def encode_changes(self, base: Publication) -> None:
        """Encode the changes from an older complete publication of the same dtype and epoch. Any thread may call it."""
        numbers = [n for n, changed in self.changed.items() if changed > base.key[1]]
        old, new = dict(base.frames), dict(self.frames)
        made = {n: _changes(old[n], new[n]) for n in numbers if n in old and n in new}
        self._changes[base.key[1]] = made

    def frames_since(self, number: int, since: int, *, changes: bool) -> tuple[bytes, ...]:
        """Return the chunks of a slice for a subscriber at version `since` (-1 = none); empty if nothing changed.

        Args:
            number: number of the slice.
            since: the subscriber's version.
            changes: whether chunks may carry changes only.

        Raises:
            Busy: this publication was dropped.
            KeyError: the slice is not in it.
        """
        if self.dropped:
            raise Busy(f"version {self.key[1]} is retained no longer; take a newer one")
        if self.changed[number] <= since:
            return ()
        if changes and number in (known := self._changes.get(since, {})):
            return known[number]
        return self.frames[number]

    def drop(self) -> None:
        """Free its memory. A subscriber that still reads it gets `Busy`."""
        self.dropped = True
        self.frames, self._changes = {}, {}


def _changes(old: tuple[bytes, ...], new: tuple[bytes, ...]) -> tuple[bytes, ...]:
    """Return for each chunk a frame of the changes, or the full frame if that is smaller."""
    frames: list[bytes] = []
    for before, after in zip(old, new, strict=True):
        header, payload = decode_chunk(after)
        dtype = dtype_from_proto(header.dtype)
        small = encode_changes(_elements(decode_chunk(before)[1], dtype), _elements(payload, dtype))
        header.compressed = small is not None
        frames.append(after if small is None else encode_chunk(header, small))
    return tuple(frames)


def _elements(payload: memoryview, dtype: DType) -> Array:
    return np.frombuffer(payload, dtype.numpy)


@dataclass(frozen=True, kw_only=True)
class Wish:
    """The versions that a subscriber wants.

    Attributes:
        dtype: element type of the values.
        epoch: number of restores of the model, as far as the subscriber knows.
        min_version: the oldest version wanted of that epoch. Any version of a later epoch is accepted.
        multiple_of: versions must be multiples of this.
    """

    dtype: DType
    epoch: int = 0
    min_version: int = 0
    multiple_of: int = 1

    def wants(self, epoch: int, version: int) -> bool:
        """Return True if the subscriber wants a version."""
        if epoch != self.epoch:
            return epoch > self.epoch
        return version >= self.min_version and version % self.multiple_of == 0


class Subscriber:
    """The versions that are retained for one subscriber.

    Attributes:
        wish: the versions that it reserves; None if it reserves nothing.
        reserved: the publications that it may choose from, oldest first.
        reserved_s: time at which the first of them was made.
        base: the publication it pulled last; None unless changes are to be made from it.
    """

    def __init__(self) -> None:
        self.wish: Wish | None = None
        self.reserved: list[Publication] = []
        self.reserved_s = 0.0
        self.base: Publication | None = None


class Publications:
    """The versions that are retained for all subscribers of a model.

    Args:
        max_bytes: memory limit; see Note: [Memory limit].
        retain_s: seconds for which a version is retained for an idle subscriber.
        counters: counters of publications.
    """

    def __init__(self, max_bytes: float, retain_s: float, counters: Counter[str]) -> None:
        self._max_bytes = max_bytes
        self._retain_s = retain_s
        self._counters = counters
        self._subscribers: list[Subscriber] = []
        self._published: dict[Key, Publication] = {}

    def __len__(self) -> int:
        return len(self._published)

    @property
    def nbytes(self) -> int:
        """Bytes of all that is retained."""
        return sum(publication.nbytes for publication in self._published.values())

    def add(self, subscriber: Subscriber) -> None:
        """Add a subscriber."""
        self._subscribers.append(subscriber)

    def remove(self, subscriber: Subscriber) -> None:
        """Remove a subscriber."""
        self._subscribers.remove(subscriber)
        self._prune()

    def publish(
        self, epoch: int, version: int, slices: Iterable[OwnedSlice], own_dtype: DType | None, now_s: float
    ) -> list[tuple[Publication, list[OwnedSlice]]]:
        """Retain the version of all slices for its subscribers; return the slices that must be encoded.

        It may be called again for the same version with more slices.

        Args:
            epoch: of the values.
            version: of the model.
            slices: the slices of which this server is the primary.
            own_dtype: the dtype of their frames; None if they are compressed.
            now_s: the time.
        """
        self._expire(epoch, now_s)
        lacking: dict[Key, list[OwnedSlice]] = {}
        slices = list(slices)
        for subscriber in self._subscribers:
            if subscriber.wish is None or not subscriber.wish.wants(epoch, version):
                continue
            key = epoch, version, subscriber.wish.dtype
            if key not in lacking:
                publication = self._published.setdefault(key, Publication(key))
                self._counters["published"] += not publication.changed
                lacking[key] = publication.add(slices, shared=key[2] is own_dtype)
            if self._published[key] not in subscriber.reserved:
                subscriber.reserved_s = subscriber.reserved_s if subscriber.reserved else now_s
                subscriber.reserved.append(self._published[key])
        made = [(self._published[key], some) for key, some in lacking.items() if some]
        self._evict()
        return made

    def reserve(self, subscriber: Subscriber, wish: Wish) -> None:
        """Retain versions for a subscriber from now on."""
        subscriber.wish, subscriber.reserved = wish, []
        self._prune()

    def choose(self, subscriber: Subscriber, epoch: int, version: int, present: tuple[int, int]) -> Publication | None:
        """Return the version that a subscriber has chosen. Its other reserved ones are released. None = it is to come.

        Args:
            subscriber: the subscriber.
            epoch, version: the version it has chosen.
            present: epoch and version of the model.

        Raises:
            Busy: this version is not retained, and it is too late to retain it.
        """
        chosen = [p for p in subscriber.reserved if p.key[:2] == (epoch, version)]
        if chosen:
            subscriber.wish, subscriber.reserved = None, chosen
            self._prune()
            return chosen[0]
        if subscriber.wish is None or not subscriber.wish.wants(epoch, version) or present >= (epoch, version):
            raise Busy(f"version {version} of epoch {epoch} is not retained (any longer); take a newer one")
        return None

    def done(self, subscriber: Subscriber, *, compare: bool) -> None:
        """Release the version that a subscriber has received, unless its next version is to be compared with it."""
        chosen, subscriber.reserved = subscriber.reserved, []
        subscriber.base = chosen[-1] if chosen and compare else None
        self._prune()

    def clear(self) -> None:
        """Drop all versions, because the values are replaced."""
        for publication in self._published.values():
            publication.drop()
        for subscriber in self._subscribers:
            subscriber.reserved, subscriber.base = [], None
        self._prune()

    def _expire(self, epoch: int, now_s: float) -> None:
        for subscriber in self._subscribers:
            if subscriber.reserved and now_s - subscriber.reserved_s > self._retain_s:
                subscriber.wish, subscriber.reserved = None, []
            if subscriber.base is not None and subscriber.base.key[0] != epoch:
                subscriber.base = None
        self._prune()

    def _prune(self) -> None:
        wanted = {p.key for s in self._subscribers for p in (*s.reserved, *filter(None, (s.base,)))}
        for key in self._published.keys() - wanted:
            self._published.pop(key).drop()

    def _evict(self) -> None:
        for only_bases in (True, False):
            for publication in sorted(self._published.values(), key=lambda p: p.key[:2]):
                if self.nbytes <= self._max_bytes or len(self._published) == 1:
                    return
                reserved = any(publication in s.reserved for s in self._subscribers)
                if not (only_bases and reserved):
                    self.give_way(publication)

    def give_way(self, publication: Publication) -> None:
        """Drop a version. Subscribers that wanted it get `Busy`, and take a newer one."""
        self._counters["published_dropped"] += 1
        for subscriber in self._subscribers:
            subscriber.reserved = [p for p in subscriber.reserved if p is not publication]
            if subscriber.base is publication:
                subscriber.base = None
        self._prune()

"""Access of the ranks of one host to each other's arrays, in a large collective.

Owns: the two ways of access, and the choice between them. Refuses: to know the use of the bytes.

    mapped   the array is shared (`host.shared_arrays`): the peers map it and compute on it where it is
    slots    every rank copies the part of its array that the peers need into its slot of a shared segment, one window
             after the other, and the peers work on it there, in the cache. Slots are used if an array is in ordinary
             memory

All ranks of a call use slots, or none does: every rank sees all descriptors and decides the same.

Note: [Two windows]
    Slots are double-buffered: a rank has one for even and one for odd windows. Two windows in the same slot have a
    window in between, and its barrier; a rank comes to that barrier only after it has finished the window before. So no
    rank still reads a slot when the next window is written into it.

No rank touches private memory of another. So a rank that gives up a call may use its arrays at once, however late a
stopped peer wakes up. If all ranks have shared arrays, peers write to them in an all-reduce or a reduce. A rank that
gives up such a call first revokes the peers' access (`SharedArrays.revoke`).

    terms: a rank's source is the array that its peers read, partitions one after the other (one for each rank, or a
    single one); positions are elements of a partition
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from axon_ps.collectives.backends.shm.control import (
    DESCRIPTOR,
    DESCRIPTOR_BYTES,
    FAILURE,
    SENT,
    SLOT_STATE,
    SLOTS,
    Control,
)
from axon_ps.errors import AxonError, Busy
from axon_ps.host import shared_memory
from axon_ps.host.host_peer import HostPeer
from axon_ps.host.leases import address_of
from axon_ps.host.shared_arrays import shared_arrays
from axon_ps.host.shared_memory import Segment
from axon_ps.types import Array, DType

Copy = Callable[[Array, Array], object]
"""Copies data: T[n] to out: T[n], the first argument."""

_NO_SOURCE, _PRIVATE, _SHARED = range(3)
_DESCRIPTOR = struct.Struct("<IQQQ")  # kind, segment, offset, size
_MADE, _FAILED = 1, 2

assert _DESCRIPTOR.size <= DESCRIPTOR_BYTES


class Descriptor(NamedTuple):
    """The location of one rank's source, as published in its header."""

    kind: int
    segment: int
    offset: int
    size_bytes: int


class PeerMemory:
    """Access to the arrays of the other ranks; lives as long as the backend.

    `location`, `location_for` and `mapped` may be called by any thread, the rest by one at a time.

    Args:
        control: control segment of the group.
        peers: the other ranks, by position.
        slot_bytes: bytes of a slot; every rank has two.
    """

    def __init__(self, control: Control, peers: Sequence[HostPeer | None], slot_bytes: int) -> None:
        self.control = control
        self.slot_bytes = slot_bytes
        self.bytes_mapped = 0
        self._peers = peers
        self._others = [peer for peer in peers if peer is not None]
        self._lock = threading.Lock()
        self._slots: list[list[Array]] | None = None  # by buffer index and rank
        self._record = control.layout.record(control.rank) + SENT
        self._closed_seen = Segment.closed
        self._taken = [0] * len(peers)

    # ------------------------------------------------------------------ ours

    def describe(self, source: Array | None, header: int) -> None:
        """Write the location of `source` for the peers into our header."""
        self._forget_closed()
        values = _NO_SOURCE, 0, 0, 0
        if source is not None:
            location = self.location(source, self._others)
            values = (_PRIVATE, 0, 0, source.nbytes) if location is None else (_SHARED, *location, source.nbytes)
        _DESCRIPTOR.pack_into(self.control.memory, header + DESCRIPTOR, *values)

    def location(self, array: Array, peers: Sequence[HostPeer]) -> tuple[int, int] | None:
        """Return segment and offset of an array for these peers; None = they cannot map it, so it must be copied."""
        address = address_of(array)
        shared = shared_arrays.find(address, array.nbytes)
        if shared is None or not self._offer(shared.segment, peers):
            return None
        return shared.segment.number, address - shared.base

    def location_for(self, rank: int, array: Array) -> tuple[int, int] | None:
        """Return `location` for one rank."""
        peer = self._peers[rank]
        return None if peer is None else self.location(array, [peer])

    def _offer(self, segment: Segment, peers: Sequence[HostPeer]) -> bool:
        with self._lock:
            offered = all(peer.offer(segment) for peer in peers)
            self._publish_sent()
        return offered

    def _forget_closed(self) -> None:
        shared_arrays.sweep()
        if self._closed_seen != Segment.closed:
            with self._lock:
                self._closed_seen = Segment.closed
                for peer in self._others:
                    peer.forget_closed()
                self._publish_sent()

    def _publish_sent(self) -> None:
        """Publish the number of messages to peers: if it changes they look for segments that were passed or closed."""
        self.control.u64[self._record // 8] = sum(peer.messages for peer in self._others)

    # ------------------------------------------------------------------ the other ranks'

    def descriptors(self, buffer_index: int) -> list[Descriptor]:
        """Return the descriptors of all ranks."""
        layout, memory = self.control.layout, self.control.memory
        return [
            Descriptor(*_DESCRIPTOR.unpack_from(memory, layout.header(r, buffer_index) + DESCRIPTOR))
            for r in range(layout.world_size)
        ]

    def choose_slots(self, descriptors: Sequence[Descriptor], deadline: float) -> list[list[Array]] | None:
        """Return the slots, if this call uses them because an array is in no shared memory."""
        return self.slots(deadline) if any(d.kind == _PRIVATE for d in descriptors) else None

    def view(self, rank: int, descriptor: Descriptor, dtype: DType, own: Array | None) -> Array | None:
        """Return a rank's source that is a shared array, mapped here: T[]; None = it has none.

        Args:
            rank: the rank (position).
            descriptor: the descriptor that it published.
            dtype: dtype of the elements.
            own: our source.
        """
        if descriptor.kind != _SHARED:
            return None
        if rank == self.control.rank:
            return own
        view = self.mapped(rank, descriptor.segment, descriptor.offset, descriptor.size_bytes)
        self.bytes_mapped += view.nbytes
        return view.view(dtype.numpy)

    def mapped(self, rank: int, segment: int, offset: int, size_bytes: int) -> Array:
        """Return u8[size_bytes]: bytes of a segment of a rank (position), where they lie."""
        peer = self._peers[rank]
        assert peer is not None, "our own arrays are not looked up"
        try:
            with self._lock:
                return peer.view(segment, offset, size_bytes)
        except AxonError as error:
            raise self.control.fail(self.control.hung_up(rank, error)) from error

    def unmap_closed(self) -> None:
        """Unmap the segments that other ranks have closed."""
        u64, layout = self.control.u64, self.control.layout
        for rank, peer in enumerate(self._peers):
            passed = u64[(layout.record(rank) + SENT) // 8]
            if peer is not None and passed != self._taken[rank]:
                self._taken[rank] = passed
                try:
                    with self._lock:
                        peer.take()
                except AxonError as error:
                    raise self.control.fail(self.control.hung_up(rank, error)) from error

    def slots(self, deadline: float) -> list[list[Array]]:
        """Return all ranks' slots, u8[slot_bytes] by buffer index and rank; the first rank makes them when needed.

        Collective: every rank must call this.

        Raises:
            Busy: there is not enough memory; every rank raises it.
        """
        if self._slots is None:
            memory, n, size = self._make_slots(deadline), self.control.layout.world_size, self.slot_bytes
            self._slots = [
                [memory[(buffer_index * n + r) * size : (buffer_index * n + r + 1) * size] for r in range(n)]
                for buffer_index in (0, 1)
            ]
        return self._slots

    def close(self) -> None:
        """Unmap everything, and hang up."""
        self._slots = None
        for peer in self._others:
            peer.close()

    def _make_slots(self, deadline: float) -> Array:
        """Make u8[...]: the memory of all slots."""
        control, size_bytes = self.control, 2 * self.control.layout.world_size * self.slot_bytes
        segment: Segment | None = None
        if control.rank == 0:
            try:
                segment, memory = shared_memory.create(size_bytes)
                self._publish_slots(segment)
            except AxonError as error:
                control.put_text(FAILURE, str(error))
                control.u32[SLOT_STATE // 4] = _FAILED
        control.barrier(deadline)
        if control.u32[SLOT_STATE // 4] == _FAILED:
            lacking = Busy(control.text(FAILURE))
            control.fail(lacking)
            raise lacking
        if segment is None:
            (number,) = control.numbers(SLOTS, "<Q")
            memory = self.mapped(0, number, 0, size_bytes)
        control.barrier(deadline)
        if segment is not None:
            segment.close()  # all have mapped it
        return memory

    def _publish_slots(self, segment: Segment) -> None:
        if not self._offer(segment, self._others):
            segment.close()
            raise Busy("a rank takes nothing that it is passed: it is stopped, or has gone")
        self.control.put_numbers(SLOTS, "<Q", segment.number)
        self.control.u32[SLOT_STATE // 4] = _MADE


class Exchange:
    """The sources of one large collective.

    Attributes:
        slots: True = they go through slots: window by window, with a barrier after each is published.
        mapped: True = all of them are shared arrays that every rank has mapped.

    Args:
        peer_memory: access to the other ranks' arrays.
        descriptors: descriptors of all ranks.
        dtype: dtype of the elements.
        starts: by rank, the begins of the partitions of its source; None = it has no source.
        longest: elements of the longest partition of any rank.
        slots: the slots, if this call uses them.
        own: our source, if we have one.
    """

    def __init__(
        self,
        peer_memory: PeerMemory,
        descriptors: Sequence[Descriptor],
        dtype: DType,
        starts: Sequence[Sequence[int] | None],
        longest: int,
        slots: list[list[Array]] | None,
        own: Array | None,
    ) -> None:
        self.slots = slots is not None
        self.mapped = False
        self._peer_memory = peer_memory
        self._dtype = dtype
        self._starts = starts
        self._longest = longest
        self._views: list[Array | None] = []
        if slots is None:
            self.mapped = all(d.kind == _SHARED for d in descriptors)
            self._views = [peer_memory.view(r, d, dtype, own) for r, d in enumerate(descriptors)]
        else:
            self._window = self._window_numel(max(len(b) for b in starts if b is not None))
            usable_bytes = peer_memory.slot_bytes // dtype.itemsize * dtype.itemsize
            self._slots = [[slot[:usable_bytes].view(dtype.numpy) for slot in of_ranks] for of_ranks in slots]

    def _window_numel(self, partitions: int) -> int:
        """Return the elements of every partition that fit into a slot at a time."""
        return max(1, self._peer_memory.slot_bytes // partitions // 64 * 64 // self._dtype.itemsize)

    def windows(self, window_bytes: int = 0) -> Iterator[tuple[int, int]]:
        """Yield positions [lo, hi) in every partition, one window after the other.

        With slots, the current window and the one before can be pulled. See Note: [Two windows].

        Args:
            window_bytes: length of a window without slots; 0 = a full partition.
        """
        if self.slots:
            step = self._window
        else:
            step = max(1, window_bytes // self._dtype.itemsize) if window_bytes else max(1, self._longest)
        for lo in range(0, self._longest, step):
            yield lo, min(lo + step, self._longest)

    def _in_slot(self, rank: int, partition: int, lo: int, hi: int) -> Array:
        """Return the part of a rank's slots that has [lo, hi) of a partition of its source; it lies in one window."""
        window, at = divmod(lo, self._window)
        at += partition * self._window
        return self._slots[window & 1][rank][at : at + hi - lo]

    def view(self, rank: int, lo: int, hi: int) -> Array:
        """Return elements [lo, hi) of a rank's source, where it is; for exchanges that are `mapped`."""
        view = self._views[rank]
        assert view is not None, "all sources are mapped"
        return view[lo:hi]

    def publish(self, partition: int, lo: int, hi: int, data: Array) -> None:
        """Copy data: T[hi - lo], which is [lo, hi) of a partition of our source, into our slot, if slots are used."""
        if self.slots and hi > lo:
            np.copyto(self._in_slot(self._peer_memory.control.rank, partition, lo, hi), data)

    def peek(self, rank: int, partition: int, lo: int, hi: int) -> Array:
        """Return [lo, hi) of a partition of a rank's source, where it is."""
        if self.slots:
            return self._in_slot(rank, partition, lo, hi)
        view, starts = self._views[rank], self._starts[rank]
        assert view is not None, "only ranks with a source are read"
        assert starts is not None
        return view[starts[partition] + lo : starts[partition] + hi]

    def pull(self, rank: int, partition: int, lo: int, hi: int, out: Array, copy: Copy = np.copyto) -> None:
        """Copy [lo, hi) of a partition of a rank's source to out: T[hi - lo], by `copy`."""
        if hi > lo:
            copy(out, self.peek(rank, partition, lo, hi))

"""How the ranks of one host read each other's arrays in a large collective.

Owns: the three ways, and which one a call uses. Refuses: to know what is done with the bytes.

    mapped   the array is shared (`host.shared_arrays`): the peers map it and compute on it where it is
    slots    every rank copies what the peers need of its array into its slot of a shared segment, one window after the
             other, and the peers work on it there, in the cache. Used for all other arrays, whether the kernel lets us
             read them or not (another security context, memory of devices)
    read     the peers copy from the array where it is with one system call (process_vm_readv), once. The kernel looks
             up every page, so with pages of 4 KiB that takes as long as two copies through slots, and longer the more
             ranks read. Used where one rank would fill the slots for all (scatter), or where a slot would hold so many
             partitions that the ranks spend their time waiting for each other

All ranks of a call use slots, or none does: every rank sees all descriptors and decides the same.

Note: [Two windows]
    Slots are double-buffered: a rank has one for even and one for odd windows. Two windows in the same slot have a
    window in between, and its barrier; a rank comes to that barrier only after it has finished the window before. So no
    rank still reads a slot when its owner writes the next window into it.

Private memory is only ever read by the peer that needs it, never written: a rank that gives up a call may use its
arrays at once, however late a stopped peer wakes up. Shared arrays are written by peers in an all-reduce, when all
ranks have one; a rank that gives up such a call first revokes the peers' access (`SharedArrays.revoke`).

    terms: a rank's source is the array that its peers read, partitions one after the other (one for each rank, or a
    single one); positions are elements of a partition
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from axon_ps.collectives.backends.shm.control import (
    DESCRIPTOR,
    FAILURE,
    RELEASED_COUNT,
    RELEASED_RING,
    SLOT_STATE,
    SLOTS,
    Control,
)
from axon_ps.errors import AxonError, Broken, Busy
from axon_ps.host import process_memory
from axon_ps.host.leases import address_of
from axon_ps.host.shared_arrays import MAX_RELEASED, MappedArrays, shared_arrays
from axon_ps.host.shared_memory import ADDRESS_BYTES, Segment, SegmentAddress
from axon_ps.types import Array, DType

Copy = Callable[[Array, Array], object]
"""out: T[n] becomes data: T[n]."""

_NO_SOURCE, _PRIVATE, _SHARED, _UNREADABLE = range(4)
_DESCRIPTOR = struct.Struct(f"<IQQQQ{ADDRESS_BYTES}s")  # kind, addresses of source and result, size, offset, segment
_MIN_WINDOW_BYTES = 128 << 10  # of a partition; smaller windows cost more in waiting than reading by the kernel does
_MADE, _FAILED = 1, 2


class Descriptor(NamedTuple):
    """How peers can read one rank's source, as published in its header."""

    kind: int
    address: int
    result_address: int
    size_bytes: int
    offset: int
    segment: bytes


class PeerMemory:
    """Access to the arrays of the other ranks; lives as long as the backend.

    Args:
        control: of the group.
        direct: whether all ranks can read each other's memory.
        slot_bytes: bytes of a slot; every rank has two.
        directory: a tmpfs to take the slots from; "" = the kernel's own memory.
    """

    def __init__(self, control: Control, direct: bool, slot_bytes: int, directory: str) -> None:
        self.control = control
        self.direct = direct
        self.slot_bytes = slot_bytes
        self.bytes_read = 0
        self._directory = directory
        self._slots: list[list[Array]] | None = None  # by buffer index and rank
        self._mapped = [MappedArrays(pid) for pid in control.pids]
        self._unmapped = [0] * len(control.pids)
        self._published = 0

    def describe(self, source: Array | None, result: Array | None, header: int) -> None:
        """Write into our header how peers read `source`, and `result` if our partition of it lies elsewhere."""
        self._publish_released()
        kind, address, result_address, size_bytes, offset, segment = _NO_SOURCE, 0, 0, 0, 0, b""
        if source is not None:
            address, size_bytes = address_of(source), source.nbytes
            result_address = address_of(result) if result is not None else 0
            shared = shared_arrays.find(address, size_bytes)
            if shared is not None:
                kind, offset, segment = _SHARED, address - shared.base, shared.segment
            else:
                # No process can read memory of devices in this way, not even its owner.
                kind = _PRIVATE if self.direct and process_memory.readable(address, size_bytes) else _UNREADABLE
        values = kind, address, result_address, size_bytes, offset, segment
        _DESCRIPTOR.pack_into(self.control.memory, header + DESCRIPTOR, *values)

    def descriptors(self, buffer_index: int) -> list[Descriptor]:
        """The descriptors of all ranks."""
        layout, memory = self.control.layout, self.control.memory
        return [
            Descriptor(*_DESCRIPTOR.unpack_from(memory, layout.header(r, buffer_index) + DESCRIPTOR))
            for r in range(layout.world_size)
        ]

    def choose_slots(
        self, descriptors: Sequence[Descriptor], deadline: float, *, results: bool, partitions: int
    ) -> list[list[Array]] | None:
        """The slots, if this call uses them.

        Args:
            descriptors: of all ranks.
            deadline: of the call.
            results: whether results lie apart from the arrays, so not in shared arrays.
            partitions: how many partitions of an array a slot holds at a time; 0 = one rank fills the slots for all.
        """
        kinds = {d.kind for d in descriptors}
        required = _UNREADABLE in kinds or (not self.direct and (_PRIVATE in kinds or results))
        pays = partitions and self.slot_bytes // partitions >= _MIN_WINDOW_BYTES
        if required or (pays and _PRIVATE in kinds):
            return self.slots(deadline, required)
        return None

    def view(self, rank: int, descriptor: Descriptor, dtype: DType, required: bool) -> Array | None:
        """A rank's source that is a shared array, mapped here: T[].

        None: it is not shared, or cannot be mapped and mapping is not `required`; read it.
        """
        if descriptor.kind != _SHARED:
            return None
        try:
            view = self._mapped[rank].view(descriptor.segment, descriptor.offset, descriptor.size_bytes)
        except AxonError as error:
            if not required:
                return None
            raise self.control.fail(Broken(f"shared array of rank {self.control.ranks[rank]}: {error}")) from error
        return view.view(dtype.numpy)

    def unmap_released(self) -> None:
        """Unmap the segments that their owners have released."""
        for rank, mapped in enumerate(self._mapped):
            record = self.control.layout.record(rank)
            (count,) = self.control.numbers(record + RELEASED_COUNT, "<Q")
            if (seen := self._unmapped[rank]) == count:
                continue
            if count - seen >= MAX_RELEASED:
                mapped.clear()
            else:
                for i in range(seen, count):
                    mapped.drop(*self.control.numbers(record + RELEASED_RING + 8 * (i % MAX_RELEASED), "<Q"))
            self._unmapped[rank] = count

    def slots(self, deadline: float, required: bool = True) -> list[list[Array]] | None:
        """All ranks' slots, u8[slot_bytes] by buffer index and rank; the first rank makes them when first needed.

        Collective: every rank has to call this.

        Returns:
            None, on every rank: there is not enough memory, and slots are not `required`.

        Raises:
            Busy: there is not enough memory, on every rank.
        """
        if self._slots is None and (required or self.control.u32[SLOT_STATE // 4] != _FAILED):
            segment = self._make_slots(deadline, required)
            if segment is None:
                return None
            n, size = self.control.layout.world_size, self.slot_bytes
            memory = segment.bytes()
            segment.close()  # the mapping lives as long as the arrays
            self._slots = [
                [memory[(buffer_index * n + r) * size : (buffer_index * n + r + 1) * size] for r in range(n)]
                for buffer_index in (0, 1)
            ]
        return self._slots

    def close(self) -> None:
        """Unmap everything."""
        self._slots = None
        for mapped in self._mapped:
            mapped.clear()

    def _make_slots(self, deadline: float, required: bool) -> Segment | None:
        control = self.control
        segment = None
        if control.rank == 0:
            try:
                segment = Segment.create(2 * control.layout.world_size * self.slot_bytes, directory=self._directory)
                control.memory[SLOTS : SLOTS + ADDRESS_BYTES] = segment.address.pack()
                control.u32[SLOT_STATE // 4] = _MADE
            except AxonError as error:
                control.put_text(FAILURE, str(error))
                control.u32[SLOT_STATE // 4] = _FAILED
        control.barrier(deadline)
        if control.u32[SLOT_STATE // 4] == _FAILED:
            if required:
                raise control.fail(Busy(control.text(FAILURE)))
            return None
        if segment is None:
            try:
                segment = Segment.open(SegmentAddress.unpack(bytes(control.memory[SLOTS : SLOTS + ADDRESS_BYTES])))
            except AxonError as error:
                raise control.fail(error) from error
        control.barrier(deadline)
        return segment

    def _publish_released(self) -> None:
        count, inodes = shared_arrays.released(self._published)
        if inodes:
            record = self.control.layout.record(self.control.rank)
            for i, inode in enumerate(inodes, count - len(inodes)):
                self.control.put_numbers(record + RELEASED_RING + 8 * (i % MAX_RELEASED), "<Q", inode)
            self.control.put_numbers(record + RELEASED_COUNT, "<Q", count)
            self._published = count


class Exchange:
    """The sources of one large collective.

    Attributes:
        slots: whether they go through slots: window by window, with a barrier after each is published.
        mapped: whether all of them are shared arrays that every rank has mapped.

    Args:
        peer_memory: of the backend.
        descriptors: of all ranks.
        dtype: of the elements.
        starts: by rank, where the partitions of its source begin; None: it has no source.
        longest: elements of the longest partition of any rank.
        slots: the slots, if this call uses them.
    """

    def __init__(
        self,
        peer_memory: PeerMemory,
        descriptors: Sequence[Descriptor],
        dtype: DType,
        starts: Sequence[Sequence[int] | None],
        longest: int,
        slots: list[list[Array]] | None,
    ) -> None:
        self.slots = slots is not None
        self.mapped = False
        self._peer_memory = peer_memory
        self._descriptors = descriptors
        self._dtype = dtype
        self._starts = starts
        self._longest = longest
        self._views: list[Array | None] = []
        if slots is None:
            self.mapped = all(d.kind == _SHARED for d in descriptors)
            required = self.mapped or not peer_memory.direct
            self._views = [peer_memory.view(r, d, dtype, required) for r, d in enumerate(descriptors)]
        else:
            self._window = self._window_numel(max(len(b) for b in starts if b is not None))
            usable_bytes = peer_memory.slot_bytes // dtype.itemsize * dtype.itemsize
            self._slots = [[slot[:usable_bytes].view(dtype.numpy) for slot in of_ranks] for of_ranks in slots]

    def _window_numel(self, partitions: int) -> int:
        """Elements of every partition that fit into a slot at a time."""
        return max(1, self._peer_memory.slot_bytes // partitions // 64 * 64 // self._dtype.itemsize)

    def windows(self, window_bytes: int = 0) -> Iterator[tuple[int, int]]:
        """Positions [lo, hi) in every partition, one window after the other.

        With slots, the current one and the one before can be pulled. See Note: [Two windows].

        Args:
            window_bytes: length of a window without slots; 0 = a whole partition.
        """
        if self.slots:
            step = self._window
        else:
            step = max(1, window_bytes // self._dtype.itemsize) if window_bytes else max(1, self._longest)
        for lo in range(0, self._longest, step):
            yield lo, min(lo + step, self._longest)

    def _in_slot(self, rank: int, partition: int, lo: int, hi: int) -> Array:
        """Where [lo, hi) of a partition of a rank's source is in its slots; it lies in one window."""
        window, at = divmod(lo, self._window)
        at += partition * self._window
        return self._slots[window & 1][rank][at : at + hi - lo]

    def view(self, rank: int, lo: int, hi: int) -> Array:
        """Elements [lo, hi) of a rank's source, where it is; for exchanges that are `mapped`."""
        view = self._views[rank]
        assert view is not None, "all sources are mapped"
        return view[lo:hi]

    def publish(self, partition: int, lo: int, hi: int, data: Array) -> None:
        """Copy data: T[hi - lo], which is [lo, hi) of a partition of our source, into our slot, if slots are used."""
        if self.slots and hi > lo:
            np.copyto(self._in_slot(self._peer_memory.control.rank, partition, lo, hi), data)

    def peek(self, rank: int, partition: int, lo: int, hi: int, scratch: Array) -> Array:
        """[lo, hi) of a partition of a rank's source: where it is, or copied to scratch: T[>= hi - lo]."""
        if self.slots:
            return self._in_slot(rank, partition, lo, hi)
        view, starts = self._views[rank], self._starts[rank]
        if view is not None and starts is not None and not self._lies_apart(rank, partition):
            return view[starts[partition] + lo : starts[partition] + hi]
        scratch = scratch[: hi - lo]
        self._read(rank, partition, lo, scratch)
        return scratch

    def pull(self, rank: int, partition: int, lo: int, hi: int, out: Array, copy: Copy = np.copyto) -> None:
        """out: T[hi - lo] becomes [lo, hi) of a partition of a rank's source, by `copy` if it is mapped here."""
        if hi <= lo:
            return
        if self.slots or (self._views[rank] is not None and not self._lies_apart(rank, partition)):
            copy(out, self.peek(rank, partition, lo, hi, out))
        else:
            self._read(rank, partition, lo, out)

    def _lies_apart(self, rank: int, partition: int) -> bool:
        """Whether that partition is a rank's own result, which lies apart from its source."""
        return partition == rank and self._descriptors[rank].result_address != 0

    def _read(self, rank: int, partition: int, lo: int, out: Array) -> None:
        starts, descriptor, peer_memory = self._starts[rank], self._descriptors[rank], self._peer_memory
        assert starts is not None, "only ranks with a source are read"
        if self._lies_apart(rank, partition):
            address = descriptor.result_address + lo * self._dtype.itemsize
        else:
            address = descriptor.address + (starts[partition] + lo) * self._dtype.itemsize
        peer_memory.bytes_read += out.nbytes
        peer_memory.control.read(rank, address, out)

"""How the ranks of one host reach each other's arrays in a large collective.

Owns: the three ways, and which one a call takes. Refuses: to know what is done with the bytes.

    mapped   the array lies in a registered segment: the others map that and compute on it where it is
    slots    everybody copies what others need of its array into its slot of a shared segment, a window after the
             other, and the others work on it there, in the cache. For all other arrays, whether the kernel lets us read
             them or not (another security context, memory of devices)
    read     the others copy from the array where it is with one system call (process_vm_readv), once. The kernel looks
             up every page, so where those are of 4 KiB that takes as long as two copies through slots, and longer the
             more ranks read; it serves where slots would be filled by one rank for all (scatter), or would hold so many
             parts that the ranks spend their time waiting for each other

All ranks of a call take slots, or none does: every rank sees everybody's descriptors and decides the same.

Note: [Two windows]
    A rank has two slots, for even and for odd windows. Between a window and the next but one, which lies in the same
    slot, there is the gate of the one between: so whatever a rank does with a window, it does before it comes to the
    gate of the next.

Private memory is only ever pulled by the one who needs it, never written by others: whoever gives a call up may use
its arrays at once, however late a stopped peer wakes up. Registered memory is written by others in an all-reduce, when
all have it; who gives that up takes the memory from the others first (`Registry.withdraw`).

    shape legend: a source is what a rank shows the others: parts one after the other; positions are elements of a part
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from axon_ps.collectives.backends.shm.control import (
    DESCRIPTOR,
    FAILURE,
    FREED,
    FREED_RING,
    FREED_RING_ENTRIES,
    PID,
    SLOT_STATE,
    SLOTS,
    Control,
)
from axon_ps.collectives.backends.shm.registry import registry
from axon_ps.errors import AxonError, Broken, Busy
from axon_ps.host.leases import address_of
from axon_ps.host.peer_process import MemoryReader
from axon_ps.host.shared_memory import Segment, SegmentAddress, boot_id
from axon_ps.types import Array, DType

Copy = Callable[[Array, Array], object]
"""out: T[n] becomes data: T[n]."""

_NOTHING, _PRIVATE, _REGISTERED, _HIDDEN = range(4)
_DESCRIPTOR = struct.Struct("<IiQQQQQ")  # kind, fd, address, address of the result, inode, size, offset
_PULL_BYTES = 4 << 20  # how much is copied before we look whether the group was aborted
_LEAST_WINDOW_BYTES = 128 << 10  # of a part; smaller ones cost more in waiting than the kernel's reading does
_MADE, _FAILED = 1, 2


@dataclass(frozen=True)
class Descriptor:
    """How one rank's source can be reached, as it says itself."""

    kind: int
    fd: int
    address: int
    result_address: int
    inode: int
    size_bytes: int
    offset: int


class Reach:
    """What a rank needs to reach the others' arrays; lives as long as the backend.

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
        self.reader = MemoryReader()
        self.bytes_read = 0
        n = control.layout.world_size
        self.pids = [int(control.words(control.layout.cell(r) + PID, "<Q")[0]) for r in range(n)]
        self._directory = directory
        self._slots: list[list[Array]] | None = None  # by parity and rank
        self._mapped: list[dict[int, Array]] = [{} for _ in range(n)]  # by rank and inode
        self._seen = [0] * n
        self._told = len(registry.freed())

    def describe(self, source: Array | None, result: Array | None, header: int) -> None:
        """Write into our header how `source` can be reached, and `result` if our part of it lies elsewhere."""
        self._tell_freed()
        values = (_NOTHING, -1, 0, 0, 0, 0, 0)
        if source is not None:
            address = address_of(source)
            place = registry.find(address, source.nbytes)
            result_address = address_of(result) if result is not None else 0
            if place is not None:
                at = place.address
                offset = address - place.base
                values = (_REGISTERED, at.fd, address, result_address, at.inode, at.size_bytes, offset)
            else:
                # Memory of devices is in no other process's reach, and not even in our own this way.
                shown = self.direct and self.reader.readable(os.getpid(), address, source.nbytes)
                values = (_PRIVATE if shown else _HIDDEN, -1, address, result_address, 0, 0, 0)
        _DESCRIPTOR.pack_into(self.control.memory, header + DESCRIPTOR, *values)

    def descriptors(self, parity: int) -> list[Descriptor]:
        """What all ranks wrote."""
        layout, memory = self.control.layout, self.control.memory
        return [
            Descriptor(*_DESCRIPTOR.unpack_from(memory, layout.header(r, parity) + DESCRIPTOR))
            for r in range(layout.world_size)
        ]

    def choose_slots(
        self, descriptors: Sequence[Descriptor], deadline: float, *, results: bool, parts: int
    ) -> list[list[Array]] | None:
        """The slots, if this call takes them.

        Args:
            descriptors: of all ranks.
            deadline: of the call.
            results: whether results lie apart from the arrays, so in no registered memory.
            parts: how many parts of an array a slot has to hold at a time; 0 = one rank fills slots for all.
        """
        kinds = {d.kind for d in descriptors}
        must = _HIDDEN in kinds or (not self.direct and (_PRIVATE in kinds or results))
        pays = parts and self.slot_bytes // parts >= _LEAST_WINDOW_BYTES
        if must or (pays and _PRIVATE in kinds):
            return self.slots(deadline, must)
        return None

    def view(self, rank: int, descriptor: Descriptor, dtype: DType, must: bool) -> Array | None:
        """A rank's registered source as we see it: T[from its begin to the end of the segment].

        None: it is not registered, or cannot be mapped and need not (`must`); read it.
        """
        if descriptor.kind != _REGISTERED:
            return None
        mapped = self._mapped[rank].get(descriptor.inode)
        if mapped is None:
            where = SegmentAddress(
                boot=boot_id(),
                pid=self.pids[rank],
                fd=descriptor.fd,
                inode=descriptor.inode,
                size_bytes=descriptor.size_bytes,
            )
            try:
                segment = Segment.open(where)
            except AxonError as error:
                if not must:
                    return None
                raise self.control.fail(
                    Broken(f"registered memory of rank {self.control.ranks[rank]}: {error}")
                ) from error
            mapped = self._mapped[rank][descriptor.inode] = segment.bytes()
        numel = (descriptor.size_bytes - descriptor.offset) // dtype.itemsize
        return np.frombuffer(mapped.data, dtype.numpy, numel, descriptor.offset)

    def forget_freed(self) -> None:
        """Let go of mappings whose owners have freed them."""
        for rank, mapped in enumerate(self._mapped):
            cell = self.control.layout.cell(rank)
            (count,) = self.control.words(cell + FREED, "<Q")
            fresh = count - self._seen[rank]
            if not fresh or not mapped:
                self._seen[rank] = count
                continue
            if fresh >= FREED_RING_ENTRIES:
                mapped.clear()
            else:
                for i in range(self._seen[rank], count):
                    (inode,) = self.control.words(cell + FREED_RING + 8 * (i % FREED_RING_ENTRIES), "<Q")
                    mapped.pop(inode, None)
            self._seen[rank] = count

    def slots(self, deadline: float, must: bool = True) -> list[list[Array]] | None:
        """All ranks' slots, u8[slot_bytes] by parity and rank; made by the first rank when they are first needed.

        Every rank has to call this at the same time.

        Returns:
            None, on every rank: there is not enough memory, and it can be done without (`must`).

        Raises:
            Busy: there is not enough memory, on every rank.
        """
        if self._slots is None and (must or self.control.u32[SLOT_STATE // 4] != _FAILED):
            segment = self._make_slots(deadline, must)
            if segment is None:
                return None
            n, size = self.control.layout.world_size, self.slot_bytes
            memory = segment.bytes()
            segment.close()  # the mapping stays with its arrays
            self._slots = [
                [memory[(parity * n + r) * size : (parity * n + r + 1) * size] for r in range(n)] for parity in (0, 1)
            ]
        return self._slots

    def close(self) -> None:
        """Let go of everything mapped."""
        self._slots = None
        for mapped in self._mapped:
            mapped.clear()

    def _make_slots(self, deadline: float, must: bool) -> Segment | None:
        control = self.control
        segment = None
        if control.rank == 0:
            try:
                segment = Segment.create(2 * control.layout.world_size * self.slot_bytes, directory=self._directory)
                control.put_words(SLOTS, "<QQQ", segment.fd, segment.address.inode, segment.size_bytes)
                control.u32[SLOT_STATE // 4] = _MADE
            except AxonError as error:
                control.put_text(FAILURE, str(error))
                control.u32[SLOT_STATE // 4] = _FAILED
        control.gate(deadline)
        if control.u32[SLOT_STATE // 4] == _FAILED:
            if must:
                raise control.fail(Busy(control.text(FAILURE)))
            return None
        if segment is None:
            fd, inode, size_bytes = control.words(SLOTS, "<QQQ")
            where = SegmentAddress(boot=boot_id(), pid=self.pids[0], fd=fd, inode=inode, size_bytes=size_bytes)
            try:
                segment = Segment.open(where)
            except AxonError as error:
                raise control.fail(error) from error
        control.gate(deadline)
        return segment

    def _tell_freed(self) -> None:
        freed = registry.freed()
        if len(freed) == self._told:
            return
        cell = self.control.layout.cell(self.control.rank)
        (count,) = self.control.words(cell + FREED, "<Q")
        for inode in freed[self._told :][-FREED_RING_ENTRIES:]:
            self.control.put_words(cell + FREED_RING + 8 * (count % FREED_RING_ENTRIES), "<Q", inode)
            count += 1
        if len(freed) - self._told > FREED_RING_ENTRIES:
            count += FREED_RING_ENTRIES  # more than the ring holds: the others let go of everything of ours
        self.control.put_words(cell + FREED, "<Q", count)
        self._told = len(freed)


class Exchange:
    """The sources of one large collective.

    Attributes:
        slots: whether they travel through slots, so window by window, with a gate after publishing each.
        mapped: whether all of them lie in registered memory that everybody has mapped.

    Args:
        reach: of the backend.
        descriptors: what all ranks said.
        dtype: of the elements.
        begins: by rank, where the parts of its source begin; None: it shows nothing.
        longest: elements of the longest part of any rank.
        slots: the slots, if this call takes them.
    """

    def __init__(
        self,
        reach: Reach,
        descriptors: Sequence[Descriptor],
        dtype: DType,
        begins: Sequence[Sequence[int] | None],
        longest: int,
        slots: list[list[Array]] | None,
    ) -> None:
        self.slots = slots is not None
        self.mapped = False
        self._reach = reach
        self._descriptors = descriptors
        self._dtype = dtype
        self._begins = begins
        self._longest = longest
        self._views: list[Array | None] = []
        if slots is None:
            self.mapped = all(d.kind == _REGISTERED for d in descriptors)
            must = self.mapped or not reach.direct
            self._views = [reach.view(r, d, dtype, must) for r, d in enumerate(descriptors)]
        else:
            self._window = self._fitting(max(len(b) for b in begins if b is not None))
            whole = reach.slot_bytes // dtype.itemsize * dtype.itemsize
            self._slots = [[slot[:whole].view(dtype.numpy) for slot in of_ranks] for of_ranks in slots]

    def _fitting(self, parts: int) -> int:
        """Elements of every part that fit into a slot at a time."""
        return max(1, self._reach.slot_bytes // parts // 64 * 64 // self._dtype.itemsize)

    def windows(self, piece_bytes: int = 0) -> Iterator[tuple[int, int]]:
        """Positions [lo, hi) in every part, one window after the other.

        With slots, the current one and the one before can be pulled. See Note: [Two windows].

        Args:
            piece_bytes: how long windows are where there are no slots; 0 = as long as the parts.
        """
        if self.slots:
            step = self._window
        else:
            step = max(1, piece_bytes // self._dtype.itemsize) if piece_bytes else max(1, self._longest)
        for lo in range(0, self._longest, step):
            yield lo, min(lo + step, self._longest)

    def _in_slot(self, rank: int, part: int, lo: int, hi: int) -> Array:
        """Where [lo, hi) of a part of a rank's source is in its slots; it lies in one window."""
        window, at = divmod(lo, self._window)
        at += part * self._window
        return self._slots[window & 1][rank][at : at + hi - lo]

    def view(self, rank: int, lo: int, hi: int) -> Array:
        """[lo, hi) of a rank's whole source, where it is; for exchanges that are `mapped`."""
        view = self._views[rank]
        assert view is not None, "all sources are mapped"
        return view[lo:hi]

    def publish(self, part: int, lo: int, hi: int, data: Array) -> None:
        """Show the others data: T[hi - lo], which is [lo, hi) of a part of our source; nothing to do but with slots."""
        if self.slots and hi > lo:
            np.copyto(self._in_slot(self._reach.control.rank, part, lo, hi), data)

    def peek(self, rank: int, part: int, lo: int, hi: int, scratch: Array) -> Array:
        """[lo, hi) of a part of a rank's source: where it is, or copied to scratch: T[>= hi - lo]."""
        if self.slots:
            return self._in_slot(rank, part, lo, hi)
        view, begins = self._views[rank], self._begins[rank]
        if view is not None and begins is not None and not self._apart(rank, part):
            return view[begins[part] + lo : begins[part] + hi]
        scratch = scratch[: hi - lo]
        self._read(rank, part, lo, scratch)
        return scratch

    def pull(self, rank: int, part: int, lo: int, hi: int, out: Array, copy: Copy = np.copyto) -> None:
        """out: T[hi - lo] becomes [lo, hi) of a part of a rank's source, by `copy` where we see it."""
        if hi <= lo:
            return
        if self.slots or (self._views[rank] is not None and not self._apart(rank, part)):
            copy(out, self.peek(rank, part, lo, hi, out))
        else:
            self._read(rank, part, lo, out)

    def _apart(self, rank: int, part: int) -> bool:
        """Whether that part is a rank's own result, which lies apart from its source."""
        return part == rank and self._descriptors[rank].result_address != 0

    def _read(self, rank: int, part: int, lo: int, out: Array) -> None:
        begins, descriptor, reach = self._begins[rank], self._descriptors[rank], self._reach
        assert begins is not None, "only ranks that show something are read"
        if self._apart(rank, part):
            remote = descriptor.result_address + lo * self._dtype.itemsize
        else:
            remote = descriptor.address + (begins[part] + lo) * self._dtype.itemsize
        local, left = address_of(out), out.nbytes
        reach.bytes_read += left
        while left:
            reach.control.check()
            size = min(left, _PULL_BYTES)
            try:
                reach.reader.read(reach.pids[rank], remote, local, size)
            except Broken as error:
                raise reach.control.unreadable(rank, error) from error
            remote, local, left = remote + size, local + size, left - size

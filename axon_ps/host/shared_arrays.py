"""Shared arrays: memory of one process that other processes of the host map, so that nothing is copied.

Owns: which ranges of our memory are segments, and until when (`SharedArrays`), and which segments of another process
are mapped here (`MappedArrays`). Refuses: to know what is in them and who maps them; an array serves the collectives of
every group of the process, and the shard servers of the host.

A segment lives as long as an array (or a torch tensor, or any view) over it. Two things end sharing before, both for
memory that others may still use when its owner wants to use it for something else:
- *revoke*, of an array that others write to: the array moves to another segment, which is shared in its place;
- *detach*, of an array that others read: what they have mapped stays as it is, and the array is ordinary memory.
"""

from __future__ import annotations

import bisect
import contextlib
import math
import os
import threading
from collections import OrderedDict, deque
from operator import attrgetter

import numpy as np

from axon_ps.errors import Busy, InvalidRequest
from axon_ps.host import fork
from axon_ps.host.shared_memory import Segment, SegmentAddress, make_private, move_mapping
from axon_ps.types import Array, DType

MAX_RELEASED = 64
"""How many of the segments that were released last are known; see `SharedArrays.released`."""


class SharedArray:
    """One segment of this process.

    Attributes:
        base: where it begins here.
        address: where others find it.
        segment: the same, packed.
    """

    def __init__(self, base: int, address: SegmentAddress) -> None:
        self.base = base
        self.move(address)

    def move(self, address: SegmentAddress) -> None:
        """Set where others find it from now on."""
        self.address, self.segment = address, address.pack()


_base = attrgetter("base")


class SharedArrays:
    """The shared arrays of a process. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._arrays: list[SharedArray] = []  # by base
        # The garbage collector appends to it, perhaps while we hold the lock; `_sweep` empties it.
        self._dead: deque[SharedArray] = deque()
        self._released: deque[int] = deque(maxlen=MAX_RELEASED)
        self._num_released = 0

    def empty(self, shape: tuple[int, ...], dtype: DType, *, directory: str = "") -> Array:
        """A new array in a segment of its own: zeros of `dtype.numpy` in `shape`.

        Raises:
            Busy: there is not enough memory; the message has the bytes needed and available.
            Misuse: this process is a fork of a worker.
        """
        fork.check()
        numel = math.prod(shape)
        segment = Segment.create(max(1, numel * dtype.itemsize), directory=directory)
        made = SharedArray(segment.base(), segment.address)
        with self._lock:
            self._sweep()
            bisect.insort(self._arrays, made, key=_base)
        fork.finalize(segment.memory, self._end, made).atexit = False
        return np.frombuffer(segment.memory, dtype.numpy, numel).reshape(shape)

    def buffer(self, size_bytes: int) -> Array:
        """u8[size_bytes], shared; ordinary memory where there is no shared memory."""
        try:
            return self.empty((size_bytes,), DType.U8)
        except Busy:
            return np.empty(size_bytes, np.uint8)

    def find(self, address: int, size_bytes: int) -> SharedArray | None:
        """The shared array that contains a range of our memory, if any."""
        if not self._arrays:
            return None
        with self._lock:
            return self._find(address, size_bytes)

    def revoke(self, address: int, size_bytes: int) -> None:
        """Revoke the other processes' access to an array's memory; the array retains its address and its values.

        Used after a collective that failed: a peer that was stopped in the middle may go on much later and still write.
        It then writes to the old segment, which is no longer the array's memory.
        """
        with self._lock, contextlib.suppress(Busy):  # without memory for a copy nothing can be done
            if (found := self._find(address, size_bytes)) is None:
                return
            old = found.address
            segment = Segment.create(old.size_bytes)
            move_mapping(found.base, old.fd, segment)
            found.move(segment.address)
            self._release(old)

    def detach(self, address: int) -> None:
        """If `address` lies in a shared array: stop sharing that. What others have mapped of it changes no more.

        Used after a push that failed: see `shard.same_host.access`, Note: [When a gradient may be overwritten]. Here
        the array stays as it is, and may be written to.

        Raises:
            Busy: the kernel refuses; all is as it was.
        """
        with self._lock:
            if (found := self._find(address, 1)) is not None:
                make_private(found.base, found.address.fd, found.address.size_bytes)
                self._arrays.remove(found)
                self._release(found.address)

    def released(self, since: int) -> tuple[int, list[int]]:
        """How many segments were released so far, and the inodes of those after the first `since`, oldest first.

        Of more than MAX_RELEASED there are the last.
        """
        if not self._dead and self._num_released == since:
            return since, []
        with self._lock:
            self._sweep()
            fresh = self._num_released - since
            return self._num_released, list(self._released)[-fresh:] if fresh else []

    def _end(self, array: SharedArray) -> None:
        """The memory of an array ends. Called by the garbage collector, so in any thread, at any moment."""
        self._dead.append(array)
        if self._lock.acquire(timeout=0):
            try:
                self._sweep()
            finally:
                self._lock.release()

    def _find(self, address: int, size_bytes: int) -> SharedArray | None:
        """See `find`. With the lock."""
        self._sweep()
        at = bisect.bisect(self._arrays, address, key=_base) - 1
        if at < 0:
            return None
        found = self._arrays[at]
        return found if address + size_bytes <= found.base + found.address.size_bytes else None

    def _sweep(self) -> None:
        while self._dead:
            if (array := self._dead.popleft()) in self._arrays:  # it was not detached
                self._arrays.remove(array)
                self._release(array.address)

    def _release(self, address: SegmentAddress) -> None:
        os.close(address.fd)
        self._released.append(address.inode)
        self._num_released += 1


shared_arrays = SharedArrays()
"""Those of this process."""


class MappedArrays:
    """The segments of one process that are mapped here. One thread at a time.

    Args:
        pid: the process.
        limit: how many segments stay mapped; the one that was used least recently is dropped.
    """

    def __init__(self, pid: int, limit: float = math.inf) -> None:
        self._pid = pid
        self._limit = limit
        self._mapped: OrderedDict[bytes, tuple[SegmentAddress, Array]] = OrderedDict()  # by packed address

    def __len__(self) -> int:
        return len(self._mapped)

    def view(self, segment: bytes, offset: int, size_bytes: int) -> Array:
        """u8[size_bytes]: bytes of a segment where they lie.

        Args:
            segment: its packed address.
            offset: where in it they begin.
            size_bytes: how many.

        Raises:
            InvalidRequest: they are not inside the segment, or it is another process's.
            Unreachable: it cannot be mapped here, and why.
        """
        known = self._mapped.get(segment)
        address = SegmentAddress.unpack(segment) if known is None else known[0]
        if address.pid != self._pid or offset + size_bytes > address.size_bytes:
            raise InvalidRequest(
                f"bytes {offset} to {offset + size_bytes} of a buffer of {address.size_bytes} in process {address.pid} "
                f"were leased by process {self._pid}"
            )
        if known is None:
            known = self._mapped[segment] = address, Segment.open(address).bytes()
            if len(self._mapped) > self._limit:
                self._mapped.popitem(last=False)
        self._mapped.move_to_end(segment)
        return known[1][offset : offset + size_bytes]

    def drop(self, inode: int) -> None:
        """Drop what is mapped of an inode."""
        for segment in [segment for segment, (address, _) in self._mapped.items() if address.inode == inode]:
            del self._mapped[segment]

    def clear(self) -> None:
        """Drop all."""
        self._mapped.clear()

"""Shared arrays: memory of this process that can be passed to other processes of the host, so that nothing is copied.

Owns: the list of segments in our memory, and their lifetime. Refuses: their contents and the receivers. An array serves
the collectives of every group of the process, and the shard servers of the host (`host.host_peer`).

A segment lives as long as an array (or a torch tensor, or any view) over it. Two calls end sharing earlier, both for
memory that other processes may still use when this one is to use it for something else:
- *revoke*, of an array that others write to: the array moves to another segment, which is shared instead;
- *detach*, of an array that others read: the contents stay in their mappings, and the array becomes ordinary memory.
"""

from __future__ import annotations

import bisect
import contextlib
import math
import threading
from collections import deque
from operator import attrgetter

import numpy as np

from axon_ps.errors import Busy
from axon_ps.host import fork, shared_memory
from axon_ps.host.shared_memory import Segment, make_private, move_mapping
from axon_ps.types import Array, DType


class SharedArray:
    """One segment of this process.

    Attributes:
        base: the address of its first byte in this process.
        segment: its file; another one after a `revoke`.
    """

    def __init__(self, base: int, segment: Segment) -> None:
        self.base = base
        self.segment = segment


_base = attrgetter("base")


class SharedArrays:
    """The shared arrays of a process. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._arrays: list[SharedArray] = []  # by base
        # The garbage collector appends to it, perhaps while this thread has the lock; `_sweep` empties it.
        self._dead: deque[SharedArray] = deque()

    def empty(self, shape: tuple[int, ...], dtype: DType) -> Array:
        """Return a new array in a segment of its own: zeros of `dtype.numpy` in `shape`.

        Raises:
            Busy: there is not enough memory. The message has the bytes needed and available.
            Misuse: this process is a fork of a worker.
        """
        fork.check()
        numel = math.prod(shape)
        segment, memory = shared_memory.create(max(1, numel * dtype.itemsize))
        made = SharedArray(shared_memory.base_of(memory), segment)
        with self._lock:
            self._sweep()
            bisect.insort(self._arrays, made, key=_base)
        fork.finalize(shared_memory.owner_of(memory), self._end, made).atexit = False
        return np.frombuffer(memory, dtype.numpy, numel).reshape(shape)

    def buffer(self, size_bytes: int) -> Array:
        """Return u8[size_bytes], shared; ordinary memory if no shared memory is available."""
        try:
            return self.empty((size_bytes,), DType.U8)
        except Busy:
            return np.empty(size_bytes, np.uint8)

    def find(self, address: int, size_bytes: int) -> SharedArray | None:
        """Return the shared array that contains a range of our memory, if any."""
        if not self._arrays:
            return None
        with self._lock:
            return self._find(address, size_bytes)

    def revoke(self, address: int, size_bytes: int) -> None:
        """Revoke the other processes' access to an array's memory. The array retains its address and its values.

        Used after a collective that failed: a peer that was suspended may continue much later and still write. It then
        writes to the old segment, which is no longer the array's memory. Without memory for a copy nothing is revoked.
        """
        with self._lock, contextlib.suppress(Busy):  # without memory for a copy nothing can be done
            if (found := self._find(address, size_bytes)) is not None:
                found.segment = move_mapping(found.base, found.segment)

    def detach(self, address: int) -> None:
        """Stop sharing the shared array at `address`, if any. The contents stay in the mappings of others.

        Used after a push that failed: a server may still read under its lease. Here the values stay in the array, which
        may be written to.

        Raises:
            Busy: the kernel refuses. Nothing has changed.
        """
        with self._lock:
            if (found := self._find(address, 1)) is not None:
                make_private(found.base, found.segment)
                self._arrays.remove(found)

    def sweep(self) -> None:
        """Close the segments of collected arrays that could not be closed when they were collected."""
        if self._dead:
            with self._lock:
                self._sweep()

    def _end(self, array: SharedArray) -> None:
        """Close an array's segment. Called by the garbage collector, so in any thread, at any moment."""
        self._dead.append(array)
        if self._lock.acquire(timeout=0):
            try:
                self._sweep()
            finally:
                self._lock.release()

    def _find(self, address: int, size_bytes: int) -> SharedArray | None:
        """See `find`. The caller has the lock."""
        self._sweep()
        at = bisect.bisect(self._arrays, address, key=_base) - 1
        if at < 0:
            return None
        found = self._arrays[at]
        return found if address + size_bytes <= found.base + found.segment.size_bytes else None

    def _sweep(self) -> None:
        while self._dead:
            if (array := self._dead.popleft()) in self._arrays:  # it was not detached
                self._arrays.remove(array)
                array.segment.close()


shared_arrays = SharedArrays()
"""The shared arrays of this process."""

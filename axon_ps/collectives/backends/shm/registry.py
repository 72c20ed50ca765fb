"""Registered arrays: memory of this process that the other processes of the host map, so that nothing is copied.

Owns: which ranges of our memory are segments. Refuses: to know groups; an array serves every group of the process.

A segment lives as long as an array (or a torch tensor, or any view) over it. When it is freed, every group publishes
that at its next large collective, and the members unmap it.
"""

from __future__ import annotations

import bisect
import contextlib
import math
import os
import threading
import weakref
from collections import deque
from dataclasses import dataclass

import numpy as np

from axon_ps.errors import Busy
from axon_ps.host import fork
from axon_ps.host.shared_memory import Segment, SegmentAddress, move_mapping
from axon_ps.types import Array, DType


@dataclass(eq=False)
class Range:
    """One segment of this process: its address here, and the address by which others open it."""

    base: int
    address: SegmentAddress


class Registry:
    """The registered memory of a process. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ranges: list[Range] = []  # by base
        self._bases: list[int] = []
        # The garbage collector appends to it, perhaps while we hold the lock; `_sweep` empties it.
        self._dead: deque[Range] = deque()
        self._released: list[int] = []

    def empty(self, shape: tuple[int, ...], dtype: DType, *, directory: str = "") -> Array:
        """A new array in a segment of its own: zeros of `dtype.numpy` in `shape`.

        Raises:
            Busy: there is not enough memory; the message has the bytes needed and available.
            Misuse: this process is a fork of a worker.
        """
        fork.check()
        numel = math.prod(shape)
        segment = Segment.create(max(1, numel * dtype.itemsize), directory=directory)
        entry = Range(segment.base(), segment.address)
        with self._lock:
            self._sweep()
            at = bisect.bisect(self._bases, entry.base)
            self._bases.insert(at, entry.base)
            self._ranges.insert(at, entry)
        weakref.finalize(segment.memory, self._dead.append, entry).atexit = False
        return np.frombuffer(segment.memory, dtype.numpy, numel).reshape(shape)

    def find(self, address: int, size_bytes: int) -> Range | None:
        """The segment that contains a range of our memory, if any."""
        if not self._bases:
            return None
        with self._lock:
            self._sweep()
            at = bisect.bisect(self._bases, address) - 1
            if at < 0:
                return None
            entry = self._ranges[at]
            return entry if address + size_bytes <= entry.base + entry.address.size_bytes else None

    def revoke(self, address: int, size_bytes: int) -> None:
        """Revoke the other processes' access to an array's memory; the array keeps its address and its values.

        Used after a collective that failed: a peer that was stopped in the middle may go on much later and still write.
        It then writes to the old segment, which is no longer the array's memory.
        """
        entry = self.find(address, size_bytes)
        if entry is None:
            return
        with self._lock, contextlib.suppress(Busy):  # without memory for a copy nothing can be done
            old = entry.address
            segment = Segment.create(old.size_bytes)
            move_mapping(entry.base, old.fd, segment)
            entry.address = segment.address
            os.close(old.fd)
            self._released.append(old.inode)

    def released(self) -> list[int]:
        """The inodes of all segments that were freed, oldest first."""
        if self._dead:
            with self._lock:
                self._sweep()
        return self._released

    def _sweep(self) -> None:
        while self._dead:
            entry = self._dead.popleft()
            at = bisect.bisect(self._bases, entry.base) - 1
            while self._ranges[at] is not entry:  # its address may be in use again
                at -= 1
            del self._bases[at], self._ranges[at]
            os.close(entry.address.fd)
            self._released.append(entry.address.inode)


registry = Registry()
"""The registered memory of this process."""

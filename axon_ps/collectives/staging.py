"""`Staging`: copies of device memory to the host and back, for data that leaves the machine.

Owns: a pool of page-locked host buffers, and for each device a side stream on which the copies run. Refuses: to know
what the data is.

Invariants:
- A copy begins when the work that was already on the calling thread's current stream is done, and is done when the call
  returns; later work on that stream runs concurrently with the copy.
- A buffer belongs to the caller from `allocate` to `free`. Any thread may call them.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from axon_ps.collectives import cuda
from axon_ps.types import Array

_MAX_IDLE = 8
"""The most freed buffers that are pooled."""


class Staging:
    """See this module's notes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: list[Array] = []  # u8
        self._allocated: dict[int, Array] = {}  # u8, by address
        self._streams: dict[int, Any] = {}
        self._counters = {"downloaded_bytes": 0.0, "uploaded_bytes": 0.0}

    def allocate(self, like: Array) -> Array:
        """Return T[like.size]: a page-locked host buffer as large as a device array; its values are arbitrary."""
        size_bytes = int(like.nbytes)
        if not size_bytes:
            return np.empty(0, like.dtype)
        with self._lock:
            fitting = [i for i, memory in enumerate(self._pool) if memory.nbytes >= size_bytes]
            best = min(fitting, key=lambda i: self._pool[i].nbytes, default=None)
            memory = None if best is None else self._pool.pop(best)
        if memory is None:
            memory = cuda.memory().pinned(size_bytes)
        with self._lock:
            self._allocated[memory.ctypes.data] = memory
        array: Array = memory[:size_bytes].view(like.dtype)
        return array

    def free(self, host: Array) -> None:
        """Return a buffer to the pool; it must not be used any more."""
        if not host.nbytes:
            return
        with self._lock:
            self._pool.append(self._allocated.pop(host.ctypes.data))
            if len(self._pool) > _MAX_IDLE:
                self._pool.pop(min(range(len(self._pool)), key=lambda i: self._pool[i].nbytes))

    def download(self, array: Any, host: Array) -> None:
        """Copy array: T[n], a cupy array, to host: T[n], page-locked."""
        if not host.size:
            return
        with array.device:
            stream = self._side_stream(array)
            array.get(stream=stream, out=host)
            stream.synchronize()
        self._count("downloaded_bytes", host)

    def upload(self, host: Array, array: Any) -> None:
        """Copy host: T[n], page-locked, to array: T[n], a cupy array."""
        if not host.size:
            return
        with array.device:
            stream = self._side_stream(array)
            array.set(host, stream=stream)
            stream.synchronize()
        self._count("uploaded_bytes", host)

    def statistics(self) -> dict[str, float]:
        """Return the bytes that were copied to the host and from it."""
        with self._lock:
            return dict(self._counters)

    def _side_stream(self, array: Any) -> Any:
        """Return the side stream of an array's device, ordered after the work that is on the current stream by now."""
        streams, index = cuda.load().cuda, int(array.device.id)
        with self._lock:
            side = self._streams.get(index)
            if side is None:
                side = self._streams[index] = streams.Stream(non_blocking=True)
        side.wait_event(streams.get_current_stream().record())
        return side

    def _count(self, what: str, host: Array) -> None:
        with self._lock:
            self._counters[what] += host.nbytes


__all__ = ["Staging"]

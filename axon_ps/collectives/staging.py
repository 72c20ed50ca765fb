"""`Staging`: how device memory crosses to the host and back, for what must leave the machine.

Owns: page-locked host buffers, kept for the next time, and one stream beside the caller's for each device. Refuses: to
know what is carried.

Invariants:
- A copy begins when what the calling thread's current stream had to do before is done, and is done when the call
  returns; what that stream is given meanwhile runs beside the copy.
- A buffer belongs to whoever took it until it is given back. Any thread.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from axon_ps.collectives import cuda
from axon_ps.types import Array

_MOST_IDLE = 8
"""How many buffers are kept for the next time."""


class Staging:
    """See this module's notes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[Array] = []  # u8
        self._taken: dict[int, Array] = {}  # u8, by address
        self._streams: dict[int, Any] = {}
        self._counters = {"downloaded_bytes": 0.0, "uploaded_bytes": 0.0}

    def take(self, like: Array) -> Array:
        """T[like.size]: a page-locked host buffer for a device array like this; hold any bytes."""
        size_bytes = int(like.nbytes)
        if not size_bytes:
            return np.empty(0, like.dtype)
        with self._lock:
            fitting = [i for i, memory in enumerate(self._idle) if memory.nbytes >= size_bytes]
            best = min(fitting, key=lambda i: self._idle[i].nbytes, default=None)
            memory = None if best is None else self._idle.pop(best)
        if memory is None:
            memory = cuda.memory().pinned(size_bytes)
        with self._lock:
            self._taken[memory.ctypes.data] = memory
        array: Array = memory[:size_bytes].view(like.dtype)
        return array

    def give(self, host: Array) -> None:
        """Return a buffer that nobody uses any more."""
        if not host.nbytes:
            return
        with self._lock:
            self._idle.append(self._taken.pop(host.ctypes.data))
            if len(self._idle) > _MOST_IDLE:
                self._idle.pop(min(range(len(self._idle)), key=lambda i: self._idle[i].nbytes))

    def download(self, array: Any, host: Array) -> None:
        """host: T[n], page-locked, becomes what array: T[n], a cupy array, holds."""
        if not host.size:
            return
        with array.device:
            stream = self._beside(array)
            array.get(stream=stream, out=host)
            stream.synchronize()
        self._count("downloaded_bytes", host)

    def upload(self, host: Array, array: Any) -> None:
        """array: T[n], a cupy array, becomes what host: T[n], page-locked, holds."""
        if not host.size:
            return
        with array.device:
            stream = self._beside(array)
            array.set(host, stream=stream)
            stream.synchronize()
        self._count("uploaded_bytes", host)

    def statistics(self) -> dict[str, float]:
        """Bytes that crossed to the host and from it."""
        with self._lock:
            return dict(self._counters)

    def _beside(self, array: Any) -> Any:
        """The side stream of an array's device, behind what the current stream has to do by now."""
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

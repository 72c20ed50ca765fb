"""Buffers for values on their way, and a count of the bytes they take, so that memory bounds can be tested."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

import torch

from axon_ps.collectives import cuda
from axon_ps.errors import Timeout
from axon_ps.types import Array
from axon_ps.worker.world import DEFAULT_TIMEOUT_S


class Meter:
    """Bytes in use now and at most; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.current_bytes = 0
        self.peak_bytes = 0

    def add(self, amount_bytes: int) -> None:
        """Count `amount_bytes` more (or fewer, when negative)."""
        with self._lock:
            self.current_bytes += amount_bytes
            self.peak_bytes = max(self.peak_bytes, self.current_bytes)


def host_empty(numel: int, dtype: torch.dtype, *, pinned: bool) -> torch.Tensor:
    """Allocate T[numel] in host memory, page-locked if `pinned`."""
    if not pinned:
        return torch.empty(numel, dtype=dtype, device="cpu")
    return torch.from_numpy(cuda.memory().pinned(numel * dtype.itemsize)).view(dtype)


class BufferPool:
    """Buffers for values on their way. Idle ones are pooled within the limit, and reused for sizes up to their own.

    Args:
        limit_bytes: most bytes of buffers in use, for `wait_for_capacity` and `has_capacity`.
        meter: counts the memory, idle buffers included.
        pinned: page-lock the buffers, for copies to and from a GPU.
        device: the device of the buffers; None = in host memory.
        make: returns memory for a buffer, u8[size]; None = torch allocates it.
        timeout_s: most seconds that `wait_for_capacity` waits. Users of buffers end by themselves before, when the
            membership changes or their own deadline passes.
    """

    def __init__(
        self,
        limit_bytes: int,
        meter: Meter,
        *,
        pinned: bool = False,
        device: torch.device | None = None,
        make: Callable[[int], Array] | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        self._timeout_s = timeout_s
        self._limit_bytes = self._least_bytes = limit_bytes
        self._device = device
        self._make = cuda.memory().pinned if pinned and device is None else make
        self._changed = threading.Condition()
        self._idle: list[torch.Tensor] = []  # u8, the longest idle first
        self._out: dict[int, torch.Tensor] = {}  # u8, by address
        self._out_bytes = 0  # of the memory behind them, which may be more than was asked for
        self._idle_bytes = 0
        self._meter = meter

    def extend(self, extra_bytes: int) -> None:
        """Set the limit to this many bytes more than the pool was made with."""
        with self._changed:
            self._limit_bytes = self._least_bytes + extra_bytes
            self._changed.notify_all()

    def has_capacity(self, size_bytes: int) -> bool:
        """Return True if a buffer of this size stays within the limit. One buffer always does."""
        return self._out_bytes == 0 or self._out_bytes + size_bytes <= self._limit_bytes

    def wait_for_capacity(self, size_bytes: int, timeout_s: float = math.inf) -> None:
        """Block until a buffer of this size stays within the limit. Another thread must be giving buffers back.

        Raises:
            Timeout: too few were given back within this time, or within the pool's own time-out.
        """
        timeout_s = min(timeout_s, self._timeout_s)
        with self._changed:
            if not self._changed.wait_for(lambda: self.has_capacity(size_bytes), timeout_s):
                raise Timeout(
                    f"no buffer of {size_bytes} bytes is free after {timeout_s:g} s: {self._out_bytes} bytes are still "
                    f"under way, {self._limit_bytes} may be; the servers have not received what was sent before"
                )

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a buffer of exactly `numel` elements, also beyond the limit."""
        size_bytes = numel * dtype.itemsize
        if size_bytes == 0:
            return torch.empty(0, dtype=dtype, device="cpu")
        with self._changed:
            memory = self._smallest_idle(size_bytes)
            self._out_bytes += size_bytes if memory is None else memory.nbytes
            if memory is None:
                self._shrink(self._limit_bytes - self._out_bytes)
                self._meter.add(size_bytes)
        if memory is None:
            memory = self._new(size_bytes)
        with self._changed:
            self._out[memory.data_ptr()] = memory
        return memory[:size_bytes].view(dtype)

    def give(self, buffer: torch.Tensor) -> None:
        """Give back a buffer that is not used any more."""
        if buffer.nbytes == 0:
            return
        with self._changed:
            memory = self._out.pop(buffer.data_ptr())
            self._out_bytes -= memory.nbytes
            self._idle.append(memory)
            self._idle_bytes += memory.nbytes
            self._shrink(self._limit_bytes - self._out_bytes)
            self._changed.notify_all()

    def trim(self) -> None:
        """Drop idle buffers."""
        with self._changed:
            self._shrink(0)

    def _new(self, size_bytes: int) -> torch.Tensor:
        if self._make is not None:
            return torch.from_numpy(self._make(size_bytes))
        return torch.empty(size_bytes, dtype=torch.uint8, device=self._device)

    def _smallest_idle(self, size_bytes: int) -> torch.Tensor | None:
        """Take an idle buffer that is large enough out of the pool, and return it, or None if there is none."""
        fitting = [i for i, memory in enumerate(self._idle) if memory.nbytes >= size_bytes]
        if not fitting:
            return None
        memory = self._idle.pop(min(fitting, key=lambda i: self._idle[i].nbytes))
        self._idle_bytes -= memory.nbytes
        return memory

    def _shrink(self, most_bytes: int) -> None:
        while self._idle and self._idle_bytes > most_bytes:
            size_bytes = self._idle.pop(0).nbytes
            self._idle_bytes -= size_bytes
            self._meter.add(-size_bytes)

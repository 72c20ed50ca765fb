"""`stand_in`: replaces cupy by the stand-in, and the GPU's tensors by torch's CPU tensors."""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np

from axon_ps.collectives import cuda
from axon_ps.types import Array
from axon_ps_lab.device import cupy_module
from axon_ps_lab.device.trace import Trace


class StandInMemory:
    """`DeviceMemory` in which every CPU tensor is the device's, except tensors in page-locked memory."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pinned: dict[int, int] = {}  # the end of each block, by its begin

    def is_device(self, device: Any) -> bool:
        """See `DeviceMemory`."""
        return bool(device.type == "cpu")

    def is_on_device(self, tensor: Any) -> bool:
        """See `DeviceMemory`."""
        return self.is_device(tensor.device) and not self.is_pinned_at(tensor.data_ptr())

    def pinned(self, size_bytes: int) -> Array:
        """See `DeviceMemory`."""
        array = np.zeros(max(1, size_bytes), np.uint8)
        begin = array.ctypes.data
        with self._lock:
            self._pinned[begin] = begin + array.nbytes
        weakref.finalize(array, self._forget, begin)
        return array[:size_bytes]

    def current_stream(self, tensor: Any) -> int:
        """See `DeviceMemory`."""
        return cupy_module.current_stream().ptr

    def on_stream(self, stream: int) -> AbstractContextManager[object]:
        """See `DeviceMemory`."""
        return contextlib.nullcontext()

    def is_pinned_at(self, address: int) -> bool:
        """Return True if an address is in page-locked memory."""
        with self._lock:
            return any(begin <= address < end for begin, end in self._pinned.items())

    def _forget(self, begin: int) -> None:
        with self._lock:
            del self._pinned[begin]


@dataclass(frozen=True)
class StandIn:
    """The value of `stand_in`.

    Attributes:
        trace: calls of NCCL, and copies.
        memory: device memory and page-locked memory.
    """

    trace: Trace
    memory: StandInMemory


@contextlib.contextmanager
def stand_in(devices: int = 8) -> Iterator[StandIn]:
    """Give the process `devices` GPUs in a `with` block, for all threads; blocks cannot be nested."""
    device = StandIn(Trace(), StandInMemory())
    modules = cupy_module.modules(devices)
    before = {name: sys.modules.get(name) for name in modules}
    with contextlib.ExitStack() as stack:
        sys.modules.update(modules)
        stack.callback(_put_back, before)
        stack.callback(cuda.use, cuda.use(device.memory))
        array = cupy_module.DeviceArray
        array.recorder, array.is_pinned = device.trace, lambda a: device.memory.is_pinned_at(a.ctypes.data)
        stack.callback(setattr, array, "recorder", None)
        if (torch := sys.modules.get("torch")) is not None:
            stack.enter_context(_copies_recorded(torch, device))
        yield device


def _put_back(modules: dict[str, Any]) -> None:
    for name, module in modules.items():
        if module is None:
            del sys.modules[name]
        else:
            sys.modules[name] = module


@contextlib.contextmanager
def _copies_recorded(torch: Any, device: StandIn) -> Iterator[None]:
    """Record torch's copies between page-locked memory and the device, and its conversions to numpy."""
    on_device, record = device.memory.is_on_device, device.trace.record
    numpy, cpu, copy = torch.Tensor.numpy, torch.Tensor.cpu, torch.Tensor.copy_

    def leaving(method: Callable[..., Any]) -> Callable[..., Any]:
        def leave(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if tensor.nbytes and on_device(tensor):
                record("torch", tensor.nbytes)
            return method(tensor, *args, **kwargs)

        return leave

    def copy_recorded(tensor: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
        if tensor.nbytes and on_device(tensor) != on_device(source):
            record("torch", tensor.nbytes)
        return copy(tensor, source, *args, **kwargs)

    torch.Tensor.numpy, torch.Tensor.cpu, torch.Tensor.copy_ = leaving(numpy), leaving(cpu), copy_recorded
    try:
        yield
    finally:
        for name in ("numpy", "cpu", "copy_"):
            delattr(torch.Tensor, name)


__all__ = ["StandIn", "StandInMemory", "stand_in"]

"""Device memory for collectives: cupy, loaded when it is first needed, and the interface that tests replace.

Owns: the tests for tensors and devices of the GPU, page-locked host memory, streams, and views of tensors as cupy
arrays. This is the only module that imports cupy. Refuses: collectives (see `nccl`), and copies between device and host
(`staging`).

`memory()` answers questions about tensors that only torch can answer. It is CUDA's unless `use` replaced it by a
stand-in, as `axon_ps_lab.device` does for tests without a GPU; a stand-in also replaces cupy's module.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from axon_ps.errors import InvalidRequest, NcclError
from axon_ps.types import Array, DType


class DeviceMemory(Protocol):
    """Device memory and page-locked host memory. Tensors are torch's, which this package does not import."""

    def is_device(self, device: Any) -> bool:
        """Return True for a `torch.device` of the GPU."""

    def is_on_device(self, tensor: Any) -> bool:
        """Return True for a tensor in the GPU's memory."""

    def pinned(self, size_bytes: int) -> Array:
        """Return u8[size_bytes] of page-locked memory: copies to and from the GPU need no other buffer, nor the CPU."""

    def current_stream(self, tensor: Any) -> int:
        """Return the stream on which the calling thread uses a tensor."""

    def on_stream(self, stream: int) -> AbstractContextManager[object]:
        """Make a stream of another thread's the current one of this thread, for torch."""


class CudaMemory:
    """`DeviceMemory` of torch with CUDA."""

    def is_device(self, device: Any) -> bool:
        """See `DeviceMemory`."""
        return bool(device.type == "cuda")

    def is_on_device(self, tensor: Any) -> bool:
        """See `DeviceMemory`."""
        return self.is_device(tensor.device)

    def pinned(self, size_bytes: int) -> Array:
        """See `DeviceMemory`; if torch is loaded it is torch's, since its caching allocator makes that cheap."""
        if (torch := sys.modules.get("torch")) is not None:
            array: Array = torch.empty(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=True).numpy()
            return array
        return np.frombuffer(load().cuda.alloc_pinned_memory(max(1, size_bytes)), np.uint8, size_bytes)

    def current_stream(self, tensor: Any) -> int:
        """See `DeviceMemory`."""
        return int(sys.modules["torch"].cuda.current_stream(tensor.device).cuda_stream)

    @contextlib.contextmanager
    def on_stream(self, stream: int) -> Iterator[None]:
        """See `DeviceMemory`."""
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_available():
            yield
            return
        # torch takes 0 for "a new one"; it is the default stream
        with torch.cuda.stream(torch.cuda.ExternalStream(stream) if stream else torch.cuda.default_stream()):
            yield


_memory: DeviceMemory = CudaMemory()


def memory() -> DeviceMemory:
    """Return the device memory: CUDA's, or a stand-in's."""
    return _memory


def use(stand_in: DeviceMemory) -> DeviceMemory:
    """Make `memory` return a stand-in; return the previous one."""
    global _memory
    before, _memory = _memory, stand_in
    return before


def load() -> Any:
    """Import cupy and return it.

    Raises:
        NcclError: it is not installed, there is no GPU, or it was built without NCCL.
    """
    try:
        cupy = importlib.import_module("cupy")
        nccl = load_nccl()
    except ImportError as error:
        raise NcclError(
            f"NCCL needs cupy, which cannot be imported ({error}); install axon-ps[cuda12] or "
            "axon-ps[cuda13], whichever CUDA the driver has"
        ) from error
    if not getattr(nccl, "available", True):
        raise NcclError("this cupy has no NCCL; install NCCL (pip install nvidia-nccl-cu12) or another build of cupy")
    try:
        devices = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:  # cupy's errors are its own
        raise NcclError(f"NCCL needs an NVIDIA GPU, and CUDA finds none: {error}") from error
    if not devices:
        raise NcclError("NCCL needs an NVIDIA GPU, and CUDA finds none on this machine")
    return cupy


def load_nccl() -> Any:
    """Import cupy's module of NCCL; `load` reports a missing one."""
    return importlib.import_module("cupy.cuda.nccl")


def current_stream(data: Any) -> int:
    """Return the CUDA stream that the calling thread uses for arrays like `data`: torch's for a tensor, else cupy's."""
    if hasattr(data, "is_contiguous"):
        return memory().current_stream(data)
    return int(load().cuda.get_current_stream().ptr)


@contextlib.contextmanager
def on_stream(array: Any, stream: int) -> Iterator[None]:
    """Use a cupy array's device, and a stream of another thread's, on this thread: in cupy and, if loaded, torch."""
    with array.device, _external(load().cuda, stream), memory().on_stream(stream):
        yield


class _External:
    """A stream of other code, by CUDA's stream protocol."""

    def __init__(self, stream: int) -> None:
        self._stream = stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._stream


def _external(streams: Any, stream: int) -> Any:
    """Return a stream of other code as cupy's; before cupy 14 there was no protocol."""
    if hasattr(streams.Stream, "from_external"):
        return streams.Stream.from_external(_External(stream))
    return streams.ExternalStream(stream)


def flat_view(data: Any, dtype: DType) -> Array:
    """Return a cupy array or a CUDA tensor as a flat cupy array T[numel] on the same memory.

    Args:
        data: contiguous.
        dtype: its element type.

    Raises:
        InvalidRequest: it is not contiguous.
        NcclError: cupy cannot be used.
    """
    cupy = load()
    if hasattr(data, "is_contiguous"):  # a tensor
        contiguous, data = data.is_contiguous(), data.detach()
        integers = {DType.BF16: "int16", DType.BOOL: "uint8"}.get(dtype)
        if integers is not None:  # DLPack has no such type for cupy
            data = data.view(getattr(sys.modules["torch"], integers))
        array = cupy.from_dlpack(data) if contiguous else None
    else:
        contiguous, array = bool(data.flags.c_contiguous), data
    if array is None or not contiguous:
        raise InvalidRequest("device memory must be contiguous; give a contiguous copy")
    flat: Array = array.reshape(-1).view(dtype.numpy)
    return flat


__all__ = [
    "CudaMemory",
    "DeviceMemory",
    "current_stream",
    "flat_view",
    "load",
    "load_nccl",
    "memory",
    "on_stream",
    "use",
]

"""The stand-in for cupy: arrays, streams, and NCCL's calls on addresses, as far as axon_ps uses them."""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np

from axon_ps.types import Array
from axon_ps_lab.device.communicator import Aborted, Clique, new_unique_id, reduced
from axon_ps_lab.device.trace import Trace

CUPY_VERSION = "14.2.0"
"""The version of cupy whose interface this module has."""

VERSION = 22304
_BF16 = 9
_DTYPES: dict[int, Any] = {
    1: np.uint8, 2: np.int32, 4: np.int64, 6: np.float16, 7: np.float32, 8: np.float64, _BF16: np.uint16,
}  # fmt: skip
_pointers = itertools.count(1)


class DeviceArray(np.ndarray):
    """An array in device memory: a numpy array with the further methods of cupy's.

    Attributes:
        recorder: records the arrays' copies; None = nothing does.
        is_pinned: returns True for an array in page-locked memory.
    """

    __module__ = "cupy"
    __array_priority__ = 1.0  # numpy's results of several arrays are in device memory, too
    __cuda_array_interface__: ClassVar[dict[str, Any]] = {}
    recorder: ClassVar[Trace | None] = None
    is_pinned: ClassVar[Callable[[Array], bool]] = staticmethod(lambda array: False)

    @property
    def data(self) -> Any:
        """The address, in cupy's form."""
        return SimpleNamespace(ptr=self.__array_interface__["data"][0])

    @property
    def device(self) -> Any:
        """The array's device."""
        return Device(0)

    def get(self, stream: Any = None, *, out: Any = None) -> Any:
        """Copy the array to host memory."""
        record("download" if out is not None and DeviceArray.is_pinned(out) else "get", self.nbytes)
        host = np.empty(self.shape, self.dtype) if out is None else out
        host[...] = self.view(np.ndarray)
        return host

    def set(self, host: Any, stream: Any = None) -> None:
        """Copy from host memory."""
        record("upload" if DeviceArray.is_pinned(host) else "asarray", self.nbytes)
        self.view(np.ndarray)[...] = host


def record(what: str, size_bytes: int) -> None:
    """Record an event in the trace, if there is one."""
    if DeviceArray.recorder is not None:
        DeviceArray.recorder.record(what, int(size_bytes))


def asarray(host: Any) -> DeviceArray:
    """Make a device array with the content of host memory."""
    array = np.array(host).view(DeviceArray)
    record("asarray", array.nbytes)
    return array


def empty(numel: int, dtype: Any) -> DeviceArray:
    """Make a device array that is not initialized."""
    return np.full(numel, 3, dtype).view(DeviceArray)


def from_dlpack(tensor: Any) -> DeviceArray:
    """Return a tensor's memory as a device array, which keeps the tensor alive."""
    dtype = np.dtype(str(tensor.dtype).removeprefix("torch."))
    if not tensor.nbytes:
        return np.empty(tuple(tensor.shape), dtype).view(DeviceArray)
    raw: Any = (ctypes.c_byte * tensor.nbytes).from_address(tensor.data_ptr())
    raw.tensor = tensor
    return np.frombuffer(memoryview(raw), dtype).reshape(tuple(tensor.shape)).view(DeviceArray)


# ---------------------------------------------------------------------- streams


class HostStream:
    """A stream whose work is done at once; within `with` it is the current one."""

    def __init__(self, non_blocking: bool = False) -> None:
        self.ptr = next(_pointers) if non_blocking else 0

    @classmethod
    def from_external(cls, stream: Any) -> HostStream:
        """Return a stream that other code has made."""
        made = cls()
        _, made.ptr = stream.__cuda_stream__()
        return made

    def __enter__(self) -> HostStream:
        _thread.streams.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        assert _thread.streams.pop() is self

    def record(self) -> object:
        """Return an event after all enqueued work, which is done already."""
        return object()

    def wait_event(self, event: object) -> None:
        """Order later work after the event; nothing has to be done."""

    def synchronize(self) -> None:
        """Wait for all work, which is done already."""


class Device:
    """A device; within `with` it is the current one."""

    def __init__(self, index: int) -> None:
        assert 0 <= index < 8
        self.id = index

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class _Thread(threading.local):
    def __init__(self) -> None:
        self.streams = [HostStream()]
        self.group: list[Callable[[], None]] | None = None


_thread = _Thread()


def current_stream() -> HostStream:
    """Return the calling thread's stream."""
    return _thread.streams[-1]


# ---------------------------------------------------------------------- NCCL


def _memory(address: int, count: int, dtype: int) -> Array:
    kind = np.dtype(_DTYPES[dtype])
    buffer = (ctypes.c_char * (count * kind.itemsize)).from_address(address)
    return np.frombuffer(buffer, np.uint8).view(kind)


def _reduced(rows: list[Array], op: int, dtype: int) -> Array:
    """Reduce numbers; 16-bit types are reduced in f32, and rounded once."""
    if dtype == _BF16:
        bits = reduced([(r.astype(np.uint32) << 16).view(np.float32) for r in rows], op).view(np.uint32)
        nan = (bits & 0x7FFF_FFFF) > 0x7F80_0000
        rounded = np.where(nan, bits | 0x40_0000, bits + 0x7FFF + ((bits >> 16) & 1))
        return (rounded >> 16).astype(np.uint16)
    if rows[0].dtype == np.float16:
        with np.errstate(over="ignore"):
            return reduced([r.astype(np.float32) for r in rows], op).astype(np.float16)
    return reduced(rows, op).astype(rows[0].dtype)


class NcclCommunicator:
    """A communicator with cupy's interface; see nccl.h for the calls."""

    def __init__(self, world_size: int, unique_id: bytes, rank: int) -> None:
        assert isinstance(unique_id, bytes)
        assert len(unique_id) == 128
        self._clique = Clique(unique_id, world_size, rank)
        self._stream = 0

    def abort(self) -> None:
        """Abort pending calls."""
        self._clique.close()

    def destroy(self) -> None:
        """Free the communicator."""
        self._clique.close()

    def check_async_error(self) -> None:
        """Do nothing: the stand-in has no asynchronous errors."""

    def _enqueue(self, what: str, size_bytes: int, go: Callable[[], None], *, first: bool = False) -> None:
        stream = current_stream().ptr
        assert stream, "collectives of several groups would wait for each other on the caller's stream"
        assert self._stream in (0, stream), "one stream for all of a communicator's collectives"
        self._stream = stream
        self._now(what, size_bytes, go, first=first)

    def _now(self, what: str, size_bytes: int, go: Callable[[], None], *, first: bool = False) -> None:
        record(what, size_bytes)
        if _thread.group is None:
            go()
        else:
            _thread.group.insert(0 if first else len(_thread.group), go)

    def _everybody(self, source: Array) -> list[Array]:
        return [np.frombuffer(data, source.dtype) for data in self._clique.exchange(source.tobytes())]

    def allReduce(self, source: int, target: int, count: int, dtype: int, op: int, stream: int) -> None:
        """ncclAllReduce."""
        mine, result = _memory(source, count, dtype), _memory(target, count, dtype)

        def go() -> None:
            result[:] = _reduced(self._everybody(mine), op, dtype)

        self._enqueue("allReduce", mine.nbytes, go)

    def reduce(self, source: int, target: int, count: int, dtype: int, op: int, root: int, stream: int) -> None:
        """ncclReduce."""
        mine, result = _memory(source, count, dtype), _memory(target, count, dtype)

        def go() -> None:
            rows = self._everybody(mine)
            if root == self._clique.rank:
                result[:] = _reduced(rows, op, dtype)

        self._enqueue("reduce", mine.nbytes, go)

    def broadcast(self, source: int, target: int, count: int, dtype: int, root: int, stream: int) -> None:
        """ncclBroadcast."""
        mine, result = _memory(source, count, dtype), _memory(target, count, dtype)

        def go() -> None:
            nothing = mine[:0]
            everybody = self._everybody(mine if root == self._clique.rank else nothing)
            result[:] = everybody[root]

        self._enqueue("broadcast", mine.nbytes, go)

    def allGather(self, source: int, target: int, count: int, dtype: int, stream: int) -> None:
        """ncclAllGather."""
        mine, result = _memory(source, count, dtype), _memory(target, count * self._clique.world_size, dtype)

        def go() -> None:
            result[:] = np.concatenate(self._everybody(mine))

        self._enqueue("allGather", mine.nbytes, go)

    def reduceScatter(self, source: int, target: int, count: int, dtype: int, op: int, stream: int) -> None:
        """ncclReduceScatter."""
        mine, result = _memory(source, count * self._clique.world_size, dtype), _memory(target, count, dtype)

        def go() -> None:
            begin = self._clique.rank * count
            result[:] = _reduced(self._everybody(mine), op, dtype)[begin : begin + count]

        self._enqueue("reduceScatter", mine.nbytes, go)

    def send(self, source: int, count: int, dtype: int, peer: int, stream: int) -> None:
        """ncclSend."""
        mine = _memory(source, count, dtype)
        self._now("send", mine.nbytes, lambda: self._clique.send(peer, mine.tobytes()), first=True)

    def recv(self, target: int, count: int, dtype: int, peer: int, stream: int) -> None:
        """ncclRecv."""
        result = _memory(target, count, dtype)

        def go() -> None:
            result[:] = np.frombuffer(self._clique.receive(peer), result.dtype)

        self._now("recv", result.nbytes, go)


def _group_start() -> None:
    _thread.group = []


def _group_end() -> None:
    group, _thread.group = _thread.group, None
    for go in group or []:
        go()


def modules(devices: int) -> dict[str, ModuleType]:
    """Return the modules of `import cupy`, by name in `sys.modules`."""
    cupy, cuda, nccl, runtime = (ModuleType(n) for n in ("cupy", "cupy.cuda", "cupy.cuda.nccl", "runtime"))
    contents: dict[ModuleType, dict[str, Any]] = {
        cupy: {
            "cuda": cuda,
            "asarray": asarray,
            "empty": empty,
            "from_dlpack": from_dlpack,
            "ndarray": DeviceArray,
            "__version__": CUPY_VERSION,
        },
        cuda: {
            "nccl": nccl,
            "runtime": runtime,
            "Device": Device,
            "Stream": HostStream,
            "get_current_stream": current_stream,
        },
        runtime: {"getDeviceCount": lambda: devices},
        nccl: {
            "NcclCommunicator": NcclCommunicator,
            "groupStart": _group_start,
            "groupEnd": _group_end,
            "get_unique_id": new_unique_id,
            "get_version": lambda: VERSION,
        },
    }
    for module, values in contents.items():
        for name, value in values.items():
            setattr(module, name, value)
    return {"cupy": cupy, "cupy.cuda": cuda, "cupy.cuda.nccl": nccl}


__all__ = ["Aborted", "DeviceArray", "asarray", "modules", "record"]

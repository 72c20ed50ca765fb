"""A cupy and an NCCL of threads and host memory: enough to run `NcclBackend` where there is no GPU.

Faithful in what the backend relies on: calls are matched by their order on a communicator, grouped calls go together,
nothing is compared between ranks, waiting has no end but `abort`, and reductions are NCCL's (NaN ignored in minima and
maxima, averages of floats by pre-multiplication).
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Iterator
from types import ModuleType
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import pytest

DTYPES = {
    1: np.uint8, 2: np.int32, 4: np.int64, 6: np.float16, 7: np.float32, 8: np.float64, 9: ml_dtypes.bfloat16,
}  # fmt: skip
_sequence = itertools.count()


class Aborted(RuntimeError):
    """What waits on an aborted communicator gets."""


class FakeArray(np.ndarray):
    """Host memory with cupy's `get`, `set` and `data.ptr`."""

    __cuda_array_interface__: ClassVar[dict[str, Any]] = {}

    @property
    def data(self) -> Any:
        pointer = ModuleType("pointer")
        pointer.ptr = self.__array_interface__["data"][0]
        return pointer

    def get(self) -> Any:
        return np.array(self.view(np.ndarray))

    def set(self, host: Any) -> None:
        self.view(np.ndarray)[:] = host


def asarray(host: Any) -> FakeArray:
    return np.array(host).view(FakeArray)


def empty(numel: int, dtype: Any) -> FakeArray:
    return np.full(numel, 3, dtype).view(FakeArray)


def _memory(address: int, count: int, dtype: int) -> Any:
    kind = np.dtype(DTYPES[dtype])
    buffer = (ctypes.c_char * (count * kind.itemsize)).from_address(address)
    return np.frombuffer(buffer, np.uint8).view(kind)


def _reduce(rows: list[Any], op: int) -> Any:
    kind = rows[0].dtype
    wide = np.float32 if kind.itemsize == 2 else kind.type
    with np.errstate(all="ignore"):
        numbers = [r.astype(wide) / wide(len(rows)) if op == 4 else r.astype(wide) for r in rows]
        result = numbers[0]
        for number in numbers[1:]:
            combine = {0: np.add, 1: np.multiply, 2: np.fmax, 3: np.fmin, 4: np.add}[op]
            result = combine(result, number)
        return result.astype(kind)


class _Clique:
    """The ranks of one unique id."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.joined = 0
        self.aborted = False
        self.calls: defaultdict[int, dict[int, Any]] = defaultdict(dict)
        self.done: set[int] = set()
        self.wires: defaultdict[tuple[int, int], deque[bytes]] = defaultdict(deque)

    def wait(self, ready: Any) -> None:
        self.changed.wait_for(lambda: self.aborted or ready())
        if self.aborted:
            raise Aborted("the communicator was aborted")


class NcclCommunicator:
    cliques: ClassVar[defaultdict[tuple[int, ...], _Clique]] = defaultdict(_Clique)

    def __init__(self, world_size: int, unique_id: tuple[int, ...], rank: int) -> None:
        assert len(unique_id) == 128
        self._clique, self._n, self._rank = self.cliques[unique_id], world_size, rank
        self._number = itertools.count()
        self._stream = 0
        with self._clique.changed:
            self._clique.joined += 1
            self._clique.changed.notify_all()
            self._clique.wait(lambda: self._clique.joined >= world_size)

    def abort(self) -> None:
        with self._clique.changed:
            self._clique.aborted = True
            self._clique.changed.notify_all()

    def destroy(self) -> None:
        self._number = iter(())

    def check_async_error(self) -> None:
        """Nothing fails by itself here."""

    def _meet(self, mine: Any, finish: Any) -> None:
        stream = current_stream().ptr
        assert stream, "collectives of several groups would wait for each other on the caller's stream"
        assert self._stream in (0, stream), "one stream for all of a group's collectives"
        self._stream = stream
        if _pending.group is not None:
            _pending.group.append(lambda: self._meet_now(mine, finish))
        else:
            self._meet_now(mine, finish)

    def _meet_now(self, mine: Any, finish: Any) -> None:
        clique, number = self._clique, next(self._number)
        with clique.changed:
            clique.calls[number][self._rank] = mine
            if len(clique.calls[number]) == self._n:
                finish([clique.calls[number][r] for r in range(self._n)])
                clique.done.add(number)
                clique.changed.notify_all()
            clique.wait(lambda: number in clique.done)

    def allReduce(self, source: int, target: int, count: int, dtype: int, op: int, stream: int) -> None:
        def finish(everybody: list[Any]) -> None:
            result = _reduce([s for s, _ in everybody], op)
            for _, t in everybody:
                t[:] = result

        self._meet((_memory(source, count, dtype), _memory(target, count, dtype)), finish)

    def reduce(self, source: int, target: int, count: int, dtype: int, op: int, root: int, stream: int) -> None:
        def finish(everybody: list[Any]) -> None:
            everybody[root][1][:] = _reduce([s for s, _ in everybody], op)

        self._meet((_memory(source, count, dtype), _memory(target, count, dtype)), finish)

    def broadcast(self, source: int, target: int, count: int, dtype: int, root: int, stream: int) -> None:
        def finish(everybody: list[Any]) -> None:
            for _, t in everybody:
                t[:] = everybody[root][0]

        self._meet((_memory(source, count, dtype), _memory(target, count, dtype)), finish)

    def allGather(self, source: int, target: int, count: int, dtype: int, stream: int) -> None:
        def finish(everybody: list[Any]) -> None:
            whole = np.concatenate([s for s, _ in everybody])
            for _, t in everybody:
                t[:] = whole

        self._meet((_memory(source, count, dtype), _memory(target, count * self._n, dtype)), finish)

    def reduceScatter(self, source: int, target: int, count: int, dtype: int, op: int, stream: int) -> None:
        def finish(everybody: list[Any]) -> None:
            result = _reduce([s for s, _ in everybody], op)
            for r, (_, t) in enumerate(everybody):
                t[:] = result[r * count : (r + 1) * count]

        self._meet((_memory(source, count * self._n, dtype), _memory(target, count, dtype)), finish)

    def send(self, source: int, count: int, dtype: int, peer: int, stream: int) -> None:
        content = _memory(source, count, dtype).tobytes()

        def go() -> None:
            with self._clique.changed:
                self._clique.wires[self._rank, peer].append(content)
                self._clique.changed.notify_all()

        go() if _pending.group is None else _pending.group.insert(0, go)

    def recv(self, target: int, count: int, dtype: int, peer: int, stream: int) -> None:
        memory = _memory(target, count, dtype)

        def go() -> None:
            wire = self._clique.wires[peer, self._rank]
            with self._clique.changed:
                self._clique.wait(lambda: wire)
                memory.view(np.uint8)[:] = np.frombuffer(wire.popleft(), np.uint8)

        go() if _pending.group is None else _pending.group.append(go)


class _Pending(threading.local):
    group: list[Any] | None = None


_pending = _Pending()


def group_start() -> None:
    _pending.group = []


def group_end() -> None:
    group, _pending.group = _pending.group, None
    for go in group or []:
        go()


class Stream:
    """A stream on which everything is done at once; within `with` it is the current one."""

    def __init__(self, non_blocking: bool = False) -> None:
        self.ptr = next(_sequence) + 1 if non_blocking else 0

    def __enter__(self) -> Stream:
        _streams.stack.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        assert _streams.stack.pop() is self

    def synchronize(self) -> None:
        """Everything is done."""


class _Streams(threading.local):
    def __init__(self) -> None:
        self.stack = [Stream()]


_streams = _Streams()


def current_stream() -> Stream:
    return _streams.stack[-1]


@contextlib.contextmanager
def device(index: int) -> Iterator[None]:
    assert 0 <= index < 8
    yield


def install(monkeypatch: pytest.MonkeyPatch, devices: int = 8) -> None:
    """Make `import cupy` give this one."""
    cupy, cuda, nccl, runtime = (ModuleType(n) for n in ("cupy", "cupy.cuda", "cupy.cuda.nccl", "runtime"))
    cupy.cuda, cupy.asarray, cupy.empty = cuda, asarray, empty
    cuda.nccl, cuda.runtime, cuda.Device, cuda.Stream = nccl, runtime, device, Stream
    cuda.get_current_stream = current_stream
    runtime.getDeviceCount = lambda: devices
    nccl.NcclCommunicator, nccl.groupStart, nccl.groupEnd = NcclCommunicator, group_start, group_end
    nccl.get_unique_id = lambda: (*(b - 128 for b in next(_sequence).to_bytes(8, "big")), *range(-60, 60))
    nccl.get_version = lambda: 22304
    for name, module in (("cupy", cupy), ("cupy.cuda", cuda), ("cupy.cuda.nccl", nccl)):
        monkeypatch.setitem(sys.modules, name, module)

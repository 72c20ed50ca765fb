"""`GlooBackend`: PyTorch's gloo behind our `Backend`, for comparison, and for TCP without servers.

Owns: the features that gloo lacks. Before a collective all pairs of ranks exchange headers, so a disagreement is found
before data moves and a time-out can name the missing ranks. Averages, NaN in minima and maxima, bool, bf16, uneven
counts and empty arrays are composed of gloo's operations. No other module of collectives imports torch.

Invariants:
- bf16 and f16 are reduced in f32 and rounded once. The order of reductions is gloo's. Blocks of int8, which gloo moves
  as bytes, are exchanged, and each rank reduces its partition.
- A message is an envelope (dtype, size, payload tag) under the user's tag, and the payload under a tag of its own. So a
  message that does not fit can be received and dropped, and concurrent receives of one tag cannot mix up payloads.
- gloo cannot cancel. But a receive that times out closes the peer's connection. That ends all pending calls on it, at
  both ends. `abort` does just that, and a call that fails publishes the reason in the store.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist

from axon_ps.collectives.backends import header, reason
from axon_ps.collectives.backends.base import Backend, GroupContext, GroupStore, Operation, disagreement
from axon_ps.collectives.backends.request import Request, check_message
from axon_ps.errors import AxonError, Broken, Closed, InvalidRequest, Timeout, again
from axon_ps.reduction import ops
from axon_ps.types import COLLECTIVE_DTYPES, Array, DType, ReduceOp

_HEADER_TAG = 0
_FIRST_MESSAGE_TAG = 1
_FIRST_PAYLOAD_TAG = 1 << 29
_PAYLOAD_TAGS = 1 << 29
_POISON_TAG = (1 << 30) + (1 << 29)
_POISON_WAIT = timedelta(milliseconds=1)
_DTYPES = COLLECTIVE_DTYPES
_HALVES = (DType.BF16, DType.F16)
_NATIVE = {
    ReduceOp.SUM: dist.ReduceOp.SUM,
    ReduceOp.AVERAGE: dist.ReduceOp.SUM,
    ReduceOp.PRODUCT: dist.ReduceOp.PRODUCT,
    ReduceOp.MIN: dist.ReduceOp.MIN,
    ReduceOp.MAX: dist.ReduceOp.MAX,
    ReduceOp.BAND: dist.ReduceOp.BAND,
    ReduceOp.BOR: dist.ReduceOp.BOR,
    ReduceOp.BXOR: dist.ReduceOp.BXOR,
}
_OF_BOOL = {
    ReduceOp.SUM: dist.ReduceOp.MAX,
    ReduceOp.PRODUCT: dist.ReduceOp.MIN,
    ReduceOp.BAND: dist.ReduceOp.MIN,
    ReduceOp.BOR: dist.ReduceOp.MAX,
}


class _Rendezvous(dist.Store):  # type: ignore[misc, name-defined]
    """The group's store behind gloo's interface; gloo exchanges addresses in it."""

    def __init__(self, store: GroupStore, prefix: str, timeout_s: float) -> None:
        super().__init__()
        self._store = store
        self._prefix = prefix
        self._timeout_s = timeout_s
        self._keys: list[str] = []
        self.timed_out = False  # torch turns our error into one without a type

    def set(self, key: str, value: bytes | str) -> None:
        """Store a value."""
        self._keys.append(f"{self._prefix}/{key}")
        self._store.put(self._keys[-1], value.encode() if isinstance(value, str) else value)

    def get(self, key: str) -> bytes:
        """Return the value of a key as soon as there is one."""
        try:
            return self._store.wait(f"{self._prefix}/{key}", self._timeout_s)
        except Timeout:
            self.timed_out = True
            raise

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Return when all keys have values."""
        for key in keys:
            self.get(key)

    def delete_keys(self) -> None:
        """Remove the keys that this rank stored."""
        for key in self._keys:
            self._store.delete(key)
        self._keys.clear()


class GlooBackend(Backend):
    """The collectives of a group over gloo's TCP connections. A group of one rank needs none and has none.

    Args:
        context: the group. All ranks must make the backend together.

    Raises:
        Timeout: some ranks did not make it in time.
        Broken: the connections cannot be made.
    """

    name: ClassVar[str] = "gloo"

    def __init__(self, context: GroupContext) -> None:
        super().__init__(context)
        self._error: AxonError | None = None
        self._lock = threading.Lock()
        self._payload_tags = itertools.count()
        self._bytes_sent = 0
        self._native: Any = None
        if self.world_size == 1:
            return
        self._rendezvous = _Rendezvous(context.store, f"gloo/{context.name}", context.timeout_s)
        limit = timedelta(seconds=context.timeout_s)
        try:
            self._native = dist.ProcessGroupGloo(self._rendezvous, self.rank, self.world_size, limit)
        except RuntimeError as error:
            self._rendezvous.delete_keys()
            if self._rendezvous.timed_out or "timed out" in str(error).lower():
                raise Timeout(f"gloo group {context.name!r} was not complete in {context.timeout_s:g} s") from error
            raise Broken(f"gloo cannot connect group {context.name!r}: {_first_line(error)}") from error

    # ------------------------------------------------------------------ collectives

    def run(self, request: Request, timeout_s: float) -> None:
        """See `Backend.run`."""
        request.check(self.rank, self.world_size)
        self._check_usable()
        deadline = time.monotonic() + timeout_s
        try:
            matrix = self._agree(request, deadline)
            _PERFORM[request.call.operation](self, request, matrix, deadline)
        except (Timeout, Broken) as error:
            self._end(error)
            raise

    def _agree(self, request: Request, deadline: float) -> list[list[int]]:
        """Exchange headers with every rank; return how many elements go from rank to rank in an all-to-all."""
        mine = header.encode(request, self.world_size)
        headers = [mine if r == self.rank else np.zeros_like(mine) for r in range(self.world_size)]
        others = [r for r in range(self.world_size) if r != self.rank]

        def start() -> list[Any]:
            sent = torch.from_numpy(mine)
            receives = [self._native.recv([torch.from_numpy(headers[r])], r, _HEADER_TAG) for r in others]
            return receives + [self._native.send([sent], r, _HEADER_TAG) for r in others]

        def missing() -> str:
            return _who([self.context.ranks[r] for r in others if not header.arrived(headers[r])])

        if others:
            self._do(start, str(request.call), missing, deadline)
            self._rendezvous.delete_keys()  # all ranks are connected
        return header.check(headers, request.call, self.context)

    def _run_native(self, start: Callable[[], Any], what: str, deadline: float) -> None:
        """Start a native collective and wait for it."""

        def missing() -> str:
            return "some rank"

        self._do(lambda: [start()], what, missing, deadline)

    def _all_reduce_native(self, tensor: Any, op: Any, root: int, what: str, deadline: float) -> None:
        """Reduce all ranks' tensors into tensor; with a root other than -1, on the root only."""
        if root < 0:
            options = dist.AllreduceOptions()
            options.reduceOp = op
            self._run_native(lambda: self._native.allreduce([tensor], options), what, deadline)
        else:
            reduce_options = dist.ReduceOptions()
            reduce_options.reduceOp, reduce_options.rootRank = op, root
            self._run_native(lambda: self._native.reduce([tensor], reduce_options), what, deadline)

    def _reduced(self, request: Request, deadline: float, root: int = -1) -> Any:
        """Return the reduction of all ranks' data, as a new tensor; with a root other than -1, on the root only."""
        call = request.call
        assert call.op is not None
        assert request.data is not None
        if call.dtype is DType.INT8_BLOCK:
            return self._reduced_blocks(request, request.data, deadline)
        tensor, what = _tensor(request.data, call.dtype), str(call)
        result = tensor.float() if call.dtype in _HALVES else tensor.clone()
        if self.world_size == 1 or not result.numel():
            return result
        op = _NATIVE[call.op] if call.dtype is not DType.BOOL else _OF_BOOL.get(call.op, _NATIVE[call.op])
        self._all_reduce_native(result, op, root, what, deadline)
        if call.op in (ReduceOp.MIN, ReduceOp.MAX) and call.dtype.is_float:  # gloo ignores a NaN there
            nan = tensor.isnan().to(torch.uint8)
            self._all_reduce_native(nan, dist.ReduceOp.MAX, root, what, deadline)
            result[nan.bool()] = torch.nan
        if call.op is ReduceOp.AVERAGE:
            result.div_(self.world_size)
        return result

    def _reduced_blocks(self, request: Request, data: Array, deadline: float) -> Any:
        """Reduce blocks of int8, in rank order: each rank reduces its partition, and all get all partitions."""
        call, n = request.call, self.world_size
        assert call.op is not None
        counts = [data.size // n + (r < data.size % n) for r in range(n)]
        mine = counts[self.rank]
        partitions = np.empty(n * mine, data.dtype)
        if data.size:
            self._exchange(partitions, data, [mine] * n, counts, request, deadline)
        result = np.empty_like(data)
        begins = np.cumsum([0, *counts])
        own = result[begins[self.rank] : begins[self.rank + 1]]
        ops.reduce_into(own, list(partitions.reshape(n, mine)), call.op, call.dtype)
        for root in range(n):
            self._broadcast_from(result[begins[root] : begins[root + 1]], root, request, deadline)
        return _tensor(result, call.dtype)

    def _all_reduce(self, request: Request, _: Any, deadline: float) -> None:
        assert request.data is not None
        _tensor(request.data, request.call.dtype).copy_(self._reduced(request, deadline))

    def _reduce(self, request: Request, _: Any, deadline: float) -> None:
        result = self._reduced(request, deadline, request.call.root)
        if self.rank == request.call.root:
            assert request.data is not None
            _tensor(request.data, request.call.dtype).copy_(result)

    def _reduce_scatter(self, request: Request, _: Any, deadline: float) -> None:
        assert request.output is not None
        begin, target = sum(request.call.counts[: self.rank]), _tensor(request.output, request.call.dtype)
        target.copy_(self._reduced(request, deadline)[begin : begin + len(target)])

    def _broadcast_from(self, array: Array, root: int, request: Request, deadline: float) -> None:
        if self.world_size == 1 or not array.size:
            return
        options = dist.BroadcastOptions()
        options.rootRank = root
        tensor = _tensor(array, request.call.dtype)
        self._run_native(lambda: self._native.broadcast([tensor], options), str(request.call), deadline)

    def _broadcast(self, request: Request, _: Any, deadline: float) -> None:
        assert request.data is not None
        self._broadcast_from(request.data, request.call.root, request, deadline)

    def _all_gather(self, request: Request, _: Any, deadline: float) -> None:
        """Make one broadcast per rank: gloo's all-gather takes equal counts only."""
        assert request.output is not None
        assert request.data is not None
        partitions = np.split(request.output, np.cumsum(request.call.counts)[:-1])
        _copy_unless_same(partitions[self.rank], request.data)
        for root, partition in enumerate(partitions):
            self._broadcast_from(partition, root, request, deadline)

    def _exchange(
        self, output: Array, data: Array, received: list[int], sent: list[int], request: Request, deadline: float
    ) -> None:
        """Send partition i of data to rank i, and receive partition i of output from there; not all are empty."""
        if self.world_size == 1:
            _copy_unless_same(output, data)
            return
        dtype = request.call.dtype
        # Tensors without elements have no memory, and gloo needs an address; so each gets one element more.
        source, target = _padded(data, dtype)[: data.size], _padded(output, dtype)[: output.size]
        self._run_native(
            lambda: self._native.alltoall_base(target, source, received, sent, dist.AllToAllOptions()),
            str(request.call),
            deadline,
        )
        if output.size:
            _tensor(output, dtype).copy_(target)

    def _gather(self, request: Request, _: Any, deadline: float) -> None:
        call, n = request.call, self.world_size
        if not sum(call.counts):
            return
        assert request.data is not None
        is_root = self.rank == call.root
        output = request.output if request.output is not None else np.empty(0, call.dtype.numpy)
        sent = [request.data.size if r == call.root else 0 for r in range(n)]
        self._exchange(output, request.data, list(call.counts) if is_root else [0] * n, sent, request, deadline)

    def _scatter(self, request: Request, _: Any, deadline: float) -> None:
        call, n = request.call, self.world_size
        if not sum(call.counts):
            return
        assert request.output is not None
        is_root = self.rank == call.root
        data = request.data if request.data is not None else np.empty(0, call.dtype.numpy)
        received = [request.output.size if r == call.root else 0 for r in range(n)]
        self._exchange(request.output, data, received, list(call.counts) if is_root else [0] * n, request, deadline)

    def _all_to_all(self, request: Request, matrix: list[list[int]], deadline: float) -> None:
        assert request.output is not None
        assert request.data is not None
        if any(map(any, matrix)):
            received, sent = list(request.output_counts), list(request.input_counts)
            self._exchange(request.output, request.data, received, sent, request, deadline)

    def _barrier(self, request: Request, _: Any, deadline: float) -> None:
        """Do nothing: the ranks have exchanged headers."""

    # ------------------------------------------------------------------ point to point

    def send(self, data: Array, dtype: DType, to: int, tag: int, timeout_s: float) -> None:
        """See `Backend.send`; it returns when the receiver has received the message."""
        self._check_message(data, dtype, to, tag, receiving=False)
        deadline = time.monotonic() + timeout_s
        payload_tag = _FIRST_PAYLOAD_TAG + next(self._payload_tags) % _PAYLOAD_TAGS
        envelope = torch.tensor([_DTYPES.index(dtype), data.size, payload_tag], dtype=torch.int64, device="cpu")
        tensor, what = _tensor(data, dtype), f"a message with tag {tag}"

        def start() -> list[Any]:
            works = [self._native.send([envelope], to, _FIRST_MESSAGE_TAG + tag)]
            return works + ([self._native.send([tensor], to, payload_tag)] if data.size else [])

        def missing() -> str:
            return _who([self.context.ranks[to]])

        try:
            self._do(start, what, missing, deadline)
        except (Timeout, Broken) as error:
            self._end(error)
            raise
        self._bytes_sent += data.nbytes

    def recv(self, data: Array, dtype: DType, source: int, tag: int, timeout_s: float) -> int:
        """See `Backend.recv`."""
        self._check_message(data, dtype, source, tag, receiving=True)
        deadline = time.monotonic() + timeout_s
        envelope = torch.zeros(3, dtype=torch.int64, device="cpu")
        what, wire_tag = f"a message with tag {tag}", _FIRST_MESSAGE_TAG + tag

        def missing() -> str:
            silent = [source] if source >= 0 else [r for r in range(self.world_size) if r != self.rank]
            return _who([self.context.ranks[r] for r in silent])

        def start() -> list[Any]:
            if source < 0:
                return [self._native.recv_anysource([envelope], wire_tag)]
            return [self._native.recv([envelope], source, wire_tag)]

        try:
            (work,) = self._do(start, what, missing, deadline)
            sender = source if source >= 0 else int(work._source_rank())
            index, numel, payload_tag = envelope.tolist()
            sent_dtype = _DTYPES[index]
            fits = (sent_dtype, numel) == (dtype, data.size)
            target = data if fits else np.empty(numel, sent_dtype.numpy)
            if numel:
                tensor = _tensor(target, sent_dtype)
                self._do(lambda: [self._native.recv([tensor], sender, payload_tag)], what, missing, deadline)
        except (Timeout, Broken) as error:
            self._end(error)
            raise
        if not fits:
            ranks = self.context.ranks
            calls = {
                ranks[sender]: f"send of {numel} {sent_dtype.value}",
                ranks[self.rank]: f"recv of {data.size} {dtype.value}",
            }
            raise disagreement(calls, f"a message with tag {tag} in group {self.context.name!r}")
        return sender

    def _check_message(self, data: Array, dtype: DType, peer: int, tag: int, *, receiving: bool) -> None:
        check_message(data, dtype, peer, tag, self.world_size, receiving=receiving)
        if peer == self.rank or self.world_size == 1:
            raise InvalidRequest(f"rank {self.rank} cannot exchange messages with itself")
        if _FIRST_MESSAGE_TAG + tag >= _FIRST_PAYLOAD_TAG:
            raise InvalidRequest(f"the tag is {tag}; over gloo it must be below {_FIRST_PAYLOAD_TAG - 1}")
        self._check_usable()

    # ------------------------------------------------------------------ errors, the end

    def _do(self, start: Callable[[], list[Any]], what: str, missing: Callable[[], str], deadline: float) -> list[Any]:
        """Start gloo's operations, wait for them and return their handles; gloo's errors become ours."""
        works: list[Any] = []
        try:
            works = start()
            for work in works:
                # gloo cuts a time-out to full milliseconds, and would report that time is up before it is.
                left_s = max(1, math.ceil((deadline - time.monotonic()) * 1000.0)) / 1000.0
                work.wait(timedelta(seconds=left_s))
            return works
        except RuntimeError as error:
            work = None
            works.clear()  # or the holder of the error would keep the connections open
            raise self._cause(error, what, missing, deadline) from error.with_traceback(None)

    def _cause(self, error: RuntimeError, what: str, missing: Callable[[], str], deadline: float) -> AxonError:
        if self._error is not None:
            return self._error
        if time.monotonic() >= deadline:
            return Timeout(f"{missing()} did not come to {what} in time")
        broken = Broken(f"gloo broke off {what} (a rank has gone, or ended the group): {_first_line(error)}")
        found = reason.find(self.context, self.name)
        return self._error or found or broken

    def _check_usable(self) -> None:
        if self._error is not None:
            raise again(self._error)

    def _end(self, error: AxonError) -> None:
        """End the group after a call of this rank has failed."""
        if self._error is None:
            reason.publish(self.context, self.name, error)
        self.abort(error)

    def abort(self, error: AxonError) -> None:
        """See `Backend.abort`; it closes the connections, so that the other ranks' calls end too."""
        with self._lock:
            if self._error is not None:
                return
            self._error = again(error)
            native = self._native
        if native is not None:
            for peer in range(self.world_size):
                if peer != self.rank:
                    with contextlib.suppress(RuntimeError):  # as intended: it closed the connection
                        native.recv([torch.zeros(1, dtype=torch.float32, device="cpu")], peer, _POISON_TAG).wait(
                            _POISON_WAIT
                        )

    def close(self) -> None:
        """See `Backend.close`."""
        with self._lock:
            # This is not the error that ended the group, whose traceback would keep the connections open.
            self._error = Closed(f"the backend of group {self.context.name!r} was closed")
            self._native = None

    def statistics(self) -> dict[str, float]:
        """Return the bytes of messages sent."""
        return {"gloo_message_bytes_sent": float(self._bytes_sent)}


_PERFORM: dict[Operation, Callable[[GlooBackend, Request, list[list[int]], float], None]] = {
    Operation.ALL_REDUCE: GlooBackend._all_reduce,
    Operation.REDUCE: GlooBackend._reduce,
    Operation.BROADCAST: GlooBackend._broadcast,
    Operation.ALL_GATHER: GlooBackend._all_gather,
    Operation.REDUCE_SCATTER: GlooBackend._reduce_scatter,
    Operation.GATHER: GlooBackend._gather,
    Operation.SCATTER: GlooBackend._scatter,
    Operation.ALL_TO_ALL: GlooBackend._all_to_all,
    Operation.BARRIER: GlooBackend._barrier,
    Operation.REFUSAL: GlooBackend._barrier,
}


def _tensor(array: Array, dtype: DType) -> Any:
    """Return the array as a tensor on the same memory; a copy if it is read-only, which no tensor can be."""
    if not array.flags.writeable:
        array = array.copy()
    if dtype is DType.BF16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    if dtype is DType.INT8_BLOCK:
        return torch.from_numpy(array.view(np.uint8).reshape(array.size, dtype.itemsize))
    return torch.from_numpy(array.view(np.uint8) if dtype is DType.BOOL else array)


def _padded(array: Array, dtype: DType) -> Any:
    padded = np.zeros(array.size + 1, array.dtype)
    padded[:-1] = array
    return _tensor(padded, dtype)


def _copy_unless_same(target: Array, source: Array) -> None:
    if target.__array_interface__["data"] != source.__array_interface__["data"]:
        np.copyto(target, source)


def _who(ranks: list[int]) -> str:
    return f"rank {', '.join(map(str, ranks))}" if ranks else "some rank"


def _first_line(error: BaseException) -> str:
    """Return gloo's message, without its source location and without its advice."""
    return re.sub(r"^\[[^\]]*\] ?", "", str(error)).partition("\n")[0].partition(" This is typically")[0]

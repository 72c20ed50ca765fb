"""`NcclBackend`: collectives of GPUs through NCCL, on cupy arrays.

Owns: what NCCL lacks. Ranks compare their calls by a small all-gather before each collective; bitwise reductions, NaN
in minima and maxima, bool, and uneven counts are composed of NCCL's operations, in one group each. A bf16 array is
uint16 here.

Invariants:
- A call first waits for the calling thread's current stream, on which the data was computed, and then runs on the
  group's own stream and is waited for. On the caller's stream, two ranks could enqueue the calls of two groups in
  opposite orders, and wait for each other for ever.
- NCCL matches calls by their order only. So one collective at a time runs on the group's communicator, and messages,
  which have tags and come from any thread, have communicators of their own, one for each direction between two ranks;
  both ends agree in the group's store which message is next.
- A watchdog checks for NCCL's asynchronous errors and for the deadline, and aborts the communicators: NCCL itself would
  wait for ever, in the device or in the call.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np

from axon_ps.collectives import reason
from axon_ps.collectives.backends import header
from axon_ps.collectives.backends.base import GroupContext, Operation
from axon_ps.collectives.backends.mock import mock_contexts
from axon_ps.collectives.backends.nccl.messages import Messages
from axon_ps.collectives.backends.nccl.symbols import MAX, NCCL_DTYPES, NcclUniqueId, nccl_op, version_of
from axon_ps.collectives.backends.nccl.watchdog import Watchdog
from axon_ps.collectives.backends.request import Request, RequestBackend, check_message
from axon_ps.collectives.cuda import load, load_nccl
from axon_ps.errors import AxonError, Closed, InvalidRequest, Misuse, NcclError, Timeout
from axon_ps.types import NUMBERS, Array, DType, ReduceOp

_BITWISE: dict[ReduceOp, Any] = {
    ReduceOp.BAND: np.bitwise_and,
    ReduceOp.BOR: np.bitwise_or,
    ReduceOp.BXOR: np.bitwise_xor,
}
_LATE_S = 0.5
_FAILED = b"failed: "


class _Late(Timeout):
    """The watchdog's error, until it is known which rank is missing."""


class NcclBackend(RequestBackend):
    """The collectives of a group of GPUs, one for each rank.

    Args:
        unique_id: what `generate_unique_id` gave on one rank.
        rank: our position.
        world_size: number of ranks. All of them must make the backend together.
        device: index of our GPU.
        context: who the group is; None = ranks that share nothing but the unique id: messages then cannot be sent,
            and a time-out cannot say who is missing.

    Raises:
        NcclError: there is no GPU or no cupy, or NCCL failed.
    """

    name: ClassVar[str] = "nccl"
    dtypes = NUMBERS

    def __init__(
        self,
        unique_id: NcclUniqueId,
        rank: int,
        world_size: int,
        device: int = 0,
        *,
        context: GroupContext | None = None,
    ) -> None:
        super().__init__(context or mock_contexts(world_size, name="nccl")[rank])
        self.device = device
        self._has_store = context is not None
        self._cupy = load()
        self._nccl = load_nccl()
        self._lock = threading.Lock()
        self._error: AxonError | None = None
        self._settling = threading.Lock()
        self._sequence = -1
        self._comms: list[Any] = []
        self._comm = self._connect(unique_id, world_size, rank)
        with self._cupy.cuda.Device(device):
            self._own_stream = self._cupy.cuda.Stream(non_blocking=True)
        self._messages = Messages(self.context, self._connect_pair, self.generate_unique_id)
        self._watchdog = Watchdog(f"axon-ps-nccl-{self.context.name}"[:60], self._async_error, self._expire)

    @classmethod
    def create(cls, context: GroupContext, *, device: int | None = None) -> NcclBackend:
        """Make the backend of a group: its first rank makes the unique id, the others find it in the group's store.

        Args:
            context: who the group is. All ranks must make it together.
            device: index of our GPU; None = by our position among the workers of our node.

        Raises:
            NcclError: there is no GPU or no cupy, or NCCL failed.
            Timeout: the first rank did not come.
        """
        key = _id_key(context)
        if context.rank == 0:
            try:
                unique_id = cls.generate_unique_id()
            except AxonError as error:
                context.store.put(key, _FAILED + str(error).encode())
                raise
            context.store.put(key, unique_id.value)
        else:
            value = context.store.wait(key, context.timeout_s)
            if value.startswith(_FAILED):
                raise NcclError(f"rank {context.ranks[0]}: {value[len(_FAILED) :].decode()}")
            unique_id = NcclUniqueId(value)
        if device is None:
            device = context.members[context.rank].local_rank % cls.device_count()
        return cls(unique_id, context.rank, len(context.ranks), device, context=context)

    @classmethod
    def create_world(cls, devices: list[int]) -> list[NcclBackend]:
        """The backends of the GPUs of this process, by rank: one for each of as many threads.

        Raises:
            NcclError: there is no GPU or no cupy, or NCCL failed.
        """
        unique_id = cls.generate_unique_id()
        made: dict[int, NcclBackend | Exception] = {}

        def make(context: GroupContext) -> None:
            try:
                made[context.rank] = cls(unique_id, context.rank, len(devices), devices[context.rank], context=context)
            except Exception as error:
                made[context.rank] = error

        threads = [threading.Thread(target=make, args=(c,)) for c in mock_contexts(len(devices), name="nccl")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        backends = [b for _, b in sorted(made.items()) if isinstance(b, NcclBackend)]
        errors = [b for b in made.values() if isinstance(b, Exception)]
        if errors:
            for backend in backends:
                backend.close()
            raise errors[0]
        return backends

    def sibling(self, context: GroupContext) -> NcclBackend:
        """See `Backend.sibling`; on our GPU.

        Raises:
            Misuse: the ranks share nothing but the unique id.
        """
        if not self._has_store:
            raise Misuse(
                "an NcclBackend made from a unique id alone has no sub-groups: give it a context, make it by "
                "NcclBackend.create_world, or ask a world for the group"
            )
        return type(self).create(context, device=self.device)

    @staticmethod
    def generate_unique_id() -> NcclUniqueId:
        """A new unique id, for one communicator.

        Raises:
            NcclError: there is no GPU or no cupy.
        """
        load()
        return NcclUniqueId.of(load_nccl().get_unique_id())

    @staticmethod
    def nccl_version() -> tuple[int, int, int]:
        """The version of NCCL: (major, minor, patch).

        Raises:
            NcclError: there is no GPU or no cupy.
        """
        load()
        return version_of(load_nccl().get_version())

    @staticmethod
    def device_count() -> int:
        """How many GPUs this process sees.

        Raises:
            NcclError: there is no GPU or no cupy.
        """
        return int(load().cuda.runtime.getDeviceCount())

    def synchronize(self) -> None:
        """Return when everything on the current stream of our GPU is done."""
        with self._cupy.cuda.Device(self.device):
            self._cupy.cuda.get_current_stream().synchronize()

    # ------------------------------------------------------------------ collectives

    def _perform(self, request: Request, timeout_s: float) -> None:
        self._sequence = request.call.sequence
        with self._watched(timeout_s, str(request.call)):
            self._wait()  # for the data
            with self._own_stream:
                matrix = self._agree(request)
                _PERFORM[request.call.operation](self, request, matrix)
                self._wait()

    @contextlib.contextmanager
    def _watched(self, timeout_s: float, what: str, peer: int = -1) -> Iterator[None]:
        """Runs the body, which calls NCCL, on our device and under the watchdog, and turns its errors into ours."""
        if self._error is not None:
            with self._settling:
                raise self._error.with_traceback(None)
        try:
            with self._cupy.cuda.Device(self.device), self._watchdog.until(time.monotonic() + timeout_s):
                yield
            failure: BaseException | None = None
        except InvalidRequest:
            raise
        except Exception as error:
            failure = error
        if failure is None and self._error is None:
            return
        with self._settling:
            self._settle(failure, what, timeout_s, peer)
        assert self._error is not None
        raise self._error from failure

    def _settle(self, failure: BaseException | None, what: str, timeout_s: float, peer: int) -> None:
        """Find out which error has ended the group, publish it, and abort."""
        if self._error is not None and not isinstance(self._error, _Late):
            return
        ended: AxonError
        if isinstance(self._error, _Late) or isinstance(failure, Timeout):
            ended = Timeout(f"{self._missing(peer)} did not come to {what} within {timeout_s:g} s")
        elif isinstance(failure, AxonError):
            ended = failure
        else:
            self._publish_late()
            found = reason.find(self.context, self.name, 2 * _LATE_S)
            ended = found or NcclError(f"NCCL failed in {what}: {failure}")
        reason.publish(self.context, self.name, ended)
        self.abort(ended)
        with self._lock:
            if isinstance(self._error, _Late):
                self._error = ended

    def _agree(self, request: Request) -> list[list[int]]:
        """Exchange headers; how many elements go from rank to rank in an all-to-all."""
        mine = self._cupy.asarray(header.encode(request, self.world_size))
        headers = self._cupy.empty(mine.size * self.world_size, np.uint8)
        self._comm.allGather(_address(mine), _address(headers), mine.size, NCCL_DTYPES[DType.U8], self._stream)
        self._wait()
        if request.call.sequence == 0 and self._has_store and self.rank == 0:
            self.context.store.delete(_id_key(self.context))  # every rank has it
        return header.check(list(headers.get().reshape(self.world_size, -1)), request.call, self.context)

    def _wait(self) -> None:
        """Return when all work that was enqueued on the current stream is done."""
        self._cupy.cuda.get_current_stream().synchronize()
        if self._error is not None:
            raise self._error.with_traceback(None)

    @property
    def _stream(self) -> int:
        return int(self._cupy.cuda.get_current_stream().ptr)

    @contextlib.contextmanager
    def _group(self) -> Iterator[None]:
        """All calls of the body become one launch, so their order does not matter."""
        self._nccl.groupStart()
        try:
            yield
        finally:
            self._nccl.groupEnd()

    def _partitions(self, array: Array, counts: tuple[int, ...]) -> list[Array]:
        ends = np.cumsum(counts).tolist()
        return [array[end - count : end] for end, count in zip(ends, counts, strict=True)]

    def _native_reduce(self, source: Array, target: Array, op: int, dtype: DType, root: int = -1) -> None:
        """target: T[m] becomes the reduction of all ranks' source: T[m], or only on the root's if there is one."""
        where = _address(source), _address(target), source.size, NCCL_DTYPES[dtype], op
        if root < 0:
            self._comm.allReduce(*where, self._stream)
        else:
            self._comm.reduce(*where, root, self._stream)

    def _reduced(self, request: Request, target: Array | None = None, root: int = -1) -> Array:
        """The reduction of all ranks' data, in `target` or a new array; with a root, there only."""
        call, data = request.call, _required(request.data)
        assert call.op is not None
        result: Array = self._cupy.empty(data.size, data.dtype) if target is None else target
        if not data.size:
            return result
        op = nccl_op(call.op, call.dtype)
        if op is None:
            everything: Array = self._cupy.empty(data.size * self.world_size, data.dtype)
            self._comm.allGather(_address(data), _address(everything), data.size, NCCL_DTYPES[call.dtype], self._stream)
            rows = everything.reshape(self.world_size, -1)
            reduced = rows[0]
            for row in rows[1:]:
                reduced = _BITWISE[call.op](reduced, row)
            result[:] = reduced
            return result
        nan: Array | None = None
        if call.op in (ReduceOp.MIN, ReduceOp.MAX) and call.dtype.is_float:  # NCCL ignores a NaN there
            nan = _is_nan(data, call.dtype).view(np.uint8)
            self._native_reduce(nan, nan, MAX, DType.U8)
        self._native_reduce(data, result, op, call.dtype, root)
        if nan is not None and root in (-1, self.rank):
            result[nan.view(np.bool_)] = 0x7FC0 if call.dtype is DType.BF16 else np.nan
        return result

    def _all_reduce(self, request: Request, _: Any) -> None:
        self._reduced(request, _required(request.data))

    def _reduce(self, request: Request, _: Any) -> None:
        is_root = self.rank == request.call.root
        self._reduced(request, _required(request.data) if is_root else None, request.call.root)

    def _reduce_scatter(self, request: Request, _: Any) -> None:
        call, data, output = request.call, _required(request.data), _required(request.output)
        assert call.op is not None
        op = nccl_op(call.op, call.dtype)
        if op is None or call.op in (ReduceOp.MIN, ReduceOp.MAX):
            output[:] = self._partitions(self._reduced(request), call.counts)[self.rank]
            return
        dtype = NCCL_DTYPES[call.dtype]
        if len(set(call.counts)) == 1:
            if output.size:
                self._comm.reduceScatter(_address(data), _address(output), output.size, dtype, op, self._stream)
            return
        with self._group():
            for root, partition in enumerate(self._partitions(data, call.counts)):
                if partition.size:
                    target = output if root == self.rank else partition
                    self._comm.reduce(
                        _address(partition), _address(target), partition.size, dtype, op, root, self._stream
                    )

    def _broadcast(self, request: Request, _: Any) -> None:
        self._broadcast_one(_required(request.data), request.call.dtype, request.call.root)

    def _broadcast_one(self, array: Array, dtype: DType, root: int) -> None:
        if array.size:
            address = _address(array)
            self._comm.broadcast(address, address, array.size, NCCL_DTYPES[dtype], root, self._stream)

    def _all_gather(self, request: Request, _: Any) -> None:
        call, data, output = request.call, _required(request.data), _required(request.output)
        if len(set(call.counts)) == 1:
            if data.size:
                dtype = NCCL_DTYPES[call.dtype]
                self._comm.allGather(_address(data), _address(output), data.size, dtype, self._stream)
            return
        partitions = self._partitions(output, call.counts)
        if data.size and _address(partitions[self.rank]) != _address(data):
            partitions[self.rank][:] = data
        with self._group():
            for root, partition in enumerate(partitions):
                self._broadcast_one(partition, call.dtype, root)

    def _exchange(self, outputs: list[Array | None], inputs: list[Array | None], dtype: DType) -> None:
        """inputs[i] goes to rank i, outputs[i] comes from there; None = nothing is sent or received."""
        number, stream = NCCL_DTYPES[dtype], self._stream
        own_output, own_input = outputs[self.rank], inputs[self.rank]
        if own_output is not None and own_input is not None and own_output.size:
            own_output[:] = own_input
        with self._group():
            for peer in range(self.world_size):
                source, target = inputs[peer], outputs[peer]
                if peer != self.rank and source is not None and source.size:
                    self._comm.send(_address(source), source.size, number, peer, stream)
                if peer != self.rank and target is not None and target.size:
                    self._comm.recv(_address(target), target.size, number, peer, stream)

    def _gather(self, request: Request, _: Any) -> None:
        call = request.call
        outputs: list[Array | None] = [None] * self.world_size
        if request.output is not None:
            outputs = [*self._partitions(request.output, call.counts)]
        inputs = [request.data if peer == call.root else None for peer in range(self.world_size)]
        self._exchange(outputs, inputs, call.dtype)

    def _scatter(self, request: Request, _: Any) -> None:
        call = request.call
        inputs: list[Array | None] = [None] * self.world_size
        if request.data is not None:
            inputs = [*self._partitions(request.data, call.counts)]
        outputs = [request.output if peer == call.root else None for peer in range(self.world_size)]
        self._exchange(outputs, inputs, call.dtype)

    def _all_to_all(self, request: Request, _: Any) -> None:
        outputs = self._partitions(_required(request.output), request.output_counts)
        inputs = self._partitions(_required(request.data), request.input_counts)
        self._exchange([*outputs], [*inputs], request.call.dtype)

    def _barrier(self, request: Request, _: Any) -> None:
        """Nothing is left to do: the ranks have exchanged headers."""

    # ------------------------------------------------------------------ point to point

    def send(self, data: Array, dtype: DType, to: int, tag: int, timeout_s: float) -> None:
        """See `Backend.send`; returns when the receiver has the message."""
        self._check_message(data, dtype, to, tag, any_source=False)
        with self._watched(timeout_s, f"a message with tag {tag}", to):
            self._messages.send(data, dtype, to, tag, timeout_s)

    def recv(self, data: Array, dtype: DType, source: int, tag: int, timeout_s: float) -> int:
        """See `Backend.recv`."""
        self._check_message(data, dtype, source, tag, any_source=True)
        with self._watched(timeout_s, f"a message with tag {tag}", source):
            sender = self._messages.recv(data, dtype, source, tag, timeout_s)
        return sender

    def _check_message(self, data: Array, dtype: DType, peer: int, tag: int, *, any_source: bool) -> None:
        if dtype not in self.dtypes:
            raise InvalidRequest(f"nccl does not send {dtype.value}; use a backend for host memory")
        check_message(data, dtype, peer, tag, self.context, any_source=any_source)
        if peer == self.rank or self.world_size == 1:
            raise InvalidRequest(f"rank {self.rank} cannot exchange messages with itself")
        if not self._has_store:
            raise InvalidRequest("messages need a group's store; make the backend with NcclBackend.create(context)")

    def _connect_pair(self, unique_id: NcclUniqueId, end: int) -> Callable[[Array, DType], None]:
        """A function that moves messages in one direction between two ranks: end 0 sends, end 1 receives."""
        comm = self._connect(unique_id, 2, end)

        def move(array: Array, dtype: DType) -> None:
            stream = self._cupy.cuda.Stream(non_blocking=True)
            self._cupy.cuda.get_current_stream().synchronize()  # for the data
            one_way = comm.recv if end else comm.send
            one_way(_address(array), array.size, NCCL_DTYPES[dtype], 1 - end, int(stream.ptr))
            stream.synchronize()

        return move

    # ------------------------------------------------------------------ errors, the end

    def _connect(self, unique_id: NcclUniqueId, world_size: int, rank: int) -> Any:
        """A communicator; all of its ranks must call this together."""
        made: list[Any] = []
        errors: list[Exception] = []

        def connect() -> None:
            try:
                with self._cupy.cuda.Device(self.device):
                    made.append(self._nccl.NcclCommunicator(world_size, unique_id.chars, rank))
            except Exception as error:  # cupy's errors are its own
                errors.append(error)

        # NCCL waits for the other ranks for ever; after a time-out this thread is left behind.
        thread = threading.Thread(target=connect, name="axon-ps-nccl-join", daemon=True)
        thread.start()
        thread.join(self.context.timeout_s)
        if errors:
            name = self.context.name
            raise NcclError(f"NCCL cannot make group {name!r} on device {self.device}: {errors[0]}") from errors[0]
        if not made:
            raise Timeout(f"NCCL group {self.context.name!r} was not complete in {self.context.timeout_s:g} s")
        comm = made[0]
        with self._lock:
            self._comms.append(comm)
        return comm

    def _async_error(self) -> AxonError | None:
        with self._lock:
            if self._error is not None:
                return None
            try:
                for comm in self._comms:
                    comm.check_async_error()
            except Exception as error:  # cupy's errors are its own
                return NcclError(f"NCCL failed in group {self.context.name!r}: {error}")
        return None

    def _expire(self, error: AxonError | None) -> None:
        if error is None:
            error = _Late(f"a call of group {self.context.name!r} was not done in time")
            self._publish_late()
        self.abort(error)

    def _publish_late(self) -> None:
        """Publish that this rank came to the call, and that the others did not come in time."""
        with contextlib.suppress(AxonError):
            self.context.store.put(self._late_key(self.rank), b"late")

    def _late_key(self, rank: int) -> str:
        return f"nccl/{self.context.name}/late/{self._sequence}/{rank}"

    def _missing(self, peer: int) -> str:
        """Who did not come. NCCL does not say; but ranks that timed out publish it in the store, the missing do not."""
        if peer >= 0:
            return f"rank {self.context.ranks[peer]}"
        if not self._has_store:
            return "some rank"
        deadline, missing = time.monotonic() + _LATE_S, []
        for position, rank in enumerate(self.context.ranks):
            if position != self.rank:
                try:
                    self.context.store.wait(self._late_key(position), max(0.01, deadline - time.monotonic()))
                except AxonError:
                    missing.append(rank)
        return f"rank {', '.join(map(str, missing))}" if missing else "some rank"

    def abort(self, error: AxonError) -> None:
        """See `Backend.abort`; it also ends calls that run on the device."""
        with self._lock:
            if self._error is not None:
                return
            self._error = error
            comms = list(self._comms)
        # It may take a while, and our caller may be the thread that is notified of lost members.
        threading.Thread(target=self._abort_all, args=(comms,), name="axon-ps-nccl-abort", daemon=True).start()
        self._messages.abort(error)

    def _abort_all(self, comms: list[Any]) -> None:
        for comm in comms:
            with self._lock, contextlib.suppress(Exception):  # nothing else can be done about a communicator
                comm.abort()

    def close(self) -> None:
        """See `Backend.close`."""
        self._watchdog.close()
        with self._lock:
            comms, self._comms = self._comms, []
            healthy = self._error is None
            self._error = Closed(f"the backend of group {self.context.name!r} was closed")
        for comm in comms if healthy else []:
            with contextlib.suppress(Exception):
                comm.destroy()


_PERFORM: dict[Operation, Callable[[NcclBackend, Request, list[list[int]]], None]] = {
    Operation.ALL_REDUCE: NcclBackend._all_reduce,
    Operation.REDUCE: NcclBackend._reduce,
    Operation.BROADCAST: NcclBackend._broadcast,
    Operation.ALL_GATHER: NcclBackend._all_gather,
    Operation.REDUCE_SCATTER: NcclBackend._reduce_scatter,
    Operation.GATHER: NcclBackend._gather,
    Operation.SCATTER: NcclBackend._scatter,
    Operation.ALL_TO_ALL: NcclBackend._all_to_all,
    Operation.BARRIER: NcclBackend._barrier,
    Operation.REFUSAL: NcclBackend._barrier,
}


def _id_key(context: GroupContext) -> str:
    return f"nccl/{context.name}/id"


def _is_nan(data: Array, dtype: DType) -> Array:
    found: Array = (data & 0x7FFF) > 0x7F80 if dtype is DType.BF16 else np.isnan(data)
    return found


def _required(array: Array | None) -> Array:
    assert array is not None, "Request.check has checked this"
    return array


def _address(array: Any) -> int:
    return int(array.data.ptr)

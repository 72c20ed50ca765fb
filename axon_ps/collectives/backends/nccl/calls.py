"""Collectives as calls of one NCCL communicator.

Owns: the features that NCCL's operations lack. Bitwise reductions, NaN in minima and maxima, bool, and uneven counts
are composed of them. A bf16 array is uint16 here. Everything is put on the calling thread's current
stream, and no call waits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from axon_ps.collectives.backends.base import Operation, Request
from axon_ps.collectives.backends.nccl.symbols import MAX, NCCL_DTYPES, nccl_op
from axon_ps.collectives.backends.request import required
from axon_ps.types import Array, DType, ReduceOp

_BITWISE: dict[ReduceOp, Any] = {
    ReduceOp.BAND: np.bitwise_and,
    ReduceOp.BOR: np.bitwise_or,
    ReduceOp.BXOR: np.bitwise_xor,
}


class NcclCalls:
    """The collectives of one communicator. One thread at a time may use it, on the communicator's device.

    Args:
        cupy: the module.
        nccl: cupy's NCCL.
        comm: the communicator.
        rank: our position.
        world_size: number of ranks.
    """

    def __init__(self, cupy: Any, nccl: Any, comm: Any, rank: int, world_size: int) -> None:
        self._cupy, self._nccl, self._comm = cupy, nccl, comm
        self._rank, self._world_size = rank, world_size

    def run(self, request: Request) -> None:
        """Enqueue a call that all ranks make."""
        _PERFORM[request.call.operation](self, request)

    def gather(self, mine: Array) -> Any:
        """Enqueue an all-gather of u8[m], which must stay until it has run; return u8[n * m], which is filled then."""
        everything = self._cupy.empty(mine.size * self._world_size, np.uint8)
        self._comm.allGather(address(mine), address(everything), mine.size, NCCL_DTYPES[DType.U8], self._stream)
        return everything

    @property
    def _stream(self) -> int:
        return int(self._cupy.cuda.get_current_stream().ptr)

    @contextlib.contextmanager
    def _group(self) -> Iterator[None]:
        """Make all calls of the body one launch, so that their order does not matter."""
        self._nccl.groupStart()
        try:
            yield
        finally:
            self._nccl.groupEnd()

    def _partitions(self, array: Array, counts: tuple[int, ...]) -> list[Array]:
        ends = np.cumsum(counts).tolist()
        return [array[end - count : end] for end, count in zip(ends, counts, strict=True)]

    def _native_reduce(self, source: Array, target: Array, op: int, dtype: DType, root: int = -1) -> None:
        """Reduce all ranks' source: T[m] into target: T[m], or only into the root's if there is one."""
        where = address(source), address(target), source.size, NCCL_DTYPES[dtype], op
        if root < 0:
            self._comm.allReduce(*where, self._stream)
        else:
            self._comm.reduce(*where, root, self._stream)

    def _reduced(self, request: Request, target: Array | None = None, root: int = -1) -> Array:
        """Return the reduction of all ranks' data, in `target` or a new array; with a root, there only."""
        call, data = request.call, required(request.data)
        assert call.op is not None
        result: Array = self._cupy.empty(data.size, data.dtype) if target is None else target
        if not data.size:
            return result
        op = nccl_op(call.op, call.dtype)
        if op is None:
            everything: Array = self._cupy.empty(data.size * self._world_size, data.dtype)
            self._comm.allGather(address(data), address(everything), data.size, NCCL_DTYPES[call.dtype], self._stream)
            rows = everything.reshape(self._world_size, -1)
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
        if nan is not None and root in (-1, self._rank):
            result[nan.view(np.bool_)] = 0x7FC0 if call.dtype is DType.BF16 else np.nan
        return result

    def _all_reduce(self, request: Request) -> None:
        self._reduced(request, required(request.data))

    def _reduce(self, request: Request) -> None:
        is_root = self._rank == request.call.root
        self._reduced(request, required(request.data) if is_root else None, request.call.root)

    def _reduce_scatter(self, request: Request) -> None:
        call, data, output = request.call, required(request.data), required(request.output)
        assert call.op is not None
        op = nccl_op(call.op, call.dtype)
        if op is None or call.op in (ReduceOp.MIN, ReduceOp.MAX):
            output[:] = self._partitions(self._reduced(request), call.counts)[self._rank]
            return
        dtype = NCCL_DTYPES[call.dtype]
        if len(set(call.counts)) == 1:
            if output.size:
                self._comm.reduceScatter(address(data), address(output), output.size, dtype, op, self._stream)
            return
        with self._group():
            for root, partition in enumerate(self._partitions(data, call.counts)):
                if partition.size:
                    target = output if root == self._rank else partition
                    self._comm.reduce(
                        address(partition), address(target), partition.size, dtype, op, root, self._stream
                    )

    def _broadcast(self, request: Request) -> None:
        self._broadcast_one(required(request.data), request.call.dtype, request.call.root)

    def _broadcast_one(self, array: Array, dtype: DType, root: int) -> None:
        if array.size:
            where = address(array)
            self._comm.broadcast(where, where, array.size, NCCL_DTYPES[dtype], root, self._stream)

    def _all_gather(self, request: Request) -> None:
        call, data, output = request.call, required(request.data), required(request.output)
        if len(set(call.counts)) == 1:
            if data.size:
                dtype = NCCL_DTYPES[call.dtype]
                self._comm.allGather(address(data), address(output), data.size, dtype, self._stream)
            return
        partitions = self._partitions(output, call.counts)
        if data.size and address(partitions[self._rank]) != address(data):
            partitions[self._rank][:] = data
        with self._group():
            for root, partition in enumerate(partitions):
                self._broadcast_one(partition, call.dtype, root)

    def _exchange(self, outputs: list[Array | None], inputs: list[Array | None], dtype: DType) -> None:
        """Send inputs[i] to rank i, and receive outputs[i] from there; None = nothing is sent or received."""
        number, stream = NCCL_DTYPES[dtype], self._stream
        own_output, own_input = outputs[self._rank], inputs[self._rank]
        if own_output is not None and own_input is not None and own_output.size:
            own_output[:] = own_input
        with self._group():
            for peer in range(self._world_size):
                source, target = inputs[peer], outputs[peer]
                if peer != self._rank and source is not None and source.size:
                    self._comm.send(address(source), source.size, number, peer, stream)
                if peer != self._rank and target is not None and target.size:
                    self._comm.recv(address(target), target.size, number, peer, stream)

    def _gather(self, request: Request) -> None:
        call = request.call
        outputs: list[Array | None] = [None] * self._world_size
        if request.output is not None:
            outputs = [*self._partitions(request.output, call.counts)]
        inputs = [request.data if peer == call.root else None for peer in range(self._world_size)]
        self._exchange(outputs, inputs, call.dtype)

    def _scatter(self, request: Request) -> None:
        call = request.call
        inputs: list[Array | None] = [None] * self._world_size
        if request.data is not None:
            inputs = [*self._partitions(request.data, call.counts)]
        outputs = [request.output if peer == call.root else None for peer in range(self._world_size)]
        self._exchange(outputs, inputs, call.dtype)

    def _all_to_all(self, request: Request) -> None:
        outputs = self._partitions(required(request.output), request.output_counts)
        inputs = self._partitions(required(request.data), request.input_counts)
        self._exchange([*outputs], [*inputs], request.call.dtype)

    def _barrier(self, request: Request) -> None:
        """Do nothing: the ranks have exchanged headers."""


_PERFORM: dict[Operation, Callable[[NcclCalls, Request], None]] = {
    Operation.ALL_REDUCE: NcclCalls._all_reduce,
    Operation.REDUCE: NcclCalls._reduce,
    Operation.BROADCAST: NcclCalls._broadcast,
    Operation.ALL_GATHER: NcclCalls._all_gather,
    Operation.REDUCE_SCATTER: NcclCalls._reduce_scatter,
    Operation.GATHER: NcclCalls._gather,
    Operation.SCATTER: NcclCalls._scatter,
    Operation.ALL_TO_ALL: NcclCalls._all_to_all,
    Operation.BARRIER: NcclCalls._barrier,
    Operation.REFUSAL: NcclCalls._barrier,
}


def _is_nan(data: Array, dtype: DType) -> Array:
    found: Array = (data & 0x7FFF) > 0x7F80 if dtype is DType.BF16 else np.isnan(data)
    return found


def address(array: Any) -> int:
    """Return the address of an array in device memory."""
    return int(array.data.ptr)

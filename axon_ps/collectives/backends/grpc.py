"""`GrpcBackend`: the collectives of ranks anywhere, reduced on the way by the job's shard servers.

Every rank sends its contribution to the servers once and receives its result once. So an all-reduce of M bytes moves M
bytes in each direction of a rank's network card, at the same time. A ring moves 2(n-1)/n·M each way.

Owns: the blocking side, and the ranges of arrays that are sent and filled. Refuses: to know how an operation is striped
over the servers (`aggregation.core.stripes`) and how streams are read and written (`aggregation.client.client`).
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from axon_ps.aggregation.client.client import Buffers, CollectiveClient, GroupHandle
from axon_ps.collectives.backends.base import Backend, GroupContext, Operation
from axon_ps.collectives.backends.request import Request, check_message, partition_starts
from axon_ps.errors import AxonError, Closed, Disagreement, MemberLost, again
from axon_ps.rpc.background_loop import BackgroundLoop
from axon_ps.types import Array, DType

T = TypeVar("T")

SERVER_REPORT_S = 0.5
"""Seconds that the servers may take to report the outcome of a call whose group has lost a member."""


@dataclass(frozen=True, kw_only=True)
class GrpcCalls:
    """A process's connection to the shard servers for collectives; all its groups share it.

    Attributes:
        loop: the loop that runs the streams.
        client: performs operations on the servers, on that loop.
    """

    loop: BackgroundLoop
    client: CollectiveClient


class GrpcBackend(Backend):
    """See the module's docstring and `Backend`.

    Args:
        context: the group.
        calls: the connection to the servers.

    After an error of the transport the servers may have done the call for some, all or none of the ranks.
    """

    name = "grpc"
    buffers_messages = True

    def __init__(self, context: GroupContext, calls: GrpcCalls) -> None:
        super().__init__(context)
        self._loop, self._client = calls.loop, calls.client
        self._group = GroupHandle(
            name=context.name,
            rank=context.rank,
            ranks=context.ranks,
            members=tuple(member.id for member in context.members),
        )
        self._lock = threading.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()  # touched on the loop's thread only
        self._error: AxonError | None = None
        self._has_messages = False
        self._closed = False

    def sibling(self, context: GroupContext) -> GrpcBackend:
        """See `Backend.sibling`."""
        return GrpcBackend(context, GrpcCalls(loop=self._loop, client=self._client))

    def run(self, request: Request, timeout_s: float) -> None:
        """See `Backend.run`."""
        request.check(self.rank, self.world_size)
        if self._error is not None:
            raise again(self._error)
        if self.world_size > 1:
            buffers = _buffers(request, self.rank, self.world_size)
            self._run_on_loop(lambda: self._client.collective(self._group, request.call, buffers, timeout_s))
        elif request.output_counts != request.input_counts:
            raise Disagreement(
                f"{request.call} of a group of one sends {request.input_counts[0]} elements to itself and expects "
                f"{request.output_counts[0]}"
            )
        _copy_own(request, self.rank, self.world_size)

    # ------------------------------------------------------------------ messages between two ranks

    def send(self, data: Array, dtype: DType, to: int, tag: int, timeout_s: float) -> None:
        """See `Backend.send`."""
        check_message(data, dtype, to, tag, self.world_size, receiving=False)
        self._has_messages = True
        self._run_on_loop(lambda: self._client.send(self._group, data, dtype, to, tag, timeout_s))

    def recv(self, data: Array, dtype: DType, source: int, tag: int, timeout_s: float) -> int:
        """See `Backend.recv`."""
        check_message(data, dtype, source, tag, self.world_size, receiving=True)
        self._has_messages = True
        return self._run_on_loop(lambda: self._client.recv(self._group, data, dtype, source, tag, timeout_s))

    # ------------------------------------------------------------------ the end

    def abort(self, error: AxonError) -> None:
        """See `Backend.abort`."""
        with self._lock:
            if self._error is not None:
                return
            self._error = again(error)
        cancelling = self._cancel()
        try:
            self._loop.submit(cancelling)
        except (Closed, AxonError):  # the loop is closed, and with it every call
            cancelling.close()

    def close(self) -> None:
        """See `Backend.close`."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            intact = self._error is None
            self._error = self._error or Closed(f"group {self.context.name!r} is closed")
        if intact and self._has_messages:
            with contextlib.suppress(AxonError):
                self._loop.run(self._client.close_group(self._group))

    def statistics(self) -> dict[str, float]:
        """Return payload bytes and messages in each direction, of all groups of this process."""
        return {name: float(value) for name, value in sorted(self._client.counters.items())}

    # ------------------------------------------------------------------ inside

    def _run_on_loop(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        if self._error is not None:
            raise again(self._error)
        return self._loop.run(self._guarded(make))

    async def _guarded(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Await a call, which `abort` can end."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            if self._error is not None:
                raise again(self._error)
            return await make()
        except asyncio.CancelledError:
            if self._error is None:
                raise
            raise again(self._error) from None
        finally:
            self._tasks.discard(task)

    async def _cancel(self) -> None:
        """End calls under way; after a death the servers do that, and calls that were complete before it succeed."""
        if isinstance(self._error, MemberLost) and self._tasks:
            await asyncio.wait(set(self._tasks), timeout=SERVER_REPORT_S)
        for task in self._tasks:
            task.cancel()


def _buffers(request: Request, rank: int, world_size: int) -> Buffers:
    """Return the range of an array that is sent, and the destination of received data."""
    call, data, output = request.call, request.data, request.output
    nowhere = [0] * world_size
    match call.operation:
        case Operation.BARRIER | Operation.REFUSAL:
            return Buffers()
        case Operation.ALL_REDUCE | Operation.REDUCE:
            reads = call.operation is Operation.ALL_REDUCE or rank == call.root
            return Buffers(source=data, target=data if reads else None, source_starts=(0,), target_starts=(0,))
        case Operation.BROADCAST:
            return Buffers(source=data, target=data, source_starts=(0,), target_starts=nowhere)
        case Operation.ALL_TO_ALL:
            return Buffers(
                source=data,
                target=output,
                source_starts=partition_starts(request.input_counts),
                target_starts=partition_starts(request.output_counts),
                input_counts=request.input_counts,
                output_counts=request.output_counts,
            )
    starts = partition_starts(call.counts)
    match call.operation:
        case Operation.ALL_GATHER | Operation.GATHER:
            return Buffers(source=data, target=output, source_starts=nowhere, target_starts=starts)
        case Operation.REDUCE_SCATTER:
            return Buffers(source=data, target=output, source_starts=starts, target_starts=(0,))
        case _:
            return Buffers(source=data, target=output, source_starts=starts, target_starts=nowhere)


def _copy_own(request: Request, rank: int, world_size: int) -> None:
    """Copy the data that a rank keeps for itself, which is not sent, to its destination."""
    call, data, output = request.call, request.data, request.output
    if data is None or output is None:
        return
    match call.operation:
        case Operation.ALL_GATHER | Operation.GATHER:
            _copy_into(output, partition_starts(call.counts)[rank], data)
        case Operation.SCATTER:
            begin = partition_starts(call.counts)[rank]
            _copy_into(output, 0, data[begin : begin + output.size])
        case Operation.ALL_TO_ALL:
            begin = partition_starts(request.input_counts)[rank]
            partition = data[begin : begin + request.input_counts[rank]]
            _copy_into(output, partition_starts(request.output_counts)[rank], partition)
        case Operation.REDUCE_SCATTER if world_size == 1:
            _copy_into(output, 0, data)


def _copy_into(output: Array, begin: int, data: Array) -> None:
    """Copy our own partition to its destination, unless it is there already."""
    target = output[begin : begin + data.size]
    if data.size and target.ctypes.data != data.ctypes.data:
        np.copyto(target, data)

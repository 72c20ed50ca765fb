"""`GrpcBackend`: the collectives of ranks anywhere, reduced on the way by the job's shard servers.

Every rank sends what it contributes to the servers once and gets what it is to have once: an all-reduce of M bytes
moves M bytes in each direction of a rank's network card, at the same time, where a ring moves 2(n-1)/n·M one way.

Owns: the blocking side, and which part of which array is sent and filled. Refuses: to know how an operation is spread
(`shard.pieces`) and how streams are read and written (`shard.collective_client`).
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from axon_ps.collectives.backend import Backend, Call, GroupContext
from axon_ps.collectives.request import check_array, part_starts
from axon_ps.errors import AxonError, Closed, Disagreement, InvalidRequest, MemberLost
from axon_ps.reduction import ops
from axon_ps.shard.collective_client import Buffers, CollectiveClient, Seating
from axon_ps.transport.loop import BackgroundLoop
from axon_ps.types import Array, DType

T = TypeVar("T")

SERVERS_WORD_S = 0.5
"""How long the servers may take to say how a call ended whose group has lost a member."""


@dataclass(frozen=True, kw_only=True)
class GrpcCalls:
    """How a process reaches the shard servers for collectives; all its groups share it.

    Attributes:
        loop: where streams run.
        client: their coroutines, on that loop.
    """

    loop: BackgroundLoop
    client: CollectiveClient


class GrpcBackend(Backend):
    """See the module's docstring and `Backend`.

    Args:
        context: the group.
        calls: the way to the servers.

    After an error of the transport the servers may have done the call for some, all or none of the ranks.
    """

    name = "grpc"

    def __init__(self, context: GroupContext, calls: GrpcCalls) -> None:
        super().__init__(context)
        self._loop, self._client = calls.loop, calls.client
        self._seating = Seating(
            group=context.name,
            rank=context.rank,
            ranks=context.ranks,
            incarnations=tuple(member.incarnation for member in context.members),
        )
        self._lock = threading.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()  # touched on the loop's thread only
        self._error: AxonError | None = None
        self._has_mail = False
        self._closed = False

    # ------------------------------------------------------------------ collectives

    def all_reduce(self, call: Call, data: Array, timeout_s: float) -> None:
        """See `Backend.all_reduce`."""
        self._check_op(call)
        check_array("data", data, call.dtype, call.counts[0])
        self._collective(call, Buffers(source=data, target=data, source_starts=(0,), target_starts=(0,)), timeout_s)

    def reduce(self, call: Call, data: Array, timeout_s: float) -> None:
        """See `Backend.reduce`."""
        self._check_op(call)
        check_array("data", data, call.dtype, call.counts[0])
        target = data if self.rank == call.root else None
        self._collective(call, Buffers(source=data, target=target, source_starts=(0,), target_starts=(0,)), timeout_s)

    def broadcast(self, call: Call, data: Array, timeout_s: float) -> None:
        """See `Backend.broadcast`."""
        check_array("data", data, call.dtype, call.counts[0])
        self._collective(
            call,
            Buffers(source=data, target=data, source_starts=(0,), target_starts=[0] * self.world_size),
            timeout_s,
        )

    def all_gather(self, call: Call, output: Array, data: Array, timeout_s: float) -> None:
        """See `Backend.all_gather`."""
        self._gather(call, output, data, timeout_s)

    def gather(self, call: Call, output: Array | None, data: Array, timeout_s: float) -> None:
        """See `Backend.gather`."""
        if self.rank == call.root and output is None:
            raise InvalidRequest(f"gather at its root, rank {call.root}, needs an output")
        self._gather(call, output if self.rank == call.root else None, data, timeout_s)

    def _gather(self, call: Call, output: Array | None, data: Array, timeout_s: float) -> None:
        check_array("data", data, call.dtype, call.counts[self.rank])
        starts = part_starts(call.counts)
        if output is not None:
            check_array("output", output, call.dtype, sum(call.counts))
        own = [0] * self.world_size  # the only part we send
        self._collective(call, Buffers(source=data, target=output, source_starts=own, target_starts=starts), timeout_s)
        if output is not None:
            _place(output, starts[self.rank], data)

    def reduce_scatter(self, call: Call, output: Array, data: Array, timeout_s: float) -> None:
        """See `Backend.reduce_scatter`."""
        self._check_op(call)
        check_array("data", data, call.dtype, sum(call.counts))
        check_array("output", output, call.dtype, call.counts[self.rank])
        self._collective(
            call,
            Buffers(source=data, target=output, source_starts=part_starts(call.counts), target_starts=(0,)),
            timeout_s,
        )
        if self.world_size == 1:
            _place(output, 0, data)

    def scatter(self, call: Call, output: Array, data: Array | None, timeout_s: float) -> None:
        """See `Backend.scatter`."""
        check_array("output", output, call.dtype, call.counts[self.rank])
        starts = part_starts(call.counts)
        if self.rank == call.root:
            if data is None:
                raise InvalidRequest(f"scatter at its root, rank {call.root}, needs data")
            check_array("data", data, call.dtype, sum(call.counts))
        self._collective(
            call,
            Buffers(source=data, target=output, source_starts=starts, target_starts=[0] * self.world_size),
            timeout_s,
        )
        if self.rank == call.root and data is not None:
            begin = starts[self.rank]
            _place(output, 0, data[begin : begin + output.size])

    def all_to_all(
        self,
        call: Call,
        output: Array,
        data: Array,
        output_counts: Sequence[int],
        input_counts: Sequence[int],
        timeout_s: float,
    ) -> None:
        """See `Backend.all_to_all`."""
        if not len(output_counts) == len(input_counts) == self.world_size:
            raise InvalidRequest(
                f"all_to_all was given {len(output_counts)} output and {len(input_counts)} input counts; needed are "
                f"{self.world_size} of each"
            )
        check_array("output", output, call.dtype, sum(output_counts))
        check_array("data", data, call.dtype, sum(input_counts))
        sources, targets = part_starts(input_counts), part_starts(output_counts)
        if self.world_size == 1 and output_counts[0] != input_counts[0]:
            raise Disagreement(
                f"{call} of a group of one sends {input_counts[0]} elements to itself and expects {output_counts[0]}"
            )
        self._collective(
            call,
            Buffers(
                source=data,
                target=output,
                source_starts=sources,
                target_starts=targets,
                input_counts=tuple(input_counts),
                output_counts=tuple(output_counts),
            ),
            timeout_s,
        )
        begin = sources[self.rank]
        _place(output, targets[self.rank], data[begin : begin + input_counts[self.rank]])

    def barrier(self, call: Call, timeout_s: float) -> None:
        """See `Backend.barrier`."""
        self._collective(call, Buffers(), timeout_s)

    # ------------------------------------------------------------------ messages between two ranks

    def send(self, data: Array, dtype: DType, to: int, tag: int, timeout_s: float) -> None:
        """See `Backend.send`."""
        check_array("data", data, dtype, data.size)
        self._check_rank(to)
        self._has_mail = True
        self._run(lambda: self._client.send(self._seating, data, dtype, to, tag, timeout_s))

    def recv(self, data: Array, dtype: DType, source: int, tag: int, timeout_s: float) -> int:
        """See `Backend.recv`."""
        check_array("data", data, dtype, data.size)
        if source != -1:
            self._check_rank(source)
        self._has_mail = True
        return self._run(lambda: self._client.recv(self._seating, data, dtype, source, tag, timeout_s))

    # ------------------------------------------------------------------ the end

    def abort(self, error: AxonError) -> None:
        """See `Backend.abort`."""
        with self._lock:
            if self._error is not None:
                return
            self._error = error
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
            well = self._error is None
            self._error = self._error or Closed(f"group {self.context.name!r} is closed")
        if well and self._has_mail:
            with contextlib.suppress(AxonError):
                self._loop.run(self._client.close_group(self._seating))

    def statistics(self) -> dict[str, float]:
        """Payload bytes and messages in each direction, of all groups of this process."""
        return {name: float(value) for name, value in sorted(self._client.counters.items())}

    # ------------------------------------------------------------------ inside

    def _collective(self, call: Call, buffers: Buffers, timeout_s: float) -> None:
        if self.world_size == 1:
            if self._error is not None:
                raise self._error
            return
        self._run(lambda: self._client.collective(self._seating, call, buffers, timeout_s))

    def _run(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        if self._error is not None:
            raise self._error
        return self._loop.run(self._guarded(make))

    async def _guarded(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """A call that `abort` ends."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            if self._error is not None:
                raise self._error
            return await make()
        except asyncio.CancelledError:
            if self._error is None:
                raise
            raise self._error from None
        finally:
            self._tasks.discard(task)

    async def _cancel(self) -> None:
        """End what is under way; after a death the servers do that, and let what was complete before it end well."""
        if isinstance(self._error, MemberLost) and self._tasks:
            await asyncio.wait(set(self._tasks), timeout=SERVERS_WORD_S)
        for task in self._tasks:
            task.cancel()

    def _check_op(self, call: Call) -> None:
        if call.op is None:
            raise InvalidRequest(f"{call.operation.value} needs a reduce operation")
        ops.check(call.op, call.dtype)

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise InvalidRequest(f"rank {rank} is not in group {self.context.name!r}, which has {self.world_size}")


def _place(output: Array, begin: int, data: Array) -> None:
    """Copy our own part to its place, unless it is there already."""
    target = output[begin : begin + data.size]
    if data.size and target.ctypes.data != data.ctypes.data:
        np.copyto(target, data)

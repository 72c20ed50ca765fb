"""`SharedMemoryBackend`: the collectives of processes on one host.

Owns: what each collective does with the ranks' arrays. Refuses: how ranks wait for each other (`control`), open each
other's memory (`rendezvous`), read each other's arrays (`exchange`), and send and receive (`mailbox`).

    n = world_size, T = call.dtype.numpy, a partition = one of n nearly equal ranges of an array

Every call begins with an exchange of headers, which is a barrier: all ranks check that they make the same call
(`agreement`).

- Small (up to INLINE_BYTES of a rank): the data lies beside the header, so after the barrier every rank has all data
  and computes its result: one barrier a call.
- Large: the headers say where the arrays lie, see `exchange`. Each rank reduces its partition of all ranks' arrays in
  blocks that stay in a cache, into its own array, and publishes its progress window by window; the others follow and
  copy the windows. A last barrier makes sure that nobody changes an array that somebody still reads.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from axon_ps.collectives.backends.base import Backend, Call, GroupContext, Operation
from axon_ps.collectives.backends.request import check_array, partition_starts
from axon_ps.collectives.backends.shm.agreement import Agreement
from axon_ps.collectives.backends.shm.control import INLINE_BYTES
from axon_ps.collectives.backends.shm.exchange import Copy, Exchange, PeerMemory
from axon_ps.collectives.backends.shm.mailbox import Mailbox
from axon_ps.collectives.backends.shm.registry import registry
from axon_ps.collectives.backends.shm.rendezvous import rendezvous
from axon_ps.errors import AxonError, Closed, Disagreement, InvalidRequest
from axon_ps.host.leases import address_of
from axon_ps.reduction import ops
from axon_ps.types import Array, DType, ReduceOp

_ROOTED = (Operation.REDUCE, Operation.BROADCAST, Operation.GATHER, Operation.SCATTER)
_NO_COUNTS = (Operation.ALL_TO_ALL, Operation.BARRIER, Operation.REFUSAL)
_ONE_COUNT = (Operation.ALL_REDUCE, Operation.REDUCE, Operation.BROADCAST)

SLOT_BYTES = 1 << 20
_CACHE_BYTES = 1 << 20  # of blocks of all ranks that are combined at a time
_MIN_BLOCK_BYTES, _MAX_BLOCK_BYTES = 64 << 10, 512 << 10
_MIN_WINDOW_BYTES, _MAX_WINDOW_BYTES = 256 << 10, 2 << 20
_GATHER_WINDOW_BYTES = 2 << 20  # of every rank; ranks that copy it at about the same time read it from memory once
_STREAM_BYTES = 8 << 20  # larger results are written past the caches, since they would evict the sources

_MIN_SLOT_BYTES = -(-max(dtype.itemsize for dtype in DType) // 64) * 64
"""The part of a slot that a rank needs at least: an element of any dtype, in full cache lines."""


def _copy_for(size_bytes: int) -> Copy:
    """How to copy into a result of this size."""
    if size_bytes < _STREAM_BYTES:
        return np.copyto
    from axon_ps.kernels import stream_copy  # loading numba takes a while, and small groups need none

    return stream_copy.copy


class SharedMemoryBackend(Backend):
    """The collectives of processes on one host. See this module and `Backend`.

    Making it is collective: every rank of the group has to.

    Args:
        context: the group. `context.store` is used while making it only, under `shm/NAME/...`, and left empty.
        slot_bytes: size of a slot; every rank has two, if arrays cannot be read directly.
        direct: whether peers may read this rank's arrays where they are.
        directory: a tmpfs to take shared memory from, such as /dev/shm; "" = the kernel's own, which has no limit but
            memory itself.

    Raises:
        Unreachable: a rank is on another host, or in another container, or the machine lacks what this needs.
        Busy: there is not enough memory; the message has the bytes needed and available.
        Timeout: a rank did not come; the message names it.
        MemberLost: a rank died meanwhile.
    """

    name = "shm"
    buffers_messages = True

    def __init__(
        self, context: GroupContext, *, slot_bytes: int = SLOT_BYTES, direct: bool = True, directory: str = ""
    ) -> None:
        super().__init__(context)
        if slot_bytes < _MIN_SLOT_BYTES * len(context.ranks):
            raise InvalidRequest(f"slot_bytes is {slot_bytes}; {len(context.ranks)} ranks need {_MIN_SLOT_BYTES} each")
        self._control, self.direct = rendezvous(context, direct=direct, directory=directory)
        self._directory = directory
        self._peer_memory = PeerMemory(self._control, self.direct, slot_bytes // 64 * 64, directory)
        self._mailbox = Mailbox(self._control, self.direct, self._peer_memory.pids)
        self._closed = False
        self._agreement = Agreement(context, self._control, self._peer_memory)
        blocks = _CACHE_BYTES // max(1, len(context.ranks) - 1)
        block_bytes = 1 << blocks.bit_length() - 1  # a power of two; windows are multiples of it
        self._block_bytes = min(_MAX_BLOCK_BYTES, max(_MIN_BLOCK_BYTES, block_bytes))
        self._scratch: list[Array] = []
        if not self.direct:
            self._peer_memory.slots(time.monotonic() + context.timeout_s)  # so that a lack of memory is found now

    def empty_shared(self, shape: Sequence[int], dtype: DType) -> Array:
        """An array of zeros in memory that the other ranks map: collectives never copy it. Not collective.

        It serves in every group of this process, and lives as long as anything refers to it.

        Args:
            shape: of the array.
            dtype: DType; the array is of `dtype.numpy`.

        Raises:
            Busy: there is not enough memory; the message has the bytes needed and available.
        """
        return registry.empty(tuple(shape), dtype, directory=self._directory)

    # --- the collectives

    def all_reduce(self, call: Call, data: Array, timeout_s: float) -> None:
        """See `Backend`."""
        deadline = self._begin(call, timeout_s)
        op = self._op(call)
        check_array("data", data, call.dtype, call.counts[0], writable=True)
        if data.nbytes <= INLINE_BYTES:
            buffer_index = self._agreement.exchange_headers(call, data, deadline)
            ops.reduce_into(data, self._agreement.inputs(buffer_index, call.dtype, data.size), op, call.dtype)
            return
        try:
            self._reduce_partitions(call, op, data, data, range(self.world_size), deadline)
        except Disagreement:
            raise
        except BaseException:
            registry.revoke(address_of(data), data.nbytes)  # peers may still write into it
            raise

    def reduce(self, call: Call, data: Array, timeout_s: float) -> None:
        """See `Backend`."""
        deadline = self._begin(call, timeout_s)
        op = self._op(call)
        here = self.rank == call.root
        check_array("data", data, call.dtype, call.counts[0], writable=here)
        if data.nbytes <= INLINE_BYTES:
            buffer_index = self._agreement.exchange_headers(call, data, deadline)
            if here:
                ops.reduce_into(data, self._agreement.inputs(buffer_index, call.dtype, data.size), op, call.dtype)
        else:
            self._reduce_partitions(call, op, data, data if here else None, (call.root,), deadline)

    def broadcast(self, call: Call, data: Array, timeout_s: float) -> None:
        """See `Backend`."""
        deadline = self._begin(call, timeout_s)
        here = self.rank == call.root
        check_array("data", data, call.dtype, call.counts[0], writable=not here)
        if data.nbytes <= INLINE_BYTES:
            buffer_index = self._agreement.exchange_headers(call, data if here else None, deadline)
            if not here:
                np.copyto(data, self._agreement.input(buffer_index, call.root, call.dtype, 0, data.size))
            return
        starts = [[0] if r == call.root else None for r in range(self.world_size)]
        exchange = self._start_exchange(call, data if here else None, starts, data.size, deadline)
        for lo, hi in exchange.windows():
            if here:
                exchange.publish(0, lo, hi, data[lo:hi])
            self._await_published(exchange, deadline)
            if not here:
                exchange.pull(call.root, 0, lo, hi, data[lo:hi])
        self._finish(exchange, deadline)

    def all_gather(self, call: Call, output: Array, data: Array, timeout_s: float) -> None:
        """See `Backend`."""
        deadline = self._begin(call, timeout_s)
        check_array("data", data, call.dtype, call.counts[self.rank])
        check_array("output", output, call.dtype, sum(call.counts), writable=True)
        self._collect(call, output, data, deadline)

    def gather(self, call: Call, output: Array | None, data: Array, timeout_s: float) -> None:
        """See `Backend`."""
        deadline = self._begin(call, timeout_s)
        check_array("data", data, call.dtype, call.counts[self.rank])
        if self.rank == call.root:
            if output is None:
                raise InvalidRequest(f"{call}: output is None on the root; give an array of {sum(call.counts)}")
            check_array("output", output, call.dtype, sum(call.counts), writable=True)
        self._collect(call, output if self.rank == call.root else None, data, deadline)

    def reduce_scatter(self, call: Call, output: Array, data: Array, timeout_s: float) -> None:
        """See `Backend`."""
        deadline = self._begin(call, timeout_s)
        op, rank, counts = self._op(call), self.rank, call.counts
        starts = partition_starts(counts)
        check_array("data", data, call.dtype, sum(counts))
        check_array("output", output, call.dtype, counts[rank], writable=True)
        if data.nbytes <= INLINE_BYTES:
            buffer_index = self._agreement.exchange_headers(call, data, deadline)
            ops.reduce_into(
                output, self._agreement.inputs(buffer_index, call.dtype, counts[rank], starts[rank]), op, call.dtype
            )
            return
        exchange = self._start_exchange(call, data, [starts] * self.world_size, max(counts), deadline)
        own = data[starts[rank] : starts[rank] + counts[rank]]
        for lo, hi in exchange.windows():
            self._publish_partitions(exchange, data, starts, counts, lo, hi, but=rank)
            self._await_published(exchange, deadline)
            self._reduce_window(exchange, call.dtype, op, own, output, lo, min(hi, counts[rank]))
        self._finish(exchange, deadline)

    def scatter(self, call: Call, output: Array, data: Array | None, timeout_s: float) -> None:
        """See `Backend`."""
        deadline = self._begin(call, timeout_s)
        rank, root, counts = self.rank, call.root, call.counts
        starts, numel = partition_starts(counts), sum(counts)
        check_array("output", output, call.dtype, counts[rank], writable=True)
        if rank != root:
            data = None
        elif data is None:
            raise InvalidRequest(f"{call}: data is None on the root; give an array of {numel}")
        else:
            check_array("data", data, call.dtype, numel)
        if numel * call.dtype.itemsize <= INLINE_BYTES:
            buffer_index = self._agreement.exchange_headers(call, data, deadline)
            np.copyto(output, self._agreement.input(buffer_index, root, call.dtype, starts[rank], counts[rank]))
            return
        root_starts = [starts if r == root else None for r in range(self.world_size)]
        exchange = self._start_exchange(call, data, root_starts, max(counts), deadline)
        for lo, hi in exchange.windows():
            if data is not None:
                self._publish_partitions(exchange, data, starts, counts, lo, hi, but=rank)
            self._await_published(exchange, deadline)
            end = min(hi, counts[rank])
            if data is None:
                exchange.pull(root, rank, lo, end, output[lo:end])
            elif end > lo:
                np.copyto(output[lo:end], data[starts[rank] + lo : starts[rank] + end])
        self._finish(exchange, deadline)

    def all_to_all(
        self,
        call: Call,
        output: Array,
        data: Array,
        output_counts: Sequence[int],
        input_counts: Sequence[int],
        timeout_s: float,
    ) -> None:
        """See `Backend`."""
        deadline = self._begin(call, timeout_s)
        n, rank = self.world_size, self.rank
        if len(output_counts) != n or len(input_counts) != n:
            raise InvalidRequest(
                f"{call}: {len(output_counts)} output counts and {len(input_counts)} input counts for {n} ranks"
            )
        check_array("data", data, call.dtype, sum(input_counts))
        check_array("output", output, call.dtype, sum(output_counts), writable=True)
        outputs, inputs = partition_starts(output_counts), partition_starts(input_counts)
        # Only after the headers are exchanged do we know whether the call is small for all: offer the array both ways.
        buffer_index = self._agreement.exchange_headers(
            call, data, deadline, pairs=(*input_counts, *output_counts), large=True, source=data
        )
        counts = [self._agreement.pairs(buffer_index, r) for r in range(n)]
        self._agreement.check_pairs(call, counts, deadline)
        order = [(rank + i) % n for i in range(n)]
        longest = max(max(row[0]) for row in counts)
        if max(sum(row[0]) for row in counts) * call.dtype.itemsize <= INLINE_BYTES:
            for r in order:
                partition = self._agreement.input(
                    buffer_index, r, call.dtype, partition_starts(counts[r][0])[rank], output_counts[r]
                )
                np.copyto(output[outputs[r] : outputs[r] + output_counts[r]], partition)
            return
        exchange = self._open_exchange(
            call, buffer_index, [partition_starts(row[0]) for row in counts], longest, deadline
        )
        for lo, hi in exchange.windows():
            self._publish_partitions(exchange, data, inputs, input_counts, lo, hi, but=rank)
            self._await_published(exchange, deadline)
            for r in order:
                end = min(hi, output_counts[r])
                if end <= lo:
                    continue
                out = output[outputs[r] + lo : outputs[r] + end]
                if r == rank:
                    np.copyto(out, data[inputs[rank] + lo : inputs[rank] + end])
                else:
                    exchange.pull(r, rank, lo, end, out)
        self._finish(exchange, deadline)

    def barrier(self, call: Call, timeout_s: float) -> None:
        """See `Backend`."""
        self._agreement.exchange_headers(call, None, self._begin(call, timeout_s))

    def send(self, data: Array, dtype: DType, to: int, tag: int, timeout_s: float) -> None:
        """See `Backend`."""
        self._check_open()
        check_array("data", data, dtype, data.size)
        if not 0 <= to < self.world_size:
            raise InvalidRequest(
                f"cannot send to rank {to} of group {self.context.name!r}, which has {self.world_size}"
            )
        self._mailbox.send(data, dtype, to, tag, timeout_s)

    def recv(self, data: Array, dtype: DType, source: int, tag: int, timeout_s: float) -> int:
        """See `Backend`."""
        self._check_open()
        check_array("data", data, dtype, data.size, writable=True)
        if not -1 <= source < self.world_size:
            raise InvalidRequest(
                f"cannot receive from rank {source} of group {self.context.name!r}, which has {self.world_size}; "
                "-1 is any rank"
            )
        return self._mailbox.recv(data, dtype, source, tag, timeout_s)

    def abort(self, error: AxonError) -> None:
        """See `Backend`. The other ranks' pending calls end too, with an error that names this rank."""
        if not self._closed:
            self._control.abort(error)

    def close(self) -> None:
        """See `Backend`. Ranks that still wait for this one get `Broken`."""
        if not self._closed:
            self._closed = True
            self._control.close()
            self._peer_memory.close()

    def statistics(self) -> dict[str, float]:
        """Bytes that went inline, were read from other processes, sent and received; waits at barriers, and sleeps."""
        return {
            "calls": self._agreement.calls,
            "bytes_inline": self._agreement.bytes_inline,
            "bytes_read": self._peer_memory.bytes_read,
            "bytes_sent": self._mailbox.bytes_sent,
            "bytes_received": self._mailbox.bytes_received,
            "waits": self._control.waits,
            "sleeps": self._control.sleeps,
        }

    # --- every call

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"group {self.context.name!r} was closed")

    def _begin(self, call: Call, timeout_s: float) -> float:
        """The checks that all calls have in common; returns the call's deadline."""
        self._check_open()
        self._control.check()
        n, counts = self.world_size, call.counts
        if call.operation in _ONE_COUNT:
            wanted = 1
        else:
            wanted = 0 if call.operation in _NO_COUNTS else n
        if len(counts) != wanted or (counts and min(counts) < 0):
            raise InvalidRequest(f"{call.operation.value} of {n} ranks with counts {counts}; {wanted} are needed, >= 0")
        if call.operation in _ROOTED and not 0 <= call.root < n:
            raise InvalidRequest(f"{call}: the root must be one of 0 .. {n - 1}")
        return time.monotonic() + timeout_s

    def _op(self, call: Call) -> ReduceOp:
        if call.op is None:
            raise InvalidRequest(f"{call.operation.value} needs a reduce operation")
        ops.check(call.op, call.dtype)
        return call.op

    # --- large calls

    def _start_exchange(
        self,
        call: Call,
        source: Array | None,
        starts: Sequence[Sequence[int] | None],
        longest: int,
        deadline: float,
        result: Array | None = None,
        results: bool = False,
    ) -> Exchange:
        """Exchange headers, and find out how all arrays can be read."""
        buffer_index = self._agreement.exchange_headers(call, None, deadline, large=True, source=source, result=result)
        return self._open_exchange(call, buffer_index, starts, longest, deadline, results)

    def _open_exchange(
        self,
        call: Call,
        buffer_index: int,
        starts: Sequence[Sequence[int] | None],
        longest: int,
        deadline: float,
        results: bool = False,
    ) -> Exchange:
        peer_memory = self._peer_memory
        peer_memory.unmap_released()
        descriptors = peer_memory.descriptors(buffer_index)
        partitions = 0 if call.operation is Operation.SCATTER else max(len(b) for b in starts if b is not None)
        slots = peer_memory.choose_slots(descriptors, deadline, results=results, partitions=partitions)
        return Exchange(peer_memory, descriptors, call.dtype, starts, longest, slots)

    def _await_published(self, exchange: Exchange, deadline: float) -> None:
        """Wait until a window of all ranks can be pulled; without slots it can since the headers were exchanged."""
        if exchange.slots:
            self._control.barrier(deadline)

    def _finish(self, exchange: Exchange, deadline: float) -> None:
        """Finish reading, and wait until no peer reads our array any more."""
        self._finish_reading(exchange)
        self._await_readers(exchange, deadline)

    def _finish_reading(self, exchange: Exchange) -> None:
        """Publish that we read no peer's array any more. With slots no rank ever does."""
        if not exchange.slots:
            self._control.arrive()

    def _await_readers(self, exchange: Exchange, deadline: float) -> None:
        """After `_finish_reading`: wait until no peer reads our array any more."""
        if not exchange.slots:
            self._control.await_barrier(deadline)

    def _publish_partitions(
        self,
        exchange: Exchange,
        data: Array,
        starts: Sequence[int],
        counts: Sequence[int],
        lo: int,
        hi: int,
        but: int,
    ) -> None:
        if exchange.slots:
            for partition, (begin, count) in enumerate(zip(starts, counts, strict=True)):
                if partition != but:
                    end = min(hi, count)
                    exchange.publish(partition, lo, end, data[begin + lo : begin + end])

    def _collect(self, call: Call, output: Array | None, data: Array, deadline: float) -> None:
        """output: T[sum(counts)], where there is one, becomes the data of all ranks: T[counts[rank]]."""
        n, rank, counts = self.world_size, self.rank, call.counts
        starts, longest = partition_starts(counts), max(counts)
        if longest * call.dtype.itemsize <= INLINE_BYTES:
            buffer_index = self._agreement.exchange_headers(call, data, deadline)
            if output is not None:
                for r in range(n):
                    np.copyto(
                        output[starts[r] : starts[r] + counts[r]],
                        self._agreement.input(buffer_index, r, call.dtype, 0, counts[r]),
                    )
            return
        exchange = self._start_exchange(call, data, [[0]] * n, longest, deadline)
        copy = _copy_for(0 if output is None else output.nbytes)
        own = None if output is None else output[starts[rank] : starts[rank] + counts[rank]]
        if own is not None and own.size and address_of(own) == address_of(data):
            own = None  # gathered in place

        def pull_others(lo: int, hi: int) -> None:
            if output is not None:
                for r in ((rank + i) % n for i in range(1, n)):
                    end = min(hi, counts[r])
                    exchange.pull(r, 0, lo, end, output[starts[r] + lo : starts[r] + end], copy)

        def copy_own(lo: int, hi: int) -> None:
            if own is not None and own[lo:hi].size:
                copy(own[lo:hi], data[lo:hi])

        # Our own partition is copied while we would otherwise wait for the others.
        for lo, hi in exchange.windows(_GATHER_WINDOW_BYTES):
            if exchange.slots:
                exchange.publish(0, lo, min(hi, counts[rank]), data[lo:hi])
                self._control.arrive()
                copy_own(lo, hi)
                self._control.await_barrier(deadline)
                pull_others(lo, hi)
            else:
                pull_others(lo, hi)
                if hi == longest:
                    self._finish_reading(exchange)
                copy_own(lo, hi)
        self._await_readers(exchange, deadline)

    def _reduce_partitions(
        self, call: Call, op: ReduceOp, data: Array, output: Array | None, readers: Sequence[int], deadline: float
    ) -> None:
        """Each rank reduces its partition; `readers` get all partitions.

        Args:
            call: ALL_REDUCE or REDUCE.
            op: its operation.
            data: T[counts[0]].
            output: the same, where the result goes there; None: data is only read.
            readers: the ranks that get the result.
            deadline: of the call.
        """
        n, rank, numel = self.world_size, self.rank, data.size
        counts = [numel // n + (r < numel % n) for r in range(n)]
        starts = partition_starts(counts)
        own = data[starts[rank] : starts[rank] + counts[rank]]
        result = own if output is not None else np.empty(counts[rank], call.dtype.numpy)
        exchange = self._start_exchange(
            call,
            data,
            [starts] * n,
            counts[0],
            deadline,
            result=None if output is not None else result,
            results=len(readers) < n,
        )
        if exchange.mapped and len(readers) == n:
            self._push_partition(exchange, call.dtype, op, data, starts[rank], counts[rank], deadline)
            return
        partition_bytes = counts[0] * call.dtype.itemsize
        window_bytes = min(_MAX_WINDOW_BYTES, max(_MIN_WINDOW_BYTES, partition_bytes // 8))
        done = self._control.progress
        previous: tuple[int, int] | None = None

        def follow() -> None:
            """Copy the peers' results of the previous window: by now they are done, so no rank waits."""
            nonlocal done
            if previous is not None and output is not None:
                done += 1
                self._pull_partitions(exchange, output, starts, counts, *previous, done, deadline)

        for lo, hi in exchange.windows(window_bytes):
            self._publish_partitions(exchange, data, starts, counts, lo, hi, but=rank)
            if exchange.slots:
                follow()
                self._control.barrier(deadline)
            end = min(hi, counts[rank])
            self._reduce_window(exchange, call.dtype, op, own, result, lo, end)
            exchange.publish(rank, lo, end, result[lo:end])
            self._control.advance()
            if not exchange.slots:
                follow()
            previous = (lo, hi)
        follow()
        self._finish(exchange, deadline)

    def _push_partition(
        self, exchange: Exchange, dtype: DType, op: ReduceOp, data: Array, begin: int, count: int, deadline: float
    ) -> None:
        """Reduce our partition of arrays that all lie in registered memory, and write it into all of them."""
        n, rank = self.world_size, self.rank
        block = max(1, self._block_bytes // 2 // dtype.itemsize)
        for lo in range(begin, begin + count, block):
            hi = min(lo + block, begin + count)
            arrays = [data[lo:hi] if r == rank else exchange.view(r, lo, hi) for r in range(n)]
            ops.reduce_into(arrays[rank], arrays, op, dtype)
            self._control.check()
            for r in range(1, n):
                np.copyto(arrays[(rank + r) % n], arrays[rank])
        self._finish(exchange, deadline)

    def _pull_partitions(
        self,
        exchange: Exchange,
        output: Array,
        starts: Sequence[int],
        counts: Sequence[int],
        lo: int,
        hi: int,
        progress: int,
        deadline: float,
    ) -> None:
        """Copy [lo, hi) of every other rank's partition as soon as its progress is that far."""
        n, rank, copy = self.world_size, self.rank, _copy_for(output.nbytes)
        for r in ((rank + i) % n for i in range(1, n)):
            self._control.await_progress(r, progress, deadline)
            end = min(hi, counts[r])
            exchange.pull(r, r, lo, end, output[starts[r] + lo : starts[r] + end], copy)

    def _reduce_window(
        self, exchange: Exchange, dtype: DType, op: ReduceOp, own: Array, out: Array, lo: int, hi: int
    ) -> None:
        """out[lo:hi] becomes the reduction of [lo, hi) of our partition of all sources; own: T[] is ours."""
        n, rank = self.world_size, self.rank
        block = max(1, self._block_bytes // dtype.itemsize)
        scratch = [s[: block * dtype.itemsize].view(dtype.numpy) for s in self._scratches()]
        for begin in range(lo, hi, block):
            end = min(begin + block, hi)
            sources = [
                own[begin:end] if r == rank else exchange.peek(r, rank, begin, end, scratch[r]) for r in range(n)
            ]
            ops.reduce_into(out[begin:end], sources, op, dtype)

    def _scratches(self) -> list[Array]:
        """u8[block] by rank, for blocks that are read from other processes."""
        if not self._scratch:
            self._scratch = [np.empty(self._block_bytes, np.uint8) for _ in range(self.world_size)]
        return self._scratch

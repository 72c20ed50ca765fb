"""Large calls on one host: the ranks read each other's arrays, or copies of them; see `exchange`.

    n = world_size, T = call.dtype.numpy, a partition = one of n nearly equal ranges of an array

The headers contain the locations of the arrays. In a reduction each rank reduces its partition of all ranks' arrays in
blocks that stay in a cache, into its own array, and publishes its progress window by window; the others follow and copy
the windows. If all arrays are shared, it writes its partition into the others' arrays instead. Without slots, a last
barrier makes sure that no rank changes an array that another one still reads.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from axon_ps.collectives.backends.base import Call, Operation, Request
from axon_ps.collectives.backends.request import partition_starts, required
from axon_ps.collectives.backends.shm.agreement import Agreement
from axon_ps.collectives.backends.shm.control import Control
from axon_ps.collectives.backends.shm.exchange import Copy, Exchange, PeerMemory
from axon_ps.errors import Disagreement
from axon_ps.host.leases import address_of
from axon_ps.host.shared_arrays import shared_arrays
from axon_ps.reduction import ops
from axon_ps.types import Array

_CACHE_BYTES = 1 << 20  # of blocks of all ranks that are combined at a time
_MIN_BLOCK_BYTES, _MAX_BLOCK_BYTES = 64 << 10, 512 << 10
_GATHER_WINDOW_BYTES = 2 << 20  # of every rank; ranks that copy it at about the same time read it from memory once
_STREAM_BYTES = 8 << 20  # larger results are written past the caches, since they would evict the sources


def _copy_for(size_bytes: int) -> Copy:
    """Return the function that copies into a result of this size."""
    if size_bytes < _STREAM_BYTES:
        return np.copyto
    from axon_ps.kernels import stream_copy  # loading numba takes a while, and small groups need none

    return stream_copy.copy


class LargeCalls:
    """The large calls of one rank; see this module.

    Args:
        control: control segment of the group.
        peer_memory: access to the other ranks' arrays.
        agreement: exchanges the headers.
    """

    def __init__(self, control: Control, peer_memory: PeerMemory, agreement: Agreement) -> None:
        self._control = control
        self._peer_memory = peer_memory
        self._agreement = agreement
        self._rank, self._world_size = control.rank, control.layout.world_size
        blocks = _CACHE_BYTES // max(1, self._world_size - 1)
        block_bytes = 1 << blocks.bit_length() - 1  # a power of two; windows are multiples of it
        self._block_bytes = min(_MAX_BLOCK_BYTES, max(_MIN_BLOCK_BYTES, block_bytes))

    def run(self, request: Request, deadline: float) -> None:
        """Make a large call, of any operation but ALL_TO_ALL; see `Backend.run`."""
        call, data = request.call, request.data
        match call.operation:
            case Operation.ALL_REDUCE:
                self._reduce_to(call, required(data), data, range(self._world_size), deadline)
            case Operation.REDUCE:
                self._reduce_to(call, required(data), request.target(self._rank), (call.root,), deadline)
            case Operation.BROADCAST:
                self._broadcast(call, required(data), deadline)
            case Operation.REDUCE_SCATTER:
                self._reduce_scatter(call, required(request.output), required(data), deadline)
            case Operation.SCATTER:
                self._scatter(call, required(request.output), data, deadline)
            case _:
                self._collect(call, request.output, required(data), deadline)

    # --- moves

    def _broadcast(self, call: Call, data: Array, deadline: float) -> None:
        here = self._rank == call.root
        starts = [[0] if r == call.root else None for r in range(self._world_size)]
        exchange = self._start_exchange(call, data if here else None, starts, data.size, deadline)
        for lo, hi in exchange.windows():
            if here:
                exchange.publish(0, lo, hi, data[lo:hi])
            self._await_published(exchange, deadline)
            if not here:
                exchange.pull(call.root, 0, lo, hi, data[lo:hi])
        self._finish(exchange, deadline)

    def _scatter(self, call: Call, output: Array, data: Array | None, deadline: float) -> None:
        rank, root, counts = self._rank, call.root, call.counts
        starts = partition_starts(counts)
        root_starts = [starts if r == root else None for r in range(self._world_size)]
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

    def all_to_all(self, request: Request, index: int, inputs: Sequence[Sequence[int]], deadline: float) -> None:
        """Make an all-to-all whose headers were exchanged; `inputs`: by rank, the counts that it sends to each rank."""
        n, rank, output, data = self._world_size, self._rank, required(request.output), required(request.data)
        targets, sources = partition_starts(request.output_counts), partition_starts(request.input_counts)
        longest = max(map(max, inputs))
        starts = [partition_starts(row) for row in inputs]
        exchange = self._open_exchange(request.call, index, data, starts, longest, deadline)
        for lo, hi in exchange.windows():
            self._publish_partitions(exchange, data, sources, request.input_counts, lo, hi, but=rank)
            self._await_published(exchange, deadline)
            for r in ((rank + i) % n for i in range(n)):
                end = min(hi, request.output_counts[r])
                if end <= lo:
                    continue
                out = output[targets[r] + lo : targets[r] + end]
                if r == rank:
                    np.copyto(out, data[sources[rank] + lo : sources[rank] + end])
                else:
                    exchange.pull(r, rank, lo, end, out)
        self._finish(exchange, deadline)

    def _collect(self, call: Call, output: Array | None, data: Array, deadline: float) -> None:
        """Gather the data of all ranks: T[counts[rank]] into output: T[sum(counts)], if there is one."""
        n, rank, counts = self._world_size, self._rank, call.counts
        starts, longest = partition_starts(counts), max(counts)
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

    # --- reductions

    def _reduce_to(
        self, call: Call, data: Array, output: Array | None, readers: Sequence[int], deadline: float
    ) -> None:
        """Do `_reduce_partitions`. After an error no peer can write into `data` any more."""
        try:
            self._reduce_partitions(call, data, output, readers, deadline)
        except Disagreement:
            raise
        except BaseException:
            if output is not None:
                shared_arrays.revoke(address_of(data), data.nbytes)
            raise

    def _reduce_scatter(self, call: Call, output: Array, data: Array, deadline: float) -> None:
        rank, counts = self._rank, call.counts
        starts = partition_starts(counts)
        exchange = self._start_exchange(call, data, [starts] * self._world_size, max(counts), deadline)
        own = data[starts[rank] : starts[rank] + counts[rank]]
        for lo, hi in exchange.windows():
            self._publish_partitions(exchange, data, starts, counts, lo, hi, but=rank)
            self._await_published(exchange, deadline)
            self._reduce_window(exchange, call, own, output, lo, min(hi, counts[rank]))
        self._finish(exchange, deadline)

    def _reduce_partitions(
        self, call: Call, data: Array, output: Array | None, readers: Sequence[int], deadline: float
    ) -> None:
        """Reduce our partition, as every rank does; `readers` get all partitions.

        Args:
            call: ALL_REDUCE or REDUCE.
            data: T[counts[0]].
            output: `data` if the result goes there; None = data is only read.
            readers: the ranks that get the result.
            deadline: deadline of the call.
        """
        n, rank, numel = self._world_size, self._rank, data.size
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
        )
        if exchange.mapped:
            self._push_partition(exchange, call, data, (starts[rank], counts[rank]), readers, deadline)
            return
        done = self._control.progress
        previous: tuple[int, int] | None = None

        def follow() -> None:
            """Copy the peers' results of the previous window: by now they are done, so no rank waits."""
            nonlocal done
            if previous is not None and output is not None:
                done += 1
                self._pull_partitions(exchange, output, starts, counts, *previous, done, deadline)

        for lo, hi in exchange.windows():
            self._publish_partitions(exchange, data, starts, counts, lo, hi, but=rank)
            follow()
            self._control.barrier(deadline)
            end = min(hi, counts[rank])
            self._reduce_window(exchange, call, own, result, lo, end)
            exchange.publish(rank, lo, end, result[lo:end])
            self._control.advance()
            previous = (lo, hi)
        follow()
        self._finish(exchange, deadline)

    def _push_partition(
        self,
        exchange: Exchange,
        call: Call,
        data: Array,
        partition: tuple[int, int],
        readers: Sequence[int],
        deadline: float,
    ) -> None:
        """Reduce our partition, [begin, begin + count), of shared arrays, and write it into those of the readers."""
        n, rank, dtype, op = self._world_size, self._rank, call.dtype, call.op
        (begin, count), target = partition, rank if rank in readers else readers[0]
        assert op is not None
        block = max(1, self._block_bytes // 2 // dtype.itemsize)
        for lo in range(begin, begin + count, block):
            hi = min(lo + block, begin + count)
            arrays = [data[lo:hi] if r == rank else exchange.view(r, lo, hi) for r in range(n)]
            ops.reduce_into(arrays[target], arrays, op, dtype)
            self._control.check()
            for r in range(1, n):
                if (other := (rank + r) % n) in readers and other != target:
                    np.copyto(arrays[other], arrays[target])
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
        n, rank, copy = self._world_size, self._rank, _copy_for(output.nbytes)
        for r in ((rank + i) % n for i in range(1, n)):
            self._control.await_progress(r, progress, deadline)
            end = min(hi, counts[r])
            exchange.pull(r, r, lo, end, output[starts[r] + lo : starts[r] + end], copy)

    def _reduce_window(self, exchange: Exchange, call: Call, own: Array, out: Array, lo: int, hi: int) -> None:
        """Reduce [lo, hi) of our partition of all sources into out[lo:hi]; own: T[] is ours."""
        n, rank, dtype, op = self._world_size, self._rank, call.dtype, call.op
        assert op is not None
        block = max(1, self._block_bytes // dtype.itemsize)
        for begin in range(lo, hi, block):
            end = min(begin + block, hi)
            sources = [own[begin:end] if r == rank else exchange.peek(r, rank, begin, end) for r in range(n)]
            ops.reduce_into(out[begin:end], sources, op, dtype)

    # --- how arrays are read

    def _start_exchange(
        self,
        call: Call,
        source: Array | None,
        starts: Sequence[Sequence[int] | None],
        longest: int,
        deadline: float,
    ) -> Exchange:
        """Exchange headers, and find out how all arrays can be read."""
        buffer_index = self._agreement.exchange_headers(call, None, deadline, large=True, source=source)
        return self._open_exchange(call, buffer_index, source, starts, longest, deadline)

    def _open_exchange(
        self,
        call: Call,
        buffer_index: int,
        own: Array | None,
        starts: Sequence[Sequence[int] | None],
        longest: int,
        deadline: float,
    ) -> Exchange:
        peer_memory = self._peer_memory
        peer_memory.unmap_closed()
        descriptors = peer_memory.descriptors(buffer_index)
        slots = peer_memory.choose_slots(descriptors, deadline)
        return Exchange(peer_memory, descriptors, call.dtype, starts, longest, slots, own)

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
        """Wait, after `_finish_reading`, until no peer reads our array any more."""
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

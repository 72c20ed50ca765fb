"""Transfers between a worker and one shard server: pull a range, push a gradient, store first values.

Payloads are copied once, between the message and the caller's array. Calls are retried in `shard.client.retries`.

Streams are pooled (`rpc.stream_pool`): ten units on four servers use eighty of them a step. A gather is over when
its last chunk has arrived, a push or an upload with the reply. These are the measured seconds of a step with four
workers and four servers at 500 Mbit/s, and 17M parameters as int8:

                     pooled    a stream for each call
    SHARD_GRAD_OP    0.62      0.67
    FULL_SHARD       0.77      0.88
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from axon_ps.aggregation.client.peers import MakeContext
from axon_ps.compress.compressor import Compressor
from axon_ps.errors import AxonError, Broken, InvalidRequest
from axon_ps.host.host_peer import HostPeer
from axon_ps.host.leases import address_of
from axon_ps.host.shared_arrays import shared_arrays
from axon_ps.observe.moments import Moment, reached
from axon_ps.observe.tracing.span import Span
from axon_ps.rpc.deadlines import Deadline
from axon_ps.rpc.service import EOF, Stream, Stub
from axon_ps.rpc.stream_pool import StreamPool
from axon_ps.shard.client.line import Permit, Rate
from axon_ps.shard.client.received import Gathering, Received
from axon_ps.shard.same_host import leases
from axon_ps.shard.same_host.access import MAX_LEASED_BYTES, MIN_LEASED_BYTES, SameHostServers
from axon_ps.sharding.plan import Slice
from axon_ps.types import Array, DType, Hyper
from axon_ps.wire.codec import dtype_to_proto, hypers_to_proto
from axon_ps.wire.frames import Target, decode_chunk, encode_buffers, encode_chunk
from axon_ps.wire.v1 import common_pb2, shard_pb2

_logger = logging.getLogger(__name__)

DTYPE_OF = {np.dtype(np.float32): DType.F32, np.dtype(np.uint16): DType.BF16, np.dtype(np.float16): DType.F16}
"""The wire dtype of an array's element type."""

MIN_SPLIT_BYTES = 1 << 20
"""Fewer bytes are not worth a separate connection."""

MAX_IDLE = 32
"""Idle streams of each kind pooled per server: as many as the units that are usually under way at once."""

COUNTERS = (
    "bytes_in",
    "bytes_out",
    "chunks_in",
    "chunks_out",
    "gathers",
    "leased_bytes_in",
    "leased_bytes_out",
    "pushes",
    "uploads",
)
"""Counts of calls and chunks, and payload bytes; `leased_`: payload bytes that did not go through a socket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One call's transfer: elements [begin, end) of a unit, from or to `array`.

    Attributes:
        begin: first element.
        end: one past the last.
        array: wire[end - begin]; None if there is no gradient.
        dtype: the elements' dtype on the wire.
        chunk_numel: elements of a chunk.
        context: returns the caller's context.
        deadline: time at which the complete call must be over.
        min_version: gathers: the oldest version accepted.
        step: gradients: the step attempt.
        epoch: number of restores of the job when the values were requested or sent.
        replica: gradients: number of the replica.
        addend: gradients: the addend that they are part of. Speculative gathers: the last one expected.
        one_version: gathers: whether all chunks must be of one version.
        expected: speculative gathers: per parameter group, the hyperparameters that `step` is expected to commit with.
        compressor: compressor of the unit; None = chunks are not compressed. With a compressor `dtype` is F32. A gather
            may still be into any wire dtype.
        received: gathers of differences: the values received before, to which payloads are added.
        same_host: the servers that memory is shared with; None = none.
        socket_only: whether payloads go through the socket although memory is shared, after a failure.
        resume: gradients: whether the server may have some of it already.
        residuals: compressed gradients: f32[end - begin] of earlier steps, and the destination for this step's.
        span: the span of the call, if it is traced.
        permit: gathers: the permit, which counts the bytes received.
        moment: gathers: name of the moment that is wanted in place of parameters; "" = none.
        updates: gathers of a moment: gets the updates of each parameter of the unit.
    """

    begin: int
    end: int
    array: Array | None
    dtype: DType
    chunk_numel: int
    context: MakeContext
    deadline: Deadline
    min_version: int = 0
    step: int = 0
    epoch: int = 0
    replica: int = 0
    addend: int = 0
    expected: tuple[Hyper, ...] = ()
    one_version: bool = True
    compressor: Compressor | None = None
    received: Received | None = None
    same_host: SameHostServers | None = None
    socket_only: bool = False
    resume: bool = False
    residuals: tuple[Array, Array] | None = None
    span: Span | None = None
    permit: Permit | None = None
    moment: str = ""
    updates: list[int] | None = None

    async def peer(self, s: Slice, stub: Stub) -> HostPeer | None:
        """Return the server of a slice, if memory is shared with it and payloads may be leased; else None."""
        if self.same_host is None or self.socket_only or self.compressor is not None:
            return None
        return await self.same_host.access(s.server, stub, self.context)

    def split(self, s: Slice, most: int) -> Iterator[Transfer]:
        """Split the part in a slice into up to `most` transfers, of full chunks and at least `MIN_SPLIT_BYTES` each."""
        begin, end = max(s.begin, self.begin), min(s.end, self.end)
        chunks = -(-(end - s.begin) // self.chunk_numel) - (begin - s.begin) // self.chunk_numel
        count = min(most, chunks, (end - begin) * self.dtype.itemsize // MIN_SPLIT_BYTES)
        if count < 2:
            yield self
            return
        first = s.begin + (begin - s.begin) // self.chunk_numel * self.chunk_numel
        cuts = [begin, *(first + chunks * i // count * self.chunk_numel for i in range(1, count)), end]
        for one, other in itertools.pairwise(cuts):
            here = slice(one - self.begin, other - self.begin)
            yield replace(
                self,
                begin=one,
                end=other,
                array=None if self.array is None else self.array[here],
                residuals=None if self.residuals is None else (self.residuals[0][here], self.residuals[1][here]),
            )

    def gathering(self, s: Slice) -> Gathering | None:
        """Return the gather of the part in a slice, if parameters are sent as differences; else None.

        Raises:
            StepAborted: it is speculative, and there is nothing that differences could be added to.
        """
        if self.received is None or self.compressor is None or self.array is None:
            return None
        begin, end = _full_chunks(s, self)
        return Gathering(
            received=self.received,
            s=s,
            begin=begin,
            end=end,
            chunk_numel=self.chunk_numel,
            compressor=self.compressor,
            epoch=self.epoch,
            min_version=self.min_version,
            out=self.array,
            out_begin=self.begin,
            dtype=DTYPE_OF[self.array.dtype],
            step=self.step,
            expected=self.expected,
        )

    def payload(self, begin: int, end: int) -> Array:
        """Return elements [begin, end) as on the wire: the same in every call, so that a stream may be resumed."""
        assert self.array is not None
        cut = slice(begin - self.begin, end - self.begin)
        if self.compressor is None:
            return self.array[cut]
        out = np.empty(self.compressor.compressed_bytes(end - begin), np.uint8)
        before, after = (None, None) if self.residuals is None else (self.residuals[0][cut], self.residuals[1][cut])
        self.compressor.compress(self.array[cut], out, before, after)
        return out


class Transfers:
    """Transfers between one worker and the shard servers. Everything runs on one event loop.

    Attributes:
        counters: `COUNTERS`.
        rate: the rate at which gathers arrive.
    """

    def __init__(self) -> None:
        self.rate = Rate()
        self.counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self._gathers = StreamPool(partial(Stub.open_bulk, method="AllGather"), MAX_IDLE)
        self._pushes = StreamPool(partial(Stub.open_bulk, method="ReduceScatter"), MAX_IDLE)
        self._uploads = StreamPool(partial(Stub.open_bulk, method="Upload"), MAX_IDLE)

    def sharing(self) -> Transfers:
        """Return another object over the same pooled streams, with its own counters."""
        other = copy.copy(self)
        other.counters = Counter(dict.fromkeys(COUNTERS, 0))
        return other

    async def pull(self, stub: Stub, s: Slice, t: Transfer) -> int:
        """Copy the part of the range that lies in `s` to the array.

        Returns:
            The version that last changed it.

        Raises:
            Broken: the stream ended early, or the unit changed while it was read.
            InvalidRequest: the server sent chunks that were not requested.
            Timeout: the server did not send them in time.
            AxonError: the server raised it.
        """
        position, stop = begin, _ = _full_chunks(s, t)
        gathering = t.gathering(s)
        if gathering is not None and not t.expected and (there := gathering.finished()) is not None:
            return there
        peer = None if t.expected or t.moment else await t.peer(s, stub)
        request = shard_pb2.AllGatherRequest(
            context=t.context(),
            unit=s.unit,
            begin=position,
            end=stop,
            min_version=t.min_version,
            epoch=t.epoch,
            dtype=dtype_to_proto(t.dtype),
            step=t.step,
            addend=t.addend,
            expected=hypers_to_proto(t.expected),
            compressed=t.compressor is not None,
            accept_leases=peer is not None,
            since=None if gathering is None else gathering.since,
            moment=t.moment,
        )
        assert t.array is not None
        version, mixed, target = -1, False, Target(common_pb2.Chunk, _memory_of(t))
        self.counters["gathers"] += 1
        async with self._gathers.acquire(stub, t.deadline) as stream:
            await stream.write(request)
            reached(Moment.GATHER)
            while position < stop:
                header, payload, copied = target.decode(await _read(stream, target))
                if header.offset != position or not 0 < header.numel <= stop - position:
                    raise InvalidRequest(
                        f"{stub.peer} sent {header.numel} elements at {header.offset} of unit {header.unit}; expected "
                        f"were those from {position} up to {stop} of unit {s.unit}"
                    )
                size_bytes = payload.nbytes
                if peer is not None and header.HasField("lease"):
                    size_bytes = await _copy_leased(header, peer, t.array, t)
                    self.counters["leased_bytes_in"] += size_bytes
                else:
                    self.rate.received(size_bytes, time.monotonic())
                    if t.updates is not None and position == begin:
                        if not header.updates:  # an older server, which does not read `moment`
                            raise InvalidRequest(f"{stub.peer} has sent parameters, not {t.moment!r}; upgrade it first")
                        t.updates[:] = header.updates
                    if gathering is not None:
                        gathering.take(header, payload)
                    elif not copied and not (t.moment and header.absent):
                        _copy(header, payload, t.array, t)
                mixed |= header.version != version and version >= 0
                version = max(version, header.version)
                position += header.numel
                self.counters["chunks_in"] += 1
                self.counters["bytes_in"] += size_bytes
                if t.permit is not None:
                    t.permit.moved(size_bytes)
                if t.span is not None:
                    t.span.add("bytes", size_bytes)
        if mixed and t.one_version:
            raise Broken(f"unit {s.unit} changed at {stub.peer} while it was read")
        if gathering is not None and gathering.refused:  # the refused chunks were forgotten: gather them in full
            return await self.pull(stub, s, t)
        return version

    async def locate(self, stub: Stub, s: Slice, t: Transfer) -> Array | None:
        """Return the segment, u8[...], that holds all of `s`, once it is at the version; None if it must be gathered.

        Raises:
            Broken: the stream ended early.
            Timeout: the server did not answer in time.
            AxonError: the server raised it.
        """
        peer = await t.peer(s, stub)
        if peer is None:
            return None
        request = shard_pb2.AllGatherRequest(
            context=t.context(),
            unit=s.unit,
            begin=s.begin,
            end=s.end,
            min_version=t.min_version,
            epoch=t.epoch,
            dtype=dtype_to_proto(t.dtype),
            map=True,
        )
        self.counters["gathers"] += 1
        async with self._gathers.acquire(stub, t.deadline) as stream:
            await stream.write(request)
            reached(Moment.GATHER)
            header, _ = decode_chunk(await _read(stream))
        if not header.HasField("lease"):
            return None
        try:
            return peer.memory(header.lease.segment)
        except AxonError as error:
            _logger.info("unit %d is gathered and not mapped: %s", s.unit, error)
            return None

    async def push(self, stub: Stub, s: Slice, t: Transfer) -> None:
        """Send the part of the range that lies in `s`; to `resume`, only the chunks that the server lacks.

        Raises:
            GenerationChanged: the step is lost.
            Broken: the stream ended early.
            Timeout: the server did not reply in time.
            AxonError: the server raised it.
        """
        begin, end = max(s.begin, t.begin), min(s.end, t.end)
        header = common_pb2.Chunk(
            context=t.context(),
            step=t.step,
            unit=s.unit,
            offset=begin,
            end=end,
            dtype=dtype_to_proto(t.dtype),
            replica=t.replica,
            addend=t.addend,
            absent=t.array is None,
            compressed=t.compressor is not None,
        )
        self.counters["pushes"] += 1
        peer = await t.peer(s, stub)
        leased = peer is not None and t.array is not None and self._may_lease(peer, t.payload(begin, end))
        try:
            async with self._pushes.acquire(stub, t.deadline) as stream:
                if t.array is None:
                    header.numel = end - begin
                    await stream.write(encode_chunk(header, None))
                else:
                    if t.resume:
                        await stream.write(encode_chunk(header, None))
                        begin = int((await _pushed(stream, t)).missing)
                    await self._send(stream, header, begin, end, t, peer if leased else None)
                reached(Moment.PUSH)
                await _pushed(stream, t)
        except BaseException:
            if leased and t.array is not None:
                shared_arrays.detach(address_of(t.array))
            raise

    async def store(self, stub: Stub, s: Slice, t: Transfer) -> None:
        """Send first values.

        Raises:
            Broken: the stream ended early.
            Timeout: the server did not reply in time.
            AxonError: the server raised it.
        """
        header = common_pb2.Chunk(
            context=t.context(), unit=s.unit, dtype=dtype_to_proto(t.dtype), epoch=t.epoch, end=s.end
        )
        self.counters["uploads"] += 1
        async with self._uploads.acquire(stub, t.deadline) as stream:
            await self._send(stream, header, s.begin, s.end, t)
            await _reply(stream)

    @staticmethod
    def _may_lease(peer: HostPeer, payload: Array) -> bool:
        """Return True if a payload can be leased from shared memory; else it is sent."""
        return payload.nbytes >= MIN_LEASED_BYTES and leases.grant(peer, payload) is not None

    async def _send(
        self,
        stream: Stream,
        header: common_pb2.Chunk,
        begin: int,
        end: int,
        t: Transfer,
        peer: HostPeer | None = None,
    ) -> None:
        """Write the chunks of [begin, end), one per message; to a `peer`, messages that lease many chunks each."""
        numel = t.chunk_numel
        if peer is not None:
            numel *= max(1, MAX_LEASED_BYTES // (t.chunk_numel * t.dtype.itemsize))
        for offset in range(begin, end, numel):
            stop = min(offset + numel, end)
            header.offset, header.numel = offset, stop - offset
            payload = t.payload(offset, stop)
            if peer is not None:
                lease = leases.grant(peer, payload)
                if lease is None:
                    raise Broken(f"memory is shared with {stream.target} no more")
                header.lease.CopyFrom(lease)
                await stream.write(encode_chunk(header, None))
                header.ClearField("lease")
                self.counters["leased_bytes_out"] += payload.nbytes
            else:
                await stream.write(encode_buffers(header, payload))
            header.ClearField("context")
            header.ClearField("end")
            self.counters["chunks_out"] += 1
            self.counters["bytes_out"] += payload.nbytes
            if t.span is not None:
                t.span.add("bytes", payload.nbytes)


def _memory_of(t: Transfer) -> Callable[[common_pb2.Chunk, int], memoryview | None]:
    """Return a function that gives the destination of a chunk's payload: its range of the array, if all of it fits."""
    assert t.array is not None
    array, itemsize = t.array.view(np.uint8), t.dtype.itemsize

    def memory(header: common_pb2.Chunk, nbytes: int) -> memoryview | None:
        begin, end = header.offset - t.begin, header.offset + header.numel - t.begin
        fits = begin >= 0 and end <= t.end - t.begin and nbytes == header.numel * itemsize
        fits = fits and not header.compressed and t.received is None
        return array[begin * itemsize : end * itemsize].data if fits else None

    return memory


async def _read(stream: Stream, target: Target[common_pb2.Chunk] | None = None) -> Any:
    """Return the next message of a gather."""
    message = await stream.read(target)
    if message is EOF:
        raise Broken(f"{stream.target} ended before everything had come")
    return message


async def _reply(stream: Stream) -> Any:
    """Return the reply of the server."""
    reply = await stream.read()
    if reply is EOF:
        raise Broken(f"{stream.target} ended without a reply")
    return reply


async def _pushed(stream: Stream, t: Transfer) -> Any:
    """Return the reply of the server to a push.

    Raises:
        InvalidRequest: the server does not know addends, and has dropped the gradient as a repeated one.
    """
    reply = await _reply(stream)
    if reply.addend != t.addend:
        raise InvalidRequest(
            f"{stream.target} is of an older axon_ps, which takes one backward a step: start it with a newer one, or "
            "accumulate the gradients of a step without sync"
        )
    return reply


async def _copy_leased(header: common_pb2.Chunk, peer: HostPeer, out: Array, t: Transfer) -> int:
    """Copy the wanted elements of a leased range to `out`; returns the number of bytes copied."""
    position, numel = header.offset, header.numel
    leased = leases.view(peer, header.lease)
    if leased.values.nbytes != numel * t.dtype.itemsize:
        raise InvalidRequest(f"{numel} elements of {t.dtype.value} were leased as {leased.values.nbytes} bytes")
    values = leased.values.view(out.dtype)
    first, last = max(position, t.begin), min(position + numel, t.end)
    for begin in range(first, last, t.chunk_numel):
        end = min(begin + t.chunk_numel, last)
        out[begin - t.begin : end - t.begin] = values[begin - position : end - position]
        if end < last:
            await asyncio.sleep(0)  # let other tasks of this loop run
    leased.check()
    return (last - first) * t.dtype.itemsize


def _copy(header: common_pb2.Chunk, payload: memoryview, out: Array, t: Transfer) -> None:
    """Copy the elements of a chunk that are in the range to `out`."""
    position, numel = header.offset, header.numel
    if t.compressor is not None:
        _unpack(header, payload, out, t, t.compressor)
        return
    if numel * t.dtype.itemsize != payload.nbytes:
        raise InvalidRequest(f"a chunk of {numel} elements of {t.dtype.value} has a payload of {payload.nbytes} bytes")
    values = np.frombuffer(payload, out.dtype)
    if position >= t.begin and position + numel <= t.end:
        out[position - t.begin : position - t.begin + numel] = values
    else:
        first, last = max(position, t.begin), min(position + numel, t.end)
        out[first - t.begin : last - t.begin] = values[first - position : last - position]


def _unpack(header: common_pb2.Chunk, payload: memoryview, out: Array, t: Transfer, compressor: Compressor) -> None:
    """Decompress the elements of a chunk that are in the range to `out`, through f32 values that stay in the caches."""
    position, numel = header.offset, header.numel
    compressor = compressor.within(position, position + numel)
    if not header.compressed or payload.nbytes != compressor.compressed_bytes(numel):
        raise InvalidRequest(
            f"a chunk of {numel} elements has a payload of {payload.nbytes} bytes; as {compressor.name} it must have "
            f"{compressor.compressed_bytes(numel)}"
        )
    first, last = max(position, t.begin), min(position + numel, t.end)
    target = out[first - t.begin : last - t.begin]
    data = np.frombuffer(payload, np.uint8)
    if out.dtype == np.float32 and last - first == numel:
        compressor.decompress(data, target)
        return
    from axon_ps.compress import cast  # numba: only where it is needed

    values = np.empty(numel, np.float32)
    compressor.decompress(data, values)
    cast.encode(values[first - position : last - position], target, DTYPE_OF[out.dtype])


def warm_up() -> None:
    """Compile the loops that convert compressed parameters to another dtype than f32, and that check differences."""
    from axon_ps.compress import cast
    from axon_ps.kernels import digest

    for dtype in (DType.BF16, DType.F16):
        cast.encode(np.empty(0, np.float32), np.empty(0, dtype.numpy), dtype)
    digest.warm_up()


def _full_chunks(s: Slice, t: Transfer) -> tuple[int, int]:
    """Return the part of the range that lies in `s`, extended to full chunks."""
    begin, end = max(s.begin, t.begin), min(s.end, t.end)
    first = (begin - s.begin) // t.chunk_numel
    last = -(-(end - s.begin) // t.chunk_numel)
    return s.begin + first * t.chunk_numel, min(s.begin + last * t.chunk_numel, s.end)

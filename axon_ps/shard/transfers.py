"""One stream between a worker and one shard server: pull a range, push a gradient, store first values.

Payloads are copied once, between the message and the caller's array. Nothing here is retried; that is `shard.client`'s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import grpc
import numpy as np

from axon_ps.errors import Broken, InvalidRequest
from axon_ps.sharding.plan import Slice
from axon_ps.transport.backoff import Deadline
from axon_ps.transport.service import Stream, Stub
from axon_ps.types import Array, DType, Hyper
from axon_ps.wire.codec import dtype_to_proto, hyper_to_proto
from axon_ps.wire.frames import decode_chunk, encode_chunk
from axon_ps.wire.v1 import common_pb2, shard_pb2

MakeContext = Callable[[], common_pb2.CallContext]
"""Gives the present job, generation and incarnation."""

RESUME_KEY = "axon-ps-resume"
"""Initial metadata of ReduceScatter: the element from which a replica's chunks are missing."""

COUNTERS = ("bytes_in", "bytes_out", "chunks_in", "chunks_out", "gather_streams", "push_streams", "upload_streams")


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """What one call moves: elements [begin, end) of a unit, from or to `array`.

    Attributes:
        begin: first element.
        end: one past the last.
        array: wire[end - begin]; None when there is no gradient.
        dtype: how its elements travel.
        chunk_numel: elements of a chunk.
        context: who calls.
        deadline: when the whole call must be over.
        min_version: gathers: the oldest version that will do.
        step: gradients: the step attempt.
        replica: gradients: whose.
        assumed: gathers ahead of the decision on `step`: per parameter group, the hyperparameters it is taken to have.
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
    replica: int = 0
    assumed: tuple[Hyper, ...] = ()

    def touches(self, s: Slice) -> bool:
        """Whether a part of the range lies in a slice."""
        return s.begin < self.end and s.end > self.begin


async def pull(stub: Stub, s: Slice, t: Transfer, counters: Counter[str]) -> int:
    """Copy what `s` has of the range to the array.

    Returns:
        The version that last changed it.

    Raises:
        Broken: the stream ended early, or the unit changed while it was read.
        InvalidRequest: the server sent something else than was asked for.
        AxonError: what the server raised.
    """
    position, stop = _whole_chunks(s, t)
    request = shard_pb2.AllGatherRequest(
        context=t.context(),
        unit=s.unit,
        begin=position,
        end=stop,
        min_version=t.min_version,
        dtype=dtype_to_proto(t.dtype),
        step=t.step,
        assumed=map(hyper_to_proto, t.assumed),
    )
    assert t.array is not None
    version, mixed = -1, False
    counters["gather_streams"] += 1
    stream = stub.open("AllGather", request, timeout_s=t.deadline.remaining())
    try:
        while (data := await stream.read()) is not grpc.aio.EOF:
            header, payload = decode_chunk(data)
            if header.offset != position or header.numel > stop - position:
                raise InvalidRequest(
                    f"{stub.peer} sent {header.numel} elements at {header.offset} of unit {header.unit}; expected were "
                    f"those from {position} up to {stop} of unit {s.unit}"
                )
            _copy(header, payload, t.array, t)
            mixed |= header.version != version and version >= 0
            version = max(version, header.version)
            position += header.numel
            counters["chunks_in"] += 1
            counters["bytes_in"] += payload.nbytes
    except BaseException:
        stream.cancel()
        raise
    if position != stop:
        raise Broken(f"{stub.peer} ended its stream at element {position} of {stop} of unit {s.unit}")
    if mixed:
        raise Broken(f"unit {s.unit} changed at {stub.peer} while it was read")
    return version


async def push(stub: Stub, s: Slice, t: Transfer, counters: Counter[str], *, resume: bool) -> None:
    """Send what `s` owns of the range; with `resume` only what the server lacks.

    Raises:
        GenerationChanged: the step is lost.
        AxonError: what the server raised.
    """
    begin, end = max(s.begin, t.begin), min(s.end, t.end)
    header = common_pb2.Chunk(
        context=t.context(),
        step=t.step,
        unit=s.unit,
        offset=begin,
        dtype=dtype_to_proto(t.dtype),
        replica=t.replica,
        absent=t.array is None,
    )
    counters["push_streams"] += 1
    stream = stub.open("ReduceScatter", timeout_s=t.deadline.remaining())
    try:
        if t.array is None:
            header.numel = end - begin
            await stream.write(encode_chunk(header, None))
        else:
            if resume:
                await stream.write(encode_chunk(header, None))
                begin = int((await stream.initial_metadata()).get(RESUME_KEY, begin))
            await _send(stream, header, begin, end, t, counters)
        await stream.done_writing()
        await stream
    except BaseException:
        stream.cancel()
        raise


async def store(stub: Stub, s: Slice, t: Transfer, counters: Counter[str]) -> None:
    """Send first values.

    Raises:
        AxonError: what the server raised.
    """
    header = common_pb2.Chunk(context=t.context(), unit=s.unit, dtype=dtype_to_proto(t.dtype))
    counters["upload_streams"] += 1
    stream = stub.open("Upload", timeout_s=t.deadline.remaining())
    try:
        await _send(stream, header, s.begin, s.end, t, counters)
        await stream.done_writing()
        await stream
    except BaseException:
        stream.cancel()
        raise


async def _send(
    stream: Stream, header: common_pb2.Chunk, begin: int, end: int, t: Transfer, counters: Counter[str]
) -> None:
    """Write the chunks of [begin, end), one message at a time."""
    assert t.array is not None
    for offset in range(begin, end, t.chunk_numel):
        stop = min(offset + t.chunk_numel, end)
        header.offset, header.numel = offset, stop - offset
        await stream.write(encode_chunk(header, t.array[offset - t.begin : stop - t.begin]))
        header.ClearField("context")
        counters["chunks_out"] += 1
        counters["bytes_out"] += (stop - offset) * t.dtype.itemsize


def _copy(header: common_pb2.Chunk, payload: memoryview, out: Array, t: Transfer) -> None:
    """Copy what a chunk has of the range to `out`."""
    position, numel = header.offset, header.numel
    if numel * t.dtype.itemsize != payload.nbytes:
        raise InvalidRequest(f"a chunk of {numel} elements of {t.dtype.value} has a payload of {payload.nbytes} bytes")
    values = np.frombuffer(payload, out.dtype)
    if position >= t.begin and position + numel <= t.end:
        out[position - t.begin : position - t.begin + numel] = values
    else:
        first, last = max(position, t.begin), min(position + numel, t.end)
        out[first - t.begin : last - t.begin] = values[first - position : last - position]


def _whole_chunks(s: Slice, t: Transfer) -> tuple[int, int]:
    """The range asked for, as far as `s` has it, widened to whole chunks."""
    begin, end = max(s.begin, t.begin), min(s.end, t.end)
    first = (begin - s.begin) // t.chunk_numel
    last = -(-(end - s.begin) // t.chunk_numel)
    return s.begin + first * t.chunk_numel, min(s.begin + last * t.chunk_numel, s.end)

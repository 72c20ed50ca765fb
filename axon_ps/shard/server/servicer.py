"""The Shard service: protocol only. It decodes and checks messages, and the shell interprets them.

Clients pool streams: a stream serves one gather, push, upload or collective after the other. See `rpc.stream_pool`.

Note: [Two kinds of first message]
    The first message of a push names caller, step, unit, replica and range. With a payload (or `absent`) it is a chunk
    like any other, and the server sends nothing before the reply. That is the normal case. Without payload it is a
    request for the element at which to resume after a broken stream, and the server answers at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from axon_ps.aggregation.client.probes import ECHO_BYTES
from axon_ps.aggregation.server import servicer
from axon_ps.aggregation.server.shell import check_job
from axon_ps.compress import cast
from axon_ps.errors import InvalidRequest
from axon_ps.host.host_peer import HostPeer
from axon_ps.host.leases import ReadLease
from axon_ps.observe.tracing.span import Span, Value
from axon_ps.rpc.calls.protocol import ServerCall
from axon_ps.rpc.stream import EOF
from axon_ps.rpc.stream_pool import IdleStreams
from axon_ps.shard.core.engine import ShardEngine
from axon_ps.shard.same_host import leases
from axon_ps.shard.same_host.access import MAX_ELEMENT_BYTES, MIN_LEASED_BYTES
from axon_ps.shard.server import copying, subscriptions
from axon_ps.shard.server.model_shell import ModelShell
from axon_ps.shard.server.shell import ShardShell
from axon_ps.types import Array, DType, Member, parse_dtype
from axon_ps.wire.codec import dtype_from_proto, dtype_to_proto, hypers_from_proto
from axon_ps.wire.frames import decode_chunk, encode_chunk, payload_array
from axon_ps.wire.v1 import common_pb2, lease_pb2, shard_pb2


class ShardServicer:
    """The methods that `rpc.service.service_handler` calls."""

    def __init__(self, shell: ShardShell) -> None:
        self._shell = shell
        self._idle = IdleStreams()
        self._warm: set[DType] = set()

    def drain(self) -> None:
        """End idle streams, now and from now on, since the server waits for open streams when it stops."""
        self._idle.drain()

    async def all_gather(self, context: ServerCall) -> None:
        """Serve gathers, one after the other."""
        while (request := await self._idle.next(context)) is not EOF:
            tracer, calling = self._shell.tracer, self._shell.fence.calling(request.context.incarnation)
            with calling, tracer.serving("gather", request.context.traceparent) as span:
                await self._gather(request, context, span)

    async def _gather(self, request: shard_pb2.AllGatherRequest, context: ServerCall, span: Span | None) -> None:
        """Send chunks of a range, once the unit is at the version asked for."""
        shell, member = await self._shell.fence.worker(request.context)
        engine, generation = shell.engine, request.context.generation
        if span is not None:
            span.attributes.update(self._about(shell, member, request.unit), version=request.min_version)
        dtype = parse_dtype(dtype_from_proto(request.dtype), "the wire dtype of parameters")
        if request.expected:
            await self._gather_speculative(shell, request, context, span)
            return
        await shell.reads.available(request.unit, request.begin, request.epoch, request.min_version, generation)
        engine.counters["gathers"] += 1
        owned = engine.slices.of(request.unit, request.begin)
        precision = owned.precision
        if request.compressed and precision.param_compression is None:
            raise InvalidRequest(f"these parameters are not compressed; they travel as {precision.param.value}")
        if request.map:
            await self._send_mapping(shell, context, request, dtype, member)
            return
        own = dtype is precision.param and request.compressed == (precision.param_compression is not None)
        self._shell.pacer.gathers += 1
        try:
            if request.moment:
                for index in range(*owned.chunks.range_of(request.begin, request.end)):
                    frame = await shell.reads.moment(request, index)
                    _count(engine, "out", len(frame), span)
                    await context.write(frame)
            elif own and precision.differs:
                await self._send_since(shell, request, context, span)
            elif own and (leased := await self._lease_to(member, shell, request, span)):
                await context.write(leased)
            elif own and not owned.raw:
                for frame in await shell.reads.frames(request.unit, request.begin, request.end, generation):
                    _count(engine, "out", len(frame), span)
                    await context.write(frame)
            else:
                if dtype not in self._warm:
                    await self._shell.off_loop(partial(cast.warm_up, dtype))  # which may compile
                    self._warm.add(dtype)
                for index in range(*owned.chunks.range_of(request.begin, request.end)):
                    owned = await shell.reads.unchanging(request.unit, request.begin, generation)
                    frame = engine.parameters.encode(owned, index, dtype)
                    await context.write(frame)
                    _count(engine, "out", len(frame), span)
        finally:
            self._shell.pacer.gathers -= 1
            shell.corruptions.report(owned)

    async def _send_since(
        self, shell: ModelShell, request: shard_pb2.AllGatherRequest, context: ServerCall, span: Span | None
    ) -> None:
        """Send chunks of a range as differences that the caller lacks, or all values."""
        parameters, where = shell.engine.parameters, (request.unit, request.begin)
        since, generation = request.since if request.HasField("since") else None, request.context.generation
        if not (frames := parameters.since(*where, request.end, since)):
            await shell.reads.unchanging(*where, generation)
            frames = parameters.since(*where, request.end, since)
        for frame in frames:
            _count(shell.engine, "out", len(frame), span)
            await context.write(frame)
        if frames:
            return
        chunks = shell.engine.slices.of(*where).chunks
        for index in range(*chunks.range_of(request.begin, request.end)):
            frame = parameters.full(await shell.reads.unchanging(*where, generation), index)
            _count(shell.engine, "out", len(frame), span)
            await context.write(frame)

    async def _lease_to(
        self, member: Member, shell: ModelShell, request: shard_pb2.AllGatherRequest, span: Span | None
    ) -> bytes:
        """Return the message that leases a range of the wire copy instead of its chunks; empty if they must be sent."""
        peer = self._shell.same_host.find(member.id) if request.accept_leases else None
        return b"" if peer is None else await _lease(shell, request, peer, span)

    async def _send_mapping(
        self,
        shell: ModelShell,
        context: ServerCall,
        request: shard_pb2.AllGatherRequest,
        dtype: DType,
        member: Member,
    ) -> None:
        """Send a lease on the unit's memory, or a chunk without one if the caller must gather a copy."""
        engine = shell.engine
        peer = self._shell.same_host.find(member.id)
        while True:
            owned = await shell.reads.unchanging(request.unit, request.begin, request.context.generation)
            header = common_pb2.Chunk(unit=request.unit, version=owned.changed, numel=owned.chunks.numel)
            if peer is None or dtype is not owned.precision.param or not engine.mappable(owned):
                break
            try:
                memory = await shell.values.mapped(owned)
            finally:
                shell.corruptions.report(owned)
            if owned.applying:  # a step began once it was mapped
                continue
            if memory is not None and peer.offer(memory.segment):
                header.lease.CopyFrom(_to_proto(memory.lease(0, owned.chunks.numel)))
            break
        await context.write(encode_chunk(header, None))

    async def _gather_speculative(
        self, shell: ModelShell, request: shard_pb2.AllGatherRequest, context: ServerCall, span: Span | None
    ) -> None:
        """Send chunks of a range as an undecided step is expected to make them, each as soon as it can be made."""
        engine = shell.engine
        owned = engine.slices.of(request.unit, request.begin)
        precision = owned.precision
        compressed = precision.param_compression is not None
        if dtype_from_proto(request.dtype) is not precision.param or request.compressed != compressed:
            how = "compressed" if compressed else precision.param.value
            raise InvalidRequest(f"a speculative gather takes parameters only as this job sends them: {how}")
        if precision.by_tensor:
            raise InvalidRequest(f"parameters that travel as {precision.param_compression} are gathered after a step")
        hypers = hypers_from_proto(request.expected)
        engine.counters["gathers"] += 1
        for index in range(*owned.chunks.range_of(request.begin, request.end)):
            frame = await shell.reads.prepared(
                request.step, owned, index, hypers, request.context.generation, request.addend
            )
            _count(engine, "out", len(frame), span)
            await context.write(frame)

    async def reduce_scatter(self, context: ServerCall) -> None:
        """Serve pushes, one after the other."""
        while (message := await self._idle.next(context)) is not EOF:
            header, payload = _first(message)
            tracer, calling = self._shell.tracer, self._shell.fence.calling(header.context.incarnation)
            with calling, tracer.serving("push", header.context.traceparent) as span:
                reply = await self._push(message, header, payload, context, span)
            await context.write(reply)

    async def _push(
        self, message: Any, header: common_pb2.Chunk, payload: memoryview, context: ServerCall, span: Span | None
    ) -> shard_pb2.ReduceScatterReply:
        """Add gradient chunks of one replica. See Note: [Two kinds of first message]."""
        shell, member = await self._shell.fence.worker(header.context)
        engine = shell.engine
        if span is not None:
            span.attributes.update(self._about(shell, member, header.unit), attempt=header.step)
        step, unit, replica, addend = header.step, header.unit, header.replica, header.addend
        if member.replica < 0:
            made = "unknown" if engine.spec is None else f"{engine.spec.grouping}, and one of its is missing"
            raise InvalidRequest(
                f"worker {member.rank} is in no replica, so its gradients do not count: these are {made}"
            )
        if replica != member.replica:
            raise InvalidRequest(f"worker {member.rank} contributes to replica {member.replica}, not {replica}")
        position, end = _range_of(engine, header)
        engine.counters["pushes"] += 1
        summed = 0
        with shell.gradients.under_way(header.context.generation):
            if header.numel == 0:
                position = min(end, engine.gradients.resume_offset(step, unit, position, replica, addend))
                await context.write(shard_pb2.ReduceScatterReply(step=step, missing=position, addend=addend))
                message = None
            while position < end:
                if message is None:
                    message = await context.read()
                    header, payload = _chunk(message)
                _check_chunk(header, unit, position)
                if (header.step, header.replica, header.addend) != (step, replica, addend):
                    raise InvalidRequest("a push is of one step, one replica and one addend")
                position += header.numel
                _count(engine, "in", len(message), span)
                if header.absent:
                    summed += await shell.gradients.push_absent(
                        step, unit, header.offset, header.numel, replica, addend=addend
                    )
                else:
                    leased = header.HasField("lease")
                    for one in self._leased_payloads(engine, member, header, span) if leased else (payload,):
                        dtype, grad = _gradient(engine, header, one)
                        summed += await shell.gradients.push(
                            (step, unit, header.offset, replica), dtype, grad, addend=addend, borrowed=leased
                        )
                        if leased:
                            await asyncio.sleep(0)  # a lease may have MiBs
                message = None
        return shard_pb2.ReduceScatterReply(step=step, chunks=summed, addend=addend)

    async def upload(self, context: ServerCall) -> None:
        """Serve uploads of first values, one slice after the other."""
        while (message := await self._idle.next(context)) is not EOF:
            await context.write(await self._store(message, context))

    async def _store(self, message: Any, context: ServerCall) -> shard_pb2.UploadReply:
        """Store first values of a slice, f32."""
        header, payload = _first(message)
        shell, _ = await self._shell.fence.worker(header.context)
        engine, epoch, unit = shell.engine, header.epoch, header.unit
        position, end = _range_of(engine, header)
        await shell.wait_withdrawn(epoch, header.context.generation)
        complete = False
        while position < end:
            if message is None:
                message = await context.read()
                header, payload = _chunk(message)
            _check_chunk(header, unit, position)
            _count(engine, "in", len(message), None)
            complete = await shell.values.upload(epoch, unit, position, _first_values(header, payload))
            position += header.numel
            message = None
        return shard_pb2.UploadReply(complete=complete)

    async def replicate(self, context: ServerCall) -> None:
        """Take sums of gradients from the primary of the slices."""
        message = await self._idle.next(context)
        if message is EOF:
            return
        header, payload = _first(message)
        shell, member = await self._shell.fence.server(header.context)
        placement = header.context.placement
        with shell.gradients.under_way(header.context.generation):
            while message is not EOF:
                total, nbytes, leased = None, payload.nbytes, header.HasField("lease")
                if leased:
                    total = self._leased_sum(shell.engine, member, header)
                    nbytes = 0 if total is None else total.nbytes
                elif not header.absent:
                    total = _total(header, payload)
                shell.engine.counters["bytes_followed"] += nbytes
                if total is not None or not leased:
                    await shell.gradients.push_sum(header, total, placement)
                message = await self._idle.next(context)
                if message is not EOF:
                    header, payload = decode_chunk(message)
                    if header.HasField("context"):
                        await self._shell.fence.server(header.context)
                        placement = header.context.placement

    async def copy(self, context: ServerCall) -> None:
        """Send all of a slice to a server that becomes a holder."""
        while (request := await self._idle.next(context)) is not EOF:
            shell, _ = await self._shell.fence.server(request.context)
            generation = request.context.generation
            owned = await shell.reads.copy_of(request.slice, request.version, request.epoch, generation)
            async for chunk in copying.chunks(shell.engine, owned):
                shell.check_generation(generation)
                await context.write(chunk)

    async def collective(self, context: ServerCall) -> None:
        """Serve a worker's collectives and messages of its groups, one after the other."""
        await servicer.serve(self._shell.collectives, self._idle, context)

    async def subscribe(self, context: ServerCall) -> None:
        """Serve versions of a model to a caller that need not be a member."""
        await subscriptions.serve(self._shell.fence, self._shell.pacer, self._idle, context)

    async def handshake(self, request: shard_pb2.HandshakeRequest, context: Any) -> shard_pb2.HandshakeReply:
        """Return the socket address for a worker or server of this host, so that memory can be shared."""
        member = await self._shell.fence.member(request.context)
        return self._shell.same_host.handshake(member.id)

    async def echo(self, context: ServerCall) -> None:
        """Send messages back unchanged, also while this server is busy."""
        while (request := await self._idle.next(context)) is not EOF:
            check_job(request.context, self._shell.job)
            if len(request.payload) > ECHO_BYTES:
                raise InvalidRequest(f"{len(request.payload)} bytes are to be sent back; at most {ECHO_BYTES} are")
            await context.write(request)

    async def stats(self, request: shard_pb2.StatsRequest, context: Any) -> shard_pb2.StatsReply:
        """Return the counters of this server. The caller may be an operator, not a member."""
        check_job(request.context, self._shell.job)
        return shard_pb2.StatsReply(values=self._shell.statistics() | self._shell.collectives.engine.statistics())

    def _about(self, shell: ModelShell, member: Member, unit: int) -> dict[str, Value]:
        """Return the attributes of the span of a worker's call."""
        rank = -1 if self._shell.reports is None else self._shell.reports.rank
        return {"unit": shell.engine.unit_name(unit), "worker": member.rank, "server": rank}

    def _leased_sum(self, engine: ShardEngine, member: Member, header: common_pb2.Chunk) -> Array | None:
        """Copy a sum from the memory of the primary.

        Returns:
            The sum; None if its lease was revoked meanwhile: its step is over, or it will come with another addend.

        Raises:
            InvalidRequest: it is larger than a chunk.
            Broken: memory is not shared with the primary any more.
        """
        assert engine.spec is not None
        if not 0 < header.numel <= engine.spec.options.chunk_numel:
            raise InvalidRequest(
                f"a sum of {header.numel} elements was leased; a chunk has at most {engine.spec.options.chunk_numel}"
            )
        total = np.empty(header.numel, np.float32)
        held = leases.read(self._shell.same_host.peer(member.id), header.lease, total)
        return total if held else None

    def _leased_payloads(
        self, engine: ShardEngine, member: Member, header: common_pb2.Chunk, span: Span | None
    ) -> Iterator[memoryview]:
        """Yield the payloads of a leased gradient's chunks, in the sender's memory. `header` is set for each.

        Raises:
            InvalidRequest: the lease does not have the form that clients use.
            Broken: memory is not shared with the caller, or not the memory that it names.
        """
        assert engine.spec is not None
        chunk_numel, lease = engine.spec.options.chunk_numel, header.lease
        element_bytes, rest = divmod(lease.size_bytes, max(1, header.numel))
        if header.compressed or rest or element_bytes > MAX_ELEMENT_BYTES:
            raise InvalidRequest(
                f"{header.numel} elements were leased as {lease.size_bytes} bytes"
                f"{' of a compressed gradient, which must be sent' if header.compressed else ''}"
            )
        begin, end = header.offset, header.offset + header.numel
        there = leases.view(self._shell.same_host.peer(member.id), lease).values
        while header.offset < end:
            header.numel = min(chunk_numel, end - header.offset)
            at = (header.offset - begin) * element_bytes
            payload = there[at : at + header.numel * element_bytes]
            for counter in ("mapped_bytes_in", "leased_bytes_in", "bytes_in"):
                engine.counters[counter] += payload.nbytes
            if span is not None:
                span.add("bytes", payload.nbytes)
            yield payload.data
            header.offset += header.numel


async def _lease(shell: ModelShell, request: shard_pb2.AllGatherRequest, peer: HostPeer, span: Span | None) -> bytes:
    """Lease a range of the wire copy; see `ShardServicer._lease_to`."""
    engine = shell.engine
    owned = engine.slices.of(request.unit, request.begin)
    begin, end = request.begin - owned.chunks.begin, request.end - owned.chunks.begin
    size_bytes = (end - begin) * owned.precision.param.itemsize
    if request.compressed or owned.applying or size_bytes < MIN_LEASED_BYTES:
        return b""
    first, last = owned.chunks.range_of(request.begin, request.end)
    memory = await shell.values.mapped(owned)
    if memory is None or owned.applying or not peer.offer(memory.segment):
        return b""
    header = common_pb2.Chunk(
        version=owned.changed,
        unit=request.unit,
        offset=request.begin,
        numel=end - begin,
        dtype=dtype_to_proto(owned.precision.param),
        lease=_to_proto(memory.lease(begin, end)),
    )
    message = encode_chunk(header, None)
    engine.counters["chunks_out"] += last - first - 1
    engine.counters["leased_bytes_out"] += size_bytes
    _count(engine, "out", size_bytes + len(message), span)
    return message


def _to_proto(lease: ReadLease) -> lease_pb2.Lease:
    return lease_pb2.Lease(segment=lease.segment, offset=lease.offset, size_bytes=lease.size_bytes, tag=lease.tag)


def _range_of(engine: ShardEngine, header: common_pb2.Chunk) -> tuple[int, int]:
    """Return the range of a push or an upload: first element, and one past the last."""
    owned = engine.slices.of(header.unit, header.offset).chunks
    owned.index_of(header.offset)
    if not header.offset < header.end <= owned.end:
        raise InvalidRequest(
            f"elements {header.offset} to {header.end} of unit {header.unit} were announced; this server has "
            f"{owned.begin} to {owned.end}"
        )
    return header.offset, header.end


def _gradient(engine: ShardEngine, header: common_pb2.Chunk, payload: memoryview) -> tuple[DType, Array]:
    """Return a gradient chunk's element type (U8 if it is compressed) and elements."""
    dtype = parse_dtype(dtype_from_proto(header.dtype), "the wire dtype of gradients")
    compressor = engine.gradients.compressor
    sizes = None if compressor is None else compressor.compressed_bytes
    return DType.U8 if header.compressed else dtype, payload_array(header, payload, header.numel, sizes)


def _total(header: common_pb2.Chunk, payload: memoryview) -> Array:
    """Return the elements of a forwarded sum, f32; widened if it was sent as bf16 or f16."""
    dtype = parse_dtype(dtype_from_proto(header.dtype), "the wire dtype of sums")
    return cast.decoded(payload_array(header, payload, header.numel), dtype)


def _count(engine: ShardEngine, direction: str, message_bytes: int, span: Span | None) -> None:
    engine.counters[f"chunks_{direction}"] += 1
    engine.counters[f"bytes_{direction}"] += message_bytes
    if span is not None:
        span.add("bytes", message_bytes)


def _first(message: Any) -> tuple[common_pb2.Chunk, memoryview]:
    """Return the first message of a push or an upload, which must name the caller."""
    header, payload = _chunk(message)
    if not header.HasField("context"):
        raise InvalidRequest("the first message must have a context: job, generation and incarnation")
    return header, payload


def _chunk(message: Any) -> tuple[common_pb2.Chunk, memoryview]:
    """Return the header and payload of a message, which must not be the end of the stream."""
    if message is EOF:
        raise InvalidRequest("the stream ended before everything had come that its first message announced")
    return decode_chunk(message)


def _check_chunk(header: common_pb2.Chunk, unit: int, position: int) -> None:
    """Check that a chunk is the next one."""
    if (header.unit, header.offset) != (unit, position) or not header.numel:
        raise InvalidRequest(
            f"{header.numel} elements at {header.offset} of unit {header.unit} came; expected were those from "
            f"{position} of unit {unit}"
        )


def _first_values(header: common_pb2.Chunk, payload: memoryview) -> Array:
    values = payload_array(header, payload, header.numel)
    if dtype_from_proto(header.dtype) is not DType.F32:
        raise InvalidRequest("first values travel as f32")
    return values

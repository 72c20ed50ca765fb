"""A worker's side of the collectives: a stream for each stripe of an operation, read and written at the same time.

Payloads are copied at most once, between the caller's arrays and messages. Collectives are not retried, since a broken
collective may have been done for some ranks and not for others.

Everything here runs on one event loop. Every method must be called on its thread. While an operation is under way, the
caller must not touch its arrays. An operation may send from and receive into the same array, since a segment comes back
only after the same segment was sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np

from axon_ps.aggregation.client.operation_stream import OperationStream
from axon_ps.aggregation.client.peers import MakeContext, Peers
from axon_ps.aggregation.client.send_window import SendWindow
from axon_ps.aggregation.core.mailbox import EAGER_BYTES
from axon_ps.aggregation.core.stripes import StripePlan, StripeSegment, home_of, owners_of, segments_of, stripes_of
from axon_ps.coordinator.client.connectivity_report import ConnectivityReport
from axon_ps.errors import AxonError, Broken, Closed, Disagreement, InternalError, InvalidRequest, Timeout
from axon_ps.host.malloc import retain_message_memory
from axon_ps.reduction.call import Call, Operation
from axon_ps.rpc.deadlines import Deadline, retry
from axon_ps.rpc.security import Security
from axon_ps.rpc.service import Stub, together
from axon_ps.rpc.stream_pool import Acquired, StreamPool
from axon_ps.types import Array, DType, Membership
from axon_ps.wire.calls import call_to_proto
from axon_ps.wire.codec import dtype_to_proto
from axon_ps.wire.frames import Target, elements
from axon_ps.wire.v1.collective_pb2 import CollectiveBegin, CollectiveChunk, Envelope

SERVER_REPORT_S = 1.0
"""Seconds after the common deadline in which a server may still report the missing ranks."""

FOREVER_S = 1e9
"""An infinite time-out on the wire, in seconds."""

CLOSE_TIMEOUT_S = 2.0
"""Seconds that a server may take to confirm that a group was closed."""

MAX_IDLE_STREAMS = 8
"""Most idle streams to one server in the pool: as many operations as are usually under way at once."""

COUNTERS = ("bytes_in", "bytes_out", "messages_in", "messages_out")

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class GroupHandle:
    """A group as one of its ranks uses it.

    Attributes:
        name: name of the group.
        rank: this rank's position.
        ranks: the members' world ranks, by position.
        members: the members' ids, by position.
    """

    name: str
    rank: int
    ranks: tuple[int, ...]
    members: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Buffers:
    """The arrays that one rank of a collective sends from and receives into: 1-D, contiguous, of the call's dtype.

    Attributes:
        source: the array to send from.
        target: the array to receive into.
        source_starts: start of each partition in `source`.
        target_starts: start in `target` of the data from each rank. Reduced data counts as from rank 0.
        input_counts: ALL_TO_ALL: elements for each rank.
        output_counts: ALL_TO_ALL: elements from each rank.
    """

    source: Array | None = None
    target: Array | None = None
    source_starts: Sequence[int] = ()
    target_starts: Sequence[int] = ()
    input_counts: tuple[int, ...] = field(default=())
    output_counts: tuple[int, ...] = field(default=())


class CollectiveClient:
    """One worker's client for collectives on the shard servers of its job. All groups of the worker share it.

    It has its own connections: parameters and gradients never queue behind collectives, nor collectives behind them.

    Args:
        security: TLS and token.
        context: returns the current job, generation and incarnation.
    """

    def __init__(self, security: Security, context: MakeContext) -> None:
        retain_message_memory()
        self._peers = Peers(security, connections=1)
        self._streams = StreamPool(self._open_collective, MAX_IDLE_STREAMS)
        self._context = context
        self._nodes: dict[str, str] = {}  # of workers, by id
        self._server_nodes: tuple[str, ...] = ()
        self._giving_up: set[asyncio.Task[None]] = set()
        self.counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))

    def probe(self, report: ConnectivityReport) -> None:
        """Probe the servers that this worker waits for, and report those that do not answer."""
        self._peers.probe(report, self._context)

    def set_members(self, membership: Membership) -> None:
        """Set the current shard servers, and the hosts of all members."""
        self._nodes = {worker.id: worker.node for worker in membership.workers}
        self._server_nodes = tuple(server.node for server in sorted(membership.shards, key=lambda s: s.rank))
        self._peers.set_members(membership)

    async def close(self) -> None:
        """Close every connection. Calls under way fail. It may be repeated."""
        await self._peers.close()
        for task in self._giving_up:
            task.cancel()
        await asyncio.gather(*self._giving_up, return_exceptions=True)

    # ------------------------------------------------------------------ collectives

    async def collective(self, group: GroupHandle, call: Call, buffers: Buffers, timeout_s: float) -> None:
        """Take part in a collective, on all servers that it is spread over.

        Raises:
            Disagreement: the ranks' calls differ.
            Timeout: some ranks did not join. The message names them.
            MemberLost: a member has left the job.
            Broken: a rank broke off, or a connection broke.
        """
        deadline = Deadline(timeout_s)
        what = f"call {call.sequence} of group {group.name!r} ({call})"
        try:
            await self._in_time(self._run_stripes(group, call, buffers, deadline), deadline, what)
        except Broken:
            task = asyncio.ensure_future(self._give_up(group, call, buffers, deadline))
            self._giving_up.add(task)
            task.add_done_callback(self._giving_up.discard)
            raise

    async def _run_stripes(self, group: GroupHandle, call: Call, buffers: Buffers, deadline: Deadline) -> None:
        plans, servers = await self._plans(group, call, buffers, deadline)
        flow_control = _FlowControl(plans)
        first = group.rank + 1  # ranks begin with different servers, to spread the first segments over network cards
        order = sorted(range(len(plans)), key=lambda stripe: (servers[stripe] - first) % len(servers))
        await together([self._run_stripe(group, plans[s], servers[s], buffers, flow_control, deadline) for s in order])

    async def _plans(
        self, group: GroupHandle, call: Call, buffers: Buffers, deadline: Deadline
    ) -> tuple[list[StripePlan], list[int]]:
        """Return this rank's plan for each stripe, and the rank of each stripe's server."""
        ranks = await self._peers.ranks(deadline)
        num_servers = len(ranks)
        home, stripes = home_of(group.name, call.sequence, num_servers), stripes_of(call, num_servers)
        nodes = [self._nodes.get(member, "") for member in group.members]
        known = self._server_nodes if len(self._server_nodes) == num_servers else ()
        owners = owners_of(call, home, stripes, nodes, known) if known else ()
        plans = [
            StripePlan(
                call=call,
                rank=group.rank,
                world_size=len(group.ranks),
                stripe=stripe,
                stripes=stripes,
                owners=owners,
                input_counts=buffers.input_counts,
                output_counts=buffers.output_counts,
            )
            for stripe in range(stripes)
        ]
        return plans, [ranks[(home + stripe) % num_servers] for stripe in range(stripes)]

    async def _give_up(self, group: GroupHandle, call: Call, buffers: Buffers, deadline: Deadline) -> None:
        """Tell the servers of all stripes that this rank broke off: other ranks may wait at a stripe it has not joined.

        The calls are retried until they succeed or the deadline has passed, in the background.
        """

        async def report(plan: StripePlan, server: int) -> None:
            begin = self._begin_stripe(group, plan, buffers, deadline)
            begin.gives_up = True
            async with await self._stream(server, deadline) as stream:
                await stream.send(CollectiveChunk(begin=begin))
                await stream.ended()

        with contextlib.suppress(AxonError):
            plans, servers = await self._plans(group, call, buffers, deadline)
            reports = (
                retry(partial(report, plan, server), until=deadline, on=(Broken, Closed))
                for plan, server in zip(plans, servers, strict=True)
            )
            await asyncio.gather(*reports, return_exceptions=True)

    async def _run_stripe(
        self,
        group: GroupHandle,
        plan: StripePlan,
        server: int,
        buffers: Buffers,
        flow_control: _FlowControl,
        deadline: Deadline,
    ) -> None:
        begin = self._begin_stripe(group, plan, buffers, deadline)
        dtype, segments = plan.call.dtype, plan.uploads()
        numel, target, starts = plan.download_numel(), buffers.target, buffers.target_starts
        async with await self._stream(server, deadline) as stream:
            first, rest = segments[:1], segments[1:]
            before_sending = partial(flow_control.before_sending, plan.stripe)
            await self._upload(stream, group.rank, first, buffers.source, buffers.source_starts, begin, before_sending)
            download = self._download(stream, numel, dtype, target, starts, partial(flow_control.received, plan.stripe))
            if rest:
                upload = self._upload(
                    stream, group.rank, rest, buffers.source, buffers.source_starts, None, before_sending
                )
                await together([upload, download])
            else:
                await download
            if numel and plan.call.operation is Operation.ALL_REDUCE:  # with the result, all its data is used
                stream.will_end()
            else:
                await stream.ended()

    # ------------------------------------------------------------------ messages between two ranks

    async def send(self, group: GroupHandle, data: Array, dtype: DType, to: int, tag: int, timeout_s: float) -> None:
        """Send data: T[any] to position `to`; returns once it was received, or the server has stored it.

        Raises:
            Disagreement: the receiver expects another size or dtype.
            Timeout: it was not received.
            MemberLost: a member has left the job.
            Broken: the receiver broke off, or a connection broke.
        """
        deadline = Deadline(timeout_s)
        envelope = Envelope(peer=to, tag=tag, dtype=dtype_to_proto(dtype), numel=data.size)
        what = f"sending {data.size} {dtype.value} with tag {tag} to rank {group.ranks[to]}"
        await self._in_time(self._send(group, envelope, data, to, deadline), deadline, what)

    async def _send(self, group: GroupHandle, envelope: Envelope, data: Array, to: int, deadline: Deadline) -> None:
        begin = self._begin(group, deadline)
        begin.envelope.CopyFrom(envelope)
        async with await self._mailbox_stream(group, to, deadline) as stream:
            if data.nbytes <= EAGER_BYTES:
                await stream.send(CollectiveChunk(begin=begin, source=group.rank), data)
            else:
                await stream.send(CollectiveChunk(begin=begin, source=group.rank))
                await stream.data()  # the receiver is ready
                await self._upload(stream, group.rank, segments_of(data.size, data.itemsize), data, (0,), None)
            await stream.ended()

    async def recv(self, group: GroupHandle, data: Array, dtype: DType, source: int, tag: int, timeout_s: float) -> int:
        """Fill data: T[any] with the next message of position `source` (-1 = any); returns the sender's position.

        Raises:
            Disagreement: the message has another size or dtype. It is dropped.
            Timeout: no message arrived.
            MemberLost: a member has left the job.
            Broken: the sender broke off, or a connection broke.
        """
        deadline = Deadline(timeout_s)
        envelope = Envelope(receive=True, peer=source, tag=tag, dtype=dtype_to_proto(dtype), numel=data.size)
        who = f"rank {group.ranks[source]}" if source >= 0 else "any rank"
        what = f"receiving {data.size} {dtype.value} with tag {tag} from {who}"
        return await self._in_time(self._recv(group, envelope, data, dtype, deadline), deadline, what)

    async def _recv(self, group: GroupHandle, envelope: Envelope, data: Array, dtype: DType, deadline: Deadline) -> int:
        begin = self._begin(group, deadline)
        begin.envelope.CopyFrom(envelope)
        async with await self._mailbox_stream(group, group.rank, deadline) as stream:
            await stream.send(CollectiveChunk(begin=begin))
            header, payload, _ = await stream.data()
            first = elements(payload, dtype)
            _check_source(header, len(group.ranks))
            if first.size > data.size:
                raise Broken(f"a shard server sent {first.size} elements of a message of {data.size}")
            data[: first.size] = first
            self._received(payload.nbytes)
            await self._download(stream, data.size - first.size, dtype, data, [0] * len(group.ranks))
            await stream.ended()
            return int(header.source)

    async def close_group(self, group: GroupHandle) -> None:
        """Tell the server that this rank receives no more messages in a group. Waiting messages to it are dropped."""
        deadline = Deadline(CLOSE_TIMEOUT_S)
        begin = self._begin(group, deadline)
        begin.envelope.CopyFrom(Envelope(receive=True, closes=True, peer=-1, dtype=dtype_to_proto(DType.U8)))

        async def send_close() -> None:
            async with await self._mailbox_stream(group, group.rank, deadline) as stream:
                await stream.send(CollectiveChunk(begin=begin))
                await stream.ended()

        await self._in_time(send_close(), deadline, f"closing group {group.name!r}")

    async def _in_time(self, call: Coroutine[Any, Any, T], deadline: Deadline, what: str) -> T:
        """Return the result of `call`, or raise an error that names `what`. A refusal is raised as `InternalError`."""
        try:
            limit_s = deadline.remaining()
            async with asyncio.timeout(None if math.isinf(limit_s) else limit_s + SERVER_REPORT_S):
                return await call
        except TimeoutError as error:
            if isinstance(error, Timeout):
                raise
            raise Timeout(
                f"{what} was not done within {deadline.timeout_s:g} s, and a shard server did not say why"
            ) from None
        except Closed:
            if self._peers.closed:
                raise
            raise Broken(f"{what} broke off: a shard server that took part has left the job, or has moved") from None
        except InvalidRequest as error:
            if isinstance(error, Disagreement):
                raise
            raise InternalError(f"{what} was refused by a shard server: {error}") from error

    # ------------------------------------------------------------------ streams

    def _begin(self, group: GroupHandle, deadline: Deadline) -> CollectiveBegin:
        timeout_s = deadline.remaining()
        timeout_s = FOREVER_S if math.isinf(timeout_s) else timeout_s
        return CollectiveBegin(
            context=self._context(),
            group=group.name,
            position=group.rank,
            ranks=group.ranks,
            members=group.members,
            timeout_s=timeout_s,
            stripes=1,
        )

    def _begin_stripe(
        self, group: GroupHandle, plan: StripePlan, buffers: Buffers, deadline: Deadline
    ) -> CollectiveBegin:
        begin = self._begin(group, deadline)
        begin.stripe, begin.stripes = plan.stripe, plan.stripes
        begin.owners.extend(plan.owners)
        begin.call.CopyFrom(call_to_proto(plan.call))
        begin.input_counts.extend(buffers.input_counts)
        begin.output_counts.extend(buffers.output_counts)
        return begin

    async def _mailbox_stream(
        self, group: GroupHandle, receiver: int, deadline: Deadline
    ) -> AbstractAsyncContextManager[OperationStream]:
        ranks = await self._peers.ranks(deadline)
        return await self._stream(ranks[home_of(group.name, receiver, len(ranks))], deadline)

    async def _stream(self, server: int, deadline: Deadline) -> AbstractAsyncContextManager[OperationStream]:
        return self._waiting(server, self._streams.acquire(await self._peers.stub(server, 0, deadline)))

    async def _open_collective(self, stub: Stub) -> OperationStream:
        return OperationStream(await stub.open_bulk("Collective"), self.counters)

    @contextlib.asynccontextmanager
    async def _waiting(self, server: int, acquired: Acquired[OperationStream]) -> AsyncIterator[OperationStream]:
        """Yield the stream to a server. Meanwhile this worker counts as waiting for it."""
        with self._peers.waiting() as waiting:
            waiting.on(server)
            async with acquired as stream:
                yield stream

    async def _upload(
        self,
        stream: OperationStream,
        rank: int,
        segments: Sequence[StripeSegment],
        source: Array | None,
        starts: Sequence[int],
        begin: CollectiveBegin | None,
        before_sending: Callable[[int], Awaitable[None]] | None = None,
    ) -> None:
        header = CollectiveChunk(begin=begin, source=rank)
        if not segments:
            await stream.send(header)
        for segment in segments:
            assert source is not None
            start = starts[segment.partition]
            header.partition, header.offset = segment.partition, segment.begin
            if before_sending is not None:
                await before_sending((segment.end - segment.begin) * source.itemsize)
            await stream.send(header, source[start + segment.begin : start + segment.end])
            header.ClearField("begin")

    async def _download(
        self,
        stream: OperationStream,
        numel: int,
        dtype: DType,
        target: Array | None,
        starts: Sequence[int],
        on_received: Callable[[int], None] | None = None,
    ) -> None:
        def memory(header: CollectiveChunk, nbytes: int) -> memoryview | None:
            """Return the destination in `target`, if the payload fits and need not be checked first."""
            if target is None or header.source >= len(starts) or dtype is DType.BOOL:
                return None
            begin = (starts[header.source] + header.offset) * target.itemsize
            return target.view(np.uint8)[begin : begin + nbytes].data if begin + nbytes <= target.nbytes else None

        into = Target(CollectiveChunk, memory)
        while numel:
            header, payload, copied = await stream.data(into)
            data = elements(payload, dtype)
            assert target is not None
            _check_source(header, len(starts))
            begin = starts[header.source] + header.offset
            if data.size > numel or begin + data.size > target.size:
                raise Broken(f"a shard server sent {data.size} elements for {begin} of an array of {target.size}")
            if not copied:
                target[begin : begin + data.size] = data
            numel -= data.size
            self._received(payload.nbytes)
            if on_received is not None:
                on_received(payload.nbytes)

    def _received(self, nbytes: int) -> None:
        self.counters["messages_in"] += 1
        self.counters["bytes_in"] += nbytes


class _FlowControl:
    """The delays of a call's uploads until its `SendWindow` permits them."""

    def __init__(self, plans: Sequence[StripePlan]) -> None:
        self._window = SendWindow(plans)
        self._changed = asyncio.Event()

    async def before_sending(self, stripe: int, nbytes: int) -> None:
        """Wait until `nbytes` more may be sent."""
        while not self._window.may_send(stripe, nbytes):
            self._changed.clear()
            await self._changed.wait()
        self._window.sent(stripe, nbytes)

    def received(self, stripe: int, nbytes: int) -> None:
        """Record that `nbytes` of the result have arrived."""
        self._window.received(stripe, nbytes)
        self._changed.set()


def _check_source(header: CollectiveChunk, ranks: int) -> None:
    """Check that the source rank of data exists."""
    if header.source >= ranks:
        raise Broken(f"a shard server sent data of rank {header.source}; it may come from {ranks} ranks here")

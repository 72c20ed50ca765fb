"""A worker's end of the collectives: a stream for each share of an operation, read and written at the same time.

Payloads are copied once, between the caller's arrays and messages. Nothing is retried: a collective that broke off may
have been done for some ranks and not for others.

Everything here runs on one event loop; every method must be called on its thread. While an operation is under way,
nobody else may touch its arrays, except that data it sends from may also be what it receives into: a piece comes back
only after the same piece was sent.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from axon_ps.aggregation.client.operation_stream import OperationStream
from axon_ps.aggregation.client.peers import MakeContext, Peers
from axon_ps.aggregation.client.send_window import SharesInStep
from axon_ps.aggregation.core.mailbox import EAGER_BYTES
from axon_ps.aggregation.core.stripes import Exchange, Piece, home_of, owners_of, pieces_of, shares_of
from axon_ps.errors import Broken, Disagreement, InternalError, InvalidRequest, Timeout
from axon_ps.host.malloc import retain_message_memory
from axon_ps.reduction.call import Call, Operation
from axon_ps.rpc.deadlines import Deadline
from axon_ps.rpc.security import Security
from axon_ps.rpc.stream_pool import StreamPool
from axon_ps.types import Array, DType, Membership
from axon_ps.wire.calls import call_to_proto
from axon_ps.wire.codec import dtype_to_proto
from axon_ps.wire.frames import elements
from axon_ps.wire.v1.collective_pb2 import CollectiveBegin, CollectiveChunk, Letter

SERVERS_WORD_S = 1.0
"""How long after a deadline a server may still say who did not come; it keeps the same deadline."""

FOREVER_S = 1e9
"""What a time-out without end is on the wire."""

CLOSE_TIMEOUT_S = 2.0
"""How long a server may take to hear that a group was closed."""

MOST_IDLE = 8
"""Streams to one server that are kept: as many operations as are usually under way at once."""

COUNTERS = ("bytes_in", "bytes_out", "messages_in", "messages_out")

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Seating:
    """A group as one of its ranks enters it.

    Attributes:
        group: name of the group.
        rank: our position.
        ranks: the members' world ranks, by position.
        members: the members' ids, by position.
    """

    group: str
    rank: int
    ranks: tuple[int, ...]
    members: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Buffers:
    """What one rank of a collective sends from and receives into. Arrays are 1-D, contiguous, of the call's dtype.

    Attributes:
        source: where `uploads` are read from.
        target: where what comes is written to.
        source_starts: by part, where it begins in `source`.
        target_starts: by rank that data is from, where it goes in `target`; by 0 for what was reduced.
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
    """The shard servers of a job, as far as one worker has collectives on them; all its groups share it.

    Its connections are its own: parameters and gradients do not queue behind collectives, nor these behind them.

    Args:
        security: TLS and token.
        context: gives the present job, generation and incarnation.
    """

    def __init__(self, security: Security, context: MakeContext) -> None:
        retain_message_memory()
        self._peers = Peers(security, connections=1)
        self._streams = StreamPool(lambda stub: OperationStream(stub.open("Collective")), MOST_IDLE)
        self._context = context
        self._nodes: dict[str, str] = {}  # of workers, by id
        self._server_nodes: tuple[str, ...] = ()
        self.counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))

    def set_members(self, membership: Membership) -> None:
        """Take the current shard servers, and on which hosts everybody is."""
        self._nodes = {worker.id: worker.node for worker in membership.workers}
        self._server_nodes = tuple(server.node for server in sorted(membership.shards, key=lambda s: s.rank))
        self._peers.set_members(membership)

    async def close(self) -> None:
        """Close every connection; calls under way fail. Harmless when repeated."""
        await self._peers.close()

    # ------------------------------------------------------------------ collectives

    async def collective(self, seating: Seating, call: Call, buffers: Buffers, timeout_s: float) -> None:
        """Do our part of a collective, on all servers that it is spread over.

        Raises:
            Disagreement: the ranks' calls differ.
            Timeout: some ranks did not come; the message names them.
            MemberLost: a member has left the job.
            Broken: a rank broke off, or a connection broke.
        """
        deadline = Deadline(timeout_s)
        what = f"call {call.sequence} of group {seating.group!r} ({call})"
        await _in_time(self._all_shares(seating, call, buffers, deadline), deadline, what)

    async def _all_shares(self, seating: Seating, call: Call, buffers: Buffers, deadline: Deadline) -> None:
        num_servers = await self._peers.num_servers(deadline)
        home, shares = home_of(seating.group, call.sequence, num_servers), shares_of(call, num_servers)
        nodes = [self._nodes.get(member, "") for member in seating.members]
        known = self._server_nodes if len(self._server_nodes) == num_servers else ()
        owners = owners_of(call, home, shares, nodes, known) if known else ()
        exchanges = [
            Exchange(
                call=call,
                rank=seating.rank,
                world_size=len(seating.ranks),
                share=share,
                shares=shares,
                owners=owners,
                input_counts=buffers.input_counts,
                output_counts=buffers.output_counts,
            )
            for share in range(shares)
        ]
        pace = _Pace(exchanges)
        servers = [(home + share) % num_servers for share in range(shares)]
        first = seating.rank + 1  # ranks begin with different servers: no card gets the first pieces of all of them
        order = sorted(range(shares), key=lambda share: (servers[share] - first) % num_servers)
        await _together([self._share(seating, exchanges[s], servers[s], buffers, pace, deadline) for s in order])

    async def _share(
        self, seating: Seating, exchange: Exchange, server: int, buffers: Buffers, pace: _Pace, deadline: Deadline
    ) -> None:
        begin = self._begin(seating, deadline)
        begin.share, begin.shares = exchange.share, exchange.shares
        begin.owners.extend(exchange.owners)
        begin.call.CopyFrom(call_to_proto(exchange.call))
        begin.input_counts.extend(buffers.input_counts)
        begin.output_counts.extend(buffers.output_counts)
        dtype, pieces = exchange.call.dtype, exchange.uploads()
        numel, target, starts = exchange.download_numel(), buffers.target, buffers.target_starts
        async with await self._stream(server, deadline) as stream:
            first, rest = pieces[:1], pieces[1:]
            turn = partial(pace.before_sending, exchange.share)
            await self._upload(stream, seating.rank, first, buffers.source, buffers.source_starts, begin, turn)
            download = self._download(stream, numel, dtype, target, starts, partial(pace.came, exchange.share))
            if rest:
                upload = self._upload(stream, seating.rank, rest, buffers.source, buffers.source_starts, None, turn)
                await _together([upload, download])
            else:
                await download
            if numel and exchange.call.operation is Operation.ALL_REDUCE:  # what came says that what we sent is used
                stream.will_end()
            else:
                await stream.ended()

    # ------------------------------------------------------------------ messages between two ranks

    async def send(self, seating: Seating, data: Array, dtype: DType, to: int, tag: int, timeout_s: float) -> None:
        """Send data: T[any] to position `to`; returns when it was received, or is kept for the receiver.

        Raises:
            Disagreement: the receiver expects another size or dtype.
            Timeout: nobody received it.
            MemberLost: a member has left the job.
            Broken: the receiver broke off, or a connection broke.
        """
        deadline = Deadline(timeout_s)
        letter = Letter(peer=to, tag=tag, dtype=dtype_to_proto(dtype), numel=data.size)
        what = f"sending {data.size} {dtype.value} with tag {tag} to rank {seating.ranks[to]}"
        await _in_time(self._send(seating, letter, data, to, deadline), deadline, what)

    async def _send(self, seating: Seating, letter: Letter, data: Array, to: int, deadline: Deadline) -> None:
        begin = self._begin(seating, deadline)
        begin.letter.CopyFrom(letter)
        async with await self._mail(seating, to, deadline) as stream:
            if data.nbytes <= EAGER_BYTES:
                await self._write(stream, CollectiveChunk(begin=begin, source=seating.rank), data)
            else:
                await self._write(stream, CollectiveChunk(begin=begin, source=seating.rank), None)
                await stream.data()  # the receiver is there
                await self._upload(stream, seating.rank, pieces_of(data.size, data.itemsize), data, (0,), None)
            await stream.ended()

    async def recv(self, seating: Seating, data: Array, dtype: DType, source: int, tag: int, timeout_s: float) -> int:
        """Fill data: T[any] with the next message of position `source` (-1 = any); who sent it.

        Raises:
            Disagreement: the message has another size or dtype; it is dropped.
            Timeout: none came.
            MemberLost: a member has left the job.
            Broken: the sender broke off, or a connection broke.
        """
        deadline = Deadline(timeout_s)
        letter = Letter(receive=True, peer=source, tag=tag, dtype=dtype_to_proto(dtype), numel=data.size)
        who = f"rank {seating.ranks[source]}" if source >= 0 else "any rank"
        what = f"receiving {data.size} {dtype.value} with tag {tag} from {who}"
        return await _in_time(self._recv(seating, letter, data, dtype, deadline), deadline, what)

    async def _recv(self, seating: Seating, letter: Letter, data: Array, dtype: DType, deadline: Deadline) -> int:
        begin = self._begin(seating, deadline)
        begin.letter.CopyFrom(letter)
        async with await self._mail(seating, seating.rank, deadline) as stream:
            await self._write(stream, CollectiveChunk(begin=begin), None)
            header, payload = await stream.data()
            came = elements(payload, dtype)
            data[: came.size] = came
            self._count("in", payload.nbytes)
            await self._download(stream, data.size - came.size, dtype, data, [0] * len(seating.ranks))
            await stream.ended()
            return int(header.source)

    async def close_group(self, seating: Seating) -> None:
        """Say that we ask for nothing any more in a group; what waits for us is dropped."""
        deadline = Deadline(CLOSE_TIMEOUT_S)
        begin = self._begin(seating, deadline)
        begin.letter.CopyFrom(Letter(receive=True, closes=True, peer=-1, dtype=dtype_to_proto(DType.U8)))

        async def say() -> None:
            async with await self._mail(seating, seating.rank, deadline) as stream:
                await self._write(stream, CollectiveChunk(begin=begin), None)
                await stream.ended()

        await _in_time(say(), deadline, f"closing group {seating.group!r}")

    # ------------------------------------------------------------------ streams

    def _begin(self, seating: Seating, deadline: Deadline) -> CollectiveBegin:
        timeout_s = deadline.remaining()
        timeout_s = FOREVER_S if math.isinf(timeout_s) else timeout_s
        return CollectiveBegin(
            context=self._context(),
            group=seating.group,
            position=seating.rank,
            ranks=seating.ranks,
            members=seating.members,
            timeout_s=timeout_s,
            shares=1,
        )

    async def _mail(
        self, seating: Seating, receiver: int, deadline: Deadline
    ) -> AbstractAsyncContextManager[OperationStream]:
        num_servers = await self._peers.num_servers(deadline)
        return await self._stream(home_of(seating.group, receiver, num_servers), deadline)

    async def _stream(self, server: int, deadline: Deadline) -> AbstractAsyncContextManager[OperationStream]:
        return self._streams.acquire(await self._peers.stub(server, 0, deadline))

    async def _upload(
        self,
        stream: OperationStream,
        rank: int,
        pieces: Sequence[Piece],
        source: Array | None,
        starts: Sequence[int],
        begin: CollectiveBegin | None,
        turn: Callable[[int], Awaitable[None]] | None = None,
    ) -> None:
        header = CollectiveChunk(begin=begin, source=rank)
        if not pieces:
            await self._write(stream, header, None)
        for piece in pieces:
            assert source is not None
            start = starts[piece.part]
            header.part, header.offset = piece.part, piece.begin
            if turn is not None:
                await turn((piece.end - piece.begin) * source.itemsize)
            await self._write(stream, header, source[start + piece.begin : start + piece.end])
            header.ClearField("begin")

    async def _download(
        self,
        stream: OperationStream,
        numel: int,
        dtype: DType,
        target: Array | None,
        starts: Sequence[int],
        came: Callable[[int], None] | None = None,
    ) -> None:
        while numel:
            header, payload = await stream.data()
            data = elements(payload, dtype)
            assert target is not None
            begin = starts[header.source] + header.offset
            if data.size > numel or begin + data.size > target.size:
                raise Broken(f"a shard server sent {data.size} elements for {begin} of an array of {target.size}")
            target[begin : begin + data.size] = data
            numel -= data.size
            self._count("in", payload.nbytes)
            if came is not None:
                came(payload.nbytes)

    async def _write(self, stream: OperationStream, header: CollectiveChunk, data: Array | None) -> None:
        await stream.write(header, data)
        self._count("out", data.nbytes if data is not None else 0)

    def _count(self, direction: str, nbytes: int) -> None:
        self.counters[f"messages_{direction}"] += 1
        self.counters[f"bytes_{direction}"] += nbytes


class _Pace:
    """Holds a call's uploads back as `SharesInStep` says."""

    def __init__(self, exchanges: Sequence[Exchange]) -> None:
        self._steps = SharesInStep(exchanges)
        self._news = asyncio.Event()

    async def before_sending(self, share: int, nbytes: int) -> None:
        """Wait until so much may be sent."""
        while not self._steps.may_send(share, nbytes):
            self._news.clear()
            await self._news.wait()
        self._steps.sent(share, nbytes)

    def came(self, share: int, nbytes: int) -> None:
        """So much of the result has come."""
        self._steps.came(share, nbytes)
        self._news.set()


async def _in_time(call: Coroutine[Any, Any, T], deadline: Deadline, what: str) -> T:
    """What `call` returns, or a `Timeout` that says `what`; a refusal is our mistake, not the user's."""
    try:
        limit_s = deadline.remaining()
        async with asyncio.timeout(None if math.isinf(limit_s) else limit_s + SERVERS_WORD_S):
            return await call
    except TimeoutError as error:
        if isinstance(error, Timeout):
            raise
        raise Timeout(
            f"{what} was not done within {deadline.timeout_s:g} s, and a shard server did not say why"
        ) from None
    except InvalidRequest as error:
        if isinstance(error, Disagreement):
            raise
        raise InternalError(f"{what} was refused by a shard server: {error}") from error


async def _together(calls: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run all at once; the first error ends the others, and is raised once they are over."""
    if len(calls) == 1:
        return await calls[0]
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise

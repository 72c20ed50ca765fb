"""Around the collective engine: the clock, the waits, and what a first message says. Decides nothing.

One event loop. Whoever reads a `CollectiveStream` and whoever writes it wait for news of its seat.
"""

from __future__ import annotations

import asyncio
import math
from functools import partial

from axon_ps.aggregation.core.engine import CollectiveEngine, Opening
from axon_ps.aggregation.core.mailbox import Letter
from axon_ps.aggregation.core.participants import Seat
from axon_ps.errors import AxonError, GenerationChanged, InvalidRequest, PermissionDenied
from axon_ps.reduction import ops
from axon_ps.reduction.call import Call
from axon_ps.types import DType, Member, Membership
from axon_ps.wire.calls import MAX_NUMEL, MAX_RANKS, call_from_proto
from axon_ps.wire.codec import dtype_from_proto, name_from_proto
from axon_ps.wire.frames import decode_bulk
from axon_ps.wire.v1.collective_pb2 import CollectiveBegin, CollectiveChunk


class CollectiveShell:
    """The engine with what it needs to run.

    Args:
        job: name of the job; calls for another one are refused.

    Attributes:
        engine: the state.
    """

    def __init__(self, job: str) -> None:
        self.engine = CollectiveEngine()
        self._job = job
        self._loop = asyncio.get_running_loop()
        self._generation = 0
        self._workers: dict[str, Member] = {}
        self._news: list[asyncio.Future[None]] = []
        self._streams: dict[Seat, CollectiveStream] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = math.inf
        self._warm: dict[DType, asyncio.Future[None]] = {}

    def close(self) -> None:
        """Stop the clock."""
        if self._timer is not None:
            self._timer.cancel()

    def on_membership(self, membership: Membership) -> None:
        """Take the job's members."""
        self._generation = membership.generation
        self._workers = {m.incarnation: m for m in membership.workers}
        self.engine.set_workers({m.id for m in membership.workers}, {m.id for m in membership.finished})
        _fire(self._news)
        self._wake()

    async def open(self, message: bytes) -> CollectiveStream:
        """Admit a rank to the operation that its first message names.

        Raises:
            PermissionDenied: another job, or not a worker of the generation it names.
            GenerationChanged: it was a worker and is none any more.
            MemberLost: a member of the group is no worker any more.
            InvalidRequest: what it says cannot be.
        """
        header, payload = decode_bulk(CollectiveChunk, message)
        if not header.HasField("begin"):
            raise InvalidRequest("the first message of a collective must say who calls and what for, in `begin`")
        await self._fence(header.begin)
        opening = _opening(header.begin)
        if isinstance(opening.what, Call) and opening.what.op is not None:
            await self._warm_up(opening.what.dtype)
        seat = self.engine.open(opening, message, header, payload, self._loop.time())
        stream = self._streams[seat] = CollectiveStream(self, seat)
        self._alarm(seat.deadline_s)
        self._wake()
        return stream

    # ------------------------------------------------------------------ for streams

    def ended(self, seat: Seat) -> None:
        """A stream has left an operation."""
        well = seat.done
        del self._streams[seat]
        self.engine.leave(seat, self._loop.time())
        if not well:
            self._alarm(self.engine.next_s())
        self._wake()

    def _wake(self) -> None:
        for seat in self.engine.woken():
            if (stream := self._streams.get(seat)) is not None:
                stream.notify()

    # ------------------------------------------------------------------ inside

    async def _fence(self, begin: CollectiveBegin) -> None:
        """Wait until we know the generation of the caller, and see that it is a worker and sits where it says.

        A caller may know less of the membership than we do: a group does not care who else comes.
        """
        context = begin.context
        if context.job != self._job:
            raise PermissionDenied(f"this server serves job {self._job!r}, not {context.job!r}")
        while self._generation < context.generation:
            future: asyncio.Future[None] = self._loop.create_future()
            self._news.append(future)
            await future
        if context.incarnation not in self._workers:
            if context.generation < self._generation:
                raise GenerationChanged(
                    f"the caller was a worker in generation {context.generation} and is none in {self._generation}",
                    self._generation,
                )
            raise PermissionDenied(
                f"incarnation {context.incarnation[:32]!r} is not a worker of generation {self._generation}"
            )
        named = begin.members[begin.position] if begin.position < len(begin.members) else ""
        if named.partition("@")[0] != context.incarnation:
            raise PermissionDenied(f"the caller is not the member at position {begin.position} of {begin.group[:80]!r}")

    async def _warm_up(self, dtype: DType) -> None:
        """Have the loops of a dtype compiled, on another thread, before the first sum needs them."""
        if dtype not in ops.CODED:
            return
        if dtype not in self._warm:
            self._warm[dtype] = self._loop.run_in_executor(None, partial(ops.warm_up, dtype))
        await asyncio.shield(self._warm[dtype])

    def _alarm(self, moment_s: float) -> None:
        """Have time looked at not later than this."""
        if moment_s >= self._timer_s:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_s = moment_s
        self._timer = self._loop.call_at(moment_s, self._ring)

    def _ring(self) -> None:
        self._timer, self._timer_s = None, math.inf
        self.engine.tick(self._loop.time())
        self._alarm(self.engine.next_s())
        self._wake()


class CollectiveStream:
    """One operation of a stream that is being served; close it when it is over.

    Args:
        shell: whose.
        seat: the rank's place.
    """

    def __init__(self, shell: CollectiveShell, seat: Seat) -> None:
        self._seat = seat
        self._shell = shell
        self._refused: AxonError | None = None
        self._waiting: list[asyncio.Future[None]] = []

    @property
    def expects(self) -> bool:
        """Whether another message is to come."""
        return self._seat.expects

    async def offer(self, message: bytes) -> None:
        """Give the next message; returns when the one after it may be read.

        Raises:
            InvalidRequest: it is not the piece whose turn it is.
        """
        header, payload = decode_bulk(CollectiveChunk, message)
        self._shell.engine.offer(self._seat, message, header, payload)
        self._shell._wake()
        await self.settled()

    async def settled(self) -> None:
        """Wait until the message given last is used."""
        while self._seat.held is not None:
            await self._change()

    async def next(self) -> bytes | None:
        """The next message for the rank; None when it has all.

        Raises:
            AxonError: what ended the operation.
        """
        seat = self._seat
        while not seat.outgoing:
            if (error := seat.error or self._refused) is not None:
                raise error
            if seat.done:
                return None
            await self._change()
        message = self._shell.engine.take(seat)
        self._shell._wake()
        return message

    def refuse(self, error: AxonError) -> None:
        """The rank sent what cannot be: `next` raises this."""
        self._refused = error
        self.notify()

    def notify(self) -> None:
        """Something of the seat changed."""
        _fire(self._waiting)

    def close(self) -> None:
        """The operation is over for the rank, well or not."""
        self._shell.ended(self._seat)

    async def _change(self) -> None:
        future: asyncio.Future[None] = self._shell._loop.create_future()
        self._waiting.append(future)
        await future


def _opening(begin: CollectiveBegin) -> Opening:
    """A first message's words, checked."""
    ranks, members = tuple(begin.ranks), tuple(begin.members)
    if len(ranks) > MAX_RANKS:
        raise InvalidRequest(f"a group of {len(ranks)} ranks is larger than {MAX_RANKS}")
    if begin.HasField("letter") == begin.HasField("call"):
        raise InvalidRequest("a first message describes either a collective or a message between two ranks")
    letter = begin.letter
    if letter.numel > MAX_NUMEL or any(sum(counts) > MAX_NUMEL for counts in (begin.input_counts, begin.output_counts)):
        raise InvalidRequest(f"a message has more than {MAX_NUMEL} elements")
    what: Call | Letter
    if begin.HasField("call"):
        what = call_from_proto(begin.call, len(ranks))
    else:
        what = Letter(
            receive=letter.receive,
            rank=begin.position,
            peer=letter.peer,
            tag=letter.tag,
            dtype=dtype_from_proto(letter.dtype, blocks=True),
            numel=letter.numel,
            closes=letter.closes,
        )
    return Opening(
        group=name_from_proto(begin.group, "a group's name"),
        rank=begin.position,
        ranks=ranks,
        members=members,
        timeout_s=begin.timeout_s,
        share=begin.share,
        shares=begin.shares,
        what=what,
        owners=tuple(begin.owners),
        input_counts=tuple(begin.input_counts),
        output_counts=tuple(begin.output_counts),
    )


def _fire(waiting: list[asyncio.Future[None]]) -> None:
    """Wake all who wait; what woke them may not be what they wait for."""
    for future in waiting:
        if not future.done():
            future.set_result(None)
    waiting.clear()

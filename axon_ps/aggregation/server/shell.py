"""The shell around the collective engine: the clock, the waits, and the decoding of first messages.

All decisions are the engine's. The reader and the writer of a `CollectiveStream` are woken by changes of its
participant. All of it runs on one event loop.
"""

from __future__ import annotations

import asyncio
import math
from functools import partial

from axon_ps.aggregation.core.engine import CollectiveEngine, OperationRequest
from axon_ps.aggregation.core.mailbox import Envelope
from axon_ps.aggregation.core.participants import Participant
from axon_ps.errors import AxonError, Broken, GenerationChanged, InvalidRequest, PermissionDenied, again
from axon_ps.reduction import ops
from axon_ps.reduction.call import Call
from axon_ps.rpc.limits import FENCE_S, MAX_NEWER
from axon_ps.types import DType, Member, Membership
from axon_ps.wire.calls import MAX_NUMEL, MAX_RANKS, call_from_proto
from axon_ps.wire.codec import dtype_from_proto, name_from_proto
from axon_ps.wire.frames import decode_bulk
from axon_ps.wire.v1.collective_pb2 import CollectiveBegin, CollectiveChunk
from axon_ps.wire.v1.common_pb2 import CallContext


class CollectiveShell:
    """The engine with the clock and the waits around it.

    Args:
        job: name of the job. Calls for another one are refused.

    Attributes:
        engine: the state and the decisions.
    """

    def __init__(self, job: str) -> None:
        self.engine = CollectiveEngine()
        self._job = job
        self._loop = asyncio.get_running_loop()
        self._generation, self._state_id = 0, ""
        self._workers: dict[str, Member] = {}
        self._membership_waiters: list[asyncio.Future[None]] = []
        self._streams: dict[Participant, CollectiveStream] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = math.inf
        self._warm: dict[DType, asyncio.Future[None]] = {}

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def on_membership(self, membership: Membership) -> None:
        """Set the job's members."""
        self._generation, self._state_id = membership.generation, membership.state_id
        self._workers = {m.incarnation: m for m in membership.workers}
        self.engine.set_workers({m.id for m in membership.workers}, {m.id for m in membership.finished})
        _wake_all(self._membership_waiters)
        self._wake()

    async def open(self, message: bytes) -> CollectiveStream:
        """Admit a rank to the operation that its first message names.

        Raises:
            PermissionDenied: another job, or not a worker of the generation it names.
            GenerationChanged: it was a worker and is no longer one.
            MemberLost: a member of the group is no longer a worker.
            InvalidRequest: the request is not valid.
            Broken: this server does not know the caller's generation in time, or knows another state of the job.
            AxonError: the operation has ended with this error.
        """
        header, payload = decode_bulk(CollectiveChunk, message)
        if not header.HasField("begin"):
            raise InvalidRequest("the first message of a collective must have `begin`, with caller and operation")
        await self._fence(header.begin)
        request = _request_from_proto(header.begin)
        if isinstance(request.what, Call) and request.what.op is not None:
            await self._warm_up(request.what.dtype)
        participant = self.engine.open(request, message, header, payload, self._loop.time())
        stream = self._streams[participant] = CollectiveStream(self, participant)
        self._set_timer(self.engine.next_s() if request.gives_up else participant.deadline_s)
        self._wake()
        return stream

    # ------------------------------------------------------------------ for streams

    def ended(self, participant: Participant) -> None:
        """Take a participant out, whose stream has left the operation."""
        done = participant.done
        del self._streams[participant]
        self.engine.leave(participant, self._loop.time())
        if not done:
            self._set_timer(self.engine.next_s())
        self._wake()

    def _wake(self) -> None:
        for participant in self.engine.woken():
            if (stream := self._streams.get(participant)) is not None:
                stream.notify()

    # ------------------------------------------------------------------ inside

    async def _fence(self, begin: CollectiveBegin) -> None:
        """Wait until the caller's generation is known, and check that it is a worker and the named member.

        A caller may know an older membership than this server, since a group does not depend on other workers.
        """
        context = begin.context
        check_job(context, self._job, self._state_id)
        if self._generation < context.generation:
            await self._catch_up(context)
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

    async def _catch_up(self, context: CallContext) -> None:
        """Wait until this server knows a generation; see `rpc.limits.FENCE_S`.

        Raises:
            InvalidRequest: it is too far ahead of the job's.
            Broken: this server has not learned of it in time.
        """
        generation = context.generation
        if generation > self._generation + MAX_NEWER:
            known = self._generation
            raise InvalidRequest(f"generation {generation} is none of this job's; this server knows {known}")
        try:
            async with asyncio.timeout(FENCE_S):
                while self._generation < generation:
                    await self._next_membership()
                    check_job(context, self._job, self._state_id)  # this process may have joined meanwhile
        except TimeoutError:
            raise Broken(
                f"this server has not heard of generation {generation} within {FENCE_S:g} s; it knows "
                f"{self._generation}"
            ) from None

    async def _next_membership(self) -> None:
        future: asyncio.Future[None] = self._loop.create_future()
        self._membership_waiters.append(future)
        try:
            await future
        finally:
            if future in self._membership_waiters:
                self._membership_waiters.remove(future)

    async def _warm_up(self, dtype: DType) -> None:
        """Compile the loops of a dtype, on another thread, before the first sum needs them."""
        if dtype not in ops.CODED:
            return
        if dtype not in self._warm:
            self._warm[dtype] = self._loop.run_in_executor(None, partial(ops.warm_up, dtype))
        await asyncio.shield(self._warm[dtype])

    def _set_timer(self, moment_s: float) -> None:
        """Set the timer to call the engine's `tick` at this moment or earlier."""
        if moment_s >= self._timer_s:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_s = moment_s
        self._timer = self._loop.call_at(moment_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer, self._timer_s = None, math.inf
        self.engine.tick(self._loop.time())
        self._set_timer(self.engine.next_s())
        self._wake()


class CollectiveStream:
    """One operation of a stream that is being served. `close` must follow.

    Args:
        shell: the shell that admitted it.
        participant: the rank in the operation.
    """

    def __init__(self, shell: CollectiveShell, participant: Participant) -> None:
        self._participant = participant
        self._shell = shell
        self._refused: AxonError | None = None
        self._waiting: list[asyncio.Future[None]] = []

    @property
    def expects(self) -> bool:
        """True if another message is expected."""
        return self._participant.expects

    async def receive(self, message: bytes) -> None:
        """Take the next message; returns once the following one may be read.

        Raises:
            InvalidRequest: it is not the next segment.
        """
        header, payload = decode_bulk(CollectiveChunk, message)
        self._shell.engine.receive(self._participant, message, header, payload)
        self._shell._wake()
        await self.consumed()

    async def consumed(self) -> None:
        """Wait until the last message is used."""
        while self._participant.pending is not None:
            await self._change()

    async def next(self) -> bytes | None:
        """Return the next message for the rank; None once it has all.

        Raises:
            AxonError: the operation ended with it.
        """
        participant = self._participant
        while not participant.outgoing:
            if (error := participant.error or self._refused) is not None:
                raise error
            if participant.done:
                return None
            await self._change()
        message = self._shell.engine.dequeue(participant)
        self._shell._wake()
        return message

    def refuse(self, error: AxonError) -> None:
        """End the operation because of the rank's invalid message: `next` raises `error`."""
        self._refused = again(error)
        self.notify()

    def notify(self) -> None:
        """Wake the reader and the writer after a change of the participant."""
        _wake_all(self._waiting)

    def close(self) -> None:
        """End the operation for the rank, with or without an error."""
        self._shell.ended(self._participant)

    async def _change(self) -> None:
        future: asyncio.Future[None] = self._shell._loop.create_future()
        self._waiting.append(future)
        await future


def check_job(context: CallContext, job: str, state_id: str = "") -> None:
    """Check that a caller is of this job, and of the same durable state of it.

    If the states differ, the coordinator has lost its state and numbers its generations anew. One of the two processes
    will soon learn that it has to end, so the error is temporary.

    Raises:
        PermissionDenied: another job.
        Broken: the caller's generation is of another state than `state_id`, if both are known.
    """
    if context.job != job:
        raise PermissionDenied(f"this server serves job {job!r}, not {context.job!r}")
    if context.state_id and state_id and context.state_id != state_id:
        raise Broken(
            f"generation {context.generation} of the caller is of another state of the job than this server's: the "
            "coordinator came back without the state it had, which one of the two has not heard of yet"
        )


def _request_from_proto(begin: CollectiveBegin) -> OperationRequest:
    """Check and decode a first message."""
    ranks, members = tuple(begin.ranks), tuple(begin.members)
    if len(ranks) > MAX_RANKS:
        raise InvalidRequest(f"a group of {len(ranks)} ranks is larger than {MAX_RANKS}")
    if begin.HasField("envelope") == begin.HasField("call"):
        raise InvalidRequest("a first message describes either a collective or a message between two ranks")
    envelope = begin.envelope
    totals = (envelope.numel, sum(begin.input_counts), sum(begin.output_counts))
    if any(total > MAX_NUMEL for total in totals):
        raise InvalidRequest(f"a message has more than {MAX_NUMEL} elements")
    what: Call | Envelope
    if begin.HasField("call"):
        what = call_from_proto(begin.call, len(ranks))
    else:
        what = Envelope(
            receive=envelope.receive,
            rank=begin.position,
            peer=envelope.peer,
            tag=envelope.tag,
            dtype=dtype_from_proto(envelope.dtype, blocks=True),
            numel=envelope.numel,
            closes=envelope.closes,
        )
    return OperationRequest(
        group=name_from_proto(begin.group, "a group's name"),
        rank=begin.position,
        ranks=ranks,
        members=members,
        timeout_s=begin.timeout_s,
        stripe=begin.stripe,
        stripes=begin.stripes,
        what=what,
        owners=tuple(begin.owners),
        gives_up=begin.gives_up,
        input_counts=tuple(begin.input_counts),
        output_counts=tuple(begin.output_counts),
    )


def _wake_all(waiting: list[asyncio.Future[None]]) -> None:
    """Wake all waiters. They check their conditions again."""
    for future in waiting:
        if not future.done():
            future.set_result(None)
    waiting.clear()

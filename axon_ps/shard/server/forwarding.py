"""Forwarding of one model's summed gradients from the primary of a slice to its backups, chunk by chunk.

Each backup has a stream and a queue. A chunk is queued when its sum is complete, and looked up again when it is sent,
so chunks that a decision has made useless are dropped. So are those to which a later addend is being added: they are
queued again once it is complete. A backup's `ready` is the acknowledgement: no step commits
before the backup has every chunk. After a broken stream, everything complete is queued again. The backup drops
duplicates. The backup sends nothing back. The primary reads only the end of the stream, to notice that the last chunks
are lost. The first chunk under each placement names that placement: a server takes no chunk before it knows that it is
a backup.
On one host a chunk is leased instead of sent, and the backup copies it from the accumulator (`same_host.leases`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass, field

from axon_ps.aggregation.client.probes import Wait
from axon_ps.compress import cast
from axon_ps.errors import AxonError, Broken, GenerationChanged
from axon_ps.host.host_peer import HostPeer
from axon_ps.rpc.service import together
from axon_ps.rpc.stream import Stream
from axon_ps.shard.core.engine import ShardEngine
from axon_ps.shard.core.slices import OwnedSlice
from axon_ps.shard.same_host.access import MIN_LEASED_BYTES
from axon_ps.shard.same_host.leases import SumLeases
from axon_ps.shard.server.links import Links
from axon_ps.types import DType
from axon_ps.wire.codec import dtype_to_proto
from axon_ps.wire.frames import encode_chunk
from axon_ps.wire.v1 import common_pb2

_RETRY_S = 0.05
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Sum:
    """A chunk whose sum is complete: its slice, index, attempt and step."""

    slice: int
    index: int
    number: int
    step: int


@dataclass
class _Follower:
    """One backup server: its queue, the slices of which it is a backup, and the task that sends.

    The server counts as waited for from a step's first sum until the decision, since only the decision shows that the
    sums have arrived.
    """

    waiting: Wait
    queue: deque[_Sum] = field(default_factory=deque)
    filled: asyncio.Event = field(default_factory=asyncio.Event)
    slices: frozenset[int] = frozenset()
    task: asyncio.Task[None] | None = None

    def refill(self, items: Iterable[_Sum]) -> None:
        """Replace the queue for the next stream, since chunks on the last one may be lost."""
        self.queue.clear()
        self.queue.extend(items)


class BackupStreams:
    """The streams to the backups of one model's slices.

    Args:
        model: its number.
        engine: the model's engine, which has the sums.
        links: to the other servers.
        corrupt: called if a sum was found to be corrupt.
    """

    def __init__(self, model: int, engine: ShardEngine, links: Links, corrupt: Callable[[OwnedSlice], object]) -> None:
        self._model = model
        self._corrupt = corrupt
        self._engine = engine
        self._links = links
        self._followers: dict[int, _Follower] = {}
        self._followers_of: dict[int, tuple[int, ...]] = {}  # by slice
        self._leases = SumLeases()
        self._placed = 0  # number of the placement

    def on_placement(self) -> None:
        """Apply a new placement: end the streams to former backups, and send the complete sums to new ones."""
        placement, slices = self._engine.placement, self._engine.slices
        assert placement is not None
        missed, self._placed = placement.number > self._placed + 1, placement.number  # a server may hold a new copy
        primaries = [s for s in slices.values() if s.primary and s.trainable]
        self._followers_of = {s.number: placement.holders[s.number].followers for s in primaries}
        wanted: dict[int, set[int]] = {}
        for number, ranks in self._followers_of.items():
            for rank in ranks:
                wanted.setdefault(rank, set()).add(number)
        for rank in set(self._followers).difference(wanted):
            self._end(rank)
        for rank, numbers in wanted.items():
            follower = self._followers.get(rank)
            if follower is None:
                follower = self._followers[rank] = _Follower(self._links.waiting())
            known, follower.slices = frozenset() if missed else follower.slices, frozenset(numbers)
            for item in self._complete(numbers - known):
                self._put(rank, item)

    def restart(self) -> None:
        """End the streams of the previous generation."""
        for rank in list(self._followers):
            self._end(rank)
        if self._engine.placement is not None:
            self.on_placement()

    def close(self) -> None:
        """End all streams."""
        self._followers_of = {}
        for rank in list(self._followers):
            self._end(rank)

    def completed(self, owned: OwnedSlice, index: int, number: int) -> None:
        """Forward a chunk whose sum is complete."""
        if ranks := self._followers_of.get(owned.number):
            item = _Sum(owned.number, index, number, self._engine.gradients.attempts[number].step)
            for rank in ranks:
                self._put(rank, item)

    def revoke(self) -> None:
        """Revoke the leases of sums that were complete, and to which another addend is added now."""
        self._leases.revoke()

    def settled(self) -> None:
        """Revoke the leases of a decided step, whose sums will be used or dropped."""
        for follower in self._followers.values():
            follower.waiting.end()
        self._leases.revoke()

    # ------------------------------------------------------------------ inside

    def _put(self, rank: int, item: _Sum) -> None:
        follower = self._followers[rank]
        follower.queue.append(item)
        follower.waiting.on(rank)
        follower.filled.set()
        if follower.task is None:
            follower.task = asyncio.get_running_loop().create_task(self._run(rank, follower))

    def _end(self, rank: int) -> None:
        follower = self._followers.pop(rank)
        follower.waiting.end()
        if follower.task is not None:
            follower.task.cancel()

    def _complete(self, numbers: Set[int]) -> Iterator[_Sum]:
        """Yield the complete sums of those slices that are still here."""
        gradients = self._engine.gradients
        for number, attempt in enumerate(gradients.attempts):
            for owned in map(self._engine.slices.__getitem__, sorted(numbers & self._engine.slices.keys())):
                for index in gradients.sums_of(number, owned):
                    yield _Sum(owned.number, index, number, attempt.step)

    async def _run(self, rank: int, follower: _Follower) -> None:
        """Send queued chunks until cancelled."""
        leases = True
        while True:
            stream: Stream | None = None
            try:
                stub = await self._links.stub(rank)
                peer = await self._links.peer(rank, stub, self._model) if leases else None
                async with await stub.open_bulk("Replicate") as stream:
                    await together([self._send(stream, follower, peer), _read_end(stream)])
            except Exception as error:
                if stream is not None and not stream.is_current():
                    follower.refill(self._complete(follower.slices))
                    continue
                unforeseen = not isinstance(error, AxonError)
                level = logging.ERROR if unforeseen else logging.INFO
                if not isinstance(error, GenerationChanged):  # the model is about to apply the next one
                    _logger.log(level, "forwarding to server %d: %s; trying again", rank, error, exc_info=unforeseen)
                    await self._check(follower)
                self._links.forget(rank)
                leases = not leases  # the next attempt uses the other way
                await asyncio.sleep(_RETRY_S)
                follower.refill(self._complete(follower.slices))

    def _is_wanted(self, item: _Sum, follower: _Follower) -> bool:
        """Return True if a sum is still of the step under way, and of a slice with this backup."""
        attempts = self._engine.gradients.attempts
        here = item.slice in follower.slices and item.slice in self._engine.slices
        if not here or item.number >= len(attempts):
            return False
        attempt, accumulator = attempts[item.number], self._engine.slices[item.slice].accumulators[item.number]
        complete = attempt.step == item.step and accumulator.is_complete(item.index, attempt.count)
        return complete and not accumulator.spoiled

    async def _check(self, follower: _Follower) -> None:
        """Check the sums here, since the backup may have refused a corrupt one."""
        for item in list(self._complete(follower.slices)):
            if self._is_wanted(item, follower):
                owned = self._engine.slices[item.slice]
                accumulator = owned.accumulators[item.number]
                owned.corruptions += accumulator.check((item.index,))
                if accumulator.spoiled:
                    self._corrupt(owned)
            await asyncio.sleep(0)  # there may be GiBs to check

    async def _send(self, stream: Stream, follower: _Follower, peer: HostPeer | None) -> None:
        engine, wire = self._engine, self._engine.precision.grad
        header, known = common_pb2.Chunk(), 0  # the placement that the follower was sent
        while True:
            if not stream.is_current():
                raise Broken(f"{stream.target} goes on with newer credentials")
            while follower.queue:
                item = follower.queue.popleft()
                if not self._is_wanted(item, follower):
                    continue
                owned, attempt = engine.slices[item.slice], engine.gradients.attempts[item.number]
                accumulator = owned.accumulators[item.number]
                if known != self._placed:
                    known = self._placed
                    context = self._links.context(self._model, generation=engine.generation, placement=known)
                    header.context.CopyFrom(context)
                elements = owned.chunks.ranges[item.index]
                header.step, header.unit, header.replica = item.step, owned.chunks.unit, item.number
                header.addend = attempt.addend
                header.offset, header.numel = owned.chunks.begin + elements.start, elements.stop - elements.start
                header.absent, header.dtype = not accumulator.present[item.index], dtype_to_proto(DType.F32)
                total = None if header.absent else accumulator.array[elements]
                header.ClearField("digest")
                if total is not None:
                    header.digest = accumulator.digest(item.index)
                nbytes = 0 if total is None else total.nbytes
                lease = None
                if total is not None and peer is not None and nbytes >= MIN_LEASED_BYTES:
                    lease = self._leases.grant(peer, total, accumulator.array)
                if lease is not None:
                    header.lease.CopyFrom(lease)
                    await stream.write(encode_chunk(header, None))
                    header.ClearField("lease")
                    engine.counters["leased_bytes_forwarded"] += nbytes
                else:
                    if total is not None and accumulator.is_rounded(item.index, attempt.replicas):
                        header.dtype = dtype_to_proto(wire)
                        total = cast.encoded(total, wire)
                        nbytes = total.nbytes
                    await stream.write(encode_chunk(header, total))
                header.ClearField("context")
                engine.counters["bytes_forwarded"] += nbytes
            follower.filled.clear()
            await follower.filled.wait()


async def _read_end(stream: Stream) -> None:
    """Wait for the end of a stream on which the backup sends nothing; raises the reason of the end."""
    await stream.read()
    raise Broken(f"{stream.target} was ended by the backup")

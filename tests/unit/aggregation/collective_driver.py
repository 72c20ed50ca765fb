"""Ranks over collective engines, without a network: a test, or hypothesis, says who does what next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from axon_ps.aggregation.core.engine import CollectiveEngine, OperationRequest
from axon_ps.aggregation.core.mailbox import Envelope
from axon_ps.aggregation.core.participants import Participant
from axon_ps.aggregation.core.stripes import StripePlan, segments_of, stripes_of
from axon_ps.errors import AxonError
from axon_ps.reduction.call import Call, Operation
from axon_ps.types import Array
from axon_ps.wire.frames import decode_bulk, elements, encode_chunk
from axon_ps.wire.v1.collective_pb2 import CollectiveBegin, CollectiveChunk


def members(n: int) -> tuple[str, ...]:
    """Those of the ranks of a test."""
    return tuple(f"worker-{rank}" for rank in range(n))


@dataclass
class RankStream:
    """One rank's stream on one stripe: what it still has to send, and what it has received."""

    participant: Participant
    messages: list[bytes]
    received: list[tuple[CollectiveChunk, Array]] = field(default_factory=list)
    error: AxonError | None = None
    over: bool = False


class Servers:
    """Engines of `stripes` servers, and the ranks of one group on them."""

    def __init__(self, n: int, stripes: int = 1, workers: Sequence[str] | None = None) -> None:
        self.n = n
        self.engines = [CollectiveEngine() for _ in range(stripes)]
        self.now_s = 0.0
        for engine in self.engines:
            engine.set_workers(members(n) if workers is None else workers)

    def request(self, rank: int, what: Call | Envelope, stripe: int = 0, **changes: Any) -> OperationRequest:
        """What a first message asks for."""
        values: dict[str, Any] = {
            "group": "g",
            "rank": rank,
            "ranks": tuple(range(self.n)),
            "members": members(self.n),
            "timeout_s": 10.0,
            "stripe": stripe,
            "stripes": len(self.engines),
            "what": what,
        }
        return OperationRequest(**{**values, **changes})

    def join(
        self,
        rank: int,
        call: Call,
        data: Array | None = None,
        starts: Sequence[int] = (0,),
        stripe: int = 0,
        **changes: Any,
    ) -> RankStream:
        """A rank joins a collective, with its first segment."""
        request = self.request(rank, call, stripe, **changes)
        plan = StripePlan(
            call=call,
            rank=rank,
            world_size=self.n,
            stripe=stripe,
            stripes=request.stripes,
            owners=request.owners,
            input_counts=request.input_counts,
            output_counts=request.output_counts,
        )
        messages = []
        for segment in plan.uploads():
            assert data is not None
            begin = CollectiveBegin(group="g") if not messages else None
            header = CollectiveChunk(begin=begin, source=rank, partition=segment.partition, offset=segment.begin)
            first = starts[segment.partition]
            messages.append(encode_chunk(header, data[first + segment.begin : first + segment.end]))
        first_message = messages.pop(0) if messages else encode_chunk(CollectiveChunk(source=rank), None)
        return RankStream(self._open(stripe, request, first_message), messages)

    def enqueue(self, rank: int, envelope: Envelope, data: Array | None = None, **changes: Any) -> RankStream:
        """A rank sends (`data`, with its envelope or after it, as the client does) or receives."""
        request = self.request(rank, envelope, **{"stripes": 1, **changes})
        eager = data is not None and data.nbytes <= 1 << 16
        first = encode_chunk(CollectiveChunk(source=rank), data if eager else None)
        messages = []
        if data is not None and not eager:
            for segment in segments_of(data.size, data.itemsize):
                header = CollectiveChunk(source=rank, offset=segment.begin)
                messages.append(encode_chunk(header, data[segment.begin : segment.end]))
        return RankStream(self._open(0, request, first), messages)

    def _open(self, stripe: int, request: OperationRequest, message: bytes) -> Participant:
        header, payload = decode_bulk(CollectiveChunk, message)
        return self.engines[stripe].open(request, message, header, payload, self.now_s)

    def step(self, stream: RankStream, stripe: int = 0) -> bool:
        """Do one thing on a stream: write, else read, else end it; False when there is nothing to do."""
        return self.write(stream, stripe) or self.read(stream, stripe)

    def write(self, stream: RankStream, stripe: int = 0) -> bool:
        """The rank's next message arrives, if the server reads."""
        if stream.over or not stream.messages:
            return False
        if stream.participant.pending is not None or stream.participant.error is not None:
            return False
        message = stream.messages.pop(0)
        self.engines[stripe].receive(stream.participant, message, *decode_bulk(CollectiveChunk, message))
        return True

    def read(self, stream: RankStream, stripe: int = 0) -> bool:
        """The rank gets the server's next message, or the end of the operation."""
        if stream.over:
            return False
        if stream.participant.outgoing:
            header, payload = decode_bulk(CollectiveChunk, self.engines[stripe].dequeue(stream.participant))
            stream.received.append((header, elements(payload, stream.participant._dtype)))
            return True
        if stream.participant.error is not None or stream.participant.done:
            stream.error = stream.participant.error
            self.leave(stream, stripe)
            return True
        return False

    def leave(self, stream: RankStream, stripe: int = 0) -> None:
        """The stream is over."""
        stream.over = True
        self.engines[stripe].leave(stream.participant, self.now_s)

    def tick(self, seconds: float) -> None:
        """Time passes."""
        self.now_s += seconds
        for engine in self.engines:
            engine.tick(self.now_s)
            assert engine.next_s() > self.now_s, "a timer that is due again at once, and again"

    def run(self, streams: Sequence[tuple[RankStream, int]], choose: Callable[[int], int] = lambda n: 0) -> None:
        """Steps of streams, the choice among those that can being the caller's, until nothing moves."""
        streams = list(streams)
        idle = 0
        order = list(range(len(streams)))
        while idle < len(streams):
            pick = order.pop(choose(len(order)) % len(order))
            order.append(pick)
            idle = 0 if self.step(*streams[pick]) else idle + 1
            if idle == len(streams):  # the choice may have missed some
                moved = [self.step(*stream) for stream in streams]
                idle = 0 if any(moved) else idle

    def assert_nothing_left(self) -> None:
        """No group, no stream, no byte."""
        for engine in self.engines:
            statistics = engine.statistics()
            assert statistics["collective_groups"] == statistics["collective_streams"] == 0
            assert not any(engine.memory.bytes.values()), engine.memory.bytes
            assert not engine._groups


def placed(target: Array, stream: RankStream, starts: Sequence[int]) -> None:
    """Write what came to its places, as a client does."""
    for header, data in stream.received:
        begin = starts[header.source] + header.offset
        target[begin : begin + data.size] = data


def stripes_needed(call: Call, servers: int) -> int:
    """On how many servers a client would spread a call."""
    return stripes_of(call, servers)


__all__ = ["Operation", "RankStream", "Servers", "members", "np", "placed", "stripes_needed"]

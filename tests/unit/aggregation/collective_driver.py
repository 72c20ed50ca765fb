"""Ranks over collective engines, without a network: a test, or hypothesis, says who does what next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from axon_ps.aggregation.core.engine import CollectiveEngine, Opening
from axon_ps.aggregation.core.mailbox import Letter
from axon_ps.aggregation.core.participants import Seat
from axon_ps.aggregation.core.stripes import Exchange, pieces_of, shares_of
from axon_ps.errors import AxonError
from axon_ps.reduction.call import Call, Operation
from axon_ps.types import Array
from axon_ps.wire.frames import decode_bulk, elements, encode_chunk
from axon_ps.wire.v1.collective_pb2 import CollectiveBegin, CollectiveChunk


def members(n: int) -> tuple[str, ...]:
    """Those of the ranks of a test."""
    return tuple(f"worker-{rank}" for rank in range(n))


@dataclass
class Part:
    """One rank's stream to one share: what it still sends, what it has got."""

    seat: Seat
    messages: list[bytes]
    got: list[tuple[CollectiveChunk, Array]] = field(default_factory=list)
    error: AxonError | None = None
    over: bool = False


class Servers:
    """Engines of `shares` servers, and the ranks of one group on them."""

    def __init__(self, n: int, shares: int = 1, workers: Sequence[str] | None = None) -> None:
        self.n = n
        self.engines = [CollectiveEngine() for _ in range(shares)]
        self.now_s = 0.0
        for engine in self.engines:
            engine.set_workers(members(n) if workers is None else workers)

    def opening(self, rank: int, what: Call | Letter, share: int = 0, **changes: Any) -> Opening:
        """A first message's words."""
        values: dict[str, Any] = {
            "group": "g",
            "rank": rank,
            "ranks": tuple(range(self.n)),
            "members": members(self.n),
            "timeout_s": 10.0,
            "share": share,
            "shares": len(self.engines),
            "what": what,
        }
        return Opening(**{**values, **changes})

    def join(
        self,
        rank: int,
        call: Call,
        data: Array | None = None,
        starts: Sequence[int] = (0,),
        share: int = 0,
        **changes: Any,
    ) -> Part:
        """A rank comes to a collective, with its first piece."""
        opening = self.opening(rank, call, share, **changes)
        exchange = Exchange(
            call=call,
            rank=rank,
            world_size=self.n,
            share=share,
            shares=opening.shares,
            owners=opening.owners,
            input_counts=opening.input_counts,
            output_counts=opening.output_counts,
        )
        messages = []
        for piece in exchange.uploads():
            assert data is not None
            begin = CollectiveBegin(group="g") if not messages else None
            header = CollectiveChunk(begin=begin, source=rank, part=piece.part, offset=piece.begin)
            first = starts[piece.part]
            messages.append(encode_chunk(header, data[first + piece.begin : first + piece.end]))
        first_message = messages.pop(0) if messages else encode_chunk(CollectiveChunk(source=rank), None)
        return Part(self._open(share, opening, first_message), messages)

    def post(self, rank: int, letter: Letter, data: Array | None = None, **changes: Any) -> Part:
        """A rank sends (with `data`, brought along or not as the client does) or receives."""
        opening = self.opening(rank, letter, **{"shares": 1, **changes})
        eager = data is not None and data.nbytes <= 1 << 16
        first = encode_chunk(CollectiveChunk(source=rank), data if eager else None)
        messages = []
        if data is not None and not eager:
            for piece in pieces_of(data.size, data.itemsize):
                header = CollectiveChunk(source=rank, offset=piece.begin)
                messages.append(encode_chunk(header, data[piece.begin : piece.end]))
        return Part(self._open(0, opening, first), messages)

    def _open(self, share: int, opening: Opening, message: bytes) -> Seat:
        header, payload = decode_bulk(CollectiveChunk, message)
        return self.engines[share].open(opening, message, header, payload, self.now_s)

    def step(self, part: Part, share: int = 0) -> bool:
        """Do one thing on a stream: write, else read, else end it; False when there is nothing to do."""
        return self.write(part, share) or self.read(part, share)

    def write(self, part: Part, share: int = 0) -> bool:
        """The rank's next message arrives, if the server reads."""
        if part.over or not part.messages or part.seat.held is not None or part.seat.error is not None:
            return False
        message = part.messages.pop(0)
        self.engines[share].offer(part.seat, message, *decode_bulk(CollectiveChunk, message))
        return True

    def read(self, part: Part, share: int = 0) -> bool:
        """The server's next message is taken, or its end."""
        if part.over:
            return False
        if part.seat.outgoing:
            header, payload = decode_bulk(CollectiveChunk, self.engines[share].take(part.seat))
            part.got.append((header, elements(payload, part.seat._dtype)))
            return True
        if part.seat.error is not None or part.seat.done:
            part.error = part.seat.error
            self.leave(part, share)
            return True
        return False

    def leave(self, part: Part, share: int = 0) -> None:
        """The stream is over."""
        part.over = True
        self.engines[share].leave(part.seat, self.now_s)

    def tick(self, seconds: float) -> None:
        """Time passes."""
        self.now_s += seconds
        for engine in self.engines:
            engine.tick(self.now_s)

    def run(self, parts: Sequence[tuple[Part, int]], choose: Callable[[int], int] = lambda n: 0) -> None:
        """Steps of streams, the choice among those that can being the caller's, until nothing moves."""
        parts = list(parts)
        idle = 0
        order = list(range(len(parts)))
        while idle < len(parts):
            pick = order.pop(choose(len(order)) % len(order))
            order.append(pick)
            idle = 0 if self.step(*parts[pick]) else idle + 1
            if idle == len(parts):  # the choice may have missed some
                moved = [self.step(*part) for part in parts]
                idle = 0 if any(moved) else idle

    def assert_nothing_left(self) -> None:
        """No group, no stream, no byte."""
        for engine in self.engines:
            statistics = engine.statistics()
            assert statistics["collective_groups"] == statistics["collective_streams"] == 0
            assert not any(engine.ledger.bytes.values()), engine.ledger.bytes
            assert not engine._groups


def placed(target: Array, part: Part, starts: Sequence[int]) -> None:
    """Write what came to its places, as a client does."""
    for header, data in part.got:
        begin = starts[header.source] + header.offset
        target[begin : begin + data.size] = data


def shares_needed(call: Call, servers: int) -> int:
    """On how many servers a client would spread a call."""
    return shares_of(call, servers)


__all__ = ["Operation", "Part", "Servers", "members", "np", "placed", "shares_needed"]

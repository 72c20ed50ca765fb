"""Which workers and shard servers of one host read each other's memory, so that no chunk goes through a socket there.

Owns: the introductions, on both sides (`Servers` in a worker, `Callers` in a server), and loans as messages. What may
be read and until when is `host.process_memory`'s. Refuses: to decide what is lent; transfers and the servicer do.

Invariants:
- Where an introduction fails (another host, another container, a kernel that forbids it), everything goes through gRPC
  as if nobody had asked.
- Either side keeps an introduction under the ids of *both* members, so it ends with either membership: a worker that
  was lost and came back is introduced again, though its process and the server's are the same as before.
- A refusal is never answered by asking the same again: what failed once is sent, and the server is asked anew later.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

import numpy as np

from axon_ps.aggregation.client.peers import MakeContext
from axon_ps.errors import AxonError, Broken, InvalidRequest
from axon_ps.host import process_memory
from axon_ps.host.leases import Lender, Loan
from axon_ps.host.process_memory import Borrower, Introduction
from axon_ps.rpc.service import Stub
from axon_ps.shard.same_host import shared_buffers
from axon_ps.shard.same_host.shared_buffers import MappedBuffers
from axon_ps.types import Member, Membership
from axon_ps.wire.v1 import memory_pb2, shard_pb2

MOST_LENT_BYTES = 16 << 20
"""Lent in one message. Reading it is one call, in which an event loop does nothing else: a few milliseconds."""

LEAST_LENT_BYTES = 32 << 10
"""Less is sent: reading a loan takes two system calls."""

MOST_ELEMENT_BYTES = 8
"""A chunk that says it is larger per element, compressed or not, is refused before memory is taken."""

_TIMEOUT_S = 5.0
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Access:
    """What a worker and a server can do with each other's memory.

    Attributes:
        borrower: reads the server's; None when we cannot.
        readable: whether the server can read ours.
    """

    borrower: Borrower | None = None
    readable: bool = False


class Servers:
    """The shard servers of a worker's own host. On one event loop.

    Args:
        node: name of the host; only servers that say the same are tried. "" = none.
    """

    def __init__(self, node: str) -> None:
        self._node = node
        self._me = ""
        self._members: dict[int, Member] = {}
        self._known: dict[str, asyncio.Future[Access]] = {}  # by the server's id

    def set_members(self, membership: Membership, me: str) -> None:
        """Take the current shard servers, and the id under which they know us."""
        self._members = {m.rank: m for m in membership.shards if self._node and m.node == self._node}
        there = {m.id for m in self._members.values()} if me == self._me else set()
        self._known = {k: v for k, v in self._known.items() if k in there}
        self._me = me

    async def access(self, server: int, stub: Stub, context: MakeContext) -> Access:
        """What can be done with a server's memory; asked once per server."""
        member = self._members.get(server)
        if member is None:
            return Access()
        known = self._known.get(member.id)
        if known is None:
            known = self._known[member.id] = asyncio.ensure_future(self._introduce(member, stub, context))
        return await asyncio.shield(known)

    def forget(self, server: int) -> None:
        """Something went wrong between us and a server: who wants its memory next asks again what can be done."""
        if (member := self._members.get(server)) is not None:
            self._known.pop(member.id, None)

    @property
    def near(self) -> bool:
        """Whether there are servers on this host."""
        return bool(self._members)

    def close(self) -> None:
        """Stop asking."""
        for known in self._known.values():
            known.cancel()
        self._known = {}

    async def _introduce(self, member: Member, stub: Stub, context: MakeContext) -> Access:
        request = shard_pb2.IntroduceRequest(context=context(), introduction=_ours())
        try:
            reply = await stub.call("Introduce", request, timeout_s=_TIMEOUT_S)
        except AxonError as error:  # the call that wanted this fails of the same in a moment, and asks again later
            _logger.debug("shard server %d was not asked whether it reads us: %s", member.rank, error)
            self._known.pop(member.id, None)
            return Access()
        return Access(_borrower(reply.introduction), reply.readable)


class Callers:
    """The workers that this server can read, by their id as members."""

    def __init__(self) -> None:
        self._known: dict[str, Borrower] = {}
        self._buffers = MappedBuffers()

    def set_members(self, membership: Membership) -> None:
        """Forget workers that have gone."""
        there = {m.id for m in membership.workers}
        self._known = {k: v for k, v in self._known.items() if k in there}
        self._buffers.keep(there)

    def introduce(self, worker: str, introduction: memory_pb2.Introduction) -> shard_pb2.IntroduceReply:
        """Take a worker's introduction, and give ours."""
        borrower = _borrower(introduction)
        if borrower is not None:
            self._known[worker] = borrower
        return shard_pb2.IntroduceReply(introduction=_ours(), readable=borrower is not None)

    def view(self, worker: str, loan: memory_pb2.Loan) -> memoryview | None:
        """What a worker lends, where it lies; it stays as it is. None: it must be read.

        Raises:
            InvalidRequest: it is not in a buffer of that worker.
        """
        borrower = self._known.get(worker)
        if borrower is None or not loan.HasField("mapping"):
            return None
        found = self._buffers.view(worker, borrower.pid, loan.mapping, loan.offset, loan.size_bytes)
        return None if found is None else found.data

    def read(self, worker: str, loan: Loan, most_bytes: int) -> memoryview:
        """A copy of what a worker lends.

        Raises:
            Broken: it was taken back, or that worker was never introduced.
            InvalidRequest: it is more than `most_bytes`.
        """
        borrower = self._known.get(worker)
        if borrower is None:
            raise Broken("this server cannot read the caller's memory; send the payload")
        if loan.size_bytes > most_bytes:
            raise InvalidRequest(f"a chunk of {loan.size_bytes} bytes was lent; at most {most_bytes} fit here")
        copy = np.empty(loan.size_bytes, np.uint8)
        borrower.read([loan], copy)
        return copy.data


def lend(lender: Lender, address: int, size_bytes: int) -> memory_pb2.Loan:
    """A loan as a message; it says where the bytes can be mapped, if they can."""
    loan = lender.lend(address, size_bytes)
    message = memory_pb2.Loan(
        address=loan.address, size_bytes=loan.size_bytes, number_address=loan.number_address, number=loan.number
    )
    if (place := shared_buffers.found(address, size_bytes)) is not None:
        message.mapping.CopyFrom(place[0])
        message.offset = place[1]
    return message


def loan_from_proto(loan: memory_pb2.Loan) -> Loan:
    """A loan from its message."""
    return Loan(
        address=loan.address, size_bytes=loan.size_bytes, number_address=loan.number_address, number=loan.number
    )


def _ours() -> memory_pb2.Introduction:
    own = process_memory.introduction()
    return memory_pb2.Introduction(pid=own.pid, address=own.address, secret=own.secret)


def _borrower(introduction: memory_pb2.Introduction) -> Borrower | None:
    """Who reads the process that introduced itself so; None when it cannot be read."""
    try:
        return Borrower(Introduction(pid=introduction.pid, address=introduction.address, secret=introduction.secret))
    except Broken as error:
        _logger.debug("%s", error)
        return None

"""Which workers and shard servers of one host read each other's memory, so that no chunk goes through a socket there.

Owns: the handshake, on both sides (`SameHostServers` in a worker or another server, `SameHostCallers` in a server).
Refuses: to decide what is leased; transfers and the servicer do. How memory is read and mapped is
`host.process_memory`'s.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from axon_ps.aggregation.client.peers import MakeContext
from axon_ps.errors import AxonError, Broken, InvalidRequest
from axon_ps.host.process_memory import Handshake, LeaseReader, own_handshake
from axon_ps.rpc.service import Stub
from axon_ps.types import Member, Membership
from axon_ps.wire.v1 import shard_pb2

MAX_LEASED_BYTES = 16 << 20
"""Leased in one message. Reading it is one call, in which an event loop does nothing else: a few milliseconds."""

MIN_LEASED_BYTES = 32 << 10
"""Less is sent: reading a lease takes two system calls."""

MAX_ELEMENT_BYTES = 8
"""A chunk that claims to be larger per element, compressed or not, is refused before memory is allocated."""

_TIMEOUT_S = 5.0
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Access:
    """What a worker and a server can do with each other's memory.

    Attributes:
        reader: reads the server's; None when we cannot.
        readable: whether the server can read ours.
    """

    reader: LeaseReader | None = None
    readable: bool = False


class SameHostServers:
    """A worker's view of the shard servers on its own host. On one event loop.

    Args:
        node: name of the host; only servers of the same name are tried. "" = none.
    """

    def __init__(self, node: str) -> None:
        self._node = node
        self._me = ""
        self._members: dict[int, Member] = {}
        self._known: dict[str, asyncio.Future[Access]] = {}  # by the server's id

    def set_members(self, membership: Membership, me: str) -> None:
        """Set the current shard servers, and our id as a member."""
        self._members = {m.rank: m for m in membership.shards if self._node and m.node == self._node}
        there = {m.id for m in self._members.values()} if me == self._me else set()
        self._known = {k: v for k, v in self._known.items() if k in there}
        self._me = me

    async def access(self, server: int, stub: Stub, context: MakeContext) -> Access:
        """What can be done with a server's memory; one handshake per server."""
        member = self._members.get(server)
        if member is None:
            return Access()
        known = self._known.get(member.id)
        if known is None:
            known = self._known[member.id] = asyncio.ensure_future(self._handshake(member, stub, context))
        return await asyncio.shield(known)

    def forget(self, server: int) -> None:
        """Drop what is known of a server, after a failure: the next `access` shakes hands again."""
        if (member := self._members.get(server)) is not None:
            self._known.pop(member.id, None)

    @property
    def has_servers(self) -> bool:
        """Whether there are servers on this host."""
        return bool(self._members)

    def close(self) -> None:
        """End the handshakes under way."""
        for known in self._known.values():
            known.cancel()
        self._known = {}

    async def _handshake(self, member: Member, stub: Stub, context: MakeContext) -> Access:
        request = shard_pb2.HandshakeRequest(context=context(), handshake=own_handshake().pack())
        try:
            reply = await stub.call("Handshake", request, timeout_s=_TIMEOUT_S)
        except AxonError as error:  # the caller's own call will fail of the same, and be retried
            _logger.debug("shard server %d did not answer the handshake: %s", member.rank, error)
            self._known.pop(member.id, None)
            return Access()
        return Access(_lease_reader(reply.handshake), reply.readable)


class SameHostCallers:
    """A server's view of the workers and other servers whose memory it can read, by their id as members."""

    def __init__(self) -> None:
        self._known: dict[str, LeaseReader] = {}

    def set_members(self, membership: Membership) -> None:
        """Drop those that are no members any more."""
        there = {m.id for m in (*membership.workers, *membership.shards)}
        self._known = {k: v for k, v in self._known.items() if k in there}

    def handshake(self, caller: str, handshake: bytes) -> shard_pb2.HandshakeReply:
        """Store a caller's handshake, and return ours."""
        reader = _lease_reader(handshake)
        if reader is not None:
            self._known[caller] = reader
        return shard_pb2.HandshakeReply(handshake=own_handshake().pack(), readable=reader is not None)

    def reader(self, caller: str) -> LeaseReader:
        """What reads a caller's memory, or maps it.

        Raises:
            Broken: there was no handshake with it.
        """
        reader = self._known.get(caller)
        if reader is None:
            raise Broken("this server cannot read the caller's memory; send the payload")
        return reader


def _lease_reader(handshake: bytes) -> LeaseReader | None:
    """A reader of the process that sent the handshake; None when it cannot be read."""
    try:
        return LeaseReader(Handshake.unpack(handshake))
    except (Broken, InvalidRequest) as error:
        _logger.debug("%s", error)
        return None

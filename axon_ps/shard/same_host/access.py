"""Shared memory between workers and shard servers of one host, so that large chunks do not go through a socket.

Owns: the handshake, on both sides (`SameHostServers` in a worker or another server, `SameHostCallers` in a server).
Refuses: the choice of the data to lease, which is made in transfers and the servicer. The passing of memory is
`host.host_peer`'s.

The RPC `Handshake` authenticates the caller as a member. It returns the name of a socket and a nonce that is valid for
one connection. The caller connects, and sends the nonce. The server accepts waiting connections when it next needs that
member. The nonce identifies the member. A connection without a nonce is not used. A connection ends with the membership
of either side. A restarted process is another member.
"""

from __future__ import annotations

import asyncio
import logging
import secrets

from axon_ps.aggregation.client.peers import MakeContext
from axon_ps.errors import AxonError, Broken, InvalidRequest, Unreachable
from axon_ps.host.host_peer import HostPeer
from axon_ps.host.peer_socket import Listener, PeerSocket
from axon_ps.host.shared_memory import Access
from axon_ps.rpc.service import Stub
from axon_ps.types import Member, Membership
from axon_ps.wire.v1 import shard_pb2

MAX_LEASED_BYTES = 16 << 20
"""Most bytes of a gradient leased in one message."""

MIN_LEASED_BYTES = 32 << 10
"""Fewer bytes are sent, since using a lease takes a system call."""

MAX_ELEMENT_BYTES = 8
"""Most bytes per element of a chunk. A larger claim is refused."""

NONCE_BYTES = 16

MAX_STRANGERS = 16
"""Most connections that have not presented a nonce yet. The oldest are closed. A valid client needs only a moment."""

_TIMEOUT_S = 5.0
_logger = logging.getLogger(__name__)


class SameHostServers:
    """The shard servers on the host of a worker or of another server. It runs on one event loop.

    Args:
        node: name of the host. Only servers with the same name are tried. "" = none.
    """

    def __init__(self, node: str) -> None:
        self._node = node
        self._me = ""
        self._members: dict[int, Member] = {}
        self._known: dict[str, asyncio.Future[HostPeer | None]] = {}  # by the server's id
        self._peers: dict[str, HostPeer] = {}

    def set_members(self, membership: Membership, me: str) -> None:
        """Set the current shard servers, and this process's id as a member."""
        self._members = {m.rank: m for m in membership.shards if self._node and m.node == self._node}
        there = {m.id for m in self._members.values()} if me == self._me else set()
        self._known = {k: v for k, v in self._known.items() if k in there}
        for gone in set(self._peers) - there:
            self._peers.pop(gone).close()
        self._me = me

    async def access(self, server: int, stub: Stub, context: MakeContext) -> HostPeer | None:
        """Return the peer of a server that shares memory with this process, else None. One handshake per server."""
        member = self._members.get(server)
        if member is None:
            return None
        known = self._known.get(member.id)
        if known is None:
            known = self._known[member.id] = asyncio.ensure_future(self._handshake(member, stub, context))
        return await asyncio.shield(known)

    def is_shared(self, server: int) -> bool:
        """Return True if memory is known to be shared with a server. Any thread may call it."""
        member = self._members.get(server)
        return member is not None and member.id in self._peers

    def forget(self, server: int) -> None:
        """Drop the peer of a server, after a failure: the next `access` makes a new handshake."""
        if (member := self._members.get(server)) is not None:
            self._known.pop(member.id, None)
            self._peers.pop(member.id, None)  # calls under way go on with it

    @property
    def has_servers(self) -> bool:
        """True if there are servers on this host."""
        return bool(self._members)

    def close(self) -> None:
        """End the handshakes under way, and close all connections."""
        for known in self._known.values():
            known.cancel()
        for peer in self._peers.values():
            peer.close()
        self._known, self._peers = {}, {}

    async def _handshake(self, member: Member, stub: Stub, context: MakeContext) -> HostPeer | None:
        try:
            reply = await stub.call("Handshake", shard_pb2.HandshakeRequest(context=context()), timeout_s=_TIMEOUT_S)
        except AxonError as error:  # the caller's own call will fail with the same error, and be retried
            _logger.debug("shard server %d did not answer the handshake: %s", member.rank, error)
            self._known.pop(member.id, None)
            return None
        try:
            peer = self._peers[member.id] = _connect(reply)
            return peer
        except AxonError as error:
            _logger.debug("no memory is shared with shard server %d: %s", member.rank, error)
            return None


def _connect(reply: shard_pb2.HandshakeReply) -> HostPeer:
    if not reply.socket:
        raise Unreachable("it shares none")
    connected = PeerSocket.connect(reply.socket)
    if not connected.send(reply.nonce):
        raise Unreachable("it accepts no connection")
    return HostPeer(connected, Access.PRIVATE)


class SameHostCallers:
    """A server's view of the workers and other servers that it shares memory with, by their id as members."""

    def __init__(self) -> None:
        self._listener: Listener | None = None
        self._nonces: dict[bytes, str] = {}
        self._strangers: list[PeerSocket] = []
        self._known: dict[str, HostPeer] = {}

    def set_members(self, membership: Membership) -> None:
        """Close the connections of former members."""
        there = {m.id for m in (*membership.workers, *membership.shards)}
        for gone in set(self._known) - there:
            self._known.pop(gone).close()
        self._nonces = {nonce: member for nonce, member in self._nonces.items() if member in there}

    def handshake(self, caller: str) -> shard_pb2.HandshakeReply:
        """Return the address and a nonce for a caller. Its earlier nonces become invalid."""
        self._accept()
        try:
            listener = self._listener = self._listener or Listener()
        except Unreachable as error:
            _logger.debug("no memory is shared: %s", error)
            return shard_pb2.HandshakeReply()
        self._nonces = {nonce: member for nonce, member in self._nonces.items() if member != caller}
        nonce = secrets.token_bytes(NONCE_BYTES)
        self._nonces[nonce] = caller
        return shard_pb2.HandshakeReply(socket=listener.name, nonce=nonce)

    def find(self, caller: str) -> HostPeer | None:
        """Return the peer of a caller that memory is shared with; None if it is not shared."""
        if self._nonces or self._strangers:
            self._accept()
        return self._known.get(caller)

    def peer(self, caller: str) -> HostPeer:
        """Return the peer of a caller that memory is shared with.

        Raises:
            Broken: it has not connected.
        """
        found = self.find(caller)
        if found is None:
            raise Broken("this server shares no memory with the caller; send the payload")
        return found

    def close(self) -> None:
        """Close all connections and the listener."""
        for each in (self._listener, *self._strangers, *self._known.values()):
            if each is not None:
                each.close()
        self._listener, self._strangers, self._known, self._nonces = None, [], {}, {}

    def _accept(self) -> None:
        """Accept waiting connections, and identify their members by the nonces."""
        while self._listener is not None and (stranger := self._listener.next_peer()) is not None:
            self._strangers.append(stranger)
        self._strangers = [stranger for stranger in self._strangers if self._is_stranger(stranger)]
        for stranger in self._strangers[:-MAX_STRANGERS]:
            stranger.close()
        self._strangers = self._strangers[-MAX_STRANGERS:]

    def _is_stranger(self, connected: PeerSocket) -> bool:
        """Read a nonce if there is one; returns True if the connection's member is still unknown."""
        try:
            found = connected.receive(descriptor=False)
        except (Broken, InvalidRequest):
            connected.close()
            return False
        if found is None:
            return True
        member = self._nonces.pop(found[0], "")
        if not member:
            _logger.warning("a process of this host (%d) presented no valid nonce", connected.pid)
            connected.close()
            return False
        if (before := self._known.pop(member, None)) is not None:
            before.close()
        self._known[member] = HostPeer(connected, Access.READ)
        return False

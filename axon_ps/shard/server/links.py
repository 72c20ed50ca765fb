"""A shard server's connections to the other shard servers of its job. It runs on one event loop."""

from __future__ import annotations

from axon_ps.aggregation.client.peers import Peers
from axon_ps.aggregation.client.probes import Wait
from axon_ps.coordinator.client.connectivity_report import ConnectivityReport
from axon_ps.host.host_peer import HostPeer
from axon_ps.rpc.deadlines import Deadline
from axon_ps.rpc.security import Security
from axon_ps.rpc.service import Stub
from axon_ps.shard.same_host.access import SameHostServers
from axon_ps.types import Membership
from axon_ps.wire.v1.common_pb2 import CallContext


class Links:
    """The other servers: the connections to them, and the shared memory.

    Args:
        security: TLS and token.
        node: name of this host; "" = memory is not shared.
        job: name of the job.
        incarnation: this server's incarnation.
    """

    def __init__(self, security: Security, node: str, job: str, incarnation: str) -> None:
        self._peers = Peers(security, connections=1)
        self._same_host = SameHostServers(node)
        self._job = job
        self._incarnation = incarnation
        self._generation, self._state_id = 0, ""

    def probe(self, report: ConnectivityReport) -> None:
        """Probe the other servers: each once, and again those of pending calls."""
        self._peers.probe(report, lambda: self.context(0), everybody=True)

    def waiting(self) -> Wait:
        """Return the context of a call for which this server waits for others."""
        return self._peers.waiting()

    def set_members(self, membership: Membership) -> None:
        """Set the current members."""
        self._generation, self._state_id = membership.generation, membership.state_id
        me = next((m.id for m in membership.shards if m.incarnation == self._incarnation), "")
        self._peers.set_members(membership)
        self._same_host.set_members(membership, me)

    def context(self, model: int, *, generation: int | None = None, placement: int = 0) -> CallContext:
        """Return the context of a call.

        Args:
            model: its number.
            generation: of the sums or slices that the call is about. A model may apply a generation later than this
                server learns of it: see Note: [In order] of `model_shell`. None = the newest.
            placement: number of the placement of its slices.
        """
        return CallContext(
            job=self._job,
            generation=self._generation if generation is None else generation,
            incarnation=self._incarnation,
            model=model,
            placement=placement,
            state_id=self._state_id,
        )

    async def stub(self, rank: int) -> Stub:
        """Return the client of a server, once it is a member. Waiting callers are cancelled with the generation."""
        return await self._peers.stub(rank, 0, Deadline(None))

    @property
    def has_neighbours(self) -> bool:
        """True if there are other servers on this host."""
        return self._same_host.has_servers

    async def peer(self, rank: int, stub: Stub, model: int) -> HostPeer | None:
        """Return the shared memory of a server; None if memory is not shared with it."""
        return await self._same_host.access(rank, stub, lambda: self.context(model))

    def forget(self, rank: int) -> None:
        """Make the next handshake with a server a new one, after a failure."""
        self._same_host.forget(rank)

    async def close(self) -> None:
        """Close every connection."""
        self._same_host.close()
        await self._peers.close()

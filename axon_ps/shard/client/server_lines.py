"""The lines from a worker to all shard servers, which its models share: bytes in flight, and the order of transfers.

The rules are those of `shard.client.line`.
"""

from __future__ import annotations

import math
from contextlib import AbstractAsyncContextManager, nullcontext

from axon_ps.aggregation.client.peers import Peers
from axon_ps.shard.client.line import SHORT_RTT_S, Permit, Permits, Rate
from axon_ps.types import Membership

_NOW = -1  # before speculative gathers, which are ordered by unit

CONNECTION_BYTES = 4 << 20
"""The bytes that fill a line are divided among bulk connections of this size each, and one more.

TCP has as many bytes in flight as the kernels' buffers hold (Linux: 4 MiB to send, of which a good half is data), and
sends little at first, after every pause. *Measured* at 500 Mbit/s, 64 MiB over one connection, as a multiple of the
time that line and round trip allow (`benchmarks/distance.py`):

    round trip    10 ms    50 ms    100 ms
    time          1.00     1.17     2.1
"""
MAX_CONNECTIONS = 8

IN_ORDER_BYTES = 1 << 20
"""Bytes left of a speculative gather when the next one begins, if the workers and servers are on the same two hosts.

Such gathers go one at a time, the first units first. The data that a host's servers send delays the host's own pushes
on its network card, and a step ends with its pushes. The next forward needs the first units first, which were pushed
last. *Measured* at 500 Mbit/s, seconds a step:

    two hosts                 in order    at once
    HYBRID_SHARD, f32         1.20        1.32
    HYBRID_SHARD, bf16        0.63        0.66
    SHARD_GRAD_OP, f32        1.15        1.20
    SHARD_GRAD_OP, bf16       0.57        0.61

With four hosts, order costs time, since a unit is not complete before the pushes of three other hosts: 1.97 instead of
1.92. It also does if servers have their own network cards: 1.90 instead of 1.47.
"""


class ServerLines:
    """The transfers of all models on the lines. It runs on one event loop.

    Args:
        peers: the servers, with their round trips.
        rate: the speed at which gathers arrive.
    """

    def __init__(self, peers: Peers, rate: Rate) -> None:
        self._peers = peers
        self._rate = rate
        self._gathers = Permits()
        self._two_hosts = False  # True if all workers and all servers are on the same two hosts

    def set_members(self, membership: Membership) -> None:
        """Set the hosts of the job."""
        hosts = {m.node for m in membership.workers}
        self._two_hosts = len(hosts) == 2 and hosts == {m.node for m in membership.shards}

    @property
    def in_flight_bytes(self) -> int:
        """The bytes that should be in flight beyond those needed now, to keep a long line busy; see `line`."""
        return self._rate.in_flight_bytes(self._peers.longest_rtt_s)

    def connections(self, server: int) -> int:
        """Return the number of connections that fill the line to a server."""
        in_flight = self._rate.in_flight_bytes(self._peers.rtt_s(server))
        return min(MAX_CONNECTIONS, 1 + math.ceil(in_flight / CONNECTION_BYTES))

    def gather(self, size_bytes: int) -> AbstractAsyncContextManager[Permit]:
        """Return the permit of a gather; granted at once if the servers are near."""
        return self._gathers.request(size_bytes, self.in_flight_bytes if self._are_long else math.inf, _NOW)

    def push(self, pushes: Permits, size_bytes: int) -> AbstractAsyncContextManager[Permit]:
        """Return the permit of a push; granted at once if the servers are near.

        A push counts until its reply has arrived, a round trip after it was sent, so one more push is allowed in
        flight.

        Args:
            pushes: those of its model. A push may have to come after those of other workers. Those workers may push
                another model first.
            size_bytes: its payloads.
        """
        return pushes.request(size_bytes, self.in_flight_bytes + size_bytes if self._are_long else math.inf, _NOW)

    def speculative(self, size_bytes: int, unit: int) -> AbstractAsyncContextManager[Permit | None]:
        """Return the permit of a speculative gather of a unit, if they go in order; see `IN_ORDER_BYTES`.

        Otherwise there is none, since the gather may take until another worker has pushed, and calls behind it would be
        held up.
        """
        in_order = self._two_hosts and not self._are_long
        return self._gathers.request(size_bytes, IN_ORDER_BYTES, unit) if in_order else nullcontext()

    @property
    def _are_long(self) -> bool:
        return self._peers.longest_rtt_s > SHORT_RTT_S

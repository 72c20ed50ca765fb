"""Calls to a shard server that are attempted until they succeed or their deadline passes.

A gather or an upload does no harm when repeated, so after a broken connection or a change of the generation it is
attempted again from its start. A push belongs to one generation: after a broken connection it is resumed where the
server replies, a change of the generation is the caller's to handle (the step is lost). Every attempt goes to the
server that holds the slice at that time, so a gather that was under way when its server died ends at another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable
from typing import TypeVar

from axon_ps.aggregation.client.peers import Peers
from axon_ps.errors import Broken, Closed, GenerationChanged, SliceMoved, StepAborted, Timeout
from axon_ps.rpc.service import Stub
from axon_ps.shard.client.transfers import Transfer
from axon_ps.shard.same_host.access import SameHostServers
from axon_ps.sharding.plan import Slice

T = TypeVar("T")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.5


class Retries:
    """The attempts of one model's calls.

    Args:
        peers: the servers.
        same_host: forgets a server whose memory may be what failed.
        holder: gives the slice with the server that holds it now; of several, the one of an index.

    Attributes:
        count: attempts after the first of a call.
    """

    def __init__(self, peers: Peers, same_host: SameHostServers, holder: Callable[[Slice, int], Slice]) -> None:
        self.count = 0
        self._holder = holder
        self._peers = peers
        self._same_host = same_host

    async def call(
        self,
        do: Callable[[Stub, Slice, Transfer], Awaitable[T]],
        connection: int,
        s: Slice,
        transfer: Transfer,
        *,
        repeatable: bool = True,
        holder: int = 0,
    ) -> T:
        """Attempt a call until it succeeds.

        A call is `Closed` when the server has a new address, and its old connection was closed meanwhile. A call that
        failed for another reason than a new generation may have failed because one side cannot read the other's memory
        any more: it goes through the socket then.

        Args:
            do: makes one attempt.
            connection: which of those to the server.
            s: the slice it is about.
            transfer: what it transfers.
            repeatable: whether it may be made in another generation, and from its start.
            holder: which of the slice's holders, the primary first.

        Raises:
            Closed: the connections were closed.
            Timeout: there is no time left for another attempt.
            AxonError: what an attempt raised that is not to be repeated.
        """
        pause_s = _FIRST_PAUSE_S
        with self._peers.waiting() as waiting:
            while True:
                s = self._holder(s, holder)
                if not self._peers.has(s.server) and not transfer.deadline.expired:
                    await self._peers.wait(transfer.deadline.remaining())
                    continue  # meanwhile another one may hold it
                waiting.on(s.server)
                stub = await self._peers.stub(s.server, connection, transfer.deadline)
                try:
                    return await do(stub, s, transfer)
                except (Broken, Closed, GenerationChanged, SliceMoved) as error:
                    elsewhere = isinstance(error, (GenerationChanged, SliceMoved))
                    if elsewhere and not repeatable:
                        if isinstance(error, SliceMoved):  # the members have changed, which we are about to learn
                            raise StepAborted(f"the step is lost: {error}") from error
                        raise
                    if transfer.deadline.remaining() <= pause_s:
                        what = f"gave up after {transfer.deadline.timeout_s:g} s; the last attempt failed: {error}"
                        raise Timeout(what) from error
                self.count += 1
                await self._peers.wait(pause_s)
                if not elsewhere:
                    self._same_host.forget(s.server)
                    transfer = dataclasses.replace(transfer, socket_only=True, resume=not repeatable)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

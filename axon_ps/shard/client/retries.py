"""Calls to a shard server that are attempted until they succeed or their deadline passes.

A gather or an upload may be repeated without harm, so it is attempted again from its start after a broken connection or
a change of the generation. A push belongs to one generation. After a broken connection it is resumed at the first
element that the server lacks. A change of the generation is left to the caller, since the step is lost. Every attempt
goes to the present holder of the slice, so a gather whose server died is finished by another server.
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
GATHERS, PUSHES = 0, 1
"""Indexes of the connections to a server."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.5


class Retries:
    """The attempts of one model's calls.

    Args:
        peers: the servers.
        same_host: the shared memory, which is forgotten for a server after a failure.
        holder: returns the slice with its present holder, by the index of the holder.

    Attributes:
        count: number of repeated attempts.
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

        An attempt raises `Closed` if the server has a new address and its old connection was closed. An attempt that
        failed for another reason than a new generation or placement may have failed because one side cannot read the
        other's memory any more. So everything is then sent through the socket.

        Args:
            do: the function that makes one attempt.
            connection: index of the connection to the server.
            s: the slice.
            transfer: the transfer.
            repeatable: whether the call may be repeated from its start, also in another generation.
            holder: index of the slice's holder, the primary first.

        Raises:
            Closed: the connections were closed.
            Timeout: no time is left for another attempt.
            AxonError: an attempt raised an error after which it is not repeated.
        """
        pause_s = _FIRST_PAUSE_S
        with self._peers.waiting() as waiting:
            while True:
                s = self._holder(s, holder)
                if not self._peers.has(s.server) and not transfer.deadline.expired:
                    await self._peers.wait(transfer.deadline.remaining())
                    continue  # another server may hold it by now
                waiting.on(s.server)
                stub = await self._peers.stub(s.server, connection, transfer.deadline)
                try:
                    return await do(stub, s, transfer)
                except (Broken, Closed, GenerationChanged, SliceMoved) as error:
                    elsewhere = isinstance(error, (GenerationChanged, SliceMoved))
                    if elsewhere and not repeatable:
                        if isinstance(error, SliceMoved):  # the members have changed; the event is about to arrive
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

"""A simulated worker's collectives, as `GrpcBackend` makes them, on the simulation's loop.

In each step of a job with collectives, the workers of its generation perform one. Its operation and its data follow
from the number of the step, so every rank knows the results of all.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Final
from unittest import mock

import numpy as np

from axon_ps.aggregation.client import client
from axon_ps.aggregation.client.client import CollectiveClient, GroupHandle
from axon_ps.aggregation.core import engine, mailbox, stripes
from axon_ps.collectives.backends.grpc import _buffers, _copy_own
from axon_ps.collectives.backends.request import Request
from axon_ps.errors import AxonError, Broken, GenerationChanged, MemberLost, Timeout
from axon_ps.reduction.call import Call, Operation
from axon_ps.types import Array, DType, Membership, ReduceOp

NUMEL: Final = 30
"""Elements of each rank; a message between two ranks has up to as many."""

TIMEOUT_S: Final = 200.0
"""Seconds; longer than a rank may be late. A rank that breaks off, or is lost, ends the operation before."""

SHORT_TIMEOUT_S: Final = 0.4
"""Seconds for some operations: less than ranks may be late, since they compute for up to a second."""

MESSAGE_TIMEOUT_S: Final = 20.0
"""Seconds for a message between two ranks: if one breaks off before it reaches the server, the other waits as long."""


@contextlib.contextmanager
def small() -> Iterator[None]:
    """Make sizes small: a few elements are several stripes of several segments, and some messages wait."""
    with contextlib.ExitStack() as stack:
        for module, name, nbytes in (
            (stripes, "STRIPE_BYTES", 64),
            (stripes, "SEGMENT_BYTES", 32),
            (stripes, "LARGE_SEGMENT_BYTES", 32),
            (stripes, "SMALL_SEGMENT_BYTES", 16),
            (mailbox, "EAGER_BYTES", 64),
            (engine, "EAGER_BYTES", 64),
            (client, "EAGER_BYTES", 64),
        ):
            stack.enter_context(mock.patch.object(module, name, nbytes))
        stripes._segments.cache_clear()
        stack.callback(stripes._segments.cache_clear)
        yield


def group_of(membership: Membership, id: str) -> GroupHandle:
    """Return the group of all workers of a generation, as one of them uses it."""
    workers = membership.workers
    members = tuple(worker.id for worker in workers)
    ranks = tuple(worker.rank for worker in workers)
    return GroupHandle(name=f"of {membership.generation}", rank=members.index(id), ranks=ranks, members=members)


def data_of(rank: int, step: int, numel: int = NUMEL) -> Array:
    """Return the data that a rank sends in a step."""
    return (np.arange(numel) + 1000 * rank + step).astype(np.float32)


class SimulatedCollectives:
    """See the module.

    Args:
        client: the worker's client.
        may_fail: returns True if something has happened by which an operation may fail.
    """

    def __init__(self, client: CollectiveClient, may_fail: Callable[[], bool]) -> None:
        self._client = client
        self._may_fail = may_fail

    async def perform(self, group: GroupHandle, step: int) -> str:
        """Perform the operation of a step; return a description of a wrong outcome, else ""."""
        perform = (self._reduce, self._gather, self._exchange, self._pass_on)[step % 4]
        try:
            got, wanted = await perform(group, step)
        except (Broken, MemberLost, GenerationChanged, Timeout) as error:
            if isinstance(error, Timeout) and self._timeout_s(step) == TIMEOUT_S:
                return f"a collective did not end: {error!r}"
            if self._may_fail() or self._timeout_s(step) == SHORT_TIMEOUT_S:
                return ""
            return f"a collective failed, and nothing had happened: {error!r}"
        except AxonError as error:
            return f"a collective failed: {error!r}"
        return "" if np.array_equal(got, wanted) else f"a collective gave {got.tolist()}, not {wanted.tolist()}"

    @staticmethod
    def _timeout_s(step: int) -> float:
        if step % 4 == 3:
            return MESSAGE_TIMEOUT_S
        return SHORT_TIMEOUT_S if step % 6 == 4 else TIMEOUT_S

    async def _run(self, group: GroupHandle, request: Request) -> None:
        ranks, timeout_s = len(group.ranks), self._timeout_s(request.call.sequence)
        await self._client.collective(group, request.call, _buffers(request, group.rank, ranks), timeout_s)
        _copy_own(request, group.rank, ranks)

    async def _reduce(self, group: GroupHandle, step: int) -> tuple[Array, Array]:
        data = data_of(group.rank, step)
        call = Call(sequence=step, operation=Operation.ALL_REDUCE, dtype=DType.F32, counts=(NUMEL,), op=ReduceOp.SUM)
        await self._run(group, Request(call=call, data=data))
        return data, np.sum([data_of(rank, step) for rank in range(len(group.ranks))], axis=0)

    async def _gather(self, group: GroupHandle, step: int) -> tuple[Array, Array]:
        ranks = range(len(group.ranks))
        counts = tuple(NUMEL - rank for rank in ranks)
        output = np.full(sum(counts), np.nan, np.float32)
        call = Call(sequence=step, operation=Operation.ALL_GATHER, dtype=DType.F32, counts=counts)
        data = data_of(group.rank, step, counts[group.rank])
        await self._run(group, Request(call=call, data=data, output=output))
        return output, np.concatenate([data_of(rank, step, counts[rank]) for rank in ranks])

    async def _exchange(self, group: GroupHandle, step: int) -> tuple[Array, Array]:
        ranks, mine = len(group.ranks), group.rank
        counts = (NUMEL // ranks,) * ranks
        output = np.full(sum(counts), np.nan, np.float32)
        call = Call(sequence=step, operation=Operation.ALL_TO_ALL, dtype=DType.F32)
        data = data_of(mine, step, sum(counts))
        await self._run(group, Request(call=call, data=data, output=output, input_counts=counts, output_counts=counts))
        arrays = [data_of(rank, step, sum(counts))[mine * counts[0] : (mine + 1) * counts[0]] for rank in range(ranks)]
        return output, np.concatenate(arrays)

    async def _pass_on(self, group: GroupHandle, step: int) -> tuple[Array, Array]:
        """Send to the next rank, and receive from the previous one."""
        ranks, mine = len(group.ranks), group.rank
        numel = NUMEL if step % 8 == 7 else NUMEL // 4
        got, last = np.full(numel, np.nan, np.float32), (mine - 1) % ranks
        data = data_of(mine, step, numel)
        calls = [
            asyncio.ensure_future(call)
            for call in (
                self._client.send(group, data, DType.F32, (mine + 1) % ranks, step, MESSAGE_TIMEOUT_S),
                self._client.recv(group, got, DType.F32, last, step, MESSAGE_TIMEOUT_S),
            )
        ]
        try:
            await asyncio.gather(*calls)
        finally:
            for call in calls:
                call.cancel()
        return got, data_of(last, step, numel)

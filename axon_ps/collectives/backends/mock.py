"""`MockBackend`: the collectives of threads of one process, for tests and for trying things out.

Owns: the state that the ranks of a group share. The last rank that comes to a collective performs it for all, in rank
order, while the others wait. So results and errors do not depend on the scheduling of the threads.

Invariants:
- The error that aborts one rank, or its time-out, is raised by the others too, when they need that rank.
- A message is copied when it is sent, so `send` returns at once. It is received even if its sender has gone meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar, cast

import numpy as np

from axon_ps.collectives.backends.base import Backend, GroupContext, Operation, disagreement
from axon_ps.collectives.backends.request import Request, check_message, describe, required
from axon_ps.collectives.store import AbortableStore, MemoryStore
from axon_ps.errors import AxonError, Broken, Closed, Disagreement, InvalidRequest, Timeout, again
from axon_ps.reduction import ops
from axon_ps.types import Array, DType, Member, Role

NODE = "mock"

T = TypeVar("T")


@dataclass
class _Round:
    """One collective: the requests of the ranks that have come, and its outcome."""

    requests: dict[int, Request] = field(default_factory=dict)
    done: bool = False
    disagreement: str = ""


@dataclass(frozen=True)
class _Message:
    source: int
    tag: int
    dtype: DType
    data: Array


class _SharedState:
    """The state that the ranks of one group share."""

    def __init__(self, context: GroupContext) -> None:
        self._name = context.name
        self._ranks = context.ranks
        self._changed = threading.Condition()
        self._current = _Round()
        self._inboxes: list[list[_Message]] = [[] for _ in context.ranks]
        self._aborted: dict[int, AxonError] = {}

    def perform(self, rank: int, request: Request, timeout_s: float) -> None:
        """Take part in the next collective; return when all ranks have come and it is done."""
        with self._changed:
            self._raise_end(rank, range(len(self._ranks)))
            current = self._current
            current.requests[rank] = request
            if len(current.requests) == len(self._ranks):
                self._current = _Round()
                self._complete(current)
            elif not self._changed.wait_for(lambda: current.done or bool(self._aborted), timeout_s):
                missing = [r for i, r in enumerate(self._ranks) if i not in current.requests]
                self._abort(rank, Timeout(f"{_who(missing)} did not come to {request.call} within {timeout_s:g} s"))
            if not current.done:
                self._raise_end(rank, range(len(self._ranks)))
            if current.disagreement:
                raise Disagreement(current.disagreement)

    def enqueue(self, to: int, message: _Message) -> None:
        """Append a message to a rank's inbox."""
        with self._changed:
            self._raise_end(message.source, [to])
            self._inboxes[to].append(message)
            self._changed.notify_all()

    def dequeue(self, rank: int, source: int, tag: int, timeout_s: float) -> _Message:
        """Return the oldest message for `rank` from `source` (-1 = any rank) with that tag, as soon as there is one."""
        inbox = self._inboxes[rank]
        others = [source] if source >= 0 else [i for i in range(len(self._ranks)) if i != rank] or [rank]

        def fitting() -> _Message | None:
            return next((m for m in inbox if m.tag == tag and source in (-1, m.source)), None)

        def over() -> bool:
            return rank in self._aborted or all(i in self._aborted for i in others)

        with self._changed:
            if not self._changed.wait_for(lambda: fitting() is not None or over(), timeout_s):
                who = _who([self._ranks[i] for i in others])
                self._abort(rank, Timeout(f"{who} did not send a message with tag {tag} within {timeout_s:g} s"))
            message = fitting()
            if message is None or isinstance(self._aborted.get(rank), Closed):
                self._raise_end(rank, others)
            inbox[:] = [m for m in inbox if m is not message]
            return cast(_Message, message)

    def abort(self, rank: int, error: AxonError) -> None:
        """End pending and later calls of `rank`, and those of other ranks that need it, with `error`."""
        with self._changed:
            self._abort(rank, error)

    def _abort(self, rank: int, error: AxonError) -> None:
        if rank not in self._aborted:
            self._aborted[rank] = again(error)
        self._changed.notify_all()

    def _raise_end(self, rank: int, needed: Iterable[int]) -> None:
        if rank in self._aborted:
            raise again(self._aborted[rank])
        for other in needed:
            if isinstance(error := self._aborted.get(other), Closed):
                raise Broken(f"rank {self._ranks[other]} has closed group {self._name!r}")
            if error is not None:
                raise again(error)

    def _complete(self, current: _Round) -> None:
        requests = [current.requests[i] for i in range(len(self._ranks))]
        calls = [describe(r.call, r.output_counts, r.input_counts) for r in requests]
        unequal = any(r.call != requests[0].call for r in requests)
        if unequal or _mismatched(requests):
            what = f"call {requests[0].call.sequence} of group {self._name!r}"
            current.disagreement = str(disagreement(dict(zip(self._ranks, calls, strict=True)), what))
        else:
            _PERFORM[requests[0].call.operation](requests)
        current.done = True
        self._changed.notify_all()


class MockBackend(Backend):
    """The collectives of a group of threads. Results have the same bits as with shm and grpc, in every run.

    Args:
        context: the group; its store must be a `MemoryStore`, through which the ranks find each other.

    Raises:
        InvalidRequest: the store is of another kind.
    """

    name: ClassVar[str] = "mock"

    def __init__(self, context: GroupContext) -> None:
        super().__init__(context)
        store = context.store.inner if isinstance(context.store, AbortableStore) else context.store
        if not isinstance(store, MemoryStore):
            raise InvalidRequest(
                "the backend 'mock' is for threads of one process (World.mock(n)); the ranks of group "
                f"{context.name!r} are processes, use 'auto'"
            )
        self._store = store
        self._shared = store.get_or_make(f"mock/{context.name}", lambda: _SharedState(context))

    @classmethod
    def create_world(cls, n: int, *, nodes: Sequence[str] = ()) -> list[MockBackend]:
        """Make the backends of a group of `n` ranks, by rank: one for each of `n` threads.

        `ProcessGroup(backend)` makes a group of each.

        Args:
            n: number of ranks.
            nodes: the node of each rank; empty = all on one.

        Raises:
            InvalidRequest: `n` is less than 1.
        """
        return [cls(context) for context in mock_contexts(n, nodes=nodes)]

    def get_or_make(self, name: str, make: Callable[[], T]) -> T:
        """Return an object that all ranks share; the first call makes it.

        After an error: the next call tries again.
        """
        return self._store.get_or_make(name, make)

    def run(self, request: Request, timeout_s: float) -> None:
        """See `Backend.run`."""
        request.check(self.rank, self.world_size)
        self._shared.perform(self.rank, request, timeout_s)

    def send(self, data: Array, dtype: DType, to: int, tag: int, timeout_s: float) -> None:
        """See `Backend.send`; it returns at once."""
        check_message(data, dtype, to, tag, self.world_size, receiving=False)
        self._shared.enqueue(to, _Message(self.rank, tag, dtype, data.copy()))

    def recv(self, data: Array, dtype: DType, source: int, tag: int, timeout_s: float) -> int:
        """See `Backend.recv`."""
        check_message(data, dtype, source, tag, self.world_size, receiving=True)
        message = self._shared.dequeue(self.rank, source, tag, timeout_s)
        if (message.dtype, message.data.size) != (dtype, data.size):
            sender = self.context.ranks[message.source]
            calls = {
                sender: f"send of {message.data.size} {message.dtype.value}",
                self.context.ranks[self.rank]: f"recv of {data.size} {dtype.value}",
            }
            raise disagreement(calls, f"a message with tag {tag} in group {self.context.name!r}")
        np.copyto(data, message.data)
        return message.source

    def abort(self, error: AxonError) -> None:
        """See `Backend.abort`; ranks that need this one get the error too."""
        self._shared.abort(self.rank, error)

    def close(self) -> None:
        """See `Backend.close`."""
        self._shared.abort(self.rank, Closed(f"the backend of group {self.context.name!r} was closed"))


def mock_contexts(
    n: int, *, nodes: Sequence[str] = (), name: str = "mock", ranks: Sequence[int] = ()
) -> list[GroupContext]:
    """Make the contexts of a group of `n` ranks that are threads of this process, by rank.

    Args:
        n: number of ranks.
        nodes: the node of each rank; empty = all on one.
        name: name of the group.
        ranks: their world ranks; empty = 0 to n - 1.

    Raises:
        InvalidRequest: `n` is less than 1.
    """
    if n < 1:
        raise InvalidRequest(f"a group was asked for with {n} ranks; it needs at least 1")
    nodes = nodes or [NODE] * n
    ranks = tuple(ranks) or tuple(range(n))
    members = tuple(
        Member(
            role=Role.WORKER,
            rank=ranks[i],
            incarnation=f"{ranks[i]:032x}",
            node=nodes[i],
            local_rank=list(nodes[:i]).count(nodes[i]),
            replica=i,
        )
        for i in range(n)
    )
    store = MemoryStore()
    return [GroupContext(name=name, rank=i, ranks=ranks, members=members, store=store) for i in range(n)]


def _who(ranks: Sequence[int]) -> str:
    return f"rank {', '.join(map(str, ranks))}"


# ---------------------------------------------------------------------- the collectives, given all ranks' requests


def _mismatched(requests: Sequence[Request]) -> bool:
    if requests[0].call.operation is not Operation.ALL_TO_ALL:
        return False
    return any(r.mismatch(requests, i) for i, r in enumerate(requests))


def _data(requests: Sequence[Request]) -> list[Array]:
    return [required(r.data) for r in requests]


def _outputs(requests: Sequence[Request]) -> list[Array]:
    return [required(r.output) for r in requests]


def _reduced(requests: Sequence[Request]) -> Array:
    call, data = requests[0].call, _data(requests)
    assert call.op is not None
    result = np.empty_like(data[0])
    ops.reduce_into(result, data, call.op, call.dtype)
    return result


def _all_reduce(requests: Sequence[Request]) -> None:
    result = _reduced(requests)
    for data in _data(requests):
        np.copyto(data, result)


def _reduce(requests: Sequence[Request]) -> None:
    np.copyto(_data(requests)[requests[0].call.root], _reduced(requests))


def _broadcast(requests: Sequence[Request]) -> None:
    data = _data(requests)
    for target in data:
        if target is not data[requests[0].call.root]:
            np.copyto(target, data[requests[0].call.root])


def _all_gather(requests: Sequence[Request]) -> None:
    full = np.concatenate(_data(requests))
    for output in _outputs(requests):
        np.copyto(output, full)


def _reduce_scatter(requests: Sequence[Request]) -> None:
    _scatter_partitions(_reduced(requests), requests)


def _gather(requests: Sequence[Request]) -> None:
    np.copyto(required(requests[requests[0].call.root].output), np.concatenate(_data(requests)))


def _scatter(requests: Sequence[Request]) -> None:
    _scatter_partitions(required(requests[requests[0].call.root].data).copy(), requests)


def _scatter_partitions(full: Array, requests: Sequence[Request]) -> None:
    partitions = np.split(full, np.cumsum(requests[0].call.counts)[:-1])
    for output, partition in zip(_outputs(requests), partitions, strict=True):
        np.copyto(output, partition)


def _all_to_all(requests: Sequence[Request]) -> None:
    partitions = [np.split(required(r.data), np.cumsum(r.input_counts)[:-1]) for r in requests]
    for i, output in enumerate(_outputs(requests)):
        np.concatenate([p[i] for p in partitions], out=output)


def _barrier(requests: Sequence[Request]) -> None:
    """Do nothing: all ranks have come."""


_PERFORM: dict[Operation, Callable[[Sequence[Request]], None]] = {
    Operation.ALL_REDUCE: _all_reduce,
    Operation.REDUCE: _reduce,
    Operation.BROADCAST: _broadcast,
    Operation.ALL_GATHER: _all_gather,
    Operation.REDUCE_SCATTER: _reduce_scatter,
    Operation.GATHER: _gather,
    Operation.SCATTER: _scatter,
    Operation.ALL_TO_ALL: _all_to_all,
    Operation.BARRIER: _barrier,
    Operation.REFUSAL: _barrier,
}

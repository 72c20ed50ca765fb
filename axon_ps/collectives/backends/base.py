"""The interface of backends: the collectives of one group of ranks, over flat arrays.

A `Backend` moves and reduces bytes; tensors, shapes, `Work` and default time-outs are not its concern. `ProcessGroup`
is the layer above: it turns users' arrays into flat ones, numbers the calls, and runs one call of a group after the
other. So a backend is never called concurrently, except `send`, `recv` and `abort`.

Note: [Agreement]
    Every rank describes a collective by a `Call`, the part of its `Request` that has no arrays. All ranks of a group
    must give equal ones; otherwise every rank gets `Disagreement` with the text of `disagreement()`, before any array
    was changed, and the group can go on. The exception is the order of calls on different groups, which cannot be
    checked. A rank that cannot make its call makes a refusal in its place: it differs from all calls, so the others get
    its reason, at once.

Note: [Rank order]
    Reductions combine contributions in the order of ranks, ((x0 + x1) + x2) + ..., in f32 for bf16 and f16, rounded
    once. So a result has the same bits on every rank, in every run, and with shm, grpc and mock.
    `HierarchicalBackend` reduces inside nodes first, and NCCL and gloo in orders of their own.

Note: [After an error]
    `Disagreement` and `InvalidRequest` leave the group usable. Any other error does not: some ranks may have finished
    the call and others not. The group is then aborted: all pending and later calls raise that error.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

from axon_ps.collectives.backends.request import Request
from axon_ps.errors import AxonError
from axon_ps.reduction.call import Call, Operation, disagreement
from axon_ps.types import COLLECTIVE_DTYPES, Array, DType, Member

__all__ = ["Backend", "Call", "GroupContext", "GroupStore", "Operation", "Request", "disagreement"]


class GroupStore(Protocol):
    """The key-value store that the ranks of a group share. Its calls block; any thread may make them."""

    def put(self, key: str, value: bytes) -> None:
        """Store a value, at most 1 MiB."""

    def wait(self, key: str, timeout_s: float) -> bytes:
        """Return the value of a key as soon as there is one.

        Raises:
            Timeout: it was not stored in time.
        """

    def delete(self, key: str) -> None:
        """Remove a key, if there is one."""


@dataclass(frozen=True, kw_only=True)
class GroupContext:
    """A group and its members, as one of its ranks sees them.

    Attributes:
        name: same on every member and never used again in the job; printable, at most 200 characters.
        rank: our position in the group.
        ranks: the members' world ranks, by position; messages name these.
        members: the members, by position; mock groups have invented ones.
        store: the store by which they find each other.
        timeout_s: seconds that making the backend may take.
        ended: returns the error that ended the group, once there is one; checked by waits while a backend is made.
    """

    name: str
    rank: int
    ranks: tuple[int, ...]
    members: tuple[Member, ...]
    store: GroupStore
    timeout_s: float = 300.0
    ended: Callable[[], AxonError | None] = lambda: None


class Backend(ABC):
    """The collectives of one group. Its calls block; see this module's notes.

    Attributes:
        name: the name under which it is selected ("shm").
        buffers_messages: True = messages are still received after their sender has closed its backend and exited.
        dtypes: the element types that it supports.
        context: the group.
        rank: our position in the group.
        world_size: number of ranks.
    """

    name: ClassVar[str]
    buffers_messages: ClassVar[bool] = False
    dtypes: tuple[DType, ...] = COLLECTIVE_DTYPES

    def __init__(self, context: GroupContext) -> None:
        self.context = context
        self.rank = context.rank
        self.world_size = len(context.ranks)

    def sibling(self, context: GroupContext) -> Backend:
        """Make another backend of this kind, for a group of some of our ranks; all of those make it together.

        Raises:
            AxonError: it cannot be made.
        """
        return type(self)(context)

    @abstractmethod
    def run(self, request: Request, timeout_s: float) -> None:
        """Make the collective call of a request. It begins with `Request.check`.

        Raises:
            Disagreement: the ranks' calls differ, or in an all-to-all a rank does not send as many elements as the
                receiver expects. See Note: [Agreement].
            InvalidRequest: arrays do not fit the call, or it cannot be done (AVERAGE of integers); raised on this rank
                before anything was sent. The other ranks wait for a call of that number: make `call.refused(error)`.
            Timeout: some ranks did not come; the message names them, by world rank.
            AxonError: the error given to `abort`, or `Broken` when the transport failed.

        After an error: see Note: [After an error]. The values of output arrays are undefined, except after
        `Disagreement`.
        """

    @abstractmethod
    def send(self, data: Array, dtype: DType, to: int, tag: int, timeout_s: float) -> None:
        """Send data: T[any] to a rank; return when `data` may be changed. Messages of one tag arrive in order.

        It may be called at the same time as any other method, from any thread.

        Raises:
            Disagreement: the receiver expects another size or dtype, and we still waited for it.
        """

    @abstractmethod
    def recv(self, data: Array, dtype: DType, source: int, tag: int, timeout_s: float) -> int:
        """Fill data: T[any] with the next message of a rank (-1 = any) with this tag; return the sender's position.

        Raises:
            Disagreement: the message has another size or dtype; it is dropped.
        """

    @abstractmethod
    def abort(self, error: AxonError) -> None:
        """End all pending and later calls with `error`; the first error counts. Any thread may call it."""

    @abstractmethod
    def close(self) -> None:
        """Free all resources, on this rank only. It may be repeated; no call may be pending."""

    def statistics(self) -> dict[str, float]:
        """Return counters: bytes copied, sent and received, waits."""
        return {}


if not TYPE_CHECKING:  # a type checker would take every name for one of this module

    def __getattr__(name: str) -> object:
        """Return a class by its old name, for one release."""
        if name != "Store":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        warnings.warn(f"{__name__}.Store is called GroupStore now; import that", DeprecationWarning, stacklevel=2)
        return GroupStore

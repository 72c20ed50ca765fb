"""`ProcessGroup`: the collectives of some workers, on arrays of any kind.

Owns: the interface of collectives and messages; `arguments` and `arrays` check what is given. Refuses: to move a byte;
its `Backend`s do that. One is for host memory and one for device memory; each is made when it is first needed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from axon_ps.collectives import arguments, arrays
from axon_ps.collectives.arguments import Async, Counts, Op, Seconds, Shape, Sync, rank_names
from axon_ps.collectives.arrays import ListT, T
from axon_ps.collectives.backends.base import Backend, disagreement
from axon_ps.collectives.backends.mock import MockBackend
from axon_ps.collectives.current_world import current
from axon_ps.collectives.group_calls import GroupCalls
from axon_ps.collectives.work import Work
from axon_ps.errors import AxonError, InvalidRequest, Misuse
from axon_ps.types import Array, Member, ReduceOp

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from axon_ps.collectives.arrays import AnyArray
    from axon_ps.collectives.current_world import JobWorld

ANY_SOURCE = -1
BACKEND_TIMEOUT_S = 60.0
"""Default time-out of the operations of a group that was made of a backend, in seconds."""

_DESCRIPTION_BYTES = 256


class ProcessGroup:
    """Some workers of a job, in a fixed order. Ranks below are positions in the group; `ranks` has their world ranks.

    Every collective takes a numpy, torch or cupy array of any layout, or memory by the buffer protocol or DLPack, of
    dtypes f64 f32 f16 bf16 i64 i32 u8 bool. Unless a method allows more, all ranks must give the same shape. All must
    give the same dtype, and make their calls in the same order. Each blocks, at most `timeout_s` seconds (the world's
    default if None), or with `async_op=True` returns a `Work` whose `wait()` gives the result. The arrays must not be
    touched before that.

    Every collective raises:

        Disagreement: the ranks' calls differ; every rank gets the calls of all ranks. Nothing was changed, except that
            `out` of an all-reduce may have `data`, and the group can go on.
        InvalidRequest: this rank's arguments are not valid. The matching calls of the other ranks end with a
            `Disagreement` that has the reason; until they come this rank waits for them, as in any call.
        MemberLost: a member has died or left.
        Timeout: some members did not come; the message names them.
        Broken: a rank broke off, or the transport failed.
        Misuse: this worker is not a member, or this process is a fork of it.
        Closed: the group or the world was closed.
        AxonError: the backend cannot be made (`Unreachable`, `Busy`, `NcclError`, for example).

    After an error: after `Disagreement`, `InvalidRequest` and `Misuse` the group can go on. After any other it has
    ended, and the values of output arrays are undefined. Make another group of the workers that are left.

    Attributes:
        name: name of the group, the same on every member.
        ranks: the members' world ranks, by position.
        members: the members, by position.
        world_size: number of members.
        size: the same.
        is_world: True if it is a group of all workers of the job.
        calls: the calls of the group, in their order.
    """

    def __init__(self, backend: Backend | GroupCalls, *, timeout_s: float = BACKEND_TIMEOUT_S) -> None:
        """Make a group of the ranks that a backend connects; the groups of a world are made by the world.

        Args:
            backend: the group's; it is closed with the group. Sub-groups get siblings of it. A world passes calls
                instead.
            timeout_s: default time-out of every operation, in seconds; for groups made of a backend.
        """
        self.calls = backend if isinstance(backend, GroupCalls) else GroupCalls.over(backend, timeout_s)
        self._who = self.calls.members
        self.name, self.ranks, self.is_world = self._who.name, self._who.ranks, self._who.is_world
        self.members: tuple[Member, ...] = self._who.context.members
        self.size = self.world_size = self._who.world_size
        self._num_sub_groups = 0

    @staticmethod
    def new(of: Backend | Sequence[int], *, timeout_s: float = BACKEND_TIMEOUT_S) -> ProcessGroup:
        """Return `ProcessGroup(backend)`, or for world ranks `World.current().new_group(ranks)`.

        Args:
            of: the backend, or the ranks.
            timeout_s: default time-out of every operation, in seconds; for groups made of a backend.

        Raises:
            Misuse: ranks were given, and there is no current world.
            InvalidRequest, Disagreement: as for `World.new_group`.
        """
        if isinstance(of, Backend):
            return ProcessGroup(of, timeout_s=timeout_s)
        if (world := current()) is None:
            raise Misuse("there is no current world to make a group of; call axon_ps.World.init() first")
        group: ProcessGroup = world.new_group(of)
        return group

    @overload
    @staticmethod
    def mock() -> ProcessGroup: ...

    @overload
    @staticmethod
    def mock(world_size: int) -> list[ProcessGroup]: ...

    @staticmethod
    def mock(world_size: int | None = None) -> ProcessGroup | list[ProcessGroup]:
        """Make a group of threads of this process, for tests and experiments.

        Features that need a job, such as FSDP, start one when it is needed: see `World.mock`. It ends with the groups.

        Args:
            world_size: number of ranks; None = one, this thread.

        Returns:
            The group; if `world_size` is given, a list with the group as each rank sees it.

        Raises:
            InvalidRequest: `world_size` is less than 1.
        """
        groups = [
            ProcessGroup(backend) for backend in MockBackend.create_world(1 if world_size is None else world_size)
        ]
        return groups[0] if world_size is None else groups

    # ------------------------------------------------------------------ members

    @property
    def rank(self) -> int:
        """This worker's position in the group.

        Raises:
            Misuse: this worker is not a member.
        """
        return self._who.rank

    def __repr__(self) -> str:
        here = f"this worker at position {self.rank}" if self._who.joined else "without this worker"
        return f"<{type(self).__name__} {self.name!r} of ranks {list(self.ranks)}, {here}>"

    def contains(self, rank: int) -> bool:
        """Return True if a world rank is a member."""
        return rank in self.ranks

    @property
    def world(self) -> JobWorld:
        """The world it belongs to.

        Raises:
            Misuse: it has none, since it was made of a backend.
        """
        return self._who.world

    @property
    def sequence(self) -> int:
        """The number of collectives that this worker has begun in it."""
        return self.calls.sequence

    @property
    def backend(self) -> str:
        """Name of the backend that serves host memory. The first call is collective.

        Raises:
            Misuse: this worker is not a member.
            AxonError: it cannot be made, or the group has ended.
        """
        return self.backend_of().name

    def backend_of(self, data: Any = None) -> Backend:
        """Return the backend for an array, or for host memory. The first call for either memory is collective.

        Raises:
            Misuse: this worker is not a member.
            AxonError: it cannot be made, or the group has ended.
        """
        return self.calls.backend_of(data is not None and arrays.flatten(data, writable=False).device)

    # ------------------------------------------------------------------ the end

    def abort(self, error: AxonError) -> None:
        """End all pending and later calls, here and in sub-groups, with `error`. Any thread may call it.

        Raises:
            Misuse: this process is a fork of a worker; the group goes on in the parent.
        """
        self.calls.abort(error)

    def close(self, linger_s: float = 0.0) -> None:
        """Free the group on this worker, sub-groups first; pending calls are aborted. May be repeated.

        A job that was started for the group ends with it.

        Args:
            linger_s: seconds to wait first until messages from asynchronous sends are received.

        Raises:
            Misuse: this process is a fork of a worker; the group goes on in the parent.
        """
        self.calls.close(linger_s)
        self._who.end_world()

    def statistics(self) -> dict[str, float]:
        """Return the counters of its backends."""
        return self.calls.backends.statistics()

    # ------------------------------------------------------------------ collectives

    @overload
    def all_reduce(
        self, data: T, op: Op = ReduceOp.SUM, *, out: T | None = None, timeout_s: Seconds = None, async_op: Sync = False
    ) -> T: ...
    @overload
    def all_reduce(
        self, data: T, op: Op = ReduceOp.SUM, *, out: T | None = None, timeout_s: Seconds = None, async_op: Async
    ) -> Work[T]: ...
    @overload
    def all_reduce(
        self, data: T, op: Op = ReduceOp.SUM, *, out: T | None = None, timeout_s: Seconds = None, async_op: bool
    ) -> T | Work[T]: ...
    def all_reduce(
        self, data: Any, op: Op = ReduceOp.SUM, *, out: Any = None, timeout_s: Seconds = None, async_op: bool = False
    ) -> Any:
        """Replace `data` (or `out`, if given; then `data` is only read) by the reduction of all ranks' data.

        `data` has the same shape and dtype on every rank.

        Returns:
            The array that holds the result; with `async_op` a `Work` that gives it.

        Raises:
            Disagreement, InvalidRequest, MemberLost, Timeout: see the class.
        """
        prepare = partial(arguments.all_reduce, data, op, out)
        return self.calls.make("all_reduce", prepare, data, timeout_s, async_op)

    @overload
    def all_reduce_each(
        self, data: ListT, op: Op = ReduceOp.SUM, *, timeout_s: Seconds = None, async_op: Sync = False
    ) -> ListT: ...
    @overload
    def all_reduce_each(
        self, data: ListT, op: Op = ReduceOp.SUM, *, timeout_s: Seconds = None, async_op: Async
    ) -> Work[ListT]: ...
    @overload
    def all_reduce_each(
        self, data: ListT, op: Op = ReduceOp.SUM, *, timeout_s: Seconds = None, async_op: bool
    ) -> ListT | Work[ListT]: ...
    def all_reduce_each(
        self, data: Any, op: Op = ReduceOp.SUM, *, timeout_s: Seconds = None, async_op: bool = False
    ) -> Any:
        """Replace each array by the reduction of all ranks' arrays, one after the other, until an error.

        Each array has the same shape and dtype on every rank.

        Returns:
            `data`; with `async_op` a `Work` that gives it.

        Raises:
            Disagreement, InvalidRequest, MemberLost, Timeout: see the class.
        """
        device = any(map(arrays.on_device, data))
        with self.calls.preparing("all_reduce_each", device, timeout_s, async_op) as limit_s:
            calls = [arguments.all_reduce(array, op) for array in data]
        return self.calls.make_each("all_reduce_each", calls, data, limit_s, async_op)

    @overload
    def reduce(
        self, data: T, dst: int = 0, op: Op = ReduceOp.SUM, *, timeout_s: Seconds = None, async_op: Sync = False
    ) -> T: ...
    @overload
    def reduce(
        self, data: T, dst: int = 0, op: Op = ReduceOp.SUM, *, timeout_s: Seconds = None, async_op: Async
    ) -> Work[T]: ...
    @overload
    def reduce(
        self, data: T, dst: int = 0, op: Op = ReduceOp.SUM, *, timeout_s: Seconds = None, async_op: bool
    ) -> T | Work[T]: ...
    @rank_names("dst", old="root")
    def reduce(
        self, data: Any, dst: int = 0, op: Op = ReduceOp.SUM, *, timeout_s: Seconds = None, async_op: bool = False
    ) -> Any:
        """Replace `data` on rank `dst` by the reduction of all ranks' data; elsewhere it is only read.

        `data` has the same shape and dtype on every rank.

        Returns:
            `data`; with `async_op` a `Work` that gives it.

        Raises:
            Disagreement, InvalidRequest, MemberLost, Timeout: see the class.
        """
        prepare = partial(arguments.reduce, self._who, data, dst, op)
        return self.calls.make("reduce", prepare, data, timeout_s, async_op)

    @overload
    def broadcast(self, data: T, src: int = 0, *, timeout_s: Seconds = None, async_op: Sync = False) -> T: ...
    @overload
    def broadcast(self, data: T, src: int = 0, *, timeout_s: Seconds = None, async_op: Async) -> Work[T]: ...
    @overload
    def broadcast(self, data: T, src: int = 0, *, timeout_s: Seconds = None, async_op: bool) -> T | Work[T]: ...
    @rank_names("src", old="root")
    def broadcast(self, data: Any, src: int = 0, *, timeout_s: Seconds = None, async_op: bool = False) -> Any:
        """Replace `data` by that of rank `src`.

        `data` has the same shape and dtype on every rank.

        Returns:
            `data`; with `async_op` a `Work` that gives it.

        Raises:
            Disagreement, InvalidRequest, MemberLost, Timeout: see the class.
        """
        prepare = partial(arguments.broadcast, self._who, data, src)
        return self.calls.make("broadcast", prepare, data, timeout_s, async_op)

    @overload
    def all_gather(
        self, data: T, *, out: T | None = None, counts: Counts = None, timeout_s: Seconds = None, async_op: Sync = False
    ) -> T: ...
    @overload
    def all_gather(
        self, data: T, *, out: T | None = None, counts: Counts = None, timeout_s: Seconds = None, async_op: Async
    ) -> Work[T]: ...
    @overload
    def all_gather(
        self, data: T, *, out: T | None = None, counts: Counts = None, timeout_s: Seconds = None, async_op: bool
    ) -> T | Work[T]: ...
    def all_gather(
        self, data: Any, *, out: Any = None, counts: Counts = None, timeout_s: Seconds = None, async_op: bool = False
    ) -> Any:
        """Gather all ranks' data, one after the other along the first dimension (a scalar counts as one row).

        Args:
            data: this rank's rows: [rows, ...]. It may be this rank's partition of `out` (same memory).
            out: the array for the result: [all rows, ...]; None = a new array.
            counts: rows by rank; None = every rank has as many as this one.
            timeout_s: seconds that it may take.
            async_op: return a `Work`.

        Returns:
            The array that holds the result; with `async_op` a `Work` that gives it.

        Raises:
            Disagreement, InvalidRequest, MemberLost, Timeout: see the class.
        """
        prepare = partial(arguments.all_gather, self._who, data, out, counts)
        return self.calls.make("all_gather", prepare, data, timeout_s, async_op)

    @overload
    def reduce_scatter(
        self,
        data: T,
        op: Op = ReduceOp.SUM,
        *,
        out: T | None = None,
        counts: Counts = None,
        timeout_s: Seconds = None,
        async_op: Sync = False,
    ) -> T: ...
    @overload
    def reduce_scatter(
        self,
        data: T,
        op: Op = ReduceOp.SUM,
        *,
        out: T | None = None,
        counts: Counts = None,
        timeout_s: Seconds = None,
        async_op: Async,
    ) -> Work[T]: ...
    @overload
    def reduce_scatter(
        self,
        data: T,
        op: Op = ReduceOp.SUM,
        *,
        out: T | None = None,
        counts: Counts = None,
        timeout_s: Seconds = None,
        async_op: bool,
    ) -> T | Work[T]: ...
    def reduce_scatter(
        self,
        data: Any,
        op: Op = ReduceOp.SUM,
        *,
        out: Any = None,
        counts: Counts = None,
        timeout_s: Seconds = None,
        async_op: bool = False,
    ) -> Any:
        """Return this rank's rows of the reduction of all ranks' data.

        Args:
            data: [rows, ...], the same shape on every rank; only read.
            op: the reduction.
            out: the array for the result: [this rank's rows, ...]; None = a new array. It may be its partition of
                `data`.
            counts: rows by rank; None = as even as possible, the first ranks have one more (`numpy.array_split`).
            timeout_s: seconds that it may take.
            async_op: return a `Work`.

        Returns:
            The array that holds the result; with `async_op` a `Work` that gives it.

        Raises:
            Disagreement, InvalidRequest, MemberLost, Timeout: see the class.
        """
        prepare = partial(arguments.reduce_scatter, self._who, data, op, out, counts)
        return self.calls.make("reduce_scatter", prepare, data, timeout_s, async_op)

    @overload
    def gather(
        self,
        data: T,
        dst: int = 0,
        *,
        out: T | None = None,
        counts: Counts = None,
        timeout_s: Seconds = None,
        async_op: Sync = False,
    ) -> T | None: ...
    @overload
    def gather(
        self,
        data: T,
        dst: int = 0,
        *,
        out: T | None = None,
        counts: Counts = None,
        timeout_s: Seconds = None,
        async_op: Async,
    ) -> Work[T | None]: ...
    @overload
    def gather(
        self,
        data: T,
        dst: int = 0,
        *,
        out: T | None = None,
        counts: Counts = None,
        timeout_s: Seconds = None,
        async_op: bool,
    ) -> T | Work[T | None] | None: ...
    @rank_names("dst", old="root")
    def gather(
        self,
        data: Any,
        dst: int = 0,
        *,
        out: Any = None,
        counts: Counts = None,
        timeout_s: Seconds = None,
        async_op: bool = False,
    ) -> Any:
        """Gather all ranks' data on rank `dst`, one after the other along the first dimension; return None elsewhere.

        Args:
            data: this rank's rows: [rows, ...].
            dst: the rank that gets them.
            out: on that rank, the array for the result: [all rows, ...]; None = a new array.
            counts: rows by rank; None = every rank has as many as this one.
            timeout_s: seconds that it may take.
            async_op: return a `Work`.

        Raises:
            Disagreement, InvalidRequest, MemberLost, Timeout: see the class.
        """
        prepare = partial(arguments.gather, self._who, data, dst, out, counts)
        return self.calls.make("gather", prepare, data, timeout_s, async_op)

    @overload
    def scatter(
        self,
        data: T | None,
        src: int = 0,
        *,
        out: T | None = None,
        counts: Counts = None,
        timeout_s: Seconds = None,
        async_op: Sync = False,
    ) -> T: ...
    @overload
    def scatter(
        self,
        data: T | None,
        src: int = 0,
        *,
        out: T | None = None,
        counts: Counts = None,
        timeout_s: Seconds = None,
        async_op: Async,
    ) -> Work[T]: ...
    @overload
    def scatter(
        self,
        data: T | None,
        src: int = 0,
        *,
        out: T | None = None,
        counts: Counts = None,
        timeout_s: Seconds = None,
        async_op: bool,
    ) -> T | Work[T]: ...
    @rank_names("src", old="root")
    def scatter(
        self,
        data: Any,
        src: int = 0,
        *,
        out: Any = None,
        counts: Counts = None,
        timeout_s: Seconds = None,
        async_op: bool = False,
    ) -> Any:
        """Return this rank's rows of rank `src`'s data.

        Args:
            data: on rank `src`: [all rows, ...]. Elsewhere its values are not used: an array like that one gives
                shape and dtype of the result, and with `out` it may be None.
            src: the rank that has the data.
            out: the array for the result: [this rank's rows, ...]; None = a new array.
            counts: rows by rank; None = every rank gets as many as fit in this rank's `out` (without `out`: an equal
                partition of `data`).
            timeout_s: seconds that it may take.
            async_op: return a `Work`.

        Returns:
            The array that holds the result; with `async_op` a `Work` that gives it.

        Raises:
            Disagreement, InvalidRequest, MemberLost, Timeout: see the class.
        """
        prepare = partial(arguments.scatter, self._who, data, src, out, counts)
        return self.calls.make("scatter", prepare, data, timeout_s, async_op)

    @overload
    def all_to_all(
        self,
        data: T,
        *,
        out: T | None = None,
        output_counts: Counts = None,
        input_counts: Counts = None,
        timeout_s: Seconds = None,
        async_op: Sync = False,
    ) -> T: ...
    @overload
    def all_to_all(
        self,
        data: T,
        *,
        out: T | None = None,
        output_counts: Counts = None,
        input_counts: Counts = None,
        timeout_s: Seconds = None,
        async_op: Async,
    ) -> Work[T]: ...
    @overload
    def all_to_all(
        self,
        data: T,
        *,
        out: T | None = None,
        output_counts: Counts = None,
        input_counts: Counts = None,
        timeout_s: Seconds = None,
        async_op: bool,
    ) -> T | Work[T]: ...
    def all_to_all(
        self,
        data: Any,
        *,
        out: Any = None,
        output_counts: Counts = None,
        input_counts: Counts = None,
        timeout_s: Seconds = None,
        async_op: bool = False,
    ) -> Any:
        """Exchange partitions: partition i of the result is the partition of rank i's data that is for this rank.

        Args:
            data: [rows, ...]: the partitions for rank 0, 1, ... one after the other.
            out: the array for the result: [sum(output_counts), ...]; None = a new array.
            output_counts: rows that come from each rank; None = as many as go there.
            input_counts: rows that go to each rank; None = equal partitions.
            timeout_s: seconds that it may take.
            async_op: return a `Work`.

        Returns:
            The array that holds the result; with `async_op` a `Work` that gives it.

        Raises:
            Disagreement, InvalidRequest, MemberLost, Timeout: see the class.
        """
        prepare = partial(arguments.all_to_all, self._who, data, out, output_counts, input_counts)
        return self.calls.make("all_to_all", prepare, data, timeout_s, async_op)

    @overload
    def barrier(self, timeout_s: Seconds = None, *, async_op: Sync = False) -> None: ...
    @overload
    def barrier(self, timeout_s: Seconds = None, *, async_op: Async) -> Work[None]: ...
    @overload
    def barrier(self, timeout_s: Seconds = None, *, async_op: bool) -> Work[None] | None: ...
    def barrier(self, timeout_s: Seconds = None, *, async_op: bool = False) -> Any:
        """Return when every member has called it, within `timeout_s` seconds.

        Raises:
            Disagreement, InvalidRequest, MemberLost, Timeout: see the class.
        """
        return self.calls.make("barrier", arguments.barrier, None, timeout_s, async_op)

    # ------------------------------------------------------------------ point to point

    @overload
    def send(
        self, data: AnyArray, dst: int, *, tag: int = 0, timeout_s: Seconds = None, async_op: Sync = False
    ) -> None: ...
    @overload
    def send(
        self, data: AnyArray, dst: int, *, tag: int = 0, timeout_s: Seconds = None, async_op: Async
    ) -> Work[None]: ...
    @overload
    def send(
        self, data: AnyArray, dst: int, *, tag: int = 0, timeout_s: Seconds = None, async_op: bool
    ) -> Work[None] | None: ...
    @rank_names("dst", old="to")
    def send(self, data: Any, dst: int, *, tag: int = 0, timeout_s: Seconds = None, async_op: bool = False) -> Any:
        """Send an array to a rank, which must `recv` it. Messages with one tag arrive in the order they were sent.

        Returns:
            None when `data` may be changed again; with `async_op` a `Work`.

        Raises:
            InvalidRequest: `dst` is this rank, or is not a rank of the group.
            Disagreement: the receiver expected another size or dtype.
        """
        if self._who.checked_rank(dst, "dst") == self.rank:
            raise InvalidRequest(f"rank {dst} cannot send to itself")
        return self.calls.send(arrays.flatten(data, writable=False), dst, tag, timeout_s, async_op)

    @overload
    def recv(
        self, out: AnyArray, src: int = ANY_SOURCE, *, tag: int = 0, timeout_s: Seconds = None, async_op: Sync = False
    ) -> int: ...
    @overload
    def recv(
        self, out: AnyArray, src: int = ANY_SOURCE, *, tag: int = 0, timeout_s: Seconds = None, async_op: Async
    ) -> Work[int]: ...
    @overload
    def recv(
        self, out: AnyArray, src: int = ANY_SOURCE, *, tag: int = 0, timeout_s: Seconds = None, async_op: bool
    ) -> int | Work[int]: ...
    @overload
    def recv(
        self,
        out: None = None,
        src: int = ANY_SOURCE,
        *,
        tag: int = 0,
        shape: Shape,
        dtype: DTypeLike = np.float32,
        timeout_s: Seconds = None,
        async_op: Sync = False,
    ) -> Array: ...
    @overload
    def recv(
        self,
        out: None = None,
        src: int = ANY_SOURCE,
        *,
        tag: int = 0,
        shape: Shape,
        dtype: DTypeLike = np.float32,
        timeout_s: Seconds = None,
        async_op: Async,
    ) -> Work[Array]: ...
    @overload
    def recv(
        self,
        out: None = None,
        src: int = ANY_SOURCE,
        *,
        tag: int = 0,
        shape: Shape,
        dtype: DTypeLike = np.float32,
        timeout_s: Seconds = None,
        async_op: bool,
    ) -> Array | Work[Array]: ...
    @rank_names("src", old="source")
    def recv(
        self,
        out: Any = None,
        src: int = ANY_SOURCE,
        *,
        tag: int = 0,
        shape: Shape | None = None,
        dtype: DTypeLike = np.float32,
        timeout_s: Seconds = None,
        async_op: bool = False,
    ) -> Any:
        """Fill `out` with the next message of a rank (-1: of any rank) with this tag.

        Args:
            out: the array to fill; None = a new numpy array.
            src: the sender.
            tag: the tag with which it was sent.
            shape: shape of the message, if `out` is not given.
            dtype: numpy dtype of the message, if `out` is not given.
            timeout_s: seconds that it may take.
            async_op: return a `Work`.

        Returns:
            The rank that sent it, or without `out` the new array; with `async_op` a `Work` that gives it.

        Raises:
            InvalidRequest: both `out` and `shape` were given, or neither; or `src` is this rank, or not a member.
            Disagreement: the message has another size or dtype; it is dropped.
        """
        if (out is None) == (shape is None):
            given = "neither was" if out is None else "both were"
            raise InvalidRequest(
                f"recv needs out=, or shape= (and dtype=) of the array that is to be made; {given} given"
            )
        made = None if shape is None else np.empty(shape, arrays.numpy_dtype(dtype))
        if src != ANY_SOURCE and self._who.checked_rank(src, "src") == self.rank:
            raise InvalidRequest(f"rank {src} cannot receive from itself")
        flat = arrays.flatten(out if made is None else made, what="out")
        return self.calls.receive(flat, src, tag, timeout_s, async_op, made)

    # ------------------------------------------------------------------ sub-groups

    def new_group(self, ranks: Sequence[int], *, backend: str = "auto") -> ProcessGroup:
        """Make a group of some members of this one; every member of this group must call it, with the same ranks.

        Args:
            ranks: positions in this group, in the order they shall have in the new one.
            backend: a name of `axon_ps.Backend`; "auto" = by the members' nodes.

        Returns:
            The group; workers outside of it get a group whose collectives raise `Misuse`.

        Raises:
            InvalidRequest: a rank is not of this group, or is given twice, or none is given.
            Disagreement: the members gave different ranks; every member gets it.
        """
        with self.calls.preparing("new_group", False, None, False):
            chosen = [self._who.checked_rank(r, "ranks") for r in ranks]
            if len(set(chosen)) != len(chosen) or not chosen:
                raise InvalidRequest(
                    f"new_group was given the ranks {list(ranks)}; it needs each at most once, and one"
                )
        self._agree(f"new_group({chosen}, backend={str(backend)!r})")
        name = str(self._num_sub_groups)
        self._num_sub_groups += 1
        return ProcessGroup(self.calls.sub_group(name, chosen, backend=backend))

    def named_group(
        self, name: str, ranks: Sequence[int], *, backend: str = "auto", timeout_s: float | None = None
    ) -> ProcessGroup:
        """Make a group of some members that have agreed on it already: only they call this, nothing is sent.

        Args:
            name: the same on every member, never used for another sub-group of this group; not a number.
            ranks: positions in this group, in the order they shall have in the new one; this rank is one of them.
            backend: as for `new_group`.
            timeout_s: default time-out of its operations, in seconds; None = this group's.

        Raises:
            InvalidRequest: a rank is not of this group, or is given twice, or this one is missing.
        """
        chosen = [self._who.checked_rank(r, "ranks") for r in ranks]
        if len(set(chosen)) != len(chosen) or self.rank not in chosen:
            raise InvalidRequest(f"named_group was given the ranks {list(ranks)}; needed is {self.rank}, each once")
        return ProcessGroup(self.calls.sub_group(name, chosen, backend=backend, timeout_s=timeout_s))

    def _agree(self, description: str) -> None:
        """Check that every member calls it with the same description. Collective.

        Raises:
            Disagreement: some do not.
        """
        encoded, ours = description.encode(), np.zeros(_DESCRIPTION_BYTES, np.uint8)
        if len(encoded) > _DESCRIPTION_BYTES:  # long ones may differ behind their beginning
            end = f"... #{hashlib.blake2b(encoded, digest_size=8).hexdigest()}".encode()
            encoded = encoded[: _DESCRIPTION_BYTES - len(end)] + end
        ours[: len(encoded)] = np.frombuffer(encoded, np.uint8)
        theirs = self.all_gather(ours).reshape(self.world_size, -1)
        texts = [bytes(t).rstrip(b"\0").decode("utf-8", "replace") for t in theirs]
        if len(set(texts)) > 1:
            raise disagreement(dict(zip(self.ranks, texts, strict=True)), f"a sub-group of {self.name!r}")

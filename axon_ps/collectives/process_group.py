"""`ProcessGroup`: the collectives of some workers, on arrays of any kind.

Owns: the shapes and dtypes of arguments and results; turning arrays into flat ones. Refuses: to move a byte; its
`Backend`s do that. One is for host memory; another, made when it is first needed, is for device memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, overload

import numpy as np

from axon_ps.collectives import arrays, shapes
from axon_ps.collectives.backends.base import Backend, GroupContext, Operation, disagreement
from axon_ps.collectives.backends.mock import MockBackend
from axon_ps.collectives.current_world import current, mock_world
from axon_ps.collectives.flight_recorder import Recorder
from axon_ps.collectives.group_base import GroupBase, MakeBackend
from axon_ps.collectives.selection import AUTO, DEVICE
from axon_ps.errors import ConfigurationError, InvalidRequest, Misuse
from axon_ps.reduction import ops as reduction
from axon_ps.types import ReduceOp

ANY_SOURCE = -1
BACKEND_TIMEOUT_S = 60.0
"""Default deadline of the operations of a group that was made of a backend."""

_DESCRIPTION_BYTES = 256


class ProcessGroup(GroupBase):
    """Some workers of a job, in a fixed order. Ranks below are positions in the group; `ranks` has their world ranks.

    Every collective takes a numpy, torch or cupy array of any layout, or memory by the buffer protocol or DLPack, of
    dtypes f64 f32 f16 bf16 i64 i32 u8 bool. All ranks must give the same shape (where not said otherwise) and dtype,
    and make their calls in the same order. Each blocks, at most `timeout_s` seconds (the world's default if None), or
    with `async_op=True` returns a `Work` whose `wait()` gives the result; the arrays must not be touched before that.

    Every collective raises:

        Disagreement: the ranks' calls differ; every rank gets the calls of all ranks, nothing was changed, and the
            group can go on.
        InvalidRequest: this rank's arguments are not valid. The matching calls of the other ranks end with a
            `Disagreement` that has the reason; until they come this one waits for them, as any call does.
        MemberLost: a member has died or left.
        Timeout: some members did not come; the message names them.
        Misuse: this worker is not a member.
        Closed: the group or the world was closed.

    After an error: after `Disagreement` and `InvalidRequest` as said. After any other the group has ended, and the
    values of output arrays are undefined; make another group of the workers that are left.

    Attributes:
        name: of the group, the same on every member.
        ranks: the members' world ranks, by position.
    """

    def __init__(self, backend: Backend, *, timeout_s: float = BACKEND_TIMEOUT_S) -> None:
        """Make a group of the ranks that a backend connects; the groups of a world are made by the world.

        Args:
            backend: the group's; it is closed with the group. Sub-groups get siblings of it.
            timeout_s: default deadline of every operation, in seconds.
        """

        def make(context: GroupContext, name: str) -> Backend:
            if name not in (AUTO, DEVICE, backend.name):
                raise ConfigurationError(
                    f"group {backend.context.name!r} was made of a backend {backend.name!r}, and its sub-groups are, "
                    f"too; leave out backend={name!r}, or make a backend of that kind"
                )
            return backend if context.name == backend.context.name else backend.sibling(context)

        world = partial(mock_world, backend) if isinstance(backend, MockBackend) else None
        super().__init__(
            backend.context, make, timeout_s=timeout_s, recorder=Recorder(), backend=backend.name, world=world
        )
        self._began_job = True

    _began_job = False
    """True if the world, if there is one, belongs to a job that was started for this group."""

    @classmethod
    def made_by(cls, context: GroupContext, make: MakeBackend, **options: Any) -> ProcessGroup:
        """Make a group whose backends `make` makes when they are needed; `options` are as for `GroupBase`."""
        group = cls.__new__(cls)
        GroupBase.__init__(group, context, make, **options)
        return group

    @staticmethod
    def new(of: Backend | Sequence[int], *, timeout_s: float = BACKEND_TIMEOUT_S) -> ProcessGroup:
        """Return `ProcessGroup(backend)`, or for world ranks `World.current().new_group(ranks)`.

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

        Features that need a job, such as FSDP, have one: see `World.mock`. It starts when needed, and ends with the
        groups.

        Args:
            world_size: number of ranks; None = one, this thread.

        Returns:
            The group; of several ranks a list with the group as each of them sees it.
        """
        groups = [
            ProcessGroup(backend) for backend in MockBackend.create_world(1 if world_size is None else world_size)
        ]
        return groups[0] if world_size is None else groups

    def close(self, linger_s: float = 0.0) -> None:
        """See `GroupBase.close`; a job that was started for the group ends with it."""
        super().close(linger_s)
        if self._began_job and self._world is not None:
            self._world.close()

    # ------------------------------------------------------------------ collectives

    def all_reduce(
        self,
        data: Any,
        op: ReduceOp = ReduceOp.SUM,
        *,
        out: Any = None,
        timeout_s: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Replace `data` (or `out`, if given; then `data` is only read) by the reduction of all ranks' data.

        Returns:
            The array that holds the result; with `async_op` a `Work` that gives it.
        """
        with self.preparing("all_reduce", arrays.on_device(data), timeout_s, async_op) as limit_s:
            target, flat, source = shapes.target(data, out)
            reduction.check(op, flat.dtype)
        counts = (flat.array.size,)
        return self._collective(
            Operation.ALL_REDUCE, flat, None, target, limit_s, async_op, counts=counts, op=op, copied=source
        )

    def all_reduce_each(
        self,
        data: Sequence[Any],
        op: ReduceOp = ReduceOp.SUM,
        *,
        timeout_s: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Replace each array by the reduction of all ranks' arrays, one after the other, until an error.

        Returns:
            `data`; with `async_op` a `Work` that gives it.
        """
        with self.preparing("all_reduce_each", any(map(arrays.on_device, data)), timeout_s, async_op) as limit_s:
            flats = [arrays.flatten(array) for array in data]
            for flat in flats:
                reduction.check(op, flat.dtype)

        def run() -> Sequence[Any]:
            for flat in flats:
                self._perform(Operation.ALL_REDUCE, flat, None, None, limit_s, counts=(flat.array.size,), op=op)
            return data

        return self._dispatch(self._work_queue, run, "all_reduce_each", async_op)

    def reduce(
        self,
        data: Any,
        root: int = 0,
        op: ReduceOp = ReduceOp.SUM,
        *,
        timeout_s: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Replace `data` on the root by the reduction of all ranks' data; elsewhere it is only read.

        Returns:
            `data`; with `async_op` a `Work` that gives it.
        """
        with self.preparing("reduce", arrays.on_device(data), timeout_s, async_op) as limit_s:
            is_root = self.checked_rank(root, "root") == self.rank
            flat = arrays.flatten(data, writable=is_root)
            reduction.check(op, flat.dtype)
        counts = (flat.array.size,)
        return self._collective(Operation.REDUCE, flat, None, data, limit_s, async_op, counts=counts, op=op, root=root)

    def broadcast(self, data: Any, root: int = 0, *, timeout_s: float | None = None, async_op: bool = False) -> Any:
        """Replace `data` by the root's data.

        Returns:
            `data`; with `async_op` a `Work` that gives it.
        """
        with self.preparing("broadcast", arrays.on_device(data), timeout_s, async_op) as limit_s:
            is_root = self.checked_rank(root, "root") == self.rank
            flat = arrays.flatten(data, writable=not is_root)
        counts = (flat.array.size,)
        return self._collective(Operation.BROADCAST, flat, None, data, limit_s, async_op, counts=counts, root=root)

    def all_gather(
        self,
        data: Any,
        *,
        out: Any = None,
        counts: Sequence[int] | None = None,
        timeout_s: float | None = None,
        async_op: bool = False,
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
        """
        with self.preparing("all_gather", arrays.on_device(data), timeout_s, async_op) as limit_s:
            flat = arrays.flatten(data, writable=False)
            rows = shapes.counts(counts, shapes.rows(flat), self.size)
            shapes.match_rows("data", flat, rows[self.rank])
            out, result = shapes.out(out, data, flat, sum(rows))
            width = shapes.width(flat.shape)
        numel = tuple(r * width for r in rows)
        return self._collective(Operation.ALL_GATHER, flat, result, out, limit_s, async_op, counts=numel)

    def reduce_scatter(
        self,
        data: Any,
        op: ReduceOp = ReduceOp.SUM,
        *,
        out: Any = None,
        counts: Sequence[int] | None = None,
        timeout_s: float | None = None,
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
        """
        with self.preparing("reduce_scatter", arrays.on_device(data), timeout_s, async_op) as limit_s:
            flat = arrays.flatten(data, writable=False)
            reduction.check(op, flat.dtype)
            rows = shapes.split(shapes.rows(flat), self.size) if counts is None else shapes.counts(counts, 0, self.size)
            shapes.match_rows("data", flat, sum(rows))
            out, result = shapes.out(out, data, flat, rows[self.rank])
            width = shapes.width(flat.shape)
        numel = tuple(r * width for r in rows)
        return self._collective(Operation.REDUCE_SCATTER, flat, result, out, limit_s, async_op, counts=numel, op=op)

    def gather(
        self,
        data: Any,
        root: int = 0,
        *,
        out: Any = None,
        counts: Sequence[int] | None = None,
        timeout_s: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Gather all ranks' data on the root, one after the other along the first dimension; return None elsewhere.

        Args:
            data: this rank's rows: [rows, ...].
            root: the rank that gets them.
            out: on the root, the array for the result: [all rows, ...]; None = a new array.
            counts: rows by rank; None = every rank has as many as this one.
            timeout_s: seconds that it may take.
            async_op: return a `Work`.
        """
        with self.preparing("gather", arrays.on_device(data), timeout_s, async_op) as limit_s:
            is_root = self.checked_rank(root, "root") == self.rank
            flat = arrays.flatten(data, writable=False)
            rows = shapes.counts(counts, shapes.rows(flat), self.size)
            shapes.match_rows("data", flat, rows[self.rank])
            out, result = shapes.out(out, data, flat, sum(rows)) if is_root else (None, None)
            width = shapes.width(flat.shape)
        numel = tuple(r * width for r in rows)
        return self._collective(Operation.GATHER, flat, result, out, limit_s, async_op, counts=numel, root=root)

    def scatter(
        self,
        data: Any,
        root: int = 0,
        *,
        out: Any = None,
        counts: Sequence[int] | None = None,
        timeout_s: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Return this rank's rows of the root's data.

        Args:
            data: on the root: [all rows, ...]. Elsewhere its values are not used: an array like the root's gives
                shape and dtype of the result, and with `out` it may be None.
            root: the rank that has the data.
            out: the array for the result: [this rank's rows, ...]; None = a new array.
            counts: rows by rank; None = every rank gets as many as fit in this rank's `out` (without `out`: an equal
                partition of `data`).
            timeout_s: seconds that it may take.
            async_op: return a `Work`.

        Returns:
            The array that holds the result; with `async_op` a `Work` that gives it.
        """
        with self.preparing("scatter", arrays.on_device(data), timeout_s, async_op) as limit_s:
            is_root = self.checked_rank(root, "root") == self.rank
            if data is None and (is_root or out is None):
                raise InvalidRequest("scatter needs data on the root, and elsewhere data or out=, whose shape comes")
            source = arrays.flatten(data, writable=False) if is_root or out is None else None
            if out is not None:
                mine = arrays.flatten(out, what="out")
                rows = shapes.counts(counts, shapes.rows(mine), self.size)
                shapes.match_rows("out", mine, rows[self.rank])
            else:
                assert source is not None
                each = shapes.divided(shapes.rows(source), self.size, "counts=") if counts is None else 0
                rows = shapes.counts(counts, each, self.size)
                out, mine = shapes.out(None, data, source, rows[self.rank])
            if is_root:
                assert source is not None
                shapes.match_rows("data", source, sum(rows))
            width = shapes.width(mine.shape)
        numel = tuple(r * width for r in rows)
        sent = source if is_root else None
        return self._collective(Operation.SCATTER, sent, mine, out, limit_s, async_op, counts=numel, root=root)

    def all_to_all(
        self,
        data: Any,
        *,
        out: Any = None,
        output_counts: Sequence[int] | None = None,
        input_counts: Sequence[int] | None = None,
        timeout_s: float | None = None,
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
        """
        with self.preparing("all_to_all", arrays.on_device(data), timeout_s, async_op) as limit_s:
            flat = arrays.flatten(data, writable=False)
            each = shapes.divided(shapes.rows(flat), self.size, "input_counts=") if input_counts is None else 0
            sent = shapes.counts(input_counts, each, self.size)
            shapes.match_rows("data", flat, sum(sent))
            received = sent if output_counts is None else shapes.counts(output_counts, 0, self.size)
            out, result = shapes.out(out, data, flat, sum(received))
            width = shapes.width(flat.shape)
        outs, ins = tuple(r * width for r in received), tuple(r * width for r in sent)
        return self._collective(
            Operation.ALL_TO_ALL, flat, result, out, limit_s, async_op, output_counts=outs, input_counts=ins
        )

    def barrier(self, timeout_s: float | None = None, *, async_op: bool = False) -> Any:
        """Return when every member has called it."""
        with self.preparing("barrier", False, timeout_s, async_op) as limit_s:
            pass  # there is only the time-out to check
        return self._collective(Operation.BARRIER, None, None, None, limit_s, async_op)

    # ------------------------------------------------------------------ point to point

    def send(self, data: Any, to: int, *, tag: int = 0, timeout_s: float | None = None, async_op: bool = False) -> Any:
        """Send an array to a rank, which must `recv` it. Messages with one tag arrive in the order they were sent.

        Returns:
            None when `data` may be changed again; with `async_op` a `Work`.

        Raises:
            Disagreement: the receiver expected another size or dtype.
        """
        if self.checked_rank(to, "to") == self.rank:
            raise InvalidRequest(f"rank {to} cannot send to itself")
        flat = arrays.flatten(data, writable=False)
        limit_s = self._limit(timeout_s)
        backend = self._backend_for(flat, limit_s)
        what = f"send of {flat.array.size} {flat.dtype.value} to rank {to} of {self.name}"

        def transmit() -> None:
            with arrays.on_stream(flat):
                backend.send(flat.array, flat.dtype, to, tag, limit_s)

        return self._dispatch(self._p2p_queue("send", to, tag), transmit, what, async_op)

    def recv(
        self,
        out: Any = None,
        source: int = ANY_SOURCE,
        *,
        tag: int = 0,
        shape: int | Sequence[int] | None = None,
        dtype: Any = np.float32,
        timeout_s: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Fill `out` with the next message of a rank (-1: of any rank) with this tag.

        Args:
            out: the array to fill; None = a new numpy array.
            source: the sender.
            tag: the tag with which it was sent.
            shape: without `out`: shape of the message.
            dtype: without `out`: numpy dtype of the message.
            timeout_s: seconds that it may take.
            async_op: return a `Work`.

        Returns:
            The rank that sent it, or without `out` the new array; with `async_op` a `Work` that gives it.

        Raises:
            InvalidRequest: both `out` and `shape` were given, or neither.
            Disagreement: the message has another size or dtype; it is dropped.
        """
        if (out is None) == (shape is None):
            given = "neither was" if out is None else "both were"
            raise InvalidRequest(
                f"recv needs out=, or shape= (and dtype=) of the array that is to be made; {given} given"
            )
        made = None if shape is None else np.empty(shape, dtype)
        if source != ANY_SOURCE and self.checked_rank(source, "source") == self.rank:
            raise InvalidRequest(f"rank {source} cannot receive from itself")
        flat = arrays.flatten(out if made is None else made, what="out")
        limit_s = self._limit(timeout_s)
        backend = self._backend_for(flat, limit_s)

        def receive() -> Any:
            with arrays.on_stream(flat):
                sender = backend.recv(flat.array, flat.dtype, source, tag, limit_s)
                flat.finish()
                return sender if made is None else made

        sender = "any rank" if source == ANY_SOURCE else f"rank {source}"
        what = f"receive of {flat.array.size} {flat.dtype.value} from {sender} of {self.name}"
        return self._dispatch(self._p2p_queue("recv", source, tag), receive, what, async_op)

    # ------------------------------------------------------------------ sub-groups

    def new_group(self, ranks: Sequence[int], *, backend: str = "auto") -> ProcessGroup:
        """Make a group of some members of this one; every member of this group must call it, with the same ranks.

        Args:
            ranks: positions in this group, in the order they shall have in the new one.
            backend: a name of `axon_ps.Backend`; "auto" = by the members' nodes.

        Returns:
            The group; workers outside of it get a group whose collectives raise `Misuse`.

        Raises:
            InvalidRequest: a rank is not of this group, or is given twice.
            Disagreement: the members gave different ranks; every member gets it.
        """
        with self.preparing("new_group", False, None, False):
            chosen = [self.checked_rank(r, "ranks") for r in ranks]
            if len(set(chosen)) != len(chosen) or not chosen:
                raise InvalidRequest(
                    f"new_group was given the ranks {list(ranks)}; it needs each at most once, and one"
                )
        self._agree(f"new_group({chosen}, backend={str(backend)!r})")
        name = f"{self.name}/{self._num_sub_groups}"
        self._num_sub_groups += 1
        return self._sub_group(name, chosen, backend, self._timeout_s)

    def named_group(
        self, name: str, ranks: Sequence[int], *, backend: str = "auto", timeout_s: float | None = None
    ) -> ProcessGroup:
        """Make a group of some members that have agreed on it already: only they call this, nothing is sent.

        Args:
            name: the same on every member, never used for another sub-group of this group; not a number.
            ranks: positions in this group, in the order they shall have in the new one; this rank is one of them.
            backend: as for `new_group`.
            timeout_s: default deadline of its operations, in seconds; None = this group's.

        Raises:
            InvalidRequest: a rank is not of this group, or is given twice, or this one is missing.
        """
        chosen = [self.checked_rank(r, "ranks") for r in ranks]
        if len(set(chosen)) != len(chosen) or self.rank not in chosen:
            raise InvalidRequest(f"named_group was given the ranks {list(ranks)}; needed is {self.rank}, each once")
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        return self._sub_group(f"{self.name}/{name}", chosen, backend, timeout_s)

    def _sub_group(self, name: str, chosen: list[int], backend: str, timeout_s: float) -> ProcessGroup:
        member = self.rank in chosen
        context = GroupContext(
            name=name,
            rank=chosen.index(self.rank) if member else -1,
            ranks=tuple(self.ranks[r] for r in chosen),
            members=tuple(self._context.members[r] for r in chosen),
            store=self._context.store,
            timeout_s=min(self._context.timeout_s, timeout_s),
        )
        group = ProcessGroup.made_by(
            context,
            self._make,
            timeout_s=timeout_s,
            recorder=self._recorder,
            backend=backend,
            member=member,
            world=self._world or self._find_world,
        )
        self._children.append(group)
        return group

    def _agree(self, description: str) -> None:
        """Check that every member calls it with the same description. Collective.

        Raises:
            Disagreement: some do not.
        """
        ours = np.zeros(_DESCRIPTION_BYTES, np.uint8)
        encoded = np.frombuffer(description.encode()[:_DESCRIPTION_BYTES], np.uint8)
        ours[: encoded.size] = encoded
        theirs = self.all_gather(ours).reshape(self.world_size, -1)
        texts = [bytes(t).rstrip(b"\0").decode("utf-8", "replace") for t in theirs]
        if len(set(texts)) > 1:
            raise disagreement(dict(zip(self.ranks, texts, strict=True)), f"a sub-group of {self.name!r}")

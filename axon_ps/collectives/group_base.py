"""The base of a group of workers, without its collectives: members, backends, the order of calls, errors, the end.

Owns: the order of a group's calls, their numbers, deadlines and handles. Refuses: to know the collectives themselves;
`ProcessGroup` has those.

Invariants:
- One collective of a group runs at a time, in the order of the calls; sends and receives run concurrently with them.
- Every collective has a number, also one that is refused; the n-th call of one rank matches the n-th of every other.
- After an error other than `Disagreement` and `InvalidRequest` the group has ended: every rank has aborted it or will
  (see `collectives.backends.base`, Note: [After an error]).
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from axon_ps.collectives import arrays
from axon_ps.collectives.arrays import Flat
from axon_ps.collectives.backends.base import Backend, Call, GroupContext, Operation
from axon_ps.collectives.flight_recorder import Recorder
from axon_ps.collectives.store import AbortableStore
from axon_ps.collectives.work import Work, WorkQueue
from axon_ps.errors import AxonError, Broken, Closed, Disagreement, InvalidRequest, Misuse
from axon_ps.host import fork
from axon_ps.types import DType, Member, ReduceOp

if TYPE_CHECKING:
    from axon_ps.collectives.current_world import JobWorld

CLOSE_TIMEOUT_S = 5.0
"""How long `close` waits for pending calls after it has aborted them."""

LINGER_S = 10.0
"""How long a worker that has finished waits until its messages from asynchronous sends are received."""

_logger = logging.getLogger(__name__)

WORLD_PREFIX = "world@"
"""The begin of the name of a group of all workers; the generation follows."""

MakeBackend = Callable[[GroupContext, str], Backend]
"""Makes the backend of a group by its name; collective."""


class GroupBase:
    """See `ProcessGroup`.

    Args:
        context: the group and its members.
        make: makes backends.
        timeout_s: default deadline.
        recorder: records its calls.
        backend: name of the backend for host memory, or "auto".
        member: whether this worker is one.
        world: the world it belongs to, or a function that returns it; None = it has none.
    """

    def __init__(
        self,
        context: GroupContext,
        make: MakeBackend,
        *,
        timeout_s: float,
        recorder: Recorder,
        backend: str = "auto",
        member: bool = True,
        world: JobWorld | Callable[[], JobWorld] | None = None,
    ) -> None:
        self.name = context.name
        self.ranks = context.ranks
        self._context = context
        self._make = make
        self._timeout_s = timeout_s
        self._recorder = recorder
        self._backend_name = backend
        self._member = member
        self._world: JobWorld | None = None if callable(world) else world
        self._find_world: Callable[[], JobWorld] | None = world if callable(world) else None
        self._store = AbortableStore(context.store)
        self._host: Backend | None = None
        self._device: Backend | None = None
        self._work_queue = WorkQueue(f"axon-ps-{context.name}"[:60])
        self._p2p_queues: dict[tuple[str, int, int], WorkQueue] = {}
        self._sequence = 0
        self._children: list[GroupBase] = []
        self._num_sub_groups = 0
        self._error: AxonError | None = None
        self._finished_error: AxonError | None = None

    # ------------------------------------------------------------------ who is in it

    @property
    def world(self) -> JobWorld:
        """The world it belongs to.

        Raises:
            Misuse: it has none, since it was made of a backend.
        """
        if self._world is None and self._find_world is not None:
            self._world = self._find_world()
        if self._world is None:
            raise Misuse(
                f"group {self.name!r} was made of a backend and is in no job: what needs shard servers (FSDP, "
                "optimizers, checkpoints) needs a group of World.init() or of World.mock()"
            )
        return self._world

    @property
    def rank(self) -> int:
        """This worker's position in the group.

        Raises:
            Misuse: this worker is not a member.
        """
        self._check_member()
        return self._context.rank

    @property
    def world_size(self) -> int:
        """Number of members."""
        return len(self.ranks)

    size = world_size

    @property
    def is_world(self) -> bool:
        """Whether it is a group of all workers of the job."""
        return self.name.startswith(WORLD_PREFIX) and "/" not in self.name  # sub-groups have a "/" in their names

    def contains(self, rank: int) -> bool:
        """Whether a world rank is a member."""
        return rank in self.ranks

    @property
    def members(self) -> tuple[Member, ...]:
        """The members, by position."""
        return self._context.members

    @property
    def sequence(self) -> int:
        """How many collectives this worker has called in it."""
        return self._sequence

    @property
    def backend(self) -> str:
        """Name of the backend that serves host memory.

        Raises:
            Misuse: this worker is not a member.
        """
        return self.backend_of().name

    def backend_of(self, data: Any = None) -> Backend:
        """The backend for an array; without one, that for host memory. The first call for either memory is collective.

        Raises:
            Misuse: this worker is not a member.
            AxonError: it cannot be made.
        """
        self._check_member()
        if self._error is not None:
            raise self._error
        device = data is not None and arrays.flatten(data, writable=False).device
        return self._device_backend(self._timeout_s) if device else self._host_backend(self._timeout_s)

    # ------------------------------------------------------------------ the end

    def abort(self, error: AxonError) -> None:
        """End all pending and later calls, here and in sub-groups, with `error`. Any thread.

        Raises:
            Misuse: this process is a fork of a worker; the group goes on in the parent.
        """
        fork.check()
        self._end(error)
        for child in self._children:
            child.abort(error)

    def member_lost(self, lost: set[str], error: AxonError) -> None:
        """Abort this group and its sub-groups where a lost member was in them.

        Args:
            lost: ids of members.
            error: raised by pending and later calls.
        """
        if any(m.id in lost for m in self._context.members):
            self._end(error)
        for child in self._children:
            child.member_lost(lost, error)

    def member_finished(self, finished: set[str], error: AxonError) -> None:
        """Members have finished and left: no collective can begin any more, but messages they sent are still received.

        Calls that wait for one of them end with an error by themselves: the backends notice who is gone.

        Args:
            finished: ids of members.
            error: raised by later collectives.
        """
        if any(m.id in finished for m in self._context.members):
            self._finished_error = self._finished_error or error
            self._store.expect_no_more(error)
            for backend in (self._host, self._device):
                if backend is not None and not backend.buffers_messages:
                    backend.abort(error)
        for child in self._children:
            child.member_finished(finished, error)

    def _end(self, error: AxonError) -> None:
        """End pending and later calls of this group, without sub-groups; the first error counts."""
        if self._error is None:
            self._error = error
        self._store.abort(error)
        for backend in (self._host, self._device):
            if backend is not None:
                backend.abort(error)

    def close(self, linger_s: float = 0.0) -> None:
        """Free the group on this worker, sub-groups first; pending calls are aborted. May be repeated.

        Args:
            linger_s: how long to wait first until messages from asynchronous sends are received.

        Raises:
            Misuse: this process is a fork of a worker; the group goes on in the parent.
        """
        fork.check()
        deadline = time.monotonic() + linger_s
        for child in self._children:
            child.close(max(0.0, deadline - time.monotonic()))
        error = Closed(f"group {self.name!r} was closed")
        if self._error is None and self._wait_idle(deadline) and all(b.buffers_messages for b in self._backends()):
            self._error = error  # no call is pending, and messages that are not received yet stay available
            self._store.abort(error)
        else:
            self.abort(error)
        self._free()

    def _wait_idle(self, deadline: float) -> bool:
        """Wait for asynchronous sends; returns whether no call is pending then."""
        for (direction, peer, _), queue in list(self._p2p_queues.items()):
            left_s = max(0.0, deadline - time.monotonic())
            if direction == "send" and not queue.wait_idle(left_s) and left_s:
                _logger.warning("group %s: rank %d did not receive a message in time; it is lost", self.name, peer)
        return all(queue.wait_idle(0.0) for queue in (self._work_queue, *self._p2p_queues.values()))

    def _backends(self) -> list[Backend]:
        return [b for b in (self._device, self._host) if b is not None]

    def release(self) -> bool:
        """Free this group and its sub-groups where they have ended; returns whether all of them had.

        A group that ended with the loss of a member may have sub-groups without that member, which go on.
        """
        self._children = [child for child in self._children if not child.release()]
        if self._error is None:
            return False
        self._free()
        return not self._children

    def _free(self) -> None:
        for queue in (self._work_queue, *self._p2p_queues.values()):
            queue.close(CLOSE_TIMEOUT_S)
        for backend in self._backends():
            backend.close()
        self._host = self._device = None

    def statistics(self) -> dict[str, float]:
        """Counters of its backends."""
        return {k: v for b in (self._host, self._device) if b is not None for k, v in b.statistics().items()}

    # ------------------------------------------------------------------ how calls are made

    def _collective(
        self,
        operation: Operation,
        flat: Flat | None,
        counts: tuple[int, ...],
        perform: Callable[[Backend, Call, float], Any],
        timeout_s: float | None,
        async_op: bool,
        *,
        op: ReduceOp | None = None,
        root: int = -1,
    ) -> Any:
        """Number a call and perform it after the calls before it."""
        run = self._numbered_call(operation, flat, counts, perform, timeout_s, async_op, op=op, root=root)
        return self._dispatch(self._work_queue, run, operation.value, async_op)

    def _numbered_call(
        self,
        operation: Operation,
        flat: Flat | None,
        counts: tuple[int, ...],
        perform: Callable[[Backend, Call, float], Any],
        timeout_s: float | None,
        async_op: bool,
        *,
        op: ReduceOp | None = None,
        root: int = -1,
    ) -> Callable[[], Any]:
        """A function that numbers a call and performs it, for `_dispatch`."""
        dtype = flat.dtype if flat is not None else DType.U8
        device = flat is not None and flat.device
        with self.preparing(operation.value, device, timeout_s, async_op):
            limit_s = self._limit(timeout_s)
        backend_for = self._device_backend if device else self._host_backend

        def run() -> Any:
            if self._error is None and self._finished_error is not None:
                raise self._finished_error
            call = Call(sequence=self._sequence, operation=operation, dtype=dtype, counts=counts, op=op, root=root)
            self._sequence += 1
            made = False
            entry = self._recorder.begin(self.name, self.ranks, call)
            try:
                if self._error is not None:
                    raise self._error
                backend = backend_for(limit_s)
                made = True
                with arrays.on_stream(flat):
                    result = perform(backend, call, limit_s)
            except BaseException as error:
                self._recorder.end(entry, f"{type(error).__name__}: {error}")
                self._failed(error)
                if made and isinstance(error, InvalidRequest) and not isinstance(error, Disagreement):
                    self._refuse(backend_for, call.refused(error), limit_s)
                raise
            self._recorder.end(entry)
            return result

        return run

    @contextlib.contextmanager
    def preparing(self, what: str, device: bool, timeout_s: float | None, async_op: bool) -> Iterator[None]:
        """A context for the checks before a collective: an error in it is also reported to the other ranks.

        This rank then makes a refusal in place of its call.

        Args:
            what: the collective.
            device: whether the others call it on the backend for device memory.
            timeout_s: how long to wait for them.
            async_op: do not wait for them.
        """
        try:
            yield
        except Exception as error:
            if not self._member or self._error is not None or self._finished_error is not None:  # no rank makes it
                raise
            text, limit_s = str(error) or type(error).__name__, self._timeout_s
            with contextlib.suppress(AxonError, TypeError):
                limit_s = self._limit(timeout_s)

            def run() -> None:
                refusal = Call.refusal(self._sequence, what, text)
                self._sequence += 1
                self._refuse(self._device_backend if device else self._host_backend, refusal, limit_s)

            with contextlib.suppress(AxonError):  # the caller's own mistake says more
                self._dispatch(self._work_queue, run, what, async_op)
            raise

    def _refuse(self, backend_for: Callable[[float], Backend], refusal: Call, limit_s: float) -> None:
        """Make a refusal in place of a call. See Note: [Agreement] of `collectives.backends.base`."""
        entry = self._recorder.begin(self.name, self.ranks, refusal)
        try:
            backend_for(limit_s).barrier(refusal, limit_s)
        except BaseException as error:
            self._recorder.end(entry, f"{type(error).__name__}: {error}")
            self._failed(error)
            if not isinstance(error, AxonError):
                raise
        else:
            self._recorder.end(entry)

    def _dispatch(self, queue: WorkQueue, run: Callable[[], Any], what: str, async_op: bool) -> Any:
        try:
            return Work(queue.submit(run), what) if async_op else queue.run(run)
        except Closed as error:
            raise self._error or error from None

    def _failed(self, error: BaseException) -> None:
        """See Note: [After an error] of `collectives.backends.base`."""
        if isinstance(error, (Disagreement, InvalidRequest)) or self._error is not None:
            return
        cause = error if isinstance(error, AxonError) else Broken(f"a call was interrupted: {type(error).__name__}")
        self.abort(cause)

    def _p2p_queue(self, direction: str, peer: int, tag: int) -> WorkQueue:
        queue = self._p2p_queues.get((direction, peer, tag))
        if queue is None:
            name = f"axon-ps-{direction}-{peer}-{tag}"
            queue = self._p2p_queues.setdefault((direction, peer, tag), WorkQueue(name))
        return queue

    def _backend_for(self, flat: Flat, limit_s: float) -> Backend:
        """The backend for a send or receive; if it must be made, that is queued with the collectives."""
        if self._error is not None:
            raise self._error
        known = self._device if flat.device else self._host
        make = self._device_backend if flat.device else self._host_backend
        return known or self._work_queue.run(lambda: make(limit_s))

    def _host_backend(self, limit_s: float) -> Backend:
        if self._host is None:
            self._host = self._new_backend(self._backend_name, limit_s)
        return self._host

    def _device_backend(self, limit_s: float) -> Backend:
        if self._device is None:
            self._device = self._new_backend("nccl" if self._backend_name == "nccl" else "device", limit_s)
        return self._device

    def _new_backend(self, name: str, limit_s: float) -> Backend:
        """Make a backend. A rank that takes part may die, which ends waits on `self._store`, or not come in time."""
        limit_s = min(limit_s, self._context.timeout_s)
        backend = self._make(
            replace(self._context, store=self._store, timeout_s=limit_s, ended=lambda: self._error), name
        )
        if self._error is not None:  # aborted meanwhile, when there was no backend to abort
            backend.abort(self._error)
        return backend

    # ------------------------------------------------------------------ checks

    def _check_member(self) -> None:
        if not self._member:
            raise Misuse(f"this worker is not a member of group {self.name!r}, which has the world ranks {self.ranks}")

    def _limit(self, timeout_s: float | None) -> float:
        self._check_member()
        if timeout_s is not None and not timeout_s >= 0.0:
            raise InvalidRequest(f"timeout_s is {timeout_s}; it must not be negative")
        return self._timeout_s if timeout_s is None else timeout_s

    def checked_rank(self, rank: int, what: str) -> int:
        """`rank`, if it is a position in the group.

        Raises:
            InvalidRequest: it is none; `what` names it.
            Misuse: this worker is no member.
        """
        self._check_member()
        if not 0 <= rank < self.world_size:
            raise InvalidRequest(f"{what} is {rank}; ranks of group {self.name!r} go from 0 to {self.world_size - 1}")
        return rank

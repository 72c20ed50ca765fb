"""The base of a group of workers, without its collectives: members, backends, the order of calls, errors, the end.

Owns: the order of a group's calls, their numbers, deadlines and handles. Refuses: to know the collectives themselves;
`ProcessGroup` has those.

Invariants:
- One collective of a group runs at a time, in the order of the calls; sends and receives run concurrently with them.
- Every collective has a number, also a refused one; the n-th call of one rank matches the n-th of every other.
- After an error other than `Disagreement` and `InvalidRequest` the group has ended: every rank has aborted it or will
  (see `collectives.backends.base`, Note: [After an error]).
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from axon_ps.collectives import arrays
from axon_ps.collectives.arrays import Flat
from axon_ps.collectives.backends.base import Backend, Call, GroupContext, Operation, Request
from axon_ps.collectives.flight_recorder import Recorder
from axon_ps.collectives.group_backends import GroupBackends
from axon_ps.collectives.group_backends import MakeBackend as MakeBackend
from axon_ps.collectives.work import Work, WorkQueue
from axon_ps.errors import AxonError, Broken, Closed, Disagreement, InvalidRequest, Misuse, again
from axon_ps.host import fork
from axon_ps.observe.metrics.sources import register
from axon_ps.types import DType, Member, ReduceOp

if TYPE_CHECKING:
    from axon_ps.collectives.current_world import JobWorld

CLOSE_TIMEOUT_S = 5.0
"""Seconds that `close` waits for pending calls after it has aborted them."""

LINGER_S = 10.0
"""Seconds that a finished worker waits until its messages from asynchronous sends are received."""

_logger = logging.getLogger(__name__)

WORLD_PREFIX = "world@"
"""The begin of the name of a group of all workers; the generation follows."""


class GroupBase:
    """See `ProcessGroup`.

    Args:
        context: the group and its members.
        make: makes backends.
        timeout_s: default deadline.
        recorder: records its calls.
        backend: name of the backend for host memory, or "auto".
        member: True = this worker is a member.
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
        self._member = member
        self._world: JobWorld | None = None if callable(world) else world
        self._find_world: Callable[[], JobWorld] | None = world if callable(world) else None
        self._backends = GroupBackends(context, make, backend)
        self._store = self._backends.store
        self._work_queue = WorkQueue(f"axon-ps-{context.name}"[:60])
        self._p2p_queues: dict[tuple[str, int, int], WorkQueue] = {}
        self._sequence = 0
        self._children: list[GroupBase] = []
        self._num_sub_groups = 0
        self._finished_error: AxonError | None = None
        register("group", self, group=self.name)

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
        """True if it is a group of all workers of the job."""
        return self.name.startswith(WORLD_PREFIX) and "/" not in self.name  # sub-groups have a "/" in their names

    def contains(self, rank: int) -> bool:
        """Return True if a world rank is a member."""
        return rank in self.ranks

    @property
    def members(self) -> tuple[Member, ...]:
        """The members, by position."""
        return self._context.members

    @property
    def sequence(self) -> int:
        """The number of collectives that this worker has called in it."""
        return self._sequence

    @property
    def backend(self) -> str:
        """Name of the backend that serves host memory.

        Raises:
            Misuse: this worker is not a member.
        """
        return self.backend_of().name

    def backend_of(self, data: Any = None) -> Backend:
        """Return the backend for an array, or for host memory. The first call for either memory is collective.

        Raises:
            Misuse: this worker is not a member.
            AxonError: it cannot be made.
        """
        self._check_member()
        if self._backends.error is not None:
            raise again(self._backends.error)
        device = data is not None and arrays.flatten(data, writable=False).device
        return self._backends.get(device, self._timeout_s)

    # ------------------------------------------------------------------ the end

    def abort(self, error: AxonError) -> None:
        """End all pending and later calls, here and in sub-groups, with `error`. Any thread may call it.

        Raises:
            Misuse: this process is a fork of a worker; the group goes on in the parent.
        """
        fork.check()
        self._backends.end(error)
        for child in self._children:
            child.abort(error)

    def member_lost(self, lost: set[str], error: AxonError) -> None:
        """Abort this group and its sub-groups, each if a lost member was in it.

        Args:
            lost: ids of members.
            error: raised by pending and later calls.
        """
        if any(m.id in lost for m in self._context.members):
            self._backends.end(error)
        for child in self._children:
            child.member_lost(lost, error)

    def member_finished(self, finished: set[str], error: AxonError) -> None:
        """End later collectives, since members have finished and left; messages that they sent are still received.

        Calls that wait for one of them end with an error by themselves: the backends notice that it is gone.

        Args:
            finished: ids of members.
            error: raised by later collectives.
        """
        if any(m.id in finished for m in self._context.members):
            self._finished_error = self._finished_error or again(error)
            self._backends.end_unbuffered(error)
        for child in self._children:
            child.member_finished(finished, error)

    def close(self, linger_s: float = 0.0) -> None:
        """Free the group on this worker, sub-groups first; pending calls are aborted. May be repeated.

        Args:
            linger_s: seconds to wait first until messages from asynchronous sends are received.

        Raises:
            Misuse: this process is a fork of a worker; the group goes on in the parent.
        """
        fork.check()
        deadline = time.monotonic() + linger_s
        for child in self._children:
            child.close(max(0.0, deadline - time.monotonic()))
        error = Closed(f"group {self.name!r} was closed")
        if self._backends.error is None and self._wait_idle(deadline):
            self._backends.end_after_messages(error)
        else:
            self.abort(error)
        self._free()

    def _wait_idle(self, deadline: float) -> bool:
        """Wait for asynchronous sends; return True if no call is pending then."""
        for (direction, peer, _), queue in list(self._p2p_queues.items()):
            left_s = max(0.0, deadline - time.monotonic())
            if direction == "send" and not queue.wait_idle(left_s) and left_s:
                _logger.warning("group %s: rank %d did not receive a message in time; it is lost", self.name, peer)
        return all(queue.wait_idle(0.0) for queue in (self._work_queue, *self._p2p_queues.values()))

    def release(self) -> bool:
        """Free this group and its sub-groups if they have ended; return True if all of them had.

        A group that ended with the loss of a member may have sub-groups without that member, which go on.
        """
        self._children = [child for child in self._children if not child.release()]
        if self._backends.error is None:
            return False
        self._free()
        return not self._children

    def _free(self) -> None:
        for queue in (self._work_queue, *self._p2p_queues.values()):
            queue.close(CLOSE_TIMEOUT_S)
        self._backends.close()

    def statistics(self) -> dict[str, float]:
        """Return the counters of its backends."""
        return self._backends.statistics()

    # ------------------------------------------------------------------ how calls are made

    def _collective(
        self,
        operation: Operation,
        data: Flat | None,
        output: Flat | None,
        result: Any,
        limit_s: float,
        async_op: bool,
        **details: Any,
    ) -> Any:
        """Make a call after the calls before it; arguments are as for `_perform`."""
        perform = partial(self._perform, operation, data, output, result, limit_s, **details)
        return self._dispatch(self._work_queue, perform, operation.value, async_op)

    def _perform(
        self,
        operation: Operation,
        data: Flat | None,
        output: Flat | None,
        result: Any,
        limit_s: float,
        *,
        counts: tuple[int, ...] = (),
        op: ReduceOp | None = None,
        root: int = -1,
        output_counts: tuple[int, ...] = (),
        input_counts: tuple[int, ...] = (),
        copied: Flat | None = None,
    ) -> Any:
        """Number a call and make it; return `result`. Calls run one at a time, on the group's queue.

        See `Request` and `Call` for the arguments; `copied` is an array that is copied to `data` first.
        """
        if self._backends.error is None and self._finished_error is not None:
            raise again(self._finished_error)
        flat = data or output
        dtype = flat.dtype if flat is not None else DType.U8
        device = flat is not None and flat.device
        call = Call(sequence=self._sequence, operation=operation, dtype=dtype, counts=counts, op=op, root=root)
        self._sequence += 1
        backend: Backend | None = None
        entry = self._recorder.begin(self.name, self.ranks, call)
        try:
            if self._backends.error is not None:
                raise again(self._backends.error)
            backend = self._backends.get(device, limit_s)
            request = Request(
                call=call,
                data=None if data is None else data.array,
                output=None if output is None else output.array,
                output_counts=output_counts,
                input_counts=input_counts,
            )
            with arrays.on_stream(flat):
                if copied is not None and data is not None:
                    data.array[...] = copied.array
                backend.run(request, limit_s)
                target = output or data
                if target is not None and request.target(self._context.rank) is not None:
                    target.finish()
        except BaseException as error:
            self._recorder.end(entry, f"{type(error).__name__}: {error}")
            self._failed(error)
            if backend is not None and isinstance(error, InvalidRequest) and not isinstance(error, Disagreement):
                self._refuse(device, call.refused(error), limit_s)
            raise
        self._recorder.end(entry)
        return result

    @contextlib.contextmanager
    def preparing(self, what: str, device: bool, timeout_s: float | None, async_op: bool) -> Iterator[float]:
        """Run the checks before a collective in this context; an error in it is also reported to the other ranks.

        This rank then makes a refusal in place of its call. The context's value is the seconds that the call may take.

        Args:
            what: the collective.
            device: True = the others call it on the backend for device memory.
            timeout_s: seconds to wait for them.
            async_op: do not wait for them.
        """
        try:
            yield self._limit(timeout_s)
        except Exception as error:
            if (
                not self._member or self._backends.error is not None or self._finished_error is not None
            ):  # no rank makes the call
                raise
            text, limit_s = str(error) or type(error).__name__, self._timeout_s
            with contextlib.suppress(AxonError, TypeError):
                limit_s = self._limit(timeout_s)

            def run() -> None:
                refusal = Call.refusal(self._sequence, what, text)
                self._sequence += 1
                self._refuse(device, refusal, limit_s)

            with contextlib.suppress(AxonError):  # the caller's own mistake says more
                self._dispatch(self._work_queue, run, what, async_op)
            raise

    def _refuse(self, device: bool, refusal: Call, limit_s: float) -> None:
        """Make a refusal in place of a call. See Note: [Agreement] of `collectives.backends.base`."""
        entry = self._recorder.begin(self.name, self.ranks, refusal)
        try:
            self._backends.get(device, limit_s).run(Request(call=refusal), limit_s)
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
            raise again(self._backends.error or error) from None

    def _failed(self, error: BaseException) -> None:
        """See Note: [After an error] of `collectives.backends.base`."""
        if isinstance(error, (Disagreement, InvalidRequest)) or self._backends.error is not None:
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
        """Return the backend for a send or receive; if it must be made, that is queued with the collectives."""
        backends = self._backends
        if backends.error is not None:
            raise again(backends.error)
        return backends.made(flat.device) or self._work_queue.run(lambda: backends.get(flat.device, limit_s))

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
        """Return `rank` if it is a position in the group.

        Raises:
            InvalidRequest: it is not; `what` names it in the message.
            Misuse: this worker is not a member.
        """
        self._check_member()
        if not 0 <= rank < self.world_size:
            raise InvalidRequest(f"{what} is {rank}; ranks of group {self.name!r} go from 0 to {self.world_size - 1}")
        return rank

"""`GroupCalls`: the calls of a group on this worker, in their order, up to the group's end.

Owns: the order of a group's calls, their numbers, deadlines and handles, and the error that ends them. Refuses: to know
the arguments of collectives (`arguments`), and to move a byte: the group's backends do that.

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
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from axon_ps.collectives import arrays
from axon_ps.collectives.arguments import PreparedCall
from axon_ps.collectives.arrays import Flat
from axon_ps.collectives.backends.base import Backend, Call, Request
from axon_ps.collectives.backends.mock import MockBackend
from axon_ps.collectives.current_world import mock_world
from axon_ps.collectives.flight_recorder import Recorder
from axon_ps.collectives.group_backends import GroupBackends, MakeBackend, Siblings
from axon_ps.collectives.group_members import GroupMembers
from axon_ps.collectives.work import Work, WorkQueue
from axon_ps.errors import AxonError, Broken, Closed, Disagreement, InvalidRequest, again
from axon_ps.host import fork
from axon_ps.observe.metrics.sources import register

CLOSE_TIMEOUT_S = 5.0
"""Seconds that `close` waits for pending calls after it has aborted them."""

LINGER_S = 10.0
"""Most seconds for which a finished worker waits until its messages from asynchronous sends are received."""

_logger = logging.getLogger(__name__)


class GroupCalls:
    """The calls of one group.

    Attributes:
        members: the members of the group.
        backends: the backends that make the calls.
        recorder: records the calls.
        sequence: number of collectives that were begun so far.

    Args:
        members: the members of the group.
        make: makes backends.
        timeout_s: default time-out, in seconds.
        recorder: records the calls.
        backend: name of the backend for host memory, or "auto".
    """

    def __init__(
        self, members: GroupMembers, make: MakeBackend, *, timeout_s: float, recorder: Recorder, backend: str = "auto"
    ) -> None:
        self.members = members
        self.backends = GroupBackends(members.context, make, backend)
        self.recorder = recorder
        self.sequence = 0
        self._make = make
        self._timeout_s = timeout_s
        self._queue = WorkQueue(f"axon-ps-{members.name}"[:60])
        self._message_queues: dict[tuple[str, int, int], WorkQueue] = {}
        self._sub_groups: list[GroupCalls] = []
        self._finished_error: AxonError | None = None
        register("group", self.backends, group=members.name)

    @classmethod
    def over(cls, backend: Backend, timeout_s: float) -> GroupCalls:
        """Return the calls of the group that a backend connects; sub-groups get siblings of the backend.

        Args:
            backend: the group's. A `MockBackend`'s group starts a job when it needs one.
            timeout_s: default time-out, in seconds.
        """
        start_world = partial(mock_world, backend) if isinstance(backend, MockBackend) else None
        members = GroupMembers(backend.context, start_world=start_world)
        return cls(members, Siblings(backend), timeout_s=timeout_s, recorder=Recorder(), backend=backend.name)

    def sub_group(
        self, name: str, positions: Sequence[int], *, backend: str, timeout_s: float | None = None
    ) -> GroupCalls:
        """Return the calls of a sub-group; `abort` and `close` of ours end them too.

        Args:
            name: name of the sub-group, below ours; never used before.
            positions: its members' positions in this group, in their new order.
            backend: name of its backend for host memory, or "auto".
            timeout_s: its default time-out, in seconds; None = ours.
        """
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        members = self.members.subset(name, positions, timeout_s)
        calls = GroupCalls(members, self._make, timeout_s=timeout_s, recorder=self.recorder, backend=backend)
        self._sub_groups.append(calls)
        return calls

    def backend_of(self, device: bool) -> Backend:
        """Return the backend for host or device memory. The first call for either memory is collective.

        Raises:
            Misuse: this worker is not a member.
            AxonError: it cannot be made, or the group has ended.
        """
        self.members.check_joined()
        self._check_going()
        return self.backends.get(device, self._timeout_s)

    # ------------------------------------------------------------------ collectives

    def make(
        self, what: str, prepare: Callable[[], PreparedCall], data: Any, timeout_s: float | None, async_op: bool
    ) -> Any:
        """Make a collective after the calls before it.

        Args:
            what: its name.
            prepare: checks its arguments; an error of it is also reported to the other ranks.
            data: an array in the kind of memory, host or device, for which the call is made.
            timeout_s: seconds that it may take; None = the default.
            async_op: return a `Work`.

        Returns:
            The result of the prepared call; with `async_op` a `Work` that gives it.
        """
        device = arrays.on_device(data)
        try:
            limit_s = self._limit(timeout_s)
            prepared = prepare()
        except Exception as error:
            self._report(error, what, device, timeout_s, async_op)
            raise
        return self._enqueue(self._queue, partial(self._perform, prepared, limit_s), what, async_op)

    def make_each(self, what: str, calls: Sequence[PreparedCall], result: Any, limit_s: float, async_op: bool) -> Any:
        """Make collectives one after the other, until an error; return `result`. See `make`."""

        def perform() -> Any:
            for prepared in calls:
                self._perform(prepared, limit_s)
            return result

        return self._enqueue(self._queue, perform, what, async_op)

    def _perform(self, prepared: PreparedCall, limit_s: float) -> Any:
        """Number a call and make it; return its result. Calls run one at a time, on the group's queue."""
        if self.backends.error is None and self._finished_error is not None:
            raise again(self._finished_error)
        data, output = prepared.data, prepared.output
        flat = data or output
        device = flat is not None and flat.device
        call = prepared.numbered(self.sequence)
        self.sequence += 1
        backend: Backend | None = None
        entry = self.recorder.begin(self.members.name, self.members.ranks, call)
        try:
            self._check_going()
            backend = self.backends.get(device, limit_s)
            request = prepared.request(call)
            with arrays.on_stream(flat):
                if prepared.copied is not None and data is not None:
                    data.array[...] = prepared.copied.array
                backend.run(request, limit_s)
                target = output or data
                if target is not None and request.target(self.members.context.rank) is not None:
                    target.finish()
        except BaseException as error:
            self.recorder.end(entry, f"{type(error).__name__}: {error}")
            self._failed(error)
            if backend is not None and isinstance(error, InvalidRequest) and not isinstance(error, Disagreement):
                self._refuse(device, call.refused(error), limit_s)
            raise
        self.recorder.end(entry)
        return prepared.result

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
            self._report(error, what, device, timeout_s, async_op)
            raise

    def _report(self, error: Exception, what: str, device: bool, timeout_s: float | None, async_op: bool) -> None:
        """Make a refusal in place of a call whose arguments are not valid."""
        ended = self.backends.error is not None or self._finished_error is not None
        if ended or not self.members.joined:  # no rank makes the call
            return
        text, limit_s = str(error) or type(error).__name__, self._timeout_s
        with contextlib.suppress(AxonError, TypeError):
            limit_s = self._limit(timeout_s)

        def run() -> None:
            refusal = Call.refusal(self.sequence, what, text)
            self.sequence += 1
            self._refuse(device, refusal, limit_s)

        with contextlib.suppress(AxonError):  # the caller's own error is more precise
            self._enqueue(self._queue, run, what, async_op)

    def _refuse(self, device: bool, refusal: Call, limit_s: float) -> None:
        """Make a refusal in place of a call. See Note: [Agreement] of `collectives.backends.base`."""
        entry = self.recorder.begin(self.members.name, self.members.ranks, refusal)
        try:
            self.backends.get(device, limit_s).run(Request(call=refusal), limit_s)
        except BaseException as error:
            self.recorder.end(entry, f"{type(error).__name__}: {error}")
            self._failed(error)
            if not isinstance(error, AxonError):
                raise
        else:
            self.recorder.end(entry)

    def _failed(self, error: BaseException) -> None:
        """See Note: [After an error] of `collectives.backends.base`."""
        if isinstance(error, (Disagreement, InvalidRequest)) or self.backends.error is not None:
            return
        cause = error if isinstance(error, AxonError) else Broken(f"a call was interrupted: {type(error).__name__}")
        self.abort(cause)

    # ------------------------------------------------------------------ messages

    def send(self, flat: Flat, to: int, tag: int, timeout_s: float | None, async_op: bool) -> Any:
        """Send an array to a rank after the messages to it with the same tag; see `ProcessGroup.send`."""
        limit_s = self._limit(timeout_s)
        backend = self._backend_for(flat, limit_s)
        what = f"send of {flat.array.size} {flat.dtype.value} to rank {to} of {self.members.name}"

        def run() -> None:
            with arrays.on_stream(flat):
                backend.send(flat.array, flat.dtype, to, tag, limit_s)

        return self._enqueue(self._message_queue("send", to, tag), run, what, async_op)

    def receive(
        self, flat: Flat, source: int, tag: int, timeout_s: float | None, async_op: bool, made: Any = None
    ) -> Any:
        """Receive the next message with a tag; return its sender, or the array that was `made` for it."""
        limit_s = self._limit(timeout_s)
        backend = self._backend_for(flat, limit_s)

        def run() -> Any:
            with arrays.on_stream(flat):
                sender = backend.recv(flat.array, flat.dtype, source, tag, limit_s)
                flat.finish()
                return sender if made is None else made

        sender = f"rank {source}" if source >= 0 else "any rank"
        what = f"receive of {flat.array.size} {flat.dtype.value} from {sender} of {self.members.name}"
        return self._enqueue(self._message_queue("recv", source, tag), run, what, async_op)

    def _message_queue(self, direction: str, peer: int, tag: int) -> WorkQueue:
        queue = self._message_queues.get((direction, peer, tag))
        if queue is None:
            name = f"axon-ps-{direction}-{peer}-{tag}"
            queue = self._message_queues.setdefault((direction, peer, tag), WorkQueue(name))
        return queue

    def _backend_for(self, flat: Flat, limit_s: float) -> Backend:
        """Return the backend for a send or receive; if it must be made, that is queued with the collectives."""
        self._check_going()
        backends = self.backends
        return backends.made(flat.device) or self._queue.run(lambda: backends.get(flat.device, limit_s))

    # ------------------------------------------------------------------ queues and deadlines

    def _enqueue(self, queue: WorkQueue, run: Callable[[], Any], what: str, async_op: bool) -> Any:
        try:
            return Work(queue.submit(run), what) if async_op else queue.run(run)
        except Closed as error:
            raise again(self.backends.error or error) from None

    def _limit(self, timeout_s: float | None) -> float:
        self.members.check_joined()
        if timeout_s is not None and not timeout_s >= 0.0:
            raise InvalidRequest(f"timeout_s is {timeout_s}; it must not be negative")
        return self._timeout_s if timeout_s is None else timeout_s

    def _check_going(self) -> None:
        if self.backends.error is not None:
            raise again(self.backends.error)

    # ------------------------------------------------------------------ the end

    def abort(self, error: AxonError) -> None:
        """See `ProcessGroup.abort`."""
        fork.check()
        self.backends.end(error)
        for sub_group in self._sub_groups:
            sub_group.abort(error)

    def member_lost(self, lost: set[str], error: AxonError) -> None:
        """Abort the calls of this group and its sub-groups, each if a lost member was in it.

        Args:
            lost: ids of members.
            error: raised by pending and later calls.
        """
        if self.members.have(lost):
            self.backends.end(error)
        for sub_group in self._sub_groups:
            sub_group.member_lost(lost, error)

    def member_finished(self, finished: set[str], error: AxonError) -> None:
        """End later collectives, since members have finished and left; messages that they sent are still received.

        Calls in which one of them is missing end with an error: the backends find that it has gone.

        Args:
            finished: ids of members.
            error: raised by later collectives.
        """
        if self.members.have(finished):
            self._finished_error = self._finished_error or again(error)
            self.backends.end_unbuffered(error)
        for sub_group in self._sub_groups:
            sub_group.member_finished(finished, error)

    def close(self, linger_s: float) -> None:
        """See `ProcessGroup.close`."""
        fork.check()
        deadline = time.monotonic() + linger_s
        for sub_group in self._sub_groups:
            sub_group.close(max(0.0, deadline - time.monotonic()))
        error = Closed(f"group {self.members.name!r} was closed")
        if self.backends.error is None and self._wait_idle(deadline):
            self.backends.end_after_messages(error)
        else:
            self.abort(error)
        self._free()

    def _wait_idle(self, deadline: float) -> bool:
        """Wait for asynchronous sends; return True if no call is pending then."""
        for (direction, peer, _), queue in list(self._message_queues.items()):
            left_s = max(0.0, deadline - time.monotonic())
            if direction == "send" and not queue.wait_idle(left_s) and left_s:
                _logger.warning(
                    "group %s: rank %d did not receive a message in time; it is lost", self.members.name, peer
                )
        return all(queue.wait_idle(0.0) for queue in (self._queue, *self._message_queues.values()))

    def release(self) -> bool:
        """Free this group and its sub-groups if they have ended; return True if all of them had.

        If a group ended with the loss of a member, its sub-groups without that member go on.
        """
        self._sub_groups = [sub_group for sub_group in self._sub_groups if not sub_group.release()]
        if self.backends.error is None:
            return False
        self._free()
        return not self._sub_groups

    def _free(self) -> None:
        for queue in (self._queue, *self._message_queues.values()):
            queue.close(CLOSE_TIMEOUT_S)
        self.backends.close()

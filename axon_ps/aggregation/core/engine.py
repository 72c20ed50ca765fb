"""The collectives that this server performs: a deterministic state machine without threads, sockets or clocks.

Its inputs are the job's workers, joining ranks, their messages, messages taken from a queue, ended streams, and time.
Its outputs are the messages to each participant, the error that ended its operation, and the participants that changed
(`woken`). The shell (`aggregation.server.shell`) has the reads, writes and waits.

Invariants:
- An operation is named by group and sequence. Its state lives until every member has its result or
  has left, but after an error at most `operations.TOMBSTONE_S`.
- A group consists of the ids of its members. When one of them is no longer a worker, all operations of the group end
  with `MemberLost`, later requests too, except operations that the member had left already. Workers outside the group
  have no effect on it.
- A member that has *finished* ends the group's collectives in the same way, but its sent messages can still be
  received. Only a rank that waits for another message from it, or sends to it, gets `MemberLost`.
- Until all ranks of a collective have joined and agree, only the first message of each rank is stored.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from axon_ps.aggregation.core.mailbox import EAGER_BYTES, Envelope, Mailbox, check_envelope
from axon_ps.aggregation.core.operations import PendingOperation
from axon_ps.aggregation.core.participants import MemoryAccounting, Participant
from axon_ps.aggregation.core.stripes import StripePlan
from axon_ps.errors import AxonError, InvalidRequest, MemberLost
from axon_ps.reduction.call import Call, Operation
from axon_ps.types import Array
from axon_ps.wire.frames import elements
from axon_ps.wire.v1.collective_pb2 import CollectiveChunk

MAX_TIMEOUT_S = 1e9
"""Longest time-out, in seconds. Longer ones are cut to it."""


@dataclass(frozen=True, kw_only=True)
class OperationRequest:
    """A rank's request: its first message, decoded.

    Attributes:
        group: name of the group.
        rank: the caller's position in it.
        ranks: the members' world ranks, by position.
        members: the members' ids, by position.
        timeout_s: seconds until the caller gives up.
        stripe: number of this stripe.
        stripes: number of stripes.
        owners: by partition, the stripe that has all of it; empty = each stripe has a range of every partition.
        what: a collective, or a message between two ranks.
        gives_up: whether the rank reports that it broke the collective off. It sends and receives no data.
        input_counts: ALL_TO_ALL: elements for each rank.
        output_counts: ALL_TO_ALL: elements from each rank.
    """

    group: str
    rank: int
    ranks: tuple[int, ...]
    members: tuple[str, ...]
    timeout_s: float
    stripe: int
    stripes: int
    what: Call | Envelope
    owners: tuple[int, ...] = ()
    input_counts: tuple[int, ...] = ()
    output_counts: tuple[int, ...] = ()
    gives_up: bool = False


class _Group:
    def __init__(self, request: OperationRequest, mailbox: Mailbox) -> None:
        self.name = request.group
        self.ranks = request.ranks
        self.members = request.members
        self.operations: dict[int, PendingOperation] = {}
        self.mailbox = mailbox

    @property
    def over(self) -> bool:
        return not self.operations and self.mailbox.over


class CollectiveEngine:
    """See the module's docstring.

    Attributes:
        memory: the memory in use.
    """

    def __init__(self) -> None:
        self.memory = MemoryAccounting()
        self._workers: frozenset[str] = frozenset()
        self._finished: frozenset[str] = frozenset()
        self._groups: dict[str, _Group] = {}
        self._participants: dict[Participant, tuple[_Group, PendingOperation | Mailbox]] = {}
        self._woken: dict[Participant, None] = {}
        self._counters: Counter[str] = Counter(dict.fromkeys(("collectives", "messages", "failures"), 0))

    # ------------------------------------------------------------------ events

    def set_workers(self, ids: Collection[str], finished: Collection[str] = ()) -> None:
        """Set the job's workers, and those that have finished. Operations of groups that lost a member end."""
        self._workers, self._finished = frozenset(ids), frozenset(finished)
        for group in list(self._groups.values()):
            if (error := self._loss_error(group.name, group.ranks, group.members)) is not None:
                self._counters["failures"] += 1
                lost = [i for i, member in enumerate(group.members) if member not in self._workers]
                for operation in group.operations.values():
                    operation.lose_members(lost, error)
                if self._have_finished(group.members, lost):
                    group.mailbox.finish(lost, error)
                else:
                    group.mailbox.fail(error)
                # `open` raises for ranks that join later
                group.operations = {n: operation for n, operation in group.operations.items() if not operation.failed}
                self._tidy(group)

    def open(
        self, request: OperationRequest, message: bytes, header: CollectiveChunk, payload: memoryview, now_s: float
    ) -> Participant:
        """Let a rank join an operation. The data in its first message is used or pending.

        Args:
            request: the rank's request.
            message: its first message, encoded.
            header: that message's header.
            payload: that message's payload.
            now_s: the present, on the clock of `tick`.

        Raises:
            MemberLost: a member of the group is no longer a worker.
            InvalidRequest: the request is not valid.
            AxonError: the operation has ended with this error.
        """
        self._check(request)
        error = self._loss_error(request.group, request.ranks, request.members)
        lost = [i for i, member in enumerate(request.members) if member not in self._workers]
        if error is not None and not self._may_be_received(request, lost):
            raise error
        group = self._groups.get(request.group)
        if group is None:
            mailbox = Mailbox(request.group, request.ranks, self.memory, self._wake)
            group = self._groups[request.group] = _Group(request, mailbox)
        if (group.ranks, group.members) != (request.ranks, request.members):
            raise InvalidRequest(
                f"group {request.group!r} has the ranks {group.ranks[:32]} here; {request.ranks[:32]} were given, or "
                "other lives of the same ranks: a group's name is used once in a job"
            )
        try:
            if isinstance(request.what, Call):
                participant = self._join(group, request, request.what, now_s)
                if payload.nbytes and participant.error is None:
                    try:
                        self.receive(participant, message, header, payload)
                    except InvalidRequest:  # a stream that was never opened is not closed by its caller
                        self.leave(participant, now_s)
                        raise
            else:
                participant = self._enqueue_message(group, request, request.what, payload, now_s)
                if error is not None:
                    group.mailbox.finish(lost, error)
        finally:
            self._tidy(group)
        return participant

    def receive(self, participant: Participant, message: bytes, header: CollectiveChunk, payload: memoryview) -> None:
        """Take the next message of a stream. The following one may be read once `participant.pending` is None.

        Raises:
            InvalidRequest: it is not the next segment.
        """
        participant.receive(message, header, payload)
        participant.on_message(participant)

    def dequeue(self, participant: Participant) -> bytes:
        """Remove the next message to send to a rank from its queue."""
        message = participant.dequeue()
        participant.on_capacity(participant)
        return message

    def leave(self, participant: Participant, now_s: float) -> None:
        """Record that a stream has left its operation, with or without an error."""
        participant.left = True
        group, operation = self._participants.pop(participant)
        operation.leave(participant, now_s)
        self._tidy(group)

    def tick(self, now_s: float) -> None:
        """End operations whose time is up."""
        for group in list(self._groups.values()):
            for operation in group.operations.values():
                operation.tick(now_s)
            group.mailbox.tick(now_s)
            self._tidy(group)

    # ------------------------------------------------------------------ results

    def next_s(self) -> float:
        """Return the time at which `tick` is needed; infinity = never."""
        moments_s = [m.next_s() for group in self._groups.values() for m in group.operations.values()]
        moments_s += [moment_s for group in self._groups.values() for moment_s in group.mailbox.next_s()]
        return min(moments_s, default=math.inf)

    def woken(self) -> list[Participant]:
        """Return the participants that changed since the last call."""
        woken = list(self._woken)
        self._woken.clear()
        return woken

    def statistics(self) -> dict[str, float]:
        """Return counts of operations, memory in use, groups with operations under way, and streams in operations."""
        counters = {f"collective_{name}": float(value) for name, value in self._counters.items()}
        purposes = ("pending", "sums", "queued", "mailbox")
        memory = {f"collective_{name}_bytes": float(self.memory.bytes[name]) for name in purposes}
        return {
            **counters,
            **memory,
            "collective_peak_bytes": float(self.memory.peak_bytes),
            "collective_groups": float(len(self._groups)),
            "collective_streams": float(len(self._participants)),
        }

    # ------------------------------------------------------------------ inside

    def _join(self, group: _Group, request: OperationRequest, call: Call, now_s: float) -> Participant:
        operation = group.operations.get(call.sequence)
        if operation is None:
            operation = PendingOperation(group.name, group.ranks, call.sequence, self.memory, self._wake)
            group.operations[call.sequence] = operation
            self._counters["collectives"] += 1
        plan = StripePlan(
            call=call,
            rank=request.rank,
            world_size=len(request.ranks),
            stripe=request.stripe,
            stripes=request.stripes,
            owners=request.owners,
            input_counts=request.input_counts,
            output_counts=request.output_counts,
        )
        if request.gives_up:
            participant = operation.give_up(plan, now_s)
        else:
            participant = operation.join(plan, min(request.timeout_s, MAX_TIMEOUT_S), now_s)
        self._participants[participant] = group, operation
        return participant

    def _enqueue_message(
        self, group: _Group, request: OperationRequest, envelope: Envelope, payload: memoryview, now_s: float
    ) -> Participant:
        data: Array | None = None
        nbytes = envelope.numel * envelope.dtype.itemsize
        if not envelope.receive and (payload.nbytes or not nbytes):
            data = elements(payload, envelope.dtype)
            if data.size != envelope.numel or nbytes > EAGER_BYTES:
                raise InvalidRequest(
                    f"a message of {envelope} came with {data.size} elements; the first message has all of them if "
                    f"they are at most {EAGER_BYTES} bytes, and else none"
                )
        self._counters["messages"] += 1
        participant = group.mailbox.enqueue(envelope, data, min(request.timeout_s, MAX_TIMEOUT_S), now_s)
        self._participants[participant] = group, group.mailbox
        return participant

    def _wake(self, participant: Participant) -> None:
        self._woken[participant] = None

    def _tidy(self, group: _Group) -> None:
        for sequence in [sequence for sequence, operation in group.operations.items() if operation.over]:
            del group.operations[sequence]
        if group.over and self._groups.get(group.name) is group:
            del self._groups[group.name]

    def _may_be_received(self, request: OperationRequest, lost: Sequence[int]) -> bool:
        """Return True if it is a receive, or a send to a worker, in a group whose missing members have all finished."""
        envelope = request.what
        receives = isinstance(envelope, Envelope) and (envelope.receive or envelope.peer not in lost)
        return receives and self._have_finished(request.members, lost)

    def _have_finished(self, members: Sequence[str], positions: Sequence[int]) -> bool:
        return all(members[position] in self._finished for position in positions)

    def _loss_error(self, name: str, ranks: Sequence[int], members: Sequence[str]) -> AxonError | None:
        lost = [r for r, member in zip(ranks, members, strict=True) if member not in self._workers]
        if not lost:
            return None
        subject = f"rank {lost[0]} has" if len(lost) == 1 else f"ranks {', '.join(map(str, lost))} have"
        return MemberLost(f"{subject} left the job, and with it group {name!r}, which cannot go on; make another group")

    @staticmethod
    def _check(request: OperationRequest) -> None:
        size = len(request.ranks)
        if len(request.members) != size or not 0 <= request.rank < size:
            raise InvalidRequest(
                f"group {request.group!r} came with {size} ranks, {len(request.members)} members, and a "
                f"caller at position {request.rank}"
            )
        if not 0 <= request.stripe < request.stripes:
            raise InvalidRequest(f"there is no stripe {request.stripe} of {request.stripes}")
        if request.owners and (len(request.owners) != size or max(request.owners) >= request.stripes):
            raise InvalidRequest(
                f"group {request.group!r} came with owners {request.owners[:32]} of its partitions; {size} are needed, "
                f"each below {request.stripes}"
            )
        if not request.timeout_s >= 0:
            raise InvalidRequest(f"timeout_s is {request.timeout_s}; it must be 0 or more")
        if isinstance(request.what, Envelope):
            check_envelope(request.what, size)
        elif request.what.operation is Operation.ALL_TO_ALL and not (
            len(request.input_counts) == len(request.output_counts) == size
        ):
            raise InvalidRequest(f"an all_to_all of {size} ranks needs {size} counts in each direction")

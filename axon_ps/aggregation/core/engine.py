"""The collectives that this server performs: a deterministic state machine without threads, sockets or clocks.

Events in: the job's workers, a rank that comes, its messages, a message that was taken to be sent, a stream that is
over, time. Out: what each seat is to be sent, what ended it, and which seats changed (`woken`). The shell around it
(`aggregation.server.shell`) reads, writes and waits.

Invariants:
- An operation is named by group and sequence; its state lives until every member has got its answer or has left.
- A group is the ids of its members. When one of them is no worker any more, everything of the group ends with
  `MemberLost`, also what comes later, except calls in which it had done its part. Workers outside the group come and
  go without any effect on it.
- A member that has *finished* ends the group's collectives likewise, but not its messages: what it sent is received,
  and only who waits for another message of it, or sends it one, gets `MemberLost`.
- Nothing is allocated for data before all ranks of an operation are there and agree.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from axon_ps.aggregation.core.mailbox import EAGER_BYTES, Letter, Mailbox, check_letter
from axon_ps.aggregation.core.operations import Meeting
from axon_ps.aggregation.core.participants import Ledger, Seat
from axon_ps.aggregation.core.stripes import Exchange
from axon_ps.errors import AxonError, InvalidRequest, MemberLost
from axon_ps.reduction.call import Call, Operation
from axon_ps.types import Array
from axon_ps.wire.frames import elements
from axon_ps.wire.v1.collective_pb2 import CollectiveChunk

MAX_TIMEOUT_S = 1e9
"""Longer than any job: time-outs beyond it are taken for it."""


@dataclass(frozen=True, kw_only=True)
class Opening:
    """What a rank's first message says, decoded.

    Attributes:
        group: name of the group.
        rank: the caller's position in it.
        ranks: the members' world ranks, by position.
        members: the members' ids, by position.
        timeout_s: seconds until it gives up.
        share: which share of the operation this is.
        shares: how many there are.
        owners: by part, the share that has all of it; empty: each has a range of every part.
        what: a collective, or a message between two ranks.
        input_counts: ALL_TO_ALL: elements for each rank.
        output_counts: ALL_TO_ALL: elements from each rank.
    """

    group: str
    rank: int
    ranks: tuple[int, ...]
    members: tuple[str, ...]
    timeout_s: float
    share: int
    shares: int
    what: Call | Letter
    owners: tuple[int, ...] = ()
    input_counts: tuple[int, ...] = ()
    output_counts: tuple[int, ...] = ()


class _Group:
    def __init__(self, opening: Opening, mailbox: Mailbox) -> None:
        self.name = opening.group
        self.ranks = opening.ranks
        self.members = opening.members
        self.meetings: dict[int, Meeting] = {}
        self.mailbox = mailbox

    @property
    def over(self) -> bool:
        return not self.meetings and self.mailbox.over


class CollectiveEngine:
    """See the module's docstring.

    Attributes:
        ledger: bytes of memory held.
    """

    def __init__(self) -> None:
        self.ledger = Ledger()
        self._workers: frozenset[str] = frozenset()
        self._finished: frozenset[str] = frozenset()
        self._groups: dict[str, _Group] = {}
        self._places: dict[Seat, tuple[_Group, Meeting | Mailbox]] = {}
        self._woken: dict[Seat, None] = {}
        self._counters: Counter[str] = Counter(dict.fromkeys(("collectives", "letters", "failures"), 0))

    # ------------------------------------------------------------------ events

    def set_workers(self, ids: Collection[str], finished: Collection[str] = ()) -> None:
        """Take who is a worker of the job now, and who was and has finished; groups that lost a member end."""
        self._workers, self._finished = frozenset(ids), frozenset(finished)
        for group in list(self._groups.values()):
            if (error := self._loss(group.name, group.ranks, group.members)) is not None:
                self._counters["failures"] += 1
                gone = [i for i, member in enumerate(group.members) if member not in self._workers]
                for meeting in group.meetings.values():
                    meeting.lose(gone, error)
                if self._have_finished(group.members, gone):
                    group.mailbox.finish(gone, error)
                else:
                    group.mailbox.fail(error)
                # whoever comes later is told by `open`
                group.meetings = {n: meeting for n, meeting in group.meetings.items() if not meeting.failed}
                self._tidy(group)

    def open(
        self, opening: Opening, message: bytes, header: CollectiveChunk, payload: memoryview, now_s: float
    ) -> Seat:
        """A rank comes to an operation; what it brought along is used or held.

        Args:
            opening: what it says.
            message: its first message, encoded.
            header: that message's header.
            payload: and its payload.
            now_s: the present, on any clock that `tick` shares.

        Raises:
            MemberLost: a member of the group is no worker any more.
            InvalidRequest: what it says cannot be.
            AxonError: what ended the operation before it came.
        """
        self._check(opening)
        error = self._loss(opening.group, opening.ranks, opening.members)
        gone = [i for i, member in enumerate(opening.members) if member not in self._workers]
        if error is not None and not self._may_be_received(opening, gone):
            raise error
        group = self._groups.get(opening.group)
        if group is None:
            mailbox = Mailbox(opening.group, opening.ranks, self.ledger, self._wake)
            group = self._groups[opening.group] = _Group(opening, mailbox)
        if (group.ranks, group.members) != (opening.ranks, opening.members):
            raise InvalidRequest(
                f"group {opening.group!r} has the ranks {group.ranks[:32]} here; {opening.ranks[:32]} were given, or "
                "other lives of the same ranks: a group's name is used once in a job"
            )
        try:
            if isinstance(opening.what, Call):
                seat = self._join(group, opening, opening.what, now_s)
                if payload.nbytes and seat.error is None:
                    self._offer_first(seat, message, header, payload, now_s)
            else:
                seat = self._post(group, opening, opening.what, payload, now_s)
                if error is not None:
                    group.mailbox.finish(gone, error)
        finally:
            self._tidy(group)
        return seat

    def offer(self, seat: Seat, message: bytes, header: CollectiveChunk, payload: memoryview) -> None:
        """The next message of a stream; the stream goes on when `seat.held` is None.

        Raises:
            InvalidRequest: it is not the piece whose turn it is.
        """
        seat.hold(message, header, payload)
        seat.arrived(seat)

    def take(self, seat: Seat) -> bytes:
        """The next message to send to a rank."""
        message = seat.take()
        seat.has_room(seat)
        return message

    def leave(self, seat: Seat, now_s: float) -> None:
        """A stream has left its operation, well or not."""
        seat.left = True
        group, place = self._places.pop(seat)
        place.leave(seat, now_s)
        self._tidy(group)

    def tick(self, now_s: float) -> None:
        """Time has passed."""
        for group in list(self._groups.values()):
            for meeting in group.meetings.values():
                meeting.tick(now_s)
            group.mailbox.tick(now_s)
            self._tidy(group)

    # ------------------------------------------------------------------ what follows

    def next_s(self) -> float:
        """When `tick` has something to do; infinity when never."""
        moments_s = [m.next_s() for group in self._groups.values() for m in group.meetings.values()]
        moments_s += [moment_s for group in self._groups.values() for moment_s in group.mailbox.next_s()]
        return min(moments_s, default=math.inf)

    def woken(self) -> list[Seat]:
        """The seats that changed since the last time this was asked."""
        woken = list(self._woken)
        self._woken.clear()
        return woken

    def statistics(self) -> dict[str, float]:
        """Groups with anything under way, streams in operations, bytes held, and how many operations there were."""
        counters = {f"collective_{name}": float(value) for name, value in self._counters.items()}
        held = {
            f"collective_{name}_bytes": float(self.ledger.bytes[name]) for name in ("held", "sums", "queued", "mail")
        }
        return {
            **counters,
            **held,
            "collective_peak_bytes": float(self.ledger.peak_bytes),
            "collective_groups": float(len(self._groups)),
            "collective_streams": float(len(self._places)),
        }

    # ------------------------------------------------------------------ inside

    def _join(self, group: _Group, opening: Opening, call: Call, now_s: float) -> Seat:
        meeting = group.meetings.get(call.sequence)
        if meeting is None:
            meeting = Meeting(group.name, group.ranks, call.sequence, self.ledger, self._wake)
            group.meetings[call.sequence] = meeting
            self._counters["collectives"] += 1
        exchange = Exchange(
            call=call,
            rank=opening.rank,
            world_size=len(opening.ranks),
            share=opening.share,
            shares=opening.shares,
            owners=opening.owners,
            input_counts=opening.input_counts,
            output_counts=opening.output_counts,
        )
        seat = meeting.join(exchange, min(opening.timeout_s, MAX_TIMEOUT_S), now_s)
        self._places[seat] = group, meeting
        return seat

    def _offer_first(
        self, seat: Seat, message: bytes, header: CollectiveChunk, payload: memoryview, now_s: float
    ) -> None:
        try:
            self.offer(seat, message, header, payload)
        except InvalidRequest:  # nobody will close a stream that was never opened
            self.leave(seat, now_s)
            raise

    def _post(self, group: _Group, opening: Opening, letter: Letter, payload: memoryview, now_s: float) -> Seat:
        data: Array | None = None
        nbytes = letter.numel * letter.dtype.itemsize
        if not letter.receive and (payload.nbytes or not nbytes):
            data = elements(payload, letter.dtype)
            if data.size != letter.numel or nbytes > EAGER_BYTES:
                raise InvalidRequest(
                    f"a message of {letter} came with {data.size} elements; it brings all of them along if they are "
                    f"at most {EAGER_BYTES} bytes, and else none"
                )
        self._counters["letters"] += 1
        seat = group.mailbox.post(letter, data, min(opening.timeout_s, MAX_TIMEOUT_S), now_s)
        self._places[seat] = group, group.mailbox
        return seat

    def _wake(self, seat: Seat) -> None:
        self._woken[seat] = None

    def _tidy(self, group: _Group) -> None:
        for sequence in [sequence for sequence, meeting in group.meetings.items() if meeting.over]:
            del group.meetings[sequence]
        if group.over and self._groups.get(group.name) is group:
            del self._groups[group.name]

    def _may_be_received(self, opening: Opening, gone: Sequence[int]) -> bool:
        """Whether somebody asks for a message in a group whose missing members have all finished."""
        letter = opening.what
        receives = isinstance(letter, Letter) and (letter.receive or letter.peer not in gone)
        return receives and self._have_finished(opening.members, gone)

    def _have_finished(self, members: Sequence[str], gone: Sequence[int]) -> bool:
        return all(members[position] in self._finished for position in gone)

    def _loss(self, name: str, ranks: Sequence[int], members: Sequence[str]) -> AxonError | None:
        lost = [r for r, member in zip(ranks, members, strict=True) if member not in self._workers]
        if not lost:
            return None
        words = f"rank {lost[0]} has" if len(lost) == 1 else f"ranks {', '.join(map(str, lost))} have"
        return MemberLost(f"{words} left the job, and with it group {name!r}, which cannot go on; make another group")

    @staticmethod
    def _check(opening: Opening) -> None:
        size = len(opening.ranks)
        if len(opening.members) != size or not 0 <= opening.rank < size:
            raise InvalidRequest(
                f"group {opening.group!r} came with {size} ranks, {len(opening.members)} members, and a "
                f"caller at position {opening.rank}"
            )
        if not 0 <= opening.share < opening.shares:
            raise InvalidRequest(f"there is no share {opening.share} of {opening.shares}")
        if opening.owners and (len(opening.owners) != size or max(opening.owners) >= opening.shares):
            raise InvalidRequest(
                f"group {opening.group!r} came with owners {opening.owners[:32]} of its parts; {size} are needed, each "
                f"below {opening.shares}"
            )
        if not opening.timeout_s >= 0:
            raise InvalidRequest(f"timeout_s is {opening.timeout_s}; it must be 0 or more")
        if isinstance(opening.what, Letter):
            check_letter(opening.what, size)
        elif opening.what.operation is Operation.ALL_TO_ALL and not (
            len(opening.input_counts) == len(opening.output_counts) == size
        ):
            raise InvalidRequest(f"an all_to_all of {size} ranks needs {size} counts in each direction")

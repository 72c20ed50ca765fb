"""The control segment of a group on one host: who has come, how far everybody is, and whether it is over.

Owns: the layout of the segment, waiting in it, and noticing that a member died or ended the group. Refuses: to know
what the ranks do together.

    layout: head | n cells | n x 2 headers | n x 2 inline buffers | n x n mailboxes
    head:   what all ranks look at: the gate's word, whether the group was aborted, where the slots are
    cell:   what one rank says: how many gates it came to, how much it did between two, its process, why it aborted

Note: [Single writer]
    Every word has one writer, so no atomic operation is needed, which Python does not have. The exceptions only ever
    wake somebody who then looks for himself: the gate's word (any rank that was the last to come writes the number of
    the gate, so all of them write the same), the bells (any value that was not there before), and `aborted` (only 1).

Note: [Gates]
    At a gate everybody waits for everybody. A rank counts up its `arrived`, then looks at all the others; who finds
    that all have come rings. At least the last one does, by the fence between the two. Who finds somebody missing
    spins for a moment, giving up the processor each time, and then sleeps until it rings. So with many more ranks
    than cores a rank sleeps once per gate and burns nothing.

Note: [Who sleeps]
    Ringing is a system call, and mostly nobody sleeps. So a sleeper says so in its cell, fences, and looks once more
    for what it waits for; who rings writes what is waited for, fences, and looks whether somebody says so. By the two
    fences at least one of them sees the other.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Callable, Sequence

from axon_ps import errors
from axon_ps.errors import AxonError, Broken, MemberLost, Timeout
from axon_ps.host import futex
from axon_ps.host.peer_process import PeerProcess
from axon_ps.host.shared_memory import Segment, pack_text, unpack_text
from axon_ps.types import Array

INLINE_BYTES = 64 << 10
"""Arrays up to this size travel beside the header of their call."""
TEXT_BYTES = 1024
RING_ENTRIES = 8
ENTRY_HEADER_BYTES = 64

_LINE = 64  # bytes of a cache line; words of different writers lie in different ones
_HEAD_BYTES = 4096
_CELL_BYTES = 2048
_SPIN_S = 50e-6
_SLICE_S = 0.1  # how often a sleeper looks whether those it waits for are alive
_DYING_S = 0.3  # how long a process may take from losing its memory to its end
_MAILBOX_BUDGET_BYTES = 8 << 20
_MASK = 0xFFFFFFFF

# Offsets in bytes: in the head,
NONCE, GATE, ABORTED, STATE, SLOT_STATE, SLOTS, FAILURE = 0, 64, 128, 192, 196, 200, 1024
# and in a cell.
ARRIVED, SLEEPS, PROGRESS, PROGRESS_BELL, DOORBELL = 0, 8, 64, 72, 128
PID, PROBE_ADDRESS, PROBE_NONCE, VERDICT, CLOSED, FREED = 192, 200, 208, 224, 228, 232
ABORT_FLAG, ABORT_KIND, ABORT_TEXT, FREED_RING = 256, 260, 320, 1536
FREED_RING_ENTRIES = 64
# A header: the call, how its array can be reached, counts, and the call in words when the ranks disagree.
DESCRIPTOR, COUNTS = 32, 128

# Errors that mean the same on every rank; others come to the peers as Broken.
_KINDS: tuple[type[AxonError], ...] = (
    Broken,
    MemberLost,
    errors.Unreachable,
    errors.GenerationChanged,
    errors.StepAborted,
)


def _up(size_bytes: int, to: int = _LINE) -> int:
    return -(-size_bytes // to) * to


class Layout:
    """Where everything lies in the control segment of n ranks. All in bytes."""

    def __init__(self, world_size: int) -> None:
        n = world_size
        self.world_size = n
        self.header_bytes = _up(COUNTS + 16 * n + TEXT_BYTES)
        self.text = COUNTS + 16 * n
        self._headers = _HEAD_BYTES + n * _CELL_BYTES
        self._inline = _up(self._headers + 2 * n * self.header_bytes, 4096)
        self._mailboxes = self._inline + 2 * n * INLINE_BYTES
        payload = min(64 << 10, max(2 << 10, _MAILBOX_BUDGET_BYTES // (n * n * RING_ENTRIES)))
        self.payload_bytes = payload // _LINE * _LINE
        self.entry_bytes = ENTRY_HEADER_BYTES + self.payload_bytes
        self._mailbox_bytes = 2 * _LINE + RING_ENTRIES * self.entry_bytes
        self.size_bytes = self._mailboxes + n * n * self._mailbox_bytes

    def cell(self, rank: int) -> int:
        """The cell of a rank."""
        return _HEAD_BYTES + rank * _CELL_BYTES

    def header(self, rank: int, parity: int) -> int:
        """The header of a rank's even or odd calls."""
        return self._headers + (2 * rank + parity) * self.header_bytes

    def inline(self, rank: int, parity: int) -> int:
        """The inline buffer of a rank's even or odd calls."""
        return self._inline + (2 * rank + parity) * INLINE_BYTES

    def mailbox(self, source: int, destination: int) -> int:
        """The mailbox in which one rank posts for another: head, tail, entries."""
        return self._mailboxes + (source * self.world_size + destination) * self._mailbox_bytes


class Control:
    """The control segment as one rank sees it.

    One thread at a time, except for `abort`, `check`, `ring` and `sleep`, which any thread may call.

    Args:
        segment: mapped.
        layout: of it.
        rank: ours.
        ranks: world ranks by position, for messages.
        name: of the group, for messages.
        ended: gives what ended the group, if anything did: it may end before there is a backend to abort.
    """

    def __init__(
        self,
        segment: Segment,
        layout: Layout,
        rank: int,
        ranks: Sequence[int],
        name: str,
        ended: Callable[[], AxonError | None] = lambda: None,
    ) -> None:
        self._ended = ended
        self.segment = segment
        self.layout = layout
        self.rank = rank
        self.ranks = tuple(ranks)
        self.name = name
        self.memory = memoryview(segment.memory)
        self.bytes: Array = segment.bytes()
        self.u64 = self.memory.cast("Q")
        self.u32 = self.memory.cast("I")
        self.base = segment.base()
        self.peers: list[PeerProcess | None] = [None] * layout.world_size
        self.waits = 0
        self.sleeps = 0
        n = layout.world_size
        # With more ranks than cores whoever spins takes the core from the one that is waited for.
        self._spin_s = _SPIN_S if n <= len(os.sched_getaffinity(0)) else 0.0
        self._gates = 0
        self.progress = 0
        self._arrived = [(layout.cell(r) + ARRIVED) // 8 for r in range(n)]
        self._progress = [(layout.cell(r) + PROGRESS) // 8 for r in range(n)]
        self._others = [self._arrived[r] for r in range(n) if r != rank]
        self._sleeps = [(layout.cell(r) + SLEEPS) // 4 for r in range(n) if r != rank]
        self._rings = 0
        self._error: AxonError | None = None
        self._abort_lock = threading.Lock()

    # --- everybody waits for everybody

    def gate(self, deadline: float) -> None:
        """Wait until every rank has come to this gate; what they wrote before it is seen after it.

        Raises:
            Timeout: some did not come by `deadline` (of `time.monotonic`).
            MemberLost: one that did not come has died.
            AxonError: the group was aborted.
        """
        self.arrive()
        self.await_gate(deadline)

    def arrive(self) -> None:
        """Come to the next gate without waiting there, which `await_gate` does.

        What we wrote before is seen by whoever has passed the gate.
        """
        self._gates = target = self._gates + 1
        futex.settle()
        self.u64[self._arrived[self.rank]] = target
        futex.fence()
        u64 = self.u64
        for index in self._others:
            if u64[index] < target:
                return
        self._ring(GATE, target & _MASK)

    def await_gate(self, deadline: float) -> None:
        """Wait until every rank has come to the gate to which we came last. Raises as `gate` does."""
        for index in self._others:
            if self.u64[index] < self._gates:
                self._wait_at_gate(self._gates, deadline)
                break
        futex.settle()

    def _wait_at_gate(self, target: int, deadline: float) -> None:
        u64 = self.u64
        self.waits += 1

        def missing() -> list[int]:
            return [r for r, index in enumerate(self._arrived) if u64[index] < target]

        until = time.monotonic() + self._spin_s
        for index in self._others:
            while u64[index] < target:
                os.sched_yield()
                if time.monotonic() > until:
                    self._sleep_until(GATE, missing, deadline)
                    return

    # --- one rank waits for another

    def advance(self) -> None:
        """Say that one more piece is done."""
        self.progress += 1
        futex.settle()
        self.u64[self._progress[self.rank]] = self.progress
        self._ring(self.layout.cell(self.rank) + PROGRESS_BELL, self.progress & _MASK)

    def await_progress(self, rank: int, pieces: int, deadline: float) -> None:
        """Wait until a rank has done that many pieces, all calls together. Raises as `gate` does."""
        u64, index = self.u64, self._progress[rank]
        if u64[index] < pieces:
            self.waits += 1
            until = time.monotonic() + self._spin_s
            while u64[index] < pieces:
                os.sched_yield()
                if time.monotonic() > until:
                    bell = self.layout.cell(rank) + PROGRESS_BELL
                    self._sleep_until(bell, lambda: [rank] if u64[index] < pieces else [], deadline)
                    break
        futex.settle()

    # --- sleeping

    def _ring(self, bell: int, value: int) -> None:
        """Write a new value into a bell, and wake who sleeps on it. See Note: [Who sleeps]."""
        self.u32[bell // 4] = value
        futex.fence()
        for index in self._sleeps:
            if self.u32[index]:
                futex.wake(self.base + bell)
                return

    def _sleep_until(self, bell: int, missing: Callable[[], list[int]], deadline: float) -> None:
        """Sleep on a bell until nobody is missing."""
        sleeps = (self.layout.cell(self.rank) + SLEEPS) // 4
        self.u32[sleeps] = 1
        try:
            self._sleep(bell, missing, deadline)
        finally:
            self.u32[sleeps] = 0

    def _sleep(self, bell: int, missing: Callable[[], list[int]], deadline: float) -> None:
        while True:
            seen = self.u32[bell // 4]
            futex.fence()
            if not missing():
                return
            self.check()
            left = deadline - time.monotonic()
            if left <= 0:
                late = missing()
                if late:
                    raise self.fail(self.too_late(late))
                return
            self.sleeps += 1
            futex.wait(self.base + bell, seen, min(left, _SLICE_S))
            if self.u32[bell // 4] == seen:
                dead = self.dead()
                late = missing()  # asked after, for a rank may do its part and end
                for rank in late:
                    if self.closed(rank):
                        raise self.fail(self.left(rank))
                    if rank in dead:
                        raise self.fail(self.lost(rank))

    def too_late(self, missing: Sequence[int]) -> Timeout:
        """The error for ranks (positions) that did not come in time."""
        names = ", ".join(str(self.ranks[r]) for r in missing)
        return Timeout(f"rank {names} did not come to what group {self.name!r} does, in time; look what it is doing")

    def lost(self, rank: int) -> MemberLost:
        """The error for a rank (position) whose process ended."""
        peer = self.peers[rank]
        return MemberLost(
            f"rank {self.ranks[rank]} of group {self.name!r} is gone: its process "
            f"{peer.pid if peer else ''} ended in the middle of what the group does"
        )

    def unreadable(self, rank: int, error: Broken) -> AxonError:
        """What to raise when the memory of a rank (position) cannot be read: the group was aborted, or it died."""
        if self._error is None and not self.u32[ABORTED // 4]:
            peer = self.peers[rank]
            if peer is not None and peer.ends(_DYING_S):
                return self.fail(self.lost(rank))
        return self.fail(Broken(f"rank {self.ranks[rank]} gave up its array in the middle of a call: {error}"))

    def left(self, rank: int) -> Broken:
        """The error for a rank (position) that left the group in good order while we wait for it."""
        return Broken(f"rank {self.ranks[rank]} closed group {self.name!r} while others still wait for it in a call")

    def closed(self, rank: int) -> bool:
        """Whether a rank (position) left the group in good order."""
        return bool(self.u32[(self.layout.cell(rank) + CLOSED) // 4])

    def dead(self) -> set[int]:
        """The ranks (positions) whose processes have ended."""
        return {r for r, peer in enumerate(self.peers) if peer is not None and not peer.alive()}

    def bell(self, rank: int) -> int:
        """The offset of a rank's doorbell, on which its threads sleep in send and recv."""
        return self.layout.cell(rank) + DOORBELL

    def ring(self, bell: int) -> None:
        """Wake whoever sleeps on a bell. See Note: [Single writer]."""
        self._rings += 1
        self.u32[bell // 4] = (self._rings * self.layout.world_size + self.rank) & _MASK
        futex.wake(self.base + bell)

    # --- the end

    def check(self) -> None:
        """Raise what the group was aborted with, if it was."""
        if self._error is None and (error := self._ended()) is not None:
            self.abort(error)
        if self._error is None and self.u32[ABORTED // 4]:
            self._remember(self._told())
        if self._error is not None:
            raise self._error

    def abort(self, error: AxonError) -> None:
        """End what every rank does or does later; the first error counts."""
        if not self._remember(error):
            return
        cell = self.layout.cell(self.rank)
        kind = next((i for i in reversed(range(len(_KINDS))) if isinstance(error, _KINDS[i])), 0)
        self.u32[(cell + ABORT_KIND) // 4] = kind
        text = str(error) if kind or isinstance(error, Broken) else f"{type(error).__name__}: {error}"
        packed = pack_text(text, TEXT_BYTES)
        self.memory[cell + ABORT_TEXT : cell + ABORT_TEXT + len(packed)] = packed
        futex.settle()
        self.u32[(cell + ABORT_FLAG) // 4] = 1
        futex.settle()
        self.u32[ABORTED // 4] = 1
        self.u32[GATE // 4] = _MASK
        futex.wake(self.base + GATE)
        for rank in range(self.layout.world_size):
            bell = self.layout.cell(rank) + PROGRESS_BELL
            self.u32[bell // 4] = _MASK
            futex.wake(self.base + bell)
            self.ring(self.bell(rank))

    def fail(self, error: AxonError) -> AxonError:
        """Abort with an error that we found ourselves; returns what to raise: the first error of the group."""
        if self._error is None and self.u32[ABORTED // 4]:
            self._remember(self._told())
        self.abort(error)
        return self._error or error

    def close(self) -> None:
        """Say that this rank does nothing any more, and let go of the segment."""
        self.u32[(self.layout.cell(self.rank) + CLOSED) // 4] = 1
        for peer in self.peers:
            if peer is not None:
                peer.close()
        self.segment.close()

    def _remember(self, error: AxonError) -> bool:
        with self._abort_lock:
            if self._error is None:
                self._error = error
                return True
        return False

    def _told(self) -> AxonError:
        """The error for what other ranks aborted with."""
        futex.settle()
        for rank in range(self.layout.world_size):
            cell = self.layout.cell(rank)
            if self.u32[(cell + ABORT_FLAG) // 4]:
                kind = _KINDS[self.u32[(cell + ABORT_KIND) // 4] % len(_KINDS)]
                text = unpack_text(self.memory[cell + ABORT_TEXT : cell + ABORT_TEXT + TEXT_BYTES])
                if kind is MemberLost:
                    return MemberLost(text)
                return kind(f"rank {self.ranks[rank]} ended group {self.name!r}: {text}")
        return Broken(f"group {self.name!r} was ended by one of its ranks")

    # --- texts and words of the head and the cells

    def words(self, offset: int, form: str) -> tuple[int, ...]:
        """Numbers at an offset, by their `struct` form."""
        return struct.unpack_from(form, self.memory, offset)

    def put_words(self, offset: int, form: str, *values: int) -> None:
        """Store numbers at an offset."""
        struct.pack_into(form, self.memory, offset, *values)

    def text(self, offset: int) -> str:
        """A text at an offset."""
        return unpack_text(self.memory[offset : offset + TEXT_BYTES])

    def put_text(self, offset: int, text: str) -> None:
        """Store a text at an offset."""
        packed = pack_text(text, TEXT_BYTES)
        self.memory[offset : offset + len(packed)] = packed

"""The control segment of a group on one host: barriers, every rank's progress, and the group's abort.

Owns: the layout of the segment, waiting in it, and noticing that a member died or ended the group. Refuses: to know
which collectives the ranks run.

    layout: head | n records | n x 2 headers | n x 2 inline buffers | n x n message rings
    head:   shared by all ranks: the futex word of the barrier, the flag of an abort, the location of the slots
    record: published by one rank: barriers and windows it has come to, its socket, the reason of its abort

Note: [Single writer]
    Every number has one writer, so no atomic operation is needed, which Python does not have. The exceptions only ever
    wake a sleeper, which then checks for itself: the futex word of the barrier (any rank that came last writes the
    number of the barrier, so all of them write the same), the doorbells (any value that was not there before), and
    `aborted` (only 1).

Note: [Barriers]
    A rank counts up its `arrived`, then reads all the others'. A rank that finds all others arrived rings the barrier's
    doorbell; because of the fence between the two, at least the last one does. A rank that finds another one missing
    spins for a moment, yielding the processor each time, and then sleeps on the doorbell. So with many more ranks than
    cores a rank sleeps once per barrier and uses no processor time.

Note: [Doorbells]
    A doorbell is a futex word. Waking its sleepers is a system call, and mostly there are none. A sleeper sets a flag
    in its record, fences, and checks its condition once more. A rank that rings writes the awaited value, fences, and
    checks the flags. By the two fences at least one of them sees the other.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Callable, Sequence

from axon_ps import errors
from axon_ps.errors import AxonError, Broken, MemberLost, Timeout, again
from axon_ps.host import futex
from axon_ps.host.peer_process import PeerProcess
from axon_ps.host.shared_memory import base_of, pack_text, unpack_text
from axon_ps.types import Array

INLINE_BYTES = 64 << 10
"""Arrays up to this size travel beside the header of their call."""
TEXT_BYTES = 1024
RING_ENTRIES = 8
ENTRY_HEADER_BYTES = 64
DYING_S = 1.0
"""Seconds within which a process that dies counts as ended, after its sockets are closed."""

_LINE = 64  # bytes of a cache line; numbers of different writers lie in different lines
_HEAD_BYTES = 4096
_RECORD_BYTES = 2048
_SPIN_S = 50e-6
_SLICE_S = 0.1  # seconds between two checks of a sleeper that the ranks it waits for are alive
_MESSAGE_RINGS_BUDGET_BYTES = 8 << 20
_MASK = 0xFFFFFFFF


def _up(size_bytes: int, to: int = _LINE) -> int:
    return -(-size_bytes // to) * to


# Offsets in bytes: in the head,
BARRIER, ABORTED, SLOT_STATE, SLOTS, FAILURE = 64, 128, 192, 200, 1024
# and in a record.
ARRIVED, SLEEPS, PROGRESS, PROGRESS_DOORBELL, MESSAGE_DOORBELL = 0, 8, 64, 72, 128
CLOSED, SENT = 224, 232
ABORT_FLAG, ABORT_KIND, ABORT_TEXT, SOCKET = 256, 260, 320, 1344
# A header: the call, the descriptor of its array, counts, and the call as text when the ranks disagree.
DESCRIPTOR = 32
DESCRIPTOR_BYTES = 32
COUNTS = _up(DESCRIPTOR + DESCRIPTOR_BYTES)

# Errors that mean the same on every rank; the peers get any other error as Broken.
_KINDS: tuple[type[AxonError], ...] = (
    Broken,
    MemberLost,
    errors.Unreachable,
    errors.GenerationChanged,
    errors.StepAborted,
)


class ControlLayout:
    """The offsets in the control segment of n ranks, in bytes."""

    def __init__(self, world_size: int) -> None:
        n = world_size
        self.world_size = n
        self.header_bytes = _up(COUNTS + 16 * n + TEXT_BYTES)
        self.text = COUNTS + 16 * n
        self._headers = _HEAD_BYTES + n * _RECORD_BYTES
        self._inline = _up(self._headers + 2 * n * self.header_bytes, 4096)
        self._message_rings = self._inline + 2 * n * INLINE_BYTES
        payload = min(64 << 10, max(2 << 10, _MESSAGE_RINGS_BUDGET_BYTES // (n * n * RING_ENTRIES)))
        self.payload_bytes = payload // _LINE * _LINE
        self.entry_bytes = ENTRY_HEADER_BYTES + self.payload_bytes
        self._message_ring_bytes = 2 * _LINE + RING_ENTRIES * self.entry_bytes
        self.size_bytes = self._message_rings + n * n * self._message_ring_bytes

    def record(self, rank: int) -> int:
        """Return the offset of a rank's record."""
        return _HEAD_BYTES + rank * _RECORD_BYTES

    def header(self, rank: int, buffer_index: int) -> int:
        """Return the offset of a rank's header for the calls that use this buffer, even or odd ones."""
        return self._headers + (2 * rank + buffer_index) * self.header_bytes

    def inline(self, rank: int, buffer_index: int) -> int:
        """Return the offset of a rank's inline data for the calls that use this buffer."""
        return self._inline + (2 * rank + buffer_index) * INLINE_BYTES

    def message_ring(self, source: int, destination: int) -> int:
        """Return the offset of the ring of messages from one rank to another: head, tail, entries."""
        return self._message_rings + (source * self.world_size + destination) * self._message_ring_bytes


class Control:
    """The control segment as one rank sees it.

    One thread at a time may call `barrier`, `arrive`, `advance` and the waits for them. Any thread may call the rest.

    Args:
        memory: u8[layout.size_bytes], the segment.
        layout: layout of the segment.
        rank: our rank.
        ranks: world ranks by position, for messages.
        name: name of the group, for messages.
        ended: returns the error that ended the group, if any: it may end before there is a backend to abort.
    """

    def __init__(
        self,
        memory: Array,
        layout: ControlLayout,
        rank: int,
        ranks: Sequence[int],
        name: str,
        ended: Callable[[], AxonError | None] = lambda: None,
    ) -> None:
        self._ended = ended
        self.layout = layout
        self.rank = rank
        self.ranks = tuple(ranks)
        self.name = name
        self.memory = memoryview(memory)  # type: ignore[arg-type]
        self.bytes: Array = memory
        self.u64 = self.memory.cast("Q")
        self.u32 = self.memory.cast("I")
        self.base = base_of(memory)
        self.peers: list[PeerProcess | None] = [None] * layout.world_size
        self.waits = 0
        self.sleeps = 0
        n = layout.world_size
        # With more ranks than cores a rank that spins takes the core from the one it waits for.
        self._spin_s = _SPIN_S if n <= len(os.sched_getaffinity(0)) else 0.0
        self._barriers = 0
        self.progress = 0
        self._arrived = [(layout.record(r) + ARRIVED) // 8 for r in range(n)]
        self._progress = [(layout.record(r) + PROGRESS) // 8 for r in range(n)]
        self._others = [self._arrived[r] for r in range(n) if r != rank]
        self._sleeps = [(layout.record(r) + SLEEPS) // 4 for r in range(n) if r != rank]
        self._notifications = 0
        self._error: AxonError | None = None
        self._abort_lock = threading.Lock()

    # --- all ranks wait for each other

    def barrier(self, deadline: float) -> None:
        """Wait until every rank has come to this barrier; their writes before it are visible after it.

        Raises:
            Timeout: some did not come by `deadline` (of `time.monotonic`).
            MemberLost: a rank that did not come has died.
            AxonError: the group was aborted.
        """
        self.arrive()
        self.await_barrier(deadline)

    def arrive(self) -> None:
        """Arrive at the next barrier without waiting, which `await_barrier` does.

        Ranks that have passed the barrier see what we wrote before.
        """
        self._barriers = target = self._barriers + 1
        futex.settle()
        self.u64[self._arrived[self.rank]] = target
        futex.fence()
        u64 = self.u64
        for index in self._others:
            if u64[index] < target:
                return
        self._notify(BARRIER, target & _MASK)

    def await_barrier(self, deadline: float) -> None:
        """Wait until every rank has come to the barrier where we arrived last. It raises as `barrier` does."""
        for index in self._others:
            if self.u64[index] < self._barriers:
                self._wait_at_barrier(self._barriers, deadline)
                break
        futex.settle()

    def _wait_at_barrier(self, target: int, deadline: float) -> None:
        u64 = self.u64
        self.waits += 1

        def missing() -> list[int]:
            return [r for r, index in enumerate(self._arrived) if u64[index] < target]

        until = time.monotonic() + self._spin_s
        for index in self._others:
            while u64[index] < target:
                os.sched_yield()
                if time.monotonic() > until:
                    self._sleep_until(BARRIER, missing, deadline)
                    return

    # --- one rank waits for another

    def advance(self) -> None:
        """Publish that one more window is done."""
        self.progress += 1
        futex.settle()
        self.u64[self._progress[self.rank]] = self.progress
        self._notify(self.layout.record(self.rank) + PROGRESS_DOORBELL, self.progress & _MASK)

    def await_progress(self, rank: int, progress: int, deadline: float) -> None:
        """Wait until a rank has done that many windows, over all calls. It raises as `barrier` does."""
        u64, index = self.u64, self._progress[rank]
        if u64[index] < progress:
            self.waits += 1
            until = time.monotonic() + self._spin_s
            while u64[index] < progress:
                os.sched_yield()
                if time.monotonic() > until:
                    doorbell = self.layout.record(rank) + PROGRESS_DOORBELL
                    self._sleep_until(doorbell, lambda: [rank] if u64[index] < progress else [], deadline)
                    break
        futex.settle()

    # --- sleeping

    def _notify(self, doorbell: int, value: int) -> None:
        """Write a new value into a doorbell, and wake its sleepers if there are any. See Note: [Doorbells]."""
        self.u32[doorbell // 4] = value
        futex.fence()
        for index in self._sleeps:
            if self.u32[index]:
                futex.wake(self.base + doorbell)
                return

    def _sleep_until(self, doorbell: int, missing: Callable[[], list[int]], deadline: float) -> None:
        """Sleep on a doorbell until no rank is missing."""
        sleeps = (self.layout.record(self.rank) + SLEEPS) // 4
        self.u32[sleeps] = 1
        try:
            self._sleep(doorbell, missing, deadline)
        finally:
            self.u32[sleeps] = 0

    def _sleep(self, doorbell: int, missing: Callable[[], list[int]], deadline: float) -> None:
        while True:
            seen = self.u32[doorbell // 4]
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
            futex.wait(self.base + doorbell, seen, min(left, _SLICE_S))
            if self.u32[doorbell // 4] == seen:
                dead = self.dead()
                late = missing()  # checked after `dead`, since a rank may finish the call and then exit
                for rank in late:
                    if self.closed(rank):
                        raise self.fail(self.departed(rank))
                    if rank in dead:
                        raise self.fail(self.lost(rank))

    def too_late(self, missing: Sequence[int]) -> Timeout:
        """Return the error for ranks (positions) that did not come in time."""
        names = ", ".join(str(self.ranks[r]) for r in missing)
        return Timeout(f"rank {names} did not come to what group {self.name!r} does, in time; look what it is doing")

    def lost(self, rank: int) -> MemberLost:
        """Return the error for a rank (position) whose process ended."""
        peer = self.peers[rank]
        return MemberLost(
            f"rank {self.ranks[rank]} of group {self.name!r} is gone: its process "
            f"{peer.pid if peer else ''} ended in the middle of what the group does"
        )

    def hung_up(self, rank: int, error: AxonError) -> AxonError:
        """Return the error for a rank (position) that cannot be asked: `lost` if its process has ended or ends now."""
        peer = self.peers[rank]
        if peer is not None and peer.ends(DYING_S):
            return self.lost(rank)
        return Broken(f"rank {self.ranks[rank]}: {error}")

    def departed(self, rank: int) -> Broken:
        """Return the error for a rank (position) that closed the group while we wait for it."""
        return Broken(f"rank {self.ranks[rank]} closed group {self.name!r} while others still wait for it in a call")

    def closed(self, rank: int) -> bool:
        """Return True if a rank (position) closed the group."""
        return bool(self.u32[(self.layout.record(rank) + CLOSED) // 4])

    def dead(self) -> set[int]:
        """Return the ranks (positions) whose processes have ended."""
        return {r for r, peer in enumerate(self.peers) if peer is not None and not peer.alive()}

    def doorbell(self, rank: int) -> int:
        """Return the offset of the doorbell on which a rank's threads sleep in send and recv."""
        return self.layout.record(rank) + MESSAGE_DOORBELL

    def notify(self, doorbell: int) -> None:
        """Ring a doorbell, which wakes all its sleepers. See Note: [Single writer]."""
        self._notifications += 1
        self.u32[doorbell // 4] = (self._notifications * self.layout.world_size + self.rank) & _MASK
        futex.wake(self.base + doorbell)

    # --- the end

    def check(self) -> None:
        """Raise the error that the group was aborted with, if it was."""
        if self._error is None and (error := self._ended()) is not None:
            self.abort(error)
        if self._error is None and self.u32[ABORTED // 4]:
            self._set_error(self._peer_error())
        if self._error is not None:
            raise again(self._error)

    def abort(self, error: AxonError) -> None:
        """End the pending and later calls of every rank; the first error counts.

        All ranks can see the error before a thread of this rank raises it. That thread may close the group, and a peer
        that saw a closed group without an error would conclude that this rank has left it.
        """
        with self._abort_lock:
            if self._error is None:
                self._publish(error)
                self._error = again(error)

    def _publish(self, error: AxonError) -> None:
        record = self.layout.record(self.rank)
        kind = next((i for i in reversed(range(len(_KINDS))) if isinstance(error, _KINDS[i])), 0)
        self.u32[(record + ABORT_KIND) // 4] = kind
        text = str(error) if kind or isinstance(error, Broken) else f"{type(error).__name__}: {error}"
        packed = pack_text(text, TEXT_BYTES)
        self.memory[record + ABORT_TEXT : record + ABORT_TEXT + len(packed)] = packed
        futex.settle()
        self.u32[(record + ABORT_FLAG) // 4] = 1
        futex.settle()
        self.u32[ABORTED // 4] = 1
        self.u32[BARRIER // 4] = _MASK
        futex.wake(self.base + BARRIER)
        for rank in range(self.layout.world_size):
            doorbell = self.layout.record(rank) + PROGRESS_DOORBELL
            self.u32[doorbell // 4] = _MASK
            futex.wake(self.base + doorbell)
            self.notify(self.doorbell(rank))

    def fail(self, error: AxonError) -> AxonError:
        """Abort with an error that this rank found; return the error to raise: the first one of the group."""
        if self._error is None and self.u32[ABORTED // 4]:
            self._set_error(self._peer_error())
        self.abort(error)
        return self._error or error

    def close(self) -> None:
        """Publish that this rank has closed the group."""
        self.u32[(self.layout.record(self.rank) + CLOSED) // 4] = 1
        for peer in self.peers:
            if peer is not None:
                peer.close()

    def _set_error(self, error: AxonError) -> None:
        with self._abort_lock:
            self._error = self._error or again(error)

    def _peer_error(self) -> AxonError:
        """Return the error with which another rank aborted."""
        futex.settle()
        for rank in range(self.layout.world_size):
            record = self.layout.record(rank)
            if self.u32[(record + ABORT_FLAG) // 4]:
                kind = _KINDS[self.u32[(record + ABORT_KIND) // 4] % len(_KINDS)]
                text = unpack_text(self.memory[record + ABORT_TEXT : record + ABORT_TEXT + TEXT_BYTES])
                if kind is MemberLost:
                    return MemberLost(text)
                return kind(f"rank {self.ranks[rank]} ended group {self.name!r}: {text}")
        return Broken(f"group {self.name!r} was ended by one of its ranks")

    # --- texts and numbers in the segment

    def numbers(self, offset: int, form: str) -> tuple[int, ...]:
        """Return the numbers at an offset, by their `struct` form."""
        return struct.unpack_from(form, self.memory, offset)

    def put_numbers(self, offset: int, form: str, *values: int) -> None:
        """Store numbers at an offset."""
        struct.pack_into(form, self.memory, offset, *values)

    def text(self, offset: int) -> str:
        """Return the text at an offset."""
        return unpack_text(self.memory[offset : offset + TEXT_BYTES])

    def put_text(self, offset: int, text: str) -> None:
        """Store a text at an offset."""
        packed = pack_text(text, TEXT_BYTES)
        self.memory[offset : offset + len(packed)] = packed

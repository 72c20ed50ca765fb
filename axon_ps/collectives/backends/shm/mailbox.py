"""send and recv between processes of one host.

Owns: a ring buffer of entries for every ordered pair of ranks, in the control segment. Refuses: collectives.

    small array   one EAGER entry with the bytes; the sender goes on
    shared array  READY_TO_SEND -> the receiver copies it from where it lies -> FINISHED
    large array   READY_TO_SEND -> CLEAR_TO_SEND -> FRAGMENT ... FRAGMENT, each in one of a few windows of shared
                  memory, which is used again once the ring's reader has passed the fragment before; or in the ring,
                  if there is none or another message is in them
    mismatch      READY_TO_SEND -> REJECTED with the reason

A thread that waits in a send or recv empties all rings that lead to its rank, whatever is in them: messages for which
no thread waits yet stay in a list, in order of arrival. So a full ring is emptied as soon as its reader waits for
anything, and two ranks that send to each other do not block. Any number of threads may send and receive.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from axon_ps.collectives.backends.shm.control import ENTRY_HEADER_BYTES, RING_ENTRIES, Control
from axon_ps.collectives.backends.shm.exchange import PeerMemory
from axon_ps.errors import Disagreement
from axon_ps.host import futex
from axon_ps.host.shared_arrays import shared_arrays
from axon_ps.types import COLLECTIVE_DTYPES, Array, DType

_EAGER, _READY_TO_SEND, _FINISHED, _CLEAR_TO_SEND, _FRAGMENT, _REJECTED = range(6)
_ENTRY = struct.Struct("<IIqQQQQQ")  # kind, dtype, tag, id of the transfer, bytes here, bytes in all, segment, offset
_DTYPES = COLLECTIVE_DTYPES
_SPIN_S = 30e-6
_SLICE_S = 0.1
_TAIL = 64
_WINDOW_BYTES, _WINDOWS = 512 << 10, 4

T = TypeVar("T")


@dataclass
class _Message:
    """A message that arrived, or the announcement of one."""

    source: int
    tag: int
    dtype: DType
    size_bytes: int
    transfer: int
    segment: int  # 0: it comes in fragments
    offset: int
    payload: bytes | None  # None: an announcement


@dataclass
class _Reassembly:
    """A message that comes in fragments."""

    into: memoryview
    have_bytes: int = 0


class ShmMailbox:
    """One rank's message rings, in and out. Any thread may use them; see this module.

    Args:
        control: control segment of the group.
        peer_memory: finds shared arrays.
    """

    def __init__(self, control: Control, peer_memory: PeerMemory) -> None:
        self._control = control
        self._peer_memory = peer_memory
        layout, me = control.layout, control.rank
        self._out = [layout.message_ring(me, r) for r in range(layout.world_size)]
        self._in = [layout.message_ring(r, me) for r in range(layout.world_size)]
        self._doorbell = control.doorbell(me)
        self._spin_s = _SPIN_S if layout.world_size <= len(os.sched_getaffinity(0)) else 0.0
        self._lock = threading.Lock()
        self._unmatched: list[_Message] = []
        self._replies: dict[int, tuple[int, str]] = {}  # by transfer: kind and text
        self._reassemblies: dict[tuple[int, int], _Reassembly] = {}  # by source and transfer
        self._transfers = 0
        self._windows: Array | None = None
        self._windows_used = threading.Lock()  # by one message at a time
        self.bytes_sent = 0
        self.bytes_received = 0

    def send(self, data: Array, dtype: DType, to: int, tag: int, timeout_s: float) -> None:
        """See `Backend.send`."""
        deadline = time.monotonic() + timeout_s
        self._control.check()
        raw = data.view(np.uint8).data if data.size else memoryview(b"")
        self.bytes_sent += raw.nbytes
        kind = _DTYPES.index(dtype)
        if raw.nbytes <= self._control.layout.payload_bytes:
            self._enqueue(to, deadline, raw, _EAGER, kind, tag, 0, raw.nbytes, raw.nbytes, 0, 0)
            return
        with self._lock:
            self._transfers += 1
            transfer = self._transfers
        location = self._peer_memory.location_for(to, data) or (0, 0)
        self._enqueue(to, deadline, None, _READY_TO_SEND, kind, tag, transfer, 0, raw.nbytes, *location)
        reply, text = self._wait(lambda: self._replies.pop(transfer, None), {to}, deadline)
        if reply == _REJECTED:
            raise Disagreement(text)
        if reply == _CLEAR_TO_SEND and not self._send_in_windows(to, deadline, raw, transfer):
            step = self._control.layout.payload_bytes
            for begin in range(0, raw.nbytes, step):
                fragment = raw[begin : begin + step]
                self._enqueue(to, deadline, fragment, _FRAGMENT, 0, 0, transfer, fragment.nbytes, raw.nbytes, 0, 0)

    def _send_in_windows(self, to: int, deadline: float, raw: memoryview, transfer: int) -> bool:
        """Send the fragments of a message through shared memory; return False if there is none, or it is in use."""
        if not self._windows_used.acquire(timeout=0):
            return False
        try:
            if self._windows is None:
                self._windows = shared_arrays.buffer(_WINDOWS * _WINDOW_BYTES)
            windows = self._windows
            if (location := self._peer_memory.location_for(to, windows)) is None:
                return False
            ring, ends = self._out[to], [0] * _WINDOWS  # the reader's position once it needs a window no more
            for i, begin in enumerate(range(0, raw.nbytes, _WINDOW_BYTES)):
                self._await_reader(to, ring, ends[i % _WINDOWS], deadline)
                fragment, at = raw[begin : begin + _WINDOW_BYTES], i % _WINDOWS * _WINDOW_BYTES
                windows[at : at + fragment.nbytes] = fragment
                sizes = fragment.nbytes, raw.nbytes
                self._enqueue(to, deadline, None, _FRAGMENT, 0, 0, transfer, *sizes, location[0], location[1] + at)
                ends[i % _WINDOWS] = self._control.u64[ring // 8]
            self._await_reader(to, ring, max(ends), deadline)
        finally:
            self._windows_used.release()
        return True

    def _await_reader(self, to: int, ring: int, position: int, deadline: float) -> None:
        """Wait until a ring's reader has passed a position."""
        u64, tail = self._control.u64, (ring + _TAIL) // 8
        self._wait(lambda: u64[tail] >= position or None, {to}, deadline)

    def recv(self, data: Array, dtype: DType, source: int, tag: int, timeout_s: float) -> int:
        """See `Backend.recv`."""
        deadline = time.monotonic() + timeout_s
        self._control.check()
        sources = {source} if source >= 0 else set(range(self._control.layout.world_size)) - {self._control.rank}
        message = self._wait(lambda: self._match(source, tag), sources, deadline)
        if message.dtype is not dtype or message.size_bytes != data.nbytes:
            self._reject(message, data, dtype, deadline)
        self.bytes_received += data.nbytes
        if message.payload is not None:
            data.view(np.uint8)[:] = np.frombuffer(message.payload, np.uint8)
        elif message.segment:
            location = message.segment, message.offset, message.size_bytes
            np.copyto(data.view(np.uint8), self._peer_memory.mapped(message.source, *location))
            self._control.check()  # a sender that has given up does so before it uses its array again
            self._reply(message, _FINISHED, "", deadline)
        else:
            key = message.source, message.transfer
            reassembly = _Reassembly(data.view(np.uint8).data)
            with self._lock:
                self._reassemblies[key] = reassembly
            try:
                self._reply(message, _CLEAR_TO_SEND, "", deadline)
                self._wait(lambda: reassembly.have_bytes == data.nbytes or None, {message.source}, deadline)
            finally:
                with self._lock:
                    self._reassemblies.pop(key, None)
        return message.source

    def _match(self, source: int, tag: int) -> _Message | None:
        for i, message in enumerate(self._unmatched):
            if message.tag == tag and source in (-1, message.source):
                return self._unmatched.pop(i)
        return None

    def _reject(self, message: _Message, data: Array, dtype: DType, deadline: float) -> None:
        ranks = self._control.ranks
        text = (
            f"rank {ranks[message.source]} sends {message.size_bytes // message.dtype.itemsize} {message.dtype.value} "
            f"to rank {ranks[self._control.rank]}, which expects {data.size} {dtype.value} (tag {message.tag})"
        )
        if message.payload is None:
            self._reply(message, _REJECTED, text, deadline)
        raise Disagreement(text)

    def _reply(self, message: _Message, kind: int, text: str, deadline: float) -> None:
        raw = memoryview(text.encode()[: self._control.layout.payload_bytes])
        self._enqueue(message.source, deadline, raw, kind, 0, 0, message.transfer, raw.nbytes, raw.nbytes, 0, 0)

    # --- rings

    def _enqueue(self, to: int, deadline: float, payload: memoryview | None, *entry: int) -> None:
        if not self._try_enqueue(to, payload, entry):
            self._wait(lambda: self._append(to, payload, entry) or None, {to}, deadline)
            self._control.notify(self._control.doorbell(to))

    def _try_enqueue(self, to: int, payload: memoryview | None, entry: tuple[int, ...]) -> bool:
        with self._lock:
            appended = self._append(to, payload, entry)
        if appended:
            self._control.notify(self._control.doorbell(to))
        return appended

    def _append(self, to: int, payload: memoryview | None, entry: tuple[int, ...]) -> bool:
        """Append to a ring unless it is full. The caller has the lock, and rings the receiver's doorbell afterwards."""
        control, ring = self._control, self._out[to]
        head, tail = control.u64[ring // 8], control.u64[(ring + _TAIL) // 8]
        if head - tail >= RING_ENTRIES:
            return False
        futex.settle()
        at = ring + 2 * _TAIL + head % RING_ENTRIES * control.layout.entry_bytes
        _ENTRY.pack_into(control.memory, at, *entry)
        if payload:
            at += ENTRY_HEADER_BYTES
            control.memory[at : at + payload.nbytes] = payload
        futex.settle()
        control.u64[ring // 8] = head + 1
        futex.fence()
        return True

    def _progress(self) -> bool:
        """Empty all rings that lead here; return True if there was anything. The caller has the lock."""
        control = self._control
        found = False
        for source, ring in enumerate(self._in):
            head, tail = control.u64[ring // 8], control.u64[(ring + _TAIL) // 8]
            if head == tail:
                continue
            found = True
            futex.settle()
            entries = [
                self._accept(source, ring + 2 * _TAIL + position % RING_ENTRIES * control.layout.entry_bytes)
                for position in range(tail, head)
            ]
            futex.settle()
            control.u64[(ring + _TAIL) // 8] = head
            futex.fence()
            if any(entries) or control.u64[ring // 8] - tail >= RING_ENTRIES // 2:  # its writer may wait for space
                control.notify(control.doorbell(source))
        return found

    def _accept(self, source: int, at: int) -> bool:
        """Take one entry; return True if its writer waits for that."""
        memory = self._control.memory
        kind, dtype, tag, transfer, size_bytes, total_bytes, segment, offset = _ENTRY.unpack_from(memory, at)
        payload = memory[at + ENTRY_HEADER_BYTES : at + ENTRY_HEADER_BYTES + size_bytes]
        if kind in (_EAGER, _READY_TO_SEND):
            copied = bytes(payload) if kind == _EAGER else None
            message = _Message(source, tag, _DTYPES[dtype], total_bytes, transfer, segment, offset, copied)
            self._unmatched.append(message)
        elif kind == _FRAGMENT:
            reassembly = self._reassemblies.get((source, transfer))
            if reassembly is not None:  # else the receiver gave up
                if segment:
                    payload = self._peer_memory.mapped(source, segment, offset, size_bytes).data
                reassembly.into[reassembly.have_bytes : reassembly.have_bytes + size_bytes] = payload
                reassembly.have_bytes += size_bytes
            return bool(segment)
        else:
            self._replies[transfer] = kind, bytes(payload).decode(errors="replace")
        return False

    def _wait(self, ready: Callable[[], T | None], ranks: set[int], deadline: float) -> T:
        """Empty rings until `ready`, called with the lock, returns a result; `ranks` are those it depends on."""
        control = self._control
        spin_until = time.monotonic() + self._spin_s
        while True:
            seen = control.u32[self._doorbell // 4]
            futex.fence()
            with self._lock:
                found = self._progress()
                result = ready()
            if found:
                # Another thread of this rank may wait for entries that we have taken out of the rings.
                control.notify(self._doorbell)
            if result is not None:
                return result
            if found:
                continue
            now = time.monotonic()
            if now < spin_until:
                os.sched_yield()
                continue
            control.check()
            if now >= deadline:
                raise control.fail(control.too_late(sorted(ranks)))
            futex.wait(control.base + self._doorbell, seen, min(deadline - now, _SLICE_S))
            if control.u32[self._doorbell // 4] == seen:
                self._check_ranks(seen, ranks)

    def _check_ranks(self, seen: int, ranks: set[int]) -> None:
        """Raise if a rank that we wait for has died, or all have closed the group, and our rings are empty."""
        control = self._control
        dead = control.dead() & ranks
        closed = {r for r in ranks if control.closed(r)}
        if not dead and not closed:
            return
        with self._lock:
            waiting = any(control.u64[ring // 8] != control.u64[(ring + _TAIL) // 8] for ring in self._in)
        if waiting or control.u32[self._doorbell // 4] != seen:
            return
        for rank in sorted(dead - closed):
            raise control.fail(control.lost(rank))
        if closed and closed == ranks:
            raise control.departed(min(closed))  # without an abort: others may still receive its messages

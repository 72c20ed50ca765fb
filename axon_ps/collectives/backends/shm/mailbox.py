"""send and recv between processes of one host.

Owns: a ring of entries for every ordered pair of ranks, in the control segment. Refuses: collectives.

    small array   one EAGER entry with the bytes; the sender goes on
    large array   OFFER -> the receiver copies it from the sender's memory -> DONE
                  or, if the kernel refuses that: OFFER -> READY -> PIECE ... PIECE
    misfit        OFFER -> REFUSED with the reason

Whoever waits in a send or recv empties all rings that lead to it, whatever is in them: entries that nobody waits for
yet are kept in order of arrival. So a ring that is full moves on as soon as its reader waits for anything, and two
ranks that send to each other do not block. Any number of threads may send and receive.
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
from axon_ps.errors import Broken, Disagreement
from axon_ps.host import futex
from axon_ps.host.leases import address_of
from axon_ps.host.peer_process import MemoryReader
from axon_ps.types import Array, DType

_EAGER, _OFFER, _DONE, _READY, _PIECE, _REFUSED = range(6)
_ENTRY = struct.Struct("<IIqQQQQ")  # kind, dtype, tag, id of the transfer, bytes here, bytes in all, address
_DTYPES = list(DType)
_SPIN_S = 30e-6
_SLICE_S = 0.1
_PULL_BYTES = 4 << 20
_TAIL = 64

T = TypeVar("T")


@dataclass
class _Message:
    """A message that arrived, or the offer of one."""

    source: int
    tag: int
    dtype: DType
    size_bytes: int
    transfer: int
    address: int  # 0: it comes in pieces
    payload: bytes | None  # None: an offer


@dataclass
class _Stream:
    """A message that comes in pieces."""

    into: memoryview
    have_bytes: int = 0


class Mailbox:
    """One rank's rings. Any thread; see this module.

    Args:
        control: of the group.
        direct: whether all ranks can read each other's memory.
        pids: the ranks' processes, by position.
    """

    def __init__(self, control: Control, direct: bool, pids: list[int]) -> None:
        self._control = control
        self._direct = direct
        self._pids = pids
        layout, me = control.layout, control.rank
        self._out = [layout.mailbox(me, r) for r in range(layout.world_size)]
        self._in = [layout.mailbox(r, me) for r in range(layout.world_size)]
        self._bell = control.bell(me)
        self._spin_s = _SPIN_S if layout.world_size <= len(os.sched_getaffinity(0)) else 0.0
        self._lock = threading.Lock()
        self._arrived: list[_Message] = []
        self._answers: dict[int, tuple[int, str]] = {}  # by transfer: kind and text
        self._streams: dict[tuple[int, int], _Stream] = {}  # by source and transfer
        self._transfers = 0
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
            self._post(to, deadline, raw, _EAGER, kind, tag, 0, raw.nbytes, raw.nbytes, 0)
            return
        with self._lock:
            self._transfers += 1
            transfer = self._transfers
        address = address_of(data)
        if not (self._direct and MemoryReader().readable(os.getpid(), address, raw.nbytes)):
            address = 0
        self._post(to, deadline, None, _OFFER, kind, tag, transfer, 0, raw.nbytes, address)
        answer, text = self._wait(lambda: self._answers.pop(transfer, None), {to}, deadline)
        if answer == _REFUSED:
            raise Disagreement(text)
        if answer == _READY:
            step = self._control.layout.payload_bytes
            for begin in range(0, raw.nbytes, step):
                piece = raw[begin : begin + step]
                self._post(to, deadline, piece, _PIECE, kind, tag, transfer, piece.nbytes, raw.nbytes, 0)

    def recv(self, data: Array, dtype: DType, source: int, tag: int, timeout_s: float) -> int:
        """See `Backend.recv`."""
        deadline = time.monotonic() + timeout_s
        self._control.check()
        sources = {source} if source >= 0 else set(range(len(self._pids))) - {self._control.rank}
        message = self._wait(lambda: self._take(source, tag), sources, deadline)
        if message.dtype is not dtype or message.size_bytes != data.nbytes:
            self._refuse(message, data, dtype, deadline)
        self.bytes_received += data.nbytes
        if message.payload is not None:
            data.view(np.uint8)[:] = np.frombuffer(message.payload, np.uint8)
        elif message.address:
            self._copy(message, data)
            self._answer(message, _DONE, "", deadline)
        else:
            key = message.source, message.transfer
            stream = _Stream(data.view(np.uint8).data)
            with self._lock:
                self._streams[key] = stream
            try:
                self._answer(message, _READY, "", deadline)
                self._wait(lambda: stream.have_bytes == data.nbytes or None, {message.source}, deadline)
            finally:
                with self._lock:
                    self._streams.pop(key, None)
        return message.source

    def _take(self, source: int, tag: int) -> _Message | None:
        for i, message in enumerate(self._arrived):
            if message.tag == tag and source in (-1, message.source):
                return self._arrived.pop(i)
        return None

    def _refuse(self, message: _Message, data: Array, dtype: DType, deadline: float) -> None:
        ranks = self._control.ranks
        text = (
            f"rank {ranks[message.source]} sends {message.size_bytes // message.dtype.itemsize} {message.dtype.value} "
            f"to rank {ranks[self._control.rank]}, which expects {data.size} {dtype.value} (tag {message.tag})"
        )
        if message.payload is None:
            self._answer(message, _REFUSED, text, deadline)
        raise Disagreement(text)

    def _copy(self, message: _Message, data: Array) -> None:
        reader, remote, local, left = MemoryReader(), message.address, address_of(data), data.nbytes
        while left:
            self._control.check()
            size = min(left, _PULL_BYTES)
            try:
                reader.read(self._pids[message.source], remote, local, size)
            except Broken as error:
                raise self._control.unreadable(message.source, error) from error
            remote, local, left = remote + size, local + size, left - size

    def _answer(self, message: _Message, kind: int, text: str, deadline: float) -> None:
        raw = memoryview(text.encode()[: self._control.layout.payload_bytes])
        self._post(message.source, deadline, raw, kind, 0, 0, message.transfer, raw.nbytes, raw.nbytes, 0)

    # --- rings

    def _post(self, to: int, deadline: float, payload: memoryview | None, *entry: int) -> None:
        if not self._try_post(to, payload, entry):
            self._wait(lambda: self._put(to, payload, entry) or None, {to}, deadline)
            self._control.ring(self._control.bell(to))

    def _try_post(self, to: int, payload: memoryview | None, entry: tuple[int, ...]) -> bool:
        with self._lock:
            posted = self._put(to, payload, entry)
        if posted:
            self._control.ring(self._control.bell(to))
        return posted

    def _put(self, to: int, payload: memoryview | None, entry: tuple[int, ...]) -> bool:
        """Append to a ring unless it is full; the receiver is to be rung. With the lock."""
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
        """Empty all rings that lead here; whether there was anything. With the lock."""
        control = self._control
        found = False
        for source, ring in enumerate(self._in):
            head, tail = control.u64[ring // 8], control.u64[(ring + _TAIL) // 8]
            if head == tail:
                continue
            found = True
            futex.settle()
            for position in range(tail, head):
                self._accept(source, ring + 2 * _TAIL + position % RING_ENTRIES * control.layout.entry_bytes)
            futex.settle()
            control.u64[(ring + _TAIL) // 8] = head
            futex.fence()
            if control.u64[ring // 8] - tail >= RING_ENTRIES // 2:  # its writer may wait for room
                control.ring(control.bell(source))
        return found

    def _accept(self, source: int, at: int) -> None:
        memory = self._control.memory
        kind, dtype, tag, transfer, size_bytes, total_bytes, address = _ENTRY.unpack_from(memory, at)
        payload = memory[at + ENTRY_HEADER_BYTES : at + ENTRY_HEADER_BYTES + size_bytes]
        if kind in (_EAGER, _OFFER):
            kept = bytes(payload) if kind == _EAGER else None
            message = _Message(source, tag, _DTYPES[dtype], total_bytes, transfer, address, kept)
            self._arrived.append(message)
        elif kind == _PIECE:
            stream = self._streams.get((source, transfer))
            if stream is not None:  # else the receiver gave up
                stream.into[stream.have_bytes : stream.have_bytes + size_bytes] = payload
                stream.have_bytes += size_bytes
        else:
            self._answers[transfer] = kind, bytes(payload).decode(errors="replace")

    def _wait(self, ready: Callable[[], T | None], ranks: set[int], deadline: float) -> T:
        """Empty rings until `ready`, called with the lock, returns something; `ranks` are those it depends on."""
        control = self._control
        spin_until = time.monotonic() + self._spin_s
        while True:
            seen = control.u32[self._bell // 4]
            futex.fence()
            with self._lock:
                found = self._progress()
                result = ready()
            if found:
                # What we emptied may be what another thread of ours waits for.
                control.ring(self._bell)
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
            futex.wait(control.base + self._bell, seen, min(deadline - now, _SLICE_S))
            if control.u32[self._bell // 4] == seen:
                self._look(seen, ranks)

    def _look(self, seen: int, ranks: set[int]) -> None:
        """Raise when somebody that we wait for has gone, and left nothing for us."""
        control = self._control
        dead = control.dead() & ranks
        closed = {r for r in ranks if control.closed(r)}
        if not dead and not closed:
            return
        with self._lock:
            waiting = any(control.u64[ring // 8] != control.u64[(ring + _TAIL) // 8] for ring in self._in)
        if waiting or control.u32[self._bell // 4] != seen:
            return
        for rank in sorted(dead - closed):
            raise control.fail(control.lost(rank))
        if closed and closed == ranks:
            raise control.left(min(closed))  # and no more: what it sent to others they may still receive

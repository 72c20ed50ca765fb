"""A process of this host that this one shares segments with: those that it was passed, and those that it passed.

Owns: which segments of each side the other has mapped, and what that may take here. Refuses: to know what is in them,
and when their contents may be used; leases (`host.leases`) and collectives know.

A segment is passed once, before the message that names it by its number. Who is named one that he does not know empties
his socket first; if it is not there either, the sender is wrong. A segment that its owner has closed is named to the
peer, too, which then drops its mapping.
"""

from __future__ import annotations

import os
import struct

from axon_ps.errors import Broken, InvalidRequest
from axon_ps.host import shared_memory
from axon_ps.host.peer_socket import PeerSocket
from axon_ps.host.shared_memory import Access, Segment, total_bytes
from axon_ps.types import Array

MAX_SEGMENTS = 1024
"""How many segments of a peer are mapped at a time. Each takes the peer a descriptor, of often 1024, and us one of
65530 mappings."""

_MESSAGE = struct.Struct("<Q")  # number of a segment: passed if a descriptor comes with it, else closed


class HostPeer:
    """The segments that this process and another have passed each other. One thread at a time.

    Args:
        socket: connected to it.
        access: what we may do in its segments.

    Attributes:
        pid: its id.
    """

    def __init__(self, socket: PeerSocket, access: Access) -> None:
        self.pid = socket.pid
        self.messages = 0
        self._socket = socket
        self._access = access
        self._closed_seen = Segment.closed
        self._sent: dict[int, Segment] = {}
        self._mapped: dict[int, Array] = {}
        self._mapped_bytes = 0

    def __len__(self) -> int:
        """The number of its segments that are mapped here."""
        return len(self._mapped)

    # ------------------------------------------------------------------ ours

    def offer(self, segment: Segment) -> bool:
        """Pass a segment unless the peer has it; False: it cannot have it now, so send what is in it.

        Counts in `messages` how often anything was sent to it.
        """
        try:
            if self._closed_seen != Segment.closed and not self._forget_closed():
                return False
            if segment.number in self._sent:
                return True
            if segment.fd < 0 or len(self._sent) >= MAX_SEGMENTS or not self._send(segment.number, segment.fd):
                return False
        except Broken:  # who depends on the peer notices otherwise
            return False
        self._sent[segment.number] = segment
        return True

    def forget_closed(self) -> None:
        """Name the segments to the peer that were closed here since."""
        if self._closed_seen != Segment.closed:
            try:
                self._forget_closed()
            except Broken:
                return

    def _forget_closed(self) -> bool:
        seen = Segment.closed
        for number in [number for number, segment in self._sent.items() if segment.fd < 0]:
            if not self._send(number):
                return False
            del self._sent[number]
        self._closed_seen = seen
        return True

    def _send(self, number: int, fd: int = -1) -> bool:
        sent = self._socket.send(_MESSAGE.pack(number), fd)
        self.messages += sent
        return sent

    # ------------------------------------------------------------------ its

    def view(self, number: int, offset: int, size_bytes: int) -> Array:
        """u8[size_bytes]: bytes of a segment of the peer, where they lie.

        Args:
            number: of the segment.
            offset: where in it they begin.
            size_bytes: how many.

        Raises:
            InvalidRequest: they are not in it, or what the peer passed is refused.
            Broken: it passed no such segment, or has closed it, or has gone.
            Busy: what it passed cannot be mapped.
        """
        if number not in self._mapped:
            self.take()
        found = self._mapped.get(number)
        if found is None:
            raise Broken(f"process {self.pid} of this host has passed no segment {number}, or has closed it")
        if not 0 <= offset <= offset + size_bytes <= found.nbytes:
            raise InvalidRequest(
                f"bytes {offset} to {offset + size_bytes} of segment {number} of process {self.pid} were named; it has "
                f"{found.nbytes}"
            )
        return found[offset : offset + size_bytes]

    def memory(self, number: int) -> Array:
        """u8[...]: a segment of the peer, all of it. Raises as `view` does."""
        self.view(number, 0, 0)
        return self._mapped[number]

    def take(self) -> None:
        """Map what the peer has passed, and drop what it has closed. Raises as `view` does.

        After an error: the connection is closed, and what is mapped stays until this ends.
        """
        try:
            while (found := self._socket.receive()) is not None:
                self._take(*found)
        except (Broken, InvalidRequest):
            self._socket.close()
            raise

    def _take(self, message: bytes, fd: int) -> None:
        if len(message) != _MESSAGE.size:
            if fd >= 0:
                os.close(fd)
            raise InvalidRequest(f"process {self.pid} of this host sent {len(message)} bytes that name no segment")
        (number,) = _MESSAGE.unpack(message)
        if fd < 0:
            self._drop(number)
            return
        memory = shared_memory.receive(fd, self._access)
        if len(self._mapped) >= MAX_SEGMENTS or self._mapped_bytes + memory.nbytes > total_bytes():
            raise InvalidRequest(
                f"process {self.pid} of this host passes more than {MAX_SEGMENTS} segments, or more bytes than this "
                f"machine has: {len(self._mapped)} are mapped, with {self._mapped_bytes} bytes; close some"
            )
        self._drop(number)
        self._mapped[number] = memory
        self._mapped_bytes += memory.nbytes

    def _drop(self, number: int) -> None:
        known = self._mapped.pop(number, None)
        if known is not None:
            self._mapped_bytes -= known.nbytes

    # ------------------------------------------------------------------ the end

    def close(self) -> None:
        """Hang up, and drop what is mapped; views of it stay. Harmless when repeated."""
        self._socket.close()
        self._sent.clear()
        self._mapped.clear()
        self._mapped_bytes = 0

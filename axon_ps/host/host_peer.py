"""A process of this host with which this one shares segments, passed in both directions.

Owns: the record of segments that each side has mapped, and the limit on them here. Refuses: their contents, and the
times at which these may be used, which are in leases (`host.leases`) and collectives.

A segment is passed once, before the message that names it by its number. A receiver that does not know a number reads
its socket first. If the segment is not there either, the sender is wrong. When a process closes a segment of its own,
it sends the number to the peer, which then drops its mapping.
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
"""Most segments of a peer that are mapped at a time. Each takes a descriptor of the peer and a mapping of this process,
of which the kernel allows a limited number."""

_MESSAGE = struct.Struct("<Q")  # number of a segment: passed if a descriptor comes with it, else closed


class HostPeer:
    """The segments that this process and another have passed each other. One thread at a time may use it.

    Args:
        socket: connected to the other process.
        access: the access that this process has to its segments.

    Attributes:
        pid: its process id.
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
        """Return the number of its segments that are mapped here."""
        return len(self._mapped)

    # ------------------------------------------------------------------ ours

    def offer(self, segment: Segment) -> bool:
        """Pass a segment unless the peer has it; False: that is impossible now, so the contents have to be sent.

        `messages` counts the messages sent to the peer.
        """
        try:
            if self._closed_seen != Segment.closed and not self._forget_closed():
                return False
            if segment.number in self._sent:
                return True
            if segment.fd < 0 or len(self._sent) >= MAX_SEGMENTS or not self._send(segment.number, segment.fd):
                return False
        except Broken:  # callers that depend on the peer notice otherwise
            return False
        self._sent[segment.number] = segment
        return True

    def forget_closed(self) -> None:
        """Send the peer the numbers of segments that were closed here since the last call."""
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
        """Return a view of a range of a peer's segment: u8[size_bytes], not copied.

        Args:
            number: the segment's number.
            offset: of the first byte in it.
            size_bytes: number of bytes.

        Raises:
            InvalidRequest: the range is not in it, or a segment that the peer passed is refused.
            Broken: it passed no such segment, or has closed it, or has gone.
            Busy: a segment that it passed cannot be mapped.
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
        """Return a segment of the peer, all of it: u8[...]. Raises as `view` does."""
        self.view(number, 0, 0)
        return self._mapped[number]

    def take(self) -> None:
        """Map the segments that the peer has passed, and drop those that it has closed. Raises as `view` does.

        After an error other than `Busy`: the connection is closed, and the mappings stay until this object ends.
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
        """Hang up, and drop the mappings. Views of them stay valid. A repeated call is harmless."""
        self._socket.close()
        self._sent.clear()
        self._mapped.clear()
        self._mapped_bytes = 0

"""Captures what passes a host's network card, and puts its TCP streams together. Run as a program, it captures.

python packet_capture.py FILE        every frame of eth0, until SIGTERM
"""

from __future__ import annotations

import contextlib
import signal
import socket
import struct
import sys
from collections import defaultdict
from pathlib import Path
from typing import Final

ETH_P_ALL: Final = 3
IPV4, IPV6, TCP = 0x0800, 0x86DD, 6
SO_RCVBUFFORCE: Final = 33  # Linux's; Python has no name for it
RECORDS: Final = range(20, 25)
"""Types of TLS records: change cipher spec, alert, handshake, application data, heartbeat."""

Stream = tuple[str, int, str, int]
"""Source and destination, each an address and a port."""


def capture(path: str) -> None:
    """Write every frame to a file, each after its length."""

    def leave(*_: object) -> None:
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, leave)
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL)) as card, open(path, "wb") as file:
        card.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 256 << 20)
        card.bind(("eth0", 0))
        sys.stdout.write("capturing\n")
        sys.stdout.flush()
        while True:
            frame = card.recv(1 << 18)  # as many segments as the cards pass at once
            file.write(struct.pack("<I", len(frame)) + frame)
            file.flush()


def frames(path: Path) -> list[bytes]:
    """The frames in a file."""
    content, found, at = path.read_bytes(), [], 0
    while at + 4 <= len(content):
        (size,) = struct.unpack_from("<I", content, at)
        found.append(content[at + 4 : at + 4 + size])
        at += 4 + size
    return found


def tcp_streams(captured: list[bytes]) -> dict[Stream, bytes]:
    """What each end of each connection has sent, from its first byte on; a gap ends it with an error.

    Raises:
        ValueError: a part of a stream was not captured.
    """
    parts: defaultdict[Stream, dict[int, bytes]] = defaultdict(dict)
    begins: dict[Stream, int] = {}
    for frame in captured:
        with contextlib.suppress(struct.error):
            if (segment := _segment(frame)) is not None:
                stream, sequence, is_first, payload = segment
                if is_first:
                    begins[stream] = sequence + 1
                if len(payload) > len(parts[stream].get(sequence, b"")):
                    parts[stream][sequence] = payload
    return {stream: _joined(stream, begins[stream], found) for stream, found in parts.items() if found}


def is_tls(stream: bytes) -> bool:
    """Whether it is a sequence of TLS records from the first byte to the last (which may be cut short)."""
    at = 0
    while at + 5 <= len(stream):
        kind, major, size = stream[at], stream[at + 1], struct.unpack_from(">H", stream, at + 3)[0]
        if kind not in RECORDS or major != 3 or size > (1 << 14) + 256:
            return False
        at += 5 + size
    return True


def _segment(frame: bytes) -> tuple[Stream, int, bool, bytes] | None:
    (kind,) = struct.unpack_from(">H", frame, 12)
    if kind == IPV4:
        header = (frame[14] & 15) * 4
        (total,) = struct.unpack_from(">H", frame, 16)
        protocol, start = frame[23], 14 + header
        source, target = (socket.inet_ntop(socket.AF_INET, frame[at : at + 4]) for at in (26, 30))
        end = 14 + total if total else len(frame)
    elif kind == IPV6:
        (length,) = struct.unpack_from(">H", frame, 18)
        protocol, start, end = frame[20], 54, 54 + length if length else len(frame)
        source, target = (socket.inet_ntop(socket.AF_INET6, frame[at : at + 16]) for at in (22, 38))
    else:
        return None
    if protocol != TCP:
        return None
    source_port, target_port, sequence = struct.unpack_from(">HHI", frame, start)
    payload = frame[start + (frame[start + 12] >> 4) * 4 : end]
    return (source, source_port, target, target_port), sequence, bool(frame[start + 13] & 2), payload


def _joined(stream: Stream, begin: int, parts: dict[int, bytes]) -> bytes:
    joined = bytearray()
    for offset, payload in sorted(((sequence - begin) % (1 << 32), payload) for sequence, payload in parts.items()):
        if offset >= 1 << 31:  # a keepalive probe, one byte before the first
            continue
        if offset > len(joined):
            raise ValueError(f"{offset - len(joined)} bytes of {stream} were not captured")
        joined[offset : offset + len(payload)] = payload
    return bytes(joined)


if __name__ == "__main__":
    capture(sys.argv[1])

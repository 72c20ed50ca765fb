"""Hostile clients of a gRPC server: they send bytes that no gRPC client would send, too many of them, or none.

Each kind is a coroutine that misbehaves on a connection for a bounded time. A connection that the server neither
answers nor ends is not a finding: the server's health is checked separately. Frames are built with hyperframe and
headers with hpack, so that they may be wrong in any way. Only loopback is ever attacked.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final

import hpack
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    PriorityFrame,
    PushPromiseFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from axon_ps_lab.fuzz.entropy import Entropy

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
PATHS: Final = (
    "/axon_ps.wire.v1.Coordinator/Status",
    "/axon_ps.wire.v1.Coordinator/Session",
    "/axon_ps.wire.v1.Coordinator/Watch",
    "/axon_ps.wire.v1.Shard/AllGather",
    "/axon_ps.wire.v1.Shard/Stats",
    "/grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/Watch",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    "/nowhere/Nothing",
)
LINGER_S: Final = 0.05
"""Seconds for which a connection stays open after its last bytes."""

SLOW_S: Final = 1.5
"""Seconds that a slow connection takes for a few bytes."""

CONNECT_S: Final = 5.0


class HostileConnection:
    """A raw connection.

    Args:
        reader: a reader of asyncio.
        writer: a writer of asyncio.
        token: the job's; empty = the attacker has none.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: str) -> None:
        self.reader, self.writer, self.token = reader, writer, token
        self.encoder = hpack.Encoder()

    async def send(self, *frames_or_bytes: bytes | Frame) -> None:
        """Write bytes and frames."""
        self.writer.write(b"".join(p.serialize() if isinstance(p, Frame) else p for p in frames_or_bytes))
        async with asyncio.timeout(CONNECT_S):
            await self.writer.drain()

    async def begin(self, settings: dict[int, int] | None = None) -> None:
        """Send preface and settings."""
        await self.send(PREFACE, SettingsFrame(0, settings=settings or {}))

    def headers(self, path: str, *more: tuple[str, str]) -> bytes:
        """Return the encoded headers of a call."""
        token = [("authorization", f"Bearer {self.token}")] if self.token else []
        return self.encoder.encode(
            [
                (":method", "POST"),
                (":scheme", "http"),
                (":path", path),
                (":authority", "localhost"),
                ("content-type", "application/grpc"),
                ("te", "trailers"),
                *token,
                *more,
            ],
            huffman=False,  # Huffman coding takes hpack minutes for large values
        )

    def call(self, stream: int, path: str, *, end: bool = False) -> Frame:
        """Return the headers of a call, in a frame."""
        flags = ["END_HEADERS", "END_STREAM"] if end else ["END_HEADERS"]
        return HeadersFrame(stream, self.headers(path), flags=flags)

    async def drained(self, limit_s: float) -> None:
        """Read until the server ends the connection, or for a while."""
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(limit_s):
                while await self.reader.read(1 << 16):
                    pass


@asynccontextmanager
async def connected(port: int, token: str) -> AsyncIterator[HostileConnection]:
    """Open a connection to a port of loopback; it is reset in the end."""
    async with asyncio.timeout(CONNECT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    raw = writer.get_extra_info("socket")
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # no ports are left in TIME_WAIT
    try:
        yield HostileConnection(reader, writer, token)
    finally:
        writer.transport.abort()


Attack = Callable[[HostileConnection, Entropy], Awaitable[None]]


async def rapid_reset(c: HostileConnection, entropy: Entropy) -> None:
    """Make calls, and reset each at once."""
    await c.begin()
    frames: list[bytes | Frame] = []
    for stream in range(1, 2 * entropy.pick((5, 50, 200)), 2):
        frames += [c.call(stream, entropy.pick(PATHS)), RstStreamFrame(stream, error_code=8)]
    await c.send(*frames)
    await c.drained(LINGER_S)


async def calls_without_end(c: HostileConnection, entropy: Entropy) -> None:
    """Open many streams that never send a message."""
    await c.begin()
    await c.send(*(c.call(stream, entropy.pick(PATHS)) for stream in range(1, 2 * entropy.pick((5, 100, 300)), 2)))
    await c.drained(LINGER_S)


async def settings_flood(c: HostileConnection, entropy: Entropy) -> None:
    """Send settings again and again, without reading an answer."""
    await c.begin()
    await c.send(*[SettingsFrame(0, settings={3: 100, 4: entropy.bits(31)})] * entropy.pick((10, 100, 1000)))
    await asyncio.sleep(LINGER_S)


async def ping_flood(c: HostileConnection, entropy: Entropy) -> None:
    """Send pings, faster than any client needs."""
    await c.begin()
    await c.send(*[PingFrame(0, b"12345678")] * entropy.pick((10, 1000, 3000)))
    await asyncio.sleep(LINGER_S)


async def bad_settings(c: HostileConnection, entropy: Entropy) -> None:
    """Send settings that are out of range, unknown, of a stream, or incomplete."""
    await c.send(PREFACE)
    values = {
        entropy.pick((1, 2, 3, 4, 5, 6, 99)): entropy.pick((0, 1, 2, 16383, 1 << 24, (1 << 31) - 1, (1 << 32) - 1))
    }
    frame = SettingsFrame(0, settings=values).serialize()
    await c.send(
        entropy.pick((frame, frame[:-2], b"\x00\x00\x05\x04\x00\x00\x00\x00\x00abcde", frame[:8] + b"\x05" + frame[9:]))
    )
    await c.send(c.call(1, entropy.pick(PATHS), end=True))
    await c.drained(LINGER_S)


async def oversized_headers(c: HostileConnection, entropy: Entropy) -> None:
    """Send headers far above every limit, in one block."""
    await c.begin()
    size = entropy.pick((20_000, 70_000, 140_000, 1_000_000))
    block = c.headers(entropy.pick(PATHS), ("x-large", "a" * size))
    await c.send(*_in_frames(1, block, 16_384, end=True))
    await c.drained(LINGER_S)


async def many_headers(c: HostileConnection, entropy: Entropy) -> None:
    """Send thousands of small headers, and a compression bomb: a large header that is referred to again and again."""
    await c.begin()
    block = c.headers(entropy.pick(PATHS), *((f"x-{i % 50}", "b" * 60) for i in range(entropy.pick((100, 3000)))))
    bomb = c.encoder.encode([("x-bomb", "c" * 3900)], huffman=False) + bytes((0x80 | 62,)) * entropy.pick(
        (1, 1000, 16_000)
    )
    await c.send(*_in_frames(1, block, 16_384, end=True), *_in_frames(3, bomb, 16_384, end=True))
    await c.drained(LINGER_S)


async def continuation_flood(c: HostileConnection, entropy: Entropy) -> None:
    """Send continuation frames without an end; some attacks send empty ones."""
    await c.begin()
    header = c.encoder.encode([("x-part", "d" * 50)])
    body = b"" if entropy.below(2) else header
    frames = [ContinuationFrame(1, body)] * entropy.pick((10, 500, 3000))
    await c.send(HeadersFrame(1, c.headers(entropy.pick(PATHS))), *frames)
    await c.drained(LINGER_S)


async def slow_headers(c: HostileConnection, entropy: Entropy) -> None:
    """Send a byte now and then."""
    data = PREFACE + SettingsFrame(0).serialize() + c.call(1, entropy.pick(PATHS)).serialize()
    cut = entropy.below(len(data))
    await c.send(data[:cut])
    for at in range(cut, min(cut + 4, len(data))):
        await asyncio.sleep(SLOW_S / 4)
        await c.send(data[at : at + 1])


async def slow_body(c: HostileConnection, entropy: Entropy) -> None:
    """Make a call whose message is announced as large and comes byte by byte."""
    await c.begin()
    await c.send(c.call(1, entropy.pick(PATHS)), DataFrame(1, b"\0" + (1 << 24).to_bytes(4, "big")))
    for _ in range(4):
        await asyncio.sleep(SLOW_S / 4)
        await c.send(DataFrame(1, b"x"))


async def large_length(c: HostileConnection, entropy: Entropy) -> None:
    """Send a message with a false length, up to the largest number, or with an unknown compression."""
    await c.begin()
    head = bytes((entropy.pick((0, 1, 2, 255)),)) + entropy.pick(
        (0, 1, 1 << 26, (1 << 31) - 1, (1 << 32) - 1)
    ).to_bytes(4, "big")
    await c.send(c.call(1, entropy.pick(PATHS)), DataFrame(1, head + entropy.data(100), flags=["END_STREAM"]))
    await c.drained(LINGER_S)


async def zero_window(c: HostileConnection, entropy: Entropy) -> None:
    """Make calls with a flow-control window of 0, so that no reply fits."""
    await c.begin({4: 0})
    message = b"\0\0\0\0\0"
    frames: list[bytes | Frame] = []
    for stream in range(1, 2 * entropy.pick((1, 30)), 2):
        frames += [c.call(stream, entropy.pick(PATHS)), DataFrame(stream, message, flags=["END_STREAM"])]
    await c.send(*frames)
    await asyncio.sleep(entropy.pick((LINGER_S, LINGER_S, SLOW_S)))


async def window_games(c: HostileConnection, entropy: Entropy) -> None:
    """Send window updates of 0, of one byte, beyond the largest window, and of streams that do not exist."""
    await c.begin({4: entropy.pick((0, 1, 65_535, (1 << 31) - 1))})
    updates = [
        WindowUpdateFrame(
            entropy.pick((0, 1, 3, 2, 99)), window_increment=entropy.pick((1, 1, 1, 65_535, (1 << 31) - 1))
        )
        for _ in range(entropy.pick((3, 100, 1000)))
    ]
    await c.send(c.call(1, entropy.pick(PATHS)), *updates, b"\x00\x00\x04\x08\x00\x00\x00\x00\x01\x00\x00\x00\x00")
    await c.drained(LINGER_S)


async def data_beyond_window(c: HostileConnection, entropy: Entropy) -> None:
    """Send more data than the server's window allows."""
    await c.begin()
    await c.send(c.call(1, entropy.pick(PATHS)), *[DataFrame(1, b"\0" * 16_000)] * entropy.pick((6, 40)))
    await c.drained(LINGER_S)


async def wrong_frames(c: HostileConnection, entropy: Entropy) -> None:
    """Send frames that are not allowed: of even, closed or unopened streams, of unknown types, of wrong lengths."""
    await c.begin()
    pool: list[bytes | Frame] = [
        DataFrame(7, b"x"),
        c.call(2, entropy.pick(PATHS)),
        PushPromiseFrame(1, promised_stream_id=2, data=c.headers("/a/b"), flags=["END_HEADERS"]),
        PriorityFrame(1, depends_on=1, stream_weight=255),
        RstStreamFrame(99, error_code=1),
        ContinuationFrame(1, b"abc", flags=["END_HEADERS"]),
        GoAwayFrame(0, last_stream_id=0, error_code=0),
        struct.pack(">I", entropy.below(1 << 24))[1:]
        + bytes((entropy.below(256), entropy.below(256)))
        + entropy.data(4),
        b"\xff\xff\xff\x00\x00\x00\x00\x00\x01",
        DataFrame(1, b"x", flags=["PADDED"]),
    ]
    await c.send(c.call(1, entropy.pick(PATHS)), *(entropy.pick(pool) for _ in range(1 + entropy.below(8))))
    await c.drained(LINGER_S)


async def garbage(c: HostileConnection, entropy: Entropy) -> None:
    """Send random bytes."""
    begin = entropy.pick((b"", PREFACE, PREFACE + SettingsFrame(0).serialize(), PREFACE[: entropy.below(24)]))
    await c.send(begin + entropy.data(entropy.pick((1, 9, 100, 5000))))
    await c.drained(LINGER_S)


async def other_protocols(c: HostileConnection, entropy: Entropy) -> None:
    """Send a TLS hello, or a request of HTTP/1.1, SSH or Redis, as scanners do."""
    hello = bytes.fromhex("16030100c8010000c40303") + entropy.data(32) + b"\x20" + entropy.data(32) + entropy.data(133)
    spoken = (
        hello,
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"SSH-2.0-x\r\n",
        b"*1\r\n$4\r\nPING\r\n",
        b"GET /" + b"a" * 9000,
    )
    await c.send(entropy.pick(spoken))
    await c.drained(LINGER_S)


async def idle(c: HostileConnection, entropy: Entropy) -> None:
    """Send nothing, or only the preface."""
    if entropy.below(2):
        await c.begin()
    await asyncio.sleep(entropy.pick((LINGER_S, LINGER_S, LINGER_S, SLOW_S)))


async def half_open(c: HostileConnection, entropy: Entropy) -> None:
    """End this side's half of the connection, and read."""
    await c.begin()
    await c.send(c.call(1, entropy.pick(PATHS)))
    c.writer.write_eof()
    await c.drained(LINGER_S)


async def gone(c: HostileConnection, entropy: Entropy) -> None:
    """Reset the connection in the middle of a frame."""
    await c.send(PREFACE, SettingsFrame(0), c.call(1, entropy.pick(PATHS)).serialize()[: 1 + entropy.below(60)])


ATTACKS: Final[tuple[Attack, ...]] = (
    *(rapid_reset, calls_without_end, settings_flood, ping_flood, bad_settings, oversized_headers, many_headers),
    *(continuation_flood, slow_headers, slow_body, large_length, zero_window, window_games, data_beyond_window),
    *(wrong_frames, garbage, other_protocols, idle, half_open, gone),
)


def _in_frames(stream: int, block: bytes, size: int, *, end: bool) -> list[Frame]:
    """Return a header block in frames of at most `size` bytes."""
    blocks = [block[at : at + size] for at in range(0, len(block), size)] or [b""]
    first = HeadersFrame(stream, blocks[0], flags=["END_STREAM"] if end else [])
    frames: list[Frame] = [first, *(ContinuationFrame(stream, more) for more in blocks[1:])]
    frames[-1].flags.add("END_HEADERS")
    return frames


async def attack(port: int, token: str, entropy: Entropy) -> str:
    """Open one hostile connection; returns the name of its kind."""
    kind = entropy.pick(ATTACKS)
    with contextlib.suppress(OSError, TimeoutError):  # the server may end it
        async with connected(port, token if entropy.below(2) else "") as connection:
            await kind(connection, entropy)
    return kind.__name__

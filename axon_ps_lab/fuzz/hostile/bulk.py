"""Hostile bulk connections: they send bytes that no client of ours would send to the port of RPC `Open`.

Each kind is a coroutine that misbehaves for a bounded time and leaves, as in `http2`. Some show the capability
of the job, as a member that has gone bad would, others none.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from axon_ps.rpc.carriers.bulk.connection import HEAD, LARGE_BYTES, FrameKind
from axon_ps.rpc.channels import MAX_MESSAGE_BYTES
from axon_ps.wire.v1 import bulk_pb2
from axon_ps_lab.fuzz.entropy import Entropy
from axon_ps_lab.fuzz.hostile.http2 import LINGER_S, SLOW_S, HostileConnection, connected
from axon_ps_lab.fuzz.targets.tapped import METHODS

STREAMING: Final = [path for path, method in METHODS.items() if method.client_streaming and "Shard/" in path]
OTHERS: Final = (
    "/axon_ps.wire.v1.Shard/Stats",
    "/axon_ps.wire.v1.Coordinator/Session",
    "/nowhere/Nothing",
    "",
    "/" + "a" * 900,
)


@dataclass(frozen=True)
class Bulk:
    """The grant of a server.

    Attributes:
        port: the port of its bulk connections.
        capability: the capability for them.
    """

    port: int
    capability: bytes


def frame(kind: int, body: bytes = b"", size: int | None = None) -> bytes:
    """Return a frame; `size` = the false size in its head, if it has one."""
    return HEAD.pack(kind, len(body) if size is None else size) + body


def hello(bulk: Bulk, entropy: Entropy, path: str = "") -> bytes:
    """Return the first frame of a call, of any method unless one is named."""
    method = path or entropy.pick(STREAMING)
    return frame(FrameKind.HELLO, bulk_pb2.BulkHello(capability=bulk.capability, method=method).SerializeToString())


async def nothing(c: HostileConnection, bulk: Bulk, entropy: Entropy) -> None:
    """Send nothing, or a part of a hello, and stay for a while."""
    await c.send(hello(bulk, entropy)[: entropy.pick((0, 1, 4, 5, 9, 40))])
    await asyncio.sleep(entropy.pick((LINGER_S, LINGER_S, SLOW_S)))


async def slow_hello(c: HostileConnection, bulk: Bulk, entropy: Entropy) -> None:
    """Send a byte now and then."""
    data = hello(bulk, entropy)
    for at in range(4):
        await c.send(data[at : at + 1])
        await asyncio.sleep(SLOW_S / 4)


async def stranger(c: HostileConnection, bulk: Bulk, entropy: Entropy) -> None:
    """Show no capability, or an almost right one."""
    capability = entropy.pick((b"", entropy.data(32), bulk.capability[:-1], bulk.capability + b"\0", entropy.data(900)))
    await c.send(
        frame(FrameKind.HELLO, bulk_pb2.BulkHello(capability=capability, method=STREAMING[0]).SerializeToString())
    )
    await c.send(frame(FrameKind.MESSAGE, b"x" * 1000))
    await c.drained(LINGER_S)


async def no_hello(c: HostileConnection, bulk: Bulk, entropy: Entropy) -> None:
    """Begin with another frame, another protocol, a frame longer than any hello, or random bytes."""
    begins = (
        frame(entropy.pick((FrameKind.MESSAGE, FrameKind.END, FrameKind.STATUS, 4, 255)), hello(bulk, entropy)),
        frame(FrameKind.HELLO, entropy.data(entropy.below(200))),
        frame(FrameKind.HELLO, b"", entropy.pick((1 << 20, (1 << 32) - 1))),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        bytes.fromhex("16030100c8010000c40303") + entropy.data(200),
        entropy.data(entropy.pick((1, 5, 6, 1000))),
    )
    await c.send(entropy.pick(begins))
    await c.drained(LINGER_S)


async def wrong_method(c: HostileConnection, bulk: Bulk, entropy: Entropy) -> None:
    """Call a method that is not a streaming call of this server, and send messages all the same."""
    await c.send(hello(bulk, entropy, entropy.pick(OTHERS) or "/"), frame(FrameKind.MESSAGE, entropy.data(100)))
    await c.drained(LINGER_S)


async def wrong_frames(c: HostileConnection, bulk: Bulk, entropy: Entropy) -> None:
    """Send frames that are not allowed: of other kinds, too long, after the end, empty, or too many."""
    pool = (
        frame(FrameKind.HELLO, b"x"),
        frame(FrameKind.STATUS, b"x"),
        frame(entropy.pick((4, 99, 255)), b"x"),
        frame(FrameKind.MESSAGE),
        frame(FrameKind.END),
        frame(FrameKind.END, b"more"),
        frame(FrameKind.MESSAGE, b"", MAX_MESSAGE_BYTES + 1),
        frame(FrameKind.MESSAGE, b"", (1 << 32) - 1),
    )
    frames = (entropy.pick(pool) for _ in range(entropy.pick((1, 3, 200))))
    await c.send(hello(bulk, entropy), *frames)
    await c.drained(LINGER_S)


async def large_garbage(c: HostileConnection, bulk: Bulk, entropy: Entropy) -> None:
    """Send a message of about `LARGE_BYTES` or more with random content, or only half of it."""
    size = entropy.pick((LARGE_BYTES - 1, LARGE_BYTES, LARGE_BYTES + 1, 1 << 20))
    body = entropy.data(64) + bytes(size - 64)
    await c.send(hello(bulk, entropy), frame(FrameKind.MESSAGE, body)[: entropy.pick((size // 2, size + HEAD.size))])
    await c.drained(LINGER_S)


async def announced(c: HostileConnection, bulk: Bulk, entropy: Entropy) -> None:
    """Announce the largest message that is allowed, and send it byte by byte."""
    await c.send(hello(bulk, entropy), frame(FrameKind.MESSAGE, b"", MAX_MESSAGE_BYTES))
    for _ in range(4):
        await asyncio.sleep(SLOW_S / 4)
        await c.send(b"x")


async def unread(c: HostileConnection, bulk: Bulk, entropy: Entropy) -> None:
    """Send requests again and again, and read nothing."""
    await c.send(hello(bulk, entropy), *[frame(FrameKind.MESSAGE, entropy.data(8))] * entropy.pick((10, 5000)))
    await asyncio.sleep(entropy.pick((LINGER_S, SLOW_S)))


async def half_open(c: HostileConnection, bulk: Bulk, entropy: Entropy) -> None:
    """End this side's half of the connection, and read."""
    await c.send(hello(bulk, entropy))
    c.writer.write_eof()
    await c.drained(LINGER_S)


Attack = Callable[[HostileConnection, Bulk, Entropy], Awaitable[None]]
ATTACKS: Final[tuple[Attack, ...]] = (
    *(nothing, slow_hello, stranger, no_hello, wrong_method, wrong_frames, large_garbage, announced, unread),
    half_open,
)


async def attack(bulk: Bulk, entropy: Entropy) -> str:
    """Open one hostile connection; returns the name of its kind."""
    kind = entropy.pick(ATTACKS)
    with contextlib.suppress(OSError, TimeoutError):  # the server may end it
        async with connected(bulk.port, "") as connection:
            await kind(connection, bulk, entropy)
    return f"bulk_{kind.__name__}"

"""What one connection, and all of them, may make a server keep open or wait for. docs/limits.md has the whole table.

Only what gRPC lets a server say: excess streams of a connection wait in their own client, an excess connection is
closed before its handshake, an excess call is answered with RESOURCE_EXHAUSTED.
"""

from __future__ import annotations

import resource
from typing import Final

MAX_STREAMS: Final = 1024
"""Calls at a time on one connection: a worker has some tens."""

MAX_SERVER_CALLS: Final = 1 << 15
"""Calls at a time on one server, of all connections: 4096 members with eight each."""

MAX_CONNECTIONS: Final = 1 << 15
"""Connections of gRPC at a time to one server, and of bulk calls, if it may open as many files: `max_connections`."""

RESERVED_FILES: Final = 256
"""Files of a process that connections leave to everything else: checkpoints, the state, other servers."""

HANDSHAKE_S: Final = 10.0
"""How long a connection may take until it speaks HTTP/2, TLS included."""

IDLE_CONNECTION_S: Final = 600.0
"""A connection without calls is closed after this; its client connects again when it calls."""

MAX_PING_STRIKES: Final = 64
"""Pings without anything else, each sooner than half of `channels.KEEPALIVE_S` after the last: then the end."""

FIRST_MESSAGE_S: Final = 20.0
"""How long a call may stay without its first message."""

MAX_READS: Final = 4
"""Messages of unary calls that are received at a time on one connection; the calls after them wait for their turn."""

MAX_READS_OF_STRANGERS: Final = 4
"""Likewise, of callers without credentials, on all connections: health checks, whose message is there at once."""

MAX_STRANGERS: Final = 64
"""Bulk connections at a time that have not shown their capability; see `rpc.bulk`."""

MAX_WATCHES: Final = 64
"""Health watches at a time: they need no token."""

WATCH_S: Final = 600.0
"""How long a health watch lasts; its client begins another."""


FENCE_S: Final = 15.0
"""How long a call may be ahead of what a shard server knows: news that reach others reach it within a lease."""

MAX_NEWER: Final = 1 << 20
"""How many generations, placements or versions a call may be ahead at all."""


def max_connections() -> int:
    """How many connections of either kind a server of this process takes: half of what its limit of files leaves."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = 2 * MAX_CONNECTIONS + RESERVED_FILES if soft == resource.RLIM_INFINITY else soft
    return max(1, min(MAX_CONNECTIONS, (files - RESERVED_FILES) // 2))


def max_bulk_calls() -> int:
    """How many bulk calls a process makes at a time, each with its connection: a quarter of the files it may open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else soft // 4


def server_options() -> tuple[tuple[str, int], ...]:
    """The limits as options of a gRPC server."""
    return (
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        ("grpc.max_allowed_incoming_connections", max_connections()),
        ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_S * 1000)),
        ("grpc.max_connection_idle_ms", int(IDLE_CONNECTION_S * 1000)),
        ("grpc.http2.max_ping_strikes", MAX_PING_STRIKES),
    )

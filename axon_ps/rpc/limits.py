"""Limits of the resources that one connection, and all of them, may take. docs/limits.md has the whole table.

Of gRPC, only what it lets a server say: excess streams of a connection wait in their own client, an excess connection
is closed before its handshake, an excess call is answered with RESOURCE_EXHAUSTED.
"""

from __future__ import annotations

import errno
import resource
from typing import Final

from axon_ps.errors import ConfigurationError

MAX_STREAMS: Final = 1024
"""Calls at a time on one connection: a worker has some tens."""

MAX_SERVER_CALLS: Final = 1 << 15
"""Calls at a time on one server, of all connections: 4096 members with eight each."""

MAX_CONNECTIONS: Final = 1 << 15
"""Connections of gRPC at a time to one server, and of bulk calls, if it may open as many files: `max_connections`."""

RESERVED_FILES: Final = 256
"""Files of a process that connections leave to everything else: checkpoints, the state, HTTP; half of less than 512."""

MIN_FILES: Final = 128
"""Fewer files are too few for a service."""

MAX_HTTP_CONNECTIONS: Final = 512
"""Connections of HTTP at a time, or an eighth of the files that the process may open."""

HTTP_HEAD_S: Final = 10.0
"""An HTTP connection may take so long for the head of a request, its first and each further one."""

HTTP_ANSWER_S: Final = 10.0
"""The client of an HTTP request may take nothing, or not all, of what it is sent for so long at a time."""

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


def how_to_raise_files() -> str:
    """Say what to do about a number of open files that is too small."""
    return "raise it: `ulimit -n 65536` before it is started, LimitNOFILE= of systemd, --ulimit nofile= of Docker"


def too_few_files() -> str:
    """Say how many files this process may open, and what to do if that is too few."""
    return f"this process may open no more than {max_files()} files; {how_to_raise_files()}"


def max_files() -> int:
    """The number of files that this process may open; at most as many as all limits of this module ask for."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 4 * MAX_CONNECTIONS
    return most if soft == resource.RLIM_INFINITY else min(most, soft)


def raise_max_files() -> None:
    """Let this process, a service's, open as many files as it may allow itself: the hard limit of `ulimit`.

    Raises:
        ConfigurationError: that is too few.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4 * MAX_CONNECTIONS if hard == resource.RLIM_INFINITY else min(hard, 4 * MAX_CONNECTIONS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if max_files() < MIN_FILES:
        found = f"a service needs {MIN_FILES} files at least, and this process may open {max_files()}"
        raise ConfigurationError(f"{found}; {how_to_raise_files()}")


def max_connections() -> int:
    """The number of connections of either kind that a server of this process takes: half of the files that are left."""
    files = max_files()
    return max(1, min(MAX_CONNECTIONS, (files - min(RESERVED_FILES, files // 2)) // 2))


def max_http_connections() -> int:
    """The number of HTTP connections that a process takes."""
    return max(1, min(MAX_HTTP_CONNECTIONS, max_files() // 8))


def max_bulk_calls() -> int:
    """The number of bulk calls of a process at a time, each with its connection: a quarter of the files it may open."""
    return min(MAX_CONNECTIONS, max_files() // 4)


def no_more_files(error: OSError | str) -> str:
    """Say why no file could be opened, and what to do, if that is what an error or its text is about; else empty."""
    text = error.lower() if isinstance(error, str) else ""
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.EMFILE or "too many open files" in text.replace("too many open files in system", ""):
        return too_few_files()
    if number == errno.ENFILE or "too many open files in system" in text:
        return "this machine can open no more files, of all processes; raise fs.file-max (sysctl), or end some"
    if number in (errno.ENOBUFS, errno.ENOMEM):
        return f"the kernel has no memory for it ({error})"
    return ""


def server_options() -> tuple[tuple[str, int], ...]:
    """The limits as options of a gRPC server."""
    return (
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        ("grpc.max_allowed_incoming_connections", max_connections()),
        ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_S * 1000)),
        ("grpc.max_connection_idle_ms", int(IDLE_CONNECTION_S * 1000)),
        ("grpc.http2.max_ping_strikes", MAX_PING_STRIKES),
    )

"""Limits of the resources that one connection, and all of them, may take. docs/limits.md has the full table.

For gRPC there are only the limits that it lets a server set. Excess streams of a connection wait in their own client.
An excess connection is closed before its handshake. An excess call is answered with RESOURCE_EXHAUSTED.
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
"""gRPC connections at a time to one server, and as many bulk calls, if it may open enough files: `max_connections`."""

RESERVED_FILES: Final = 256
"""Files of a process that are reserved for uses other than connections: checkpoints, the state, HTTP.

A process that may open fewer than 512 files reserves half of them.
"""

MIN_FILES: Final = 128
"""Least number of files that a service needs."""

MAX_HTTP_CONNECTIONS: Final = 512
"""HTTP connections at a time, or an eighth of the files that the process may open if that is less."""

HTTP_HEAD_S: Final = 10.0
"""Seconds for the head of a request on an HTTP connection, the first and each further one."""

HTTP_ANSWER_S: Final = 10.0
"""Seconds for the client of an HTTP request to read each part of the answer."""

HANDSHAKE_S: Final = 10.0
"""Seconds until a connection must use HTTP/2, including TLS."""

IDLE_CONNECTION_S: Final = 600.0
"""Seconds after which a connection without calls is closed; its client connects again at its next call."""

MAX_PING_STRIKES: Final = 64
"""Pings without other frames, each sooner than half of `channels.KEEPALIVE_S` after the last, that end a connection."""

FIRST_MESSAGE_S: Final = 20.0
"""Seconds that a call may be without its first message."""

MAX_READS: Final = 4
"""Messages of unary calls that are received at a time on one connection; further calls wait."""

MAX_READS_OF_STRANGERS: Final = 4
"""The same for callers without credentials, on all connections: health checks, whose message comes at once."""

MAX_STRANGERS: Final = 64
"""Bulk connections at a time that have not shown their capability; see `rpc.carriers.bulk`."""

MAX_WATCHES: Final = 64
"""Health watches at a time: they need no token."""

WATCH_S: Final = 600.0
"""Seconds that a health watch lasts; its client begins another."""


FENCE_S: Final = 15.0
"""Seconds that a call may be ahead of a shard server's state: changes known to others reach it within a lease."""

MAX_NEWER: Final = 1 << 20
"""Most generations, placements or versions that a call may be ahead."""


def how_to_raise_files() -> str:
    """Return a hint on raising the number of open files."""
    return "raise it: `ulimit -n 65536` before it is started, LimitNOFILE= of systemd, --ulimit nofile= of Docker"


def too_few_files() -> str:
    """Return a message with the number of files that this process may open, and a hint on raising it."""
    return f"this process may open no more than {max_files()} files; {how_to_raise_files()}"


def max_files() -> int:
    """Return the number of files that this process may open, up to the number that the limits here need."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 4 * MAX_CONNECTIONS
    return most if soft == resource.RLIM_INFINITY else min(most, soft)


def raise_max_files() -> None:
    """Raise the number of files that this process, a service, may open to the hard limit of `ulimit`.

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
    """Return the number of connections of either kind that a server accepts: half of the files not reserved."""
    files = max_files()
    return max(1, min(MAX_CONNECTIONS, (files - min(RESERVED_FILES, files // 2)) // 2))


def max_http_connections() -> int:
    """Return the number of HTTP connections that a process accepts."""
    return max(1, min(MAX_HTTP_CONNECTIONS, max_files() // 8))


def max_bulk_calls() -> int:
    """Return the number of bulk calls of a process at a time, each with a connection: a quarter of its files."""
    return min(MAX_CONNECTIONS, max_files() // 4)


def no_more_files(error: OSError | str) -> str:
    """Return the cause and a hint, if an error or its text means that no file could be opened; else empty."""
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
    """Return the limits as options of a gRPC server."""
    return (
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        ("grpc.max_allowed_incoming_connections", max_connections()),
        ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_S * 1000)),
        ("grpc.max_connection_idle_ms", int(IDLE_CONNECTION_S * 1000)),
        ("grpc.http2.max_ping_strikes", MAX_PING_STRIKES),
    )

"""Connections to an address, and the channel options that both ends share.

Channels with equal arguments share a connection in gRPC, so the number of the connection is an argument. Bulk traffic
of the two directions uses different connections, so that neither queues behind the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import stat
from collections.abc import Mapping
from functools import cache
from typing import Final, cast
from weakref import WeakKeyDictionary, WeakSet

import grpc

from axon_ps.errors import ConfigurationError, Unreachable
from axon_ps.host import fork
from axon_ps.rpc.auth.certificates import Chain
from axon_ps.rpc.auth.identity import Principal
from axon_ps.rpc.auth.loopback import is_loopback
from axon_ps.rpc.calls.protocol import Carrier
from axon_ps.rpc.carriers.grpc import GrpcCarrier
from axon_ps.rpc.carriers.in_process import InProcessChannel, is_in_process
from axon_ps.rpc.renewed_channel import RenewedChannel
from axon_ps.rpc.security import Security, credentials_of

MAX_MESSAGE_BYTES: Final = 64 << 20
"""Longest message that clients and shard servers accept: a chunk has at most 4 Mi elements (16 MiB of f32)."""

MAX_CALL_BYTES: Final = 16 << 20
"""Longest message that a coordinator accepts: a layout of a hundred thousand parameters is about 10 MiB."""


LOOKAHEAD_BYTES: Final = 4 << 20
"""Flow-control window of a stream: bytes that are sent to a receiver before it reads.

1 to 16 MiB are equally fast on loopback. 4 MiB are sent in 3 ms at 10 Gbit/s. The window bounds the memory that a
waiting stream costs its server.
"""

CALL_LOOKAHEAD_BYTES: Final = 256 << 10
"""Flow-control window of a coordinator's stream: bytes of a call that arrive before its caller is known."""

FRAME_BYTES: Final = 5 << 18
"""Longest HTTP/2 frame: a chunk with its header.

With the default, 16 KiB, the same bytes cost 5 to 10 % more CPU time.
"""

KEEPALIVE_S: Final = 10.0
"""A connection that was silent for so many seconds is pinged."""

KEEPALIVE_TIMEOUT_S: Final = 5.0
"""A connection whose ping is not answered in time is broken. This finds a frozen peer; a dead one is found at once."""

Option = tuple[str, int | str]
Channel = grpc.aio.Channel

OPTIONS: Final[tuple[Option, ...]] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", 64 << 10),
    ("grpc.absolute_max_metadata_size", 128 << 10),
    ("grpc.http2.lookahead_bytes", LOOKAHEAD_BYTES),
    ("grpc.http2.max_frame_size", FRAME_BYTES),
    ("grpc.experimental.tcp_min_read_chunk_size", 256 << 10),  # fewer, larger reads from the socket
    ("grpc.experimental.tcp_max_read_chunk_size", 4 << 20),
    ("grpc.keepalive_time_ms", int(KEEPALIVE_S * 1000)),
    ("grpc.keepalive_timeout_ms", int(KEEPALIVE_TIMEOUT_S * 1000)),
    ("grpc.http2.ping_timeout_ms", int(KEEPALIVE_TIMEOUT_S * 1000)),  # 60 s by default, and the later of the two counts
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
"""Options of both ends."""

CLIENT_OPTIONS: Final[tuple[Option, ...]] = (
    *OPTIONS,
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5000),
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.enable_retries", 0),
)
"""Options of a client: no proxy between members, quick reconnects, and no retries by gRPC."""

SERVER_OPTIONS: Final[tuple[Option, ...]] = (
    *OPTIONS,
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", int(KEEPALIVE_S * 500)),
)
"""Options of a server, beside those of `limits`: a port belongs to one server, clients' keepalive pings are welcome."""

CALL_OPTIONS: Final[Mapping[str, int]] = {
    "grpc.max_receive_message_length": MAX_CALL_BYTES,
    "grpc.http2.lookahead_bytes": CALL_LOOKAHEAD_BYTES,
    "grpc.http2.bdp_probe": 0,  # it would raise the window; a message that is being read arrives in full anyway
    "grpc.experimental.tcp_min_read_chunk_size": 8 << 10,
}
"""Options that replace those of `SERVER_OPTIONS` in a coordinator, whose calls are small: strangers can send little."""

_logger = logging.getLogger(__name__)
connected_ports: Final[set[int]] = set()
"""Ports to which this process has opened connections other than gRPC's (`rpc.carriers.bulk`)."""

_addresses: WeakKeyDictionary[Channel, str] = WeakKeyDictionary()
_by_secret: WeakSet[Channel] = WeakSet()


def connect(
    address: str,
    security: Security,
    *,
    connection: int = 0,
    watched: bool = False,
    name: str = "",
    to: Principal | None = None,
) -> Channel:
    """Return a channel to `address`. It sends nothing before its first call. Call this on the thread of an event loop.

    Args:
        address: "host:port"; an IPv6 host is in brackets. A server of this process (`carriers.in_process`) is called
            without gRPC's core.
        security: selects TLS and the certificate. The token does not belong to the channel: give it to `Stub`.
        connection: its number; channels with different numbers never share a connection.
        name: the host that the server's certificate names, if `address` has a number instead.
        to: the role that the server must prove to have, if certificates name roles; None = one of the services.

    Raises:
        ConfigurationError: the address is malformed, or a file of `security` cannot be used.
    """
    host, _ = split_address(address)
    if is_in_process(host):
        inside = cast(Channel, InProcessChannel(address))  # it is used by `carrier_of` and closed, as a channel is
        _addresses[inside] = address
        return inside
    options = [*CLIENT_OPTIONS, ("axon_ps.connection", connection)]
    source = security.channel_chain(host)
    if source is None:
        if security.tokens() and not security.insecure and not is_loopback(host):
            _warn_plaintext()
        channel = grpc.aio.insecure_channel(address, options=options)
        _addresses[channel] = address
        return channel
    if target := security.target_name(to) or name:
        options += [("grpc.ssl_target_name_override", target), ("grpc.default_authority", target)]

    def open_with(chain: Chain) -> Channel:
        return grpc.aio.secure_channel(address, credentials_of(chain), options=options)

    renewed = cast(Channel, RenewedChannel(source, open_with))  # it has the methods that stubs use
    _addresses[renewed] = address
    if not security.ca_file:
        _by_secret.add(renewed)
    return renewed


def carrier_of(channel: Channel) -> Carrier:
    """Return the carrier of a channel's calls."""
    return channel if isinstance(channel, InProcessChannel) else GrpcCarrier(channel)


def proves_the_secret(channel: Channel) -> bool:
    """Return True if a channel's certificate proves that this process has the job's secret; the secret is not sent
    then."""
    return channel in _by_secret


async def until_connected(channel: Channel, timeout_s: float) -> None:
    """Return when a channel is connected.

    Raises:
        Unreachable: it cannot connect, or did not within `timeout_s` seconds; then the channel is not usable.
    """
    state = channel.get_state(try_to_connect=True)
    try:
        async with asyncio.timeout(timeout_s):
            while state is not grpc.ChannelConnectivity.READY:
                if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                    raise Unreachable(
                        f"nobody answers at {address_of(channel)}: is the address right and the server up?"
                    )
                await channel.wait_for_state_change(state)
                state = channel.get_state(try_to_connect=True)
    except TimeoutError:
        raise Unreachable(f"nobody answers at {address_of(channel)} within {timeout_s:g} s") from None


@cache
def _warn_plaintext() -> None:  # once a process
    _logger.warning(
        "the job's token leaves this machine in plaintext: use a secret that `axon-ps auth init` has made, or "
        "certificates of your own (--tls-ca, AXON_PS_TLS_CA), for TLS"
    )


@fork.in_child
def _leave_connections() -> object:
    """Close our connections in a fork, so that a peer learns at once when the worker itself dies.

    gRPC does not know that they are closed, and may close a descriptor later. So its number stays in use, for
    /dev/null. The worker's own connections are not affected.
    """
    channels = dict(_addresses)
    ports = connected_ports.union(split_address(address)[1] for address in channels.values())
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # of listing the directory itself; not a socket; not connected
            if stat.S_ISSOCK(os.fstat(fd).st_mode) and _port_of_peer(fd) in ports:
                os.dup2(nothing, fd, inheritable=False)
    os.close(nothing)
    return channels


def _port_of_peer(fd: int) -> int:
    """Return the peer's port of a connected TCP socket; 0 for another socket."""
    known = socket.socket(fileno=fd)
    try:
        return int(known.getpeername()[1]) if known.family in (socket.AF_INET, socket.AF_INET6) else 0
    finally:
        known.detach()


def address_of(channel: Channel) -> str:
    """Return the address of a channel that `connect` made; empty for another channel."""
    return _addresses.get(channel, "")


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of "host:port".

    Raises:
        ConfigurationError: there is no host, none can have its name, or the port is not a number from 1 to 65535.
    """
    host, _, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    number = int(port) if port.isascii() and port.isdigit() else 0
    if not host or (":" in host and not bracketed) or not 0 < number < 65536:
        raise ConfigurationError(f"address {address!r} is not host:port with a port from 1 to 65535")
    try:
        host.encode("idna")  # as looking it up does
    except UnicodeError as error:
        why = error.__cause__ or error
        raise ConfigurationError(f"no host can have the name in address {address!r}: {why}") from None
    return host.strip("[]"), number


def split_addresses(addresses: str) -> tuple[str, ...]:
    """Return the addresses of "host:port,host:port".

    Raises:
        ConfigurationError: one of them has another form.
    """
    each = tuple(address.strip() for address in addresses.split(","))
    for address in each:
        split_address(address)
    return each


def join_address(host: str, port: int) -> str:
    """Return "host:port", with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"

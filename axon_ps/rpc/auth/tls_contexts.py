"""TLS contexts whose certificates are renewed, for connections that are not gRPC's: HTTP servers, bulk connections.

gRPC has its own: `Security.server_credentials` and `channel_credentials`.
"""

from __future__ import annotations

import os
import ssl
from functools import lru_cache

from axon_ps.errors import ConfigurationError
from axon_ps.rpc.auth.certificates import Chain, ChainSource


def server_context(source: ChainSource, *, required: bool) -> ssl.SSLContext:
    """Make a context that uses the newest certificate at every handshake.

    Args:
        source: the source of certificates.
        required: whether every client must show a certificate; else it may.

    Raises:
        ConfigurationError: the certificate cannot be used.
    """
    made: list[tuple[Chain, ssl.SSLContext]] = []

    def newest() -> ssl.SSLContext:
        chain = source.current()
        if not made or made[0][0] is not chain:
            made[:] = [(chain, _context(chain, required=required))]
        return made[0][1]

    def at_handshake(connection: ssl.SSLObject, *_: object) -> None:
        connection.context = newest()

    first = newest()
    first.sni_callback = at_handshake
    return first


@lru_cache(maxsize=16)
def client_context(chain: Chain) -> ssl.SSLContext:
    """Make a context of a client that proves itself by `chain`, and verifies the server's name.

    Raises:
        ConfigurationError: the certificate cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_verify_locations(cadata=chain.roots.decode())
        if chain.certificate:
            _load(context, chain)
    except (OSError, ValueError, ssl.SSLError) as error:
        raise ConfigurationError(f"the certificate (ca_file, cert_file, key_file) cannot be used: {error}") from error
    return context


def _context(chain: Chain, *, required: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        if chain.roots:
            context.load_verify_locations(cadata=chain.roots.decode())
            context.verify_mode = ssl.CERT_REQUIRED if required else ssl.CERT_OPTIONAL
        _load(context, chain)
    except (OSError, ValueError, ssl.SSLError) as error:
        raise ConfigurationError(f"the certificate (cert_file, key_file) cannot be used: {error}") from error
    return context


def _load(context: ssl.SSLContext, chain: Chain) -> None:
    """Load a certificate and its key from an unnamed file in memory, since Python's ssl reads files only."""
    fd = os.memfd_create("axon-ps certificate", os.MFD_CLOEXEC)
    try:
        os.write(fd, chain.certificate + b"\n" + chain.key)
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)

"""Rules for listening, and the proofs of identity of both ends: TLS certificates and tokens.

Loopback may be plaintext. Any other address needs TLS and credentials, or an explicit `insecure`. There are two ways to
have certificates:

- A secret of the job is enough: the job's own authority makes certificates, and both ends show theirs.
- The user's own authority makes certificates, which are given in files.

`credentials` derives a caller's identity from its certificate and token; `access` has the calls that it may make. A
token is sent as metadata `authorization: Bearer ...`, with every call. No token and no key is ever logged, or part of a
repr or message.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

import grpc

from axon_ps.errors import ConfigurationError
from axon_ps.rpc.auth.certificates import LIFETIME_S, AuthoritySource, Chain, ChainSource, FileSource, files_in
from axon_ps.rpc.auth.identity import ANY_SERVICE, Identity, Principal, server_name
from axon_ps.rpc.auth.loopback import is_loopback
from axon_ps.rpc.auth.tokens import check_strong, is_strong
from axon_ps.rpc.auth.watched_file import lines_of

TOKEN_KEY: Final = "authorization"
SCHEME: Final = "Bearer "

UNDER_WAY_S: Final = 0.05
"""Seconds for which a renewed certificate is held back, for handshakes that are about to use the previous one.

A gRPC handshake asks for the newest certificate under a lock, releases the lock, and uses the current certificate. A
new certificate frees that one (https://github.com/grpc/grpc/issues/36693); if this happens within those microseconds, a
server crashes. So an unchanged certificate is never returned again. A new one is returned when no handshake is between
the two steps: they all wait for the lock.
"""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Security:
    """The security of a server's or a client's connections. The default is plaintext without a token, on loopback only.

    Attributes:
        token: the token that a client sends, and to which a server permits everything: the job's shared secret (or, for
            a client, a token of a role that was made from it); empty = none is required or sent.
        token_file: a file with the token, if `token` is empty; read again when it changes. A server accepts the token
            of every line, a client sends the first. See `watched_file`, Note: [Rotation].
        observer_token: a token to which a server permits only reading (a client gives it as its `token`); empty = none.
        ca_file: PEM of the authorities trusted. A client that has one uses TLS; a server with `mutual` checks clients
            against it.
        cert_file: PEM certificate (chain) of this end: a server's, or a client's for mutual TLS.
        key_file: PEM private key of `cert_file`. Files are read again when they change.
        mutual: the server demands a certificate signed by `ca_file` from every client.
        spiffe: every certificate of `ca_file` names a role as a SPIFFE ID, which identifies the peer. Servers are
            verified by the name of their role instead of their host's.
        spiffe_pattern: the form of SPIFFE IDs, if it is not the default; see `identity.identity_of`.
        tls: use TLS on loopback, too, with certificates of the job's own authority.
        lifetime_s: seconds that such a certificate is valid; it is renewed after two thirds of them.
        insecure: allow a server to listen beyond loopback without TLS or without a token.
        identity: the identity of this process; see `acting`.
    """

    token: str = field(default="", repr=False)
    token_file: str = ""
    observer_token: str = field(default="", repr=False)
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    mutual: bool = False
    spiffe: bool = False
    spiffe_pattern: str = ""
    tls: bool = False
    lifetime_s: float = LIFETIME_S
    insecure: bool = False
    identity: Identity | None = None

    def __post_init__(self) -> None:
        if bool(self.cert_file) != bool(self.key_file):
            given, missing = ("cert_file", "key_file") if self.cert_file else ("key_file", "cert_file")
            raise ConfigurationError(f"{given} is given without {missing}; TLS needs both")
        if self.mutual and not self.ca_file:
            raise ConfigurationError("mutual TLS needs ca_file, the authority that signed the clients' certificates")
        if self.spiffe and not (self.ca_file and self.cert_file):
            raise ConfigurationError("certificates with SPIFFE IDs need ca_file, cert_file and key_file")
        if not 1.0 <= self.lifetime_s <= 366 * 86400:
            raise ConfigurationError(f"a certificate for {self.lifetime_s:g} s; it must be 1 s to a year")
        named = [("token", token) for token in self.tokens()] + [("observer's token", self.observer_token)]
        for name, token in named:
            if not _can_be_sent(token):
                raise ConfigurationError(f"the {name} cannot be sent; use printable ASCII characters without spaces")

    def acting(self, role: Principal, job: str, rank: int | None = None) -> Security:
        """Return a copy with the identity of a process with this role; `self` if it has an identity already."""
        if self.identity is not None:
            return self
        return dataclasses.replace(self, identity=Identity(role, job, rank))

    # ------------------------------------------------------------------ tokens

    def tokens(self) -> tuple[str, ...]:
        """Return the tokens that are valid; the first is the one to send.

        Raises:
            ConfigurationError: the file cannot be read or has no token.
        """
        if self.token or not self.token_file:
            return (self.token,) if self.token else ()
        return lines_of(self.token_file)

    def secrets(self) -> tuple[str, ...]:
        """Return the secrets that must not be logged."""
        return (*self.tokens(), self.observer_token)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata that a client sends with every call.

        Raises:
            ConfigurationError: the token's file cannot be read or has no token.
        """
        return tuple((TOKEN_KEY, SCHEME + token) for token in self.tokens()[:1])

    def _first_token(self) -> str:
        return next(iter(self.tokens()), "")

    # ------------------------------------------------------------------ TLS

    def check_bind(self, host: str, port: int = 0) -> None:
        """Refuse to listen on `host` when it would be open to the network without protection.

        Raises:
            ConfigurationError: TLS or a token is missing, `insecure` is not set, and `host` is not loopback or `tls` is
                set; or there is no such port.
        """
        if not 0 <= port < 65536:
            raise ConfigurationError(f"port {port} does not exist; use 1 to 65535, or 0 for any free one")
        if self.insecure or self.spiffe or (is_loopback(host) and not self.tls):
            return
        if not self.cert_file:
            instead = "; or give --tls-cert and --tls-key, or --insecure"
            check_strong(self._first_token(), f"listening on {host!r}{_beyond(host)}", instead)
        elif not self.tokens() and not is_loopback(host):
            raise ConfigurationError(
                f"listening on {host!r}{_beyond(host)} needs a token besides the certificate: give --token-file or "
                "AXON_PS_TOKEN (or --insecure to go without)"
            )

    def server_chain(self, host: str) -> ChainSource | None:
        """Return the certificates of a server that listens on `host`; None for plaintext.

        Raises:
            ConfigurationError: a file is missing, unreadable or not PEM; or there is no strong secret.
        """
        if self.cert_file:
            return _from_files(self.ca_file if self.mutual or self.spiffe else "", self.cert_file, self.key_file)
        if self.mutual:
            raise ConfigurationError("mutual TLS needs cert_file and key_file on the server")
        if self.insecure or (is_loopback(host) and not self.tls):
            return None
        return self._authority()

    def server_credentials(self, host: str = "127.0.0.1") -> grpc.ServerCredentials | None:
        """Return credentials of a server on `host`; None for plaintext. Handshakes use the newest certificate.

        Raises:
            ConfigurationError: see `server_chain`.
        """
        if (source := self.server_chain(host)) is None:
            return None
        used = source.current()

        def newer() -> grpc.ServerCertificateConfiguration | None:  # called on a gRPC thread, at every handshake
            nonlocal used
            if (chain := source.current()) is used:
                return None
            time.sleep(UNDER_WAY_S)
            used = chain
            return _configuration(chain)

        fetch: Any = newer  # the types of gRPC lack None, which means that nothing is newer
        return grpc.dynamic_ssl_server_credentials(
            _configuration(used), fetch, require_client_authentication=bool(used.roots)
        )

    def channel_chain(self, host: str) -> ChainSource | None:
        """Return the certificates of a client that connects to `host`; None for plaintext.

        Raises:
            ConfigurationError: a file is missing, unreadable or not PEM; or `tls` needs a strong secret.
        """
        if self.ca_file:
            if self.mutual and not self.cert_file:
                raise ConfigurationError("mutual TLS needs cert_file and key_file on the client too")
            return _from_files(self.ca_file, self.cert_file, self.key_file)
        if self.cert_file:
            _logger.warning(
                "connecting in plaintext: a certificate is given, but no authority (--tls-ca, AXON_PS_TLS_CA) to "
                "switch TLS on"
            )
            return None
        if self.tls or (not self.insecure and not is_loopback(host) and is_strong(self._first_token())):
            return self._authority()
        return None

    def channel_credentials(self, host: str = "127.0.0.1") -> grpc.ChannelCredentials | None:
        """Return the current credentials of a client's channel to `host`; None for plaintext.

        Raises:
            ConfigurationError: see `channel_chain`.
        """
        source = self.channel_chain(host)
        return None if source is None else credentials_of(source.current())

    def target_name(self, to: Principal | None) -> str:
        """Return the name in the certificate of a server of role `to`; empty = that of its host.

        Args:
            to: its role; None = one of the services.
        """
        if self.ca_file and not self.spiffe:
            return ""
        return ANY_SERVICE if to is None else server_name(to)

    def _authority(self) -> ChainSource:
        if self.identity is None:
            raise ConfigurationError("mutual TLS needs to know who this process is: see Security.acting")
        check_strong(self._first_token(), "mutual TLS by the job's own authority")
        return _from_authority(self)


def in_directory(directory: str, files: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes with the paths of certificates: of a directory in SPIRE's layout, else the `files`.

    Raises:
        ConfigurationError: a file of the directory is missing, or both are given.
    """
    if not directory:
        return files
    if any(files.values()):
        raise ConfigurationError("--tls-dir (AXON_PS_TLS_DIR) names all certificate files; leave out the others")
    return {**files_in(directory), "mutual": True, "spiffe": True}


def _configuration(chain: Chain) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(chain.key, chain.certificate)], chain.roots or None)


def credentials_of(chain: Chain) -> grpc.ChannelCredentials:
    """Return gRPC's credentials of a client that proves itself by `chain`."""
    return grpc.ssl_channel_credentials(chain.roots, chain.key or None, chain.certificate or None)


@lru_cache(maxsize=64)
def _from_authority(security: Security) -> ChainSource:
    assert security.identity is not None, "the caller has checked it"
    return AuthoritySource(security.tokens, security.identity, security.lifetime_s)


@lru_cache(maxsize=64)
def _from_files(ca_file: str, cert_file: str, key_file: str) -> ChainSource:
    return FileSource(ca_file, cert_file, key_file)


def _can_be_sent(token: str) -> bool:
    return token.isascii() and all(c.isprintable() and not c.isspace() for c in token)


def _beyond(host: str) -> str:
    return "" if is_loopback(host) else ", which is not loopback,"

"""Certificates: those of this process, which are renewed while it runs, and those of peers, which are read.

There are two sources: the job's authority (`authority`), for a process with the job's secret; and PEM files. The files
are read again when they were replaced (by SPIRE's helper, cert-manager, `axon-ps auth issue`).

Any thread may use a source: gRPC does at every handshake, from threads of its own.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Final, Protocol

from axon_ps.errors import ConfigurationError, PermissionDenied
from axon_ps.rpc.auth.identity import SCHEME, Identity, identity_of
from axon_ps.rpc.auth.watched_file import WatchedFiles, warn_of_readers

LIFETIME_S: Final = 86400.0
"""Seconds that a certificate of the job's authority is valid."""

RENEWED_AFTER: Final = 2 / 3
"""The fraction of a certificate's lifetime after which it is made again."""

_logger = logging.getLogger(__name__)

SPIRE_FILES: Final = {"ca_file": "bundle.pem", "cert_file": "svid.pem", "key_file": "svid.key"}
"""The names that SPIRE's helper, and `axon-ps auth issue`, give the files in a directory."""


@dataclass(frozen=True)
class Chain:
    """The proof of a process's identity, and the authorities that it trusts: PEM.

    A source returns the same object until it has a newer one.

    Attributes:
        roots: the authorities it trusts; empty = it asks no peer for a certificate.
        certificate: its certificate, and those between it and its authority; empty = it has none.
        key: the private key.
    """

    roots: bytes
    certificate: bytes = b""
    key: bytes = field(default=b"", repr=False)


class ChainSource(Protocol):
    """The source of a process's certificate."""

    def current(self) -> Chain:
        """Return the chain to use now."""


class AuthoritySource:
    """Certificates that this process issues to itself by the job's authority.

    Args:
        known_secrets: returns the job's secrets; the first is the one to use. See Note: [Rotation].
        identity: the identity of this process.
        lifetime_s: seconds that a certificate is valid.

    Raises:
        ConfigurationError: the secret could be guessed, or the job's name cannot be in a certificate.
    """

    def __init__(
        self, known_secrets: Callable[[], Sequence[str]], identity: Identity, lifetime_s: float = LIFETIME_S
    ) -> None:
        self._secrets = known_secrets
        self._identity = identity
        self._lifetime_s = lifetime_s
        self._process = secrets.token_hex(8)
        self._lock = threading.Lock()
        self._made_by: tuple[str, ...] = ()
        self._renew_s = 0.0
        self._chain = self._make(tuple(known_secrets()))

    def current(self) -> Chain:
        """Return the chain to use now; a new one after two thirds of the last one's time, or if the secret changed."""
        known = tuple(self._secrets())
        with self._lock:
            if known != self._made_by or time.time() >= self._renew_s:
                self._renew(known)
            return self._chain

    def _renew(self, known: tuple[str, ...]) -> None:
        try:
            self._chain = self._make(known)
        except ConfigurationError as error:
            self._made_by, self._renew_s = known, time.time() + (1 - RENEWED_AFTER) / 2 * self._lifetime_s
            _logger.error("the certificate of this process cannot be renewed: %s", error)

    def _make(self, known: tuple[str, ...]) -> Chain:
        from axon_ps.rpc.auth.authority import authority_of, roots_of

        issued = authority_of(known[0]).issue(
            self._identity, self._lifetime_s, process=self._process, hosts=_own_hosts(), itself=True
        )
        self._made_by, self._renew_s = known, time.time() + RENEWED_AFTER * self._lifetime_s
        return Chain(roots_of(known), issued.chain, issued.key)


class FileSource:
    """Certificates in PEM files.

    Args:
        ca_file: the authorities that are trusted; empty = none.
        cert_file: the certificate (chain); empty = none.
        key_file: its key.

    Raises:
        ConfigurationError: a file cannot be read, or is not PEM.
    """

    def __init__(self, ca_file: str, cert_file: str, key_file: str) -> None:
        given = [("ca_file", ca_file), ("cert_file", cert_file), ("key_file", key_file)]
        self._names = [option for option, path in given if path]
        self._files = WatchedFiles([(option, path) for option, path in given if path], secret=["key_file"])
        self._lock = threading.Lock()
        for option, path, content in zip(
            self._names, filter(None, (p for _, p in given)), self._files.contents(), strict=True
        ):
            if b"-----BEGIN " not in content:
                raise ConfigurationError(f"{option} {path!r} is not a PEM file")
        self._read: tuple[bytes, ...] = ()
        self._chain = Chain(b"")

    def current(self) -> Chain:
        """Return the chain to use now."""
        contents = self._files.contents()
        with self._lock:
            if contents is not self._read:
                found = dict(zip(self._names, contents, strict=True))
                self._read = contents
                self._chain = Chain(found.get("ca_file", b""), found.get("cert_file", b""), found.get("key_file", b""))
            return self._chain


@dataclass(frozen=True)
class PeerCertificate:
    """The claims of a peer's certificate.

    Attributes:
        identity: the identity of its process; None = it has no SPIFFE ID.
        serial: its serial number, in hex.
        process: the common name, if the job's authority issued it, else empty; its successors have the same.
        expires_s: the end of its validity, in seconds since 1970.
        makes_itself: whether its process has the job's secret, and issued it itself.
    """

    identity: Identity | None
    serial: str
    process: str
    expires_s: float
    makes_itself: bool


@lru_cache(maxsize=4096)
def peer_certificate(pem: bytes, pattern: str = "") -> PeerCertificate:
    """Return the claims of a peer's certificate; the handshake has verified that a trusted authority signed it.

    Args:
        pem: the certificate.
        pattern: see `identity.identity_of`.

    Raises:
        PermissionDenied: its SPIFFE ID does not name a process of axon_ps, or it has several.
    """
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    from axon_ps.rpc.auth.authority import ISSUER, MAKES_ITSELF

    certificate = x509.load_pem_x509_certificate(pem)
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = [uri for uri in names.get_values_for_type(x509.UniformResourceIdentifier) if uri.startswith(SCHEME)]
    except x509.ExtensionNotFound:
        uris = []
    if len(uris) > 1:
        raise PermissionDenied(f"the certificate has {len(uris)} SPIFFE IDs; it must have one")
    ours = certificate.issuer == ISSUER
    common = [str(a.value) for a in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    units = [str(a.value) for a in certificate.subject.get_attributes_for_oid(NameOID.ORGANIZATIONAL_UNIT_NAME)]
    return PeerCertificate(
        identity=identity_of(uris[0], pattern) if uris else None,
        serial=f"{certificate.serial_number:x}",
        process=common[0] if ours and common else "",
        expires_s=certificate.not_valid_after_utc.timestamp(),
        makes_itself=ours and MAKES_ITSELF in units,
    )


def files_in(directory: str) -> dict[str, str]:
    """Return the paths in a directory that SPIRE's helper or `axon-ps auth issue` has written.

    Raises:
        ConfigurationError: one of the files is missing.
    """
    paths = {option: str(Path(directory) / name) for option, name in SPIRE_FILES.items()}
    if missing := [path for path in paths.values() if not Path(path).is_file()]:
        raise ConfigurationError(
            f"the directory {directory} of a certificate needs {', '.join(SPIRE_FILES.values())}; there is no "
            f"{' and no '.join(missing)}"
        )
    warn_of_readers(paths["key_file"])
    return paths


def _own_hosts() -> list[str]:
    """Return the names of this machine for clients that know no role names: browsers, Prometheus."""
    name = socket.gethostname()
    return [*([name] if name.isascii() and name else []), "localhost", "127.0.0.1", "::1"]

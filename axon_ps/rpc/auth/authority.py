"""The authority of a job: every process with the job's secret can issue certificates. No protocol is needed.

Note: [An authority without a file]
    Its private key is derived from the secret (`tokens.derived_key`). So all processes with the secret have the same
    authority, without a message, a file or a process that could be lost. Each makes a key of its own when it starts,
    signs a certificate for it with its role, and trusts certificates that the authority has signed. Rotating the secret
    rotates the authority.

    A certificate is valid for a day by default, and is made again after two thirds of it. Its name is a SPIFFE ID
    (`identity`). Its DNS names include that of its role. By it a client verifies that it has reached a process of that
    role, at any address: a worker's certificate is never accepted as a shard server's. Its common name is an id of the
    process, which does not change when the certificate is made again: revoking the id revokes all of them.

The curve is P-256. It is the most common curve that gRPC's BoringSSL verifies by default.
"""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from axon_ps.errors import ConfigurationError
from axon_ps.rpc.auth.identity import ANY_SERVICE, SERVICES, Identity, server_name
from axon_ps.rpc.auth.tokens import check_strong, derived_key

MAKES_ITSELF: Final = "holds the job's secret"
"""The organizational unit in a certificate that a process has issued to itself: it can issue another one."""

CLOCKS_S: Final = 300
"""A certificate is valid from this many seconds before it was made, since clocks differ."""

_ORDER: Final = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551  # of P-256
ISSUER: Final = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "axon-ps job authority")])
"""The name of every job's authority."""
_BEGINS: Final = datetime(2020, 1, 1, tzinfo=UTC)
_ENDS: Final = datetime(2120, 1, 1, tzinfo=UTC)
_USAGE: Final = {
    "digital_signature": True, "content_commitment": False, "key_encipherment": False, "data_encipherment": False,
    "key_agreement": False, "key_cert_sign": False, "crl_sign": False, "encipher_only": False, "decipher_only": False,
}  # fmt: skip


@dataclass(frozen=True)
class Issued:
    """A certificate and its private key, as PEM; the repr does not contain the key.

    Attributes:
        chain: the certificate.
        key: its private key.
        expires_s: the end of its validity, in seconds since 1970.
    """

    chain: bytes
    key: bytes
    expires_s: float

    def __repr__(self) -> str:
        return f"Issued(expires_s={self.expires_s})"


class JobAuthority:
    """The authority of the jobs of one secret.

    Args:
        secret: the secret.

    Attributes:
        certificate: the authority's certificate, as PEM, to be trusted.

    Raises:
        ConfigurationError: the secret could be guessed.
    """

    def __init__(self, secret: str) -> None:
        check_strong(secret, "mutual TLS by the job's own authority")
        number = int.from_bytes(derived_key(secret, "authority v1", 48), "big") % (_ORDER - 1) + 1
        self._key = ec.derive_private_key(number, ec.SECP256R1())
        self.certificate = _pem(self._self_signed())

    def issue(
        self,
        identity: Identity,
        lifetime_s: float,
        *,
        process: str = "",
        hosts: Iterable[str] = (),
        itself: bool = False,
    ) -> Issued:
        """Make a key, and a certificate for it.

        Args:
            identity: the identity of its process.
            lifetime_s: seconds that it is valid from now on.
            process: id that the next certificate of the same process has, too; empty = a random one.
            hosts: host names and addresses that it is valid for besides the names of its role.
            itself: whether it is for this process, which has the secret.

        Raises:
            ConfigurationError: the job's name or a host name cannot be in a certificate.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.now(UTC)
        expires = now + timedelta(seconds=lifetime_s)
        certificate = (
            x509.CertificateBuilder(issuer_name=ISSUER, serial_number=x509.random_serial_number())
            .subject_name(_subject(process or secrets.token_hex(8), itself=itself))
            .public_key(key.public_key())
            .not_valid_before(now - timedelta(seconds=CLOCKS_S))
            .not_valid_after(expires)
            .add_extension(x509.SubjectAlternativeName(_names(identity, hosts)), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.KeyUsage(**_USAGE), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
                critical=False,
            )
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        unencrypted = serialization.NoEncryption()
        private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, unencrypted)
        return Issued(_pem(certificate), private, expires.timestamp())

    def _self_signed(self) -> x509.Certificate:
        """Make the authority's certificate; in all processes name and key are equal, though the bytes differ."""
        public = self._key.public_key()
        usage = _USAGE | {"digital_signature": False, "key_cert_sign": True, "crl_sign": True}
        return (
            x509.CertificateBuilder(issuer_name=ISSUER, subject_name=ISSUER, serial_number=1, public_key=public)
            .not_valid_before(_BEGINS)
            .not_valid_after(_ENDS)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(x509.KeyUsage(**usage), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .sign(self._key, hashes.SHA256())
        )


@cache
def authority_of(secret: str) -> JobAuthority:
    """Return the authority of a secret, which is made once in a process.

    Raises:
        ConfigurationError: the secret could be guessed.
    """
    return JobAuthority(secret)


def roots_of(known_secrets: Sequence[str]) -> bytes:
    """Return the certificates to trust, as PEM, if several secrets are valid.

    Raises:
        ConfigurationError: a secret could be guessed.
    """
    return b"".join(authority_of(secret).certificate for secret in known_secrets)


def _subject(process: str, *, itself: bool) -> x509.Name:
    unit = [x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, MAKES_ITSELF)] if itself else []
    return x509.Name([*unit, x509.NameAttribute(NameOID.COMMON_NAME, process)])


def _names(identity: Identity, hosts: Iterable[str]) -> list[x509.GeneralName]:
    named = [server_name(identity.role), *([ANY_SERVICE] if identity.role in SERVICES else [])]
    return [
        x509.UniformResourceIdentifier(identity.uri()),
        *map(x509.DNSName, named),
        *map(_host, dict.fromkeys(hosts)),
    ]


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError:
        raise ConfigurationError(f"the host name {host!r} cannot be in a certificate; it must be ASCII") from None


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)

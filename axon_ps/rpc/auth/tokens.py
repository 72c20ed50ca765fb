"""Tokens: the job's secret, and tokens of one role that are made from it (JWT, HS256).

A process with the secret has every role, and can make tokens and certificates. A token of a role names the job (`aud`),
the role (`sub`), optionally the rank, and its end (`exp`). It is revoked by its id (`jti`). It is signed by a key that
is derived from the secret. With a token, or a certificate, an attacker can test guesses of the secret offline. So
neither is made from a short secret. A long random secret cannot be guessed.

PyJWT is imported when the first such token is used.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from axon_ps.errors import ConfigurationError, PermissionDenied
from axon_ps.rpc.auth.identity import MAX_RANK, Identity, role_of

SECRET_BYTES: Final = 24
MIN_SECRET_CHARS: Final = 22
"""Characters of 128 random bits in base64. In hex the same bits have 32 digits."""

MIN_DISTINCT_CHARS: Final = 8
"""A secret with fewer different characters is not random."""

_ALGORITHM: Final = "HS256"
_REQUIRED: Final = ("sub", "aud", "exp", "jti")


@dataclass(frozen=True)
class Claims:
    """The claims of a role's token.

    Attributes:
        identity: the identity that it gives.
        id: its id, by which it is revoked.
        expires_s: the end of its validity, in seconds since 1970.
    """

    identity: Identity
    id: str
    expires_s: float


def new_secret() -> str:
    """Return a random secret of a job."""
    return secrets.token_urlsafe(SECRET_BYTES)


def is_strong(secret: str) -> bool:
    """Return True if keys may be derived from a secret: it is long and varied enough, and not a token of a role."""
    return len(secret) >= MIN_SECRET_CHARS and len(set(secret)) >= MIN_DISTINCT_CHARS and not is_role_token(secret)


def check_strong(secret: str, what: str, otherwise: str = "") -> None:
    """Refuse to derive keys from a secret that could be guessed.

    Args:
        secret: the secret.
        what: the feature that needs it, for the message.
        otherwise: an alternative, for the message.

    Raises:
        ConfigurationError: it could be guessed (the message has the command that makes a secret), or is a role's token.
    """
    if is_role_token(secret):
        raise ConfigurationError(f"{what} needs the job's secret, and the token that was given is one of a role")
    if not is_strong(secret):
        given = f"the one that was given ({len(secret)} characters) can be guessed" if secret else "none was given"
        raise ConfigurationError(
            f"{what} needs a secret of the job of at least 128 random bits, and {given}: `axon-ps auth init FILE` "
            f"makes one for --token-file (AXON_PS_TOKEN_FILE) or AXON_PS_TOKEN{otherwise}"
        )


def derived_key(secret: str, purpose: str, size: int = 32) -> bytes:
    """Derive a key for a purpose, by HKDF-SHA256 (RFC 5869) without salt, as the secret is random; at most 64 bytes."""
    extracted = hmac.digest(bytes(32), secret.encode(), hashlib.sha256)
    info = f"axon-ps {purpose}".encode()
    first = hmac.digest(extracted, info + b"\x01", hashlib.sha256)
    return (first + hmac.digest(extracted, first + info + b"\x02", hashlib.sha256))[:size]


def is_role_token(token: str) -> bool:
    """Return True if a token is of a role, rather than a secret: a JWT has three fields."""
    return token.count(".") == 2 and token.startswith("ey")


def mint(secret: str, identity: Identity, lifetime_s: float) -> str:
    """Make a token of a role.

    Raises:
        ConfigurationError: the secret could be guessed from it.
    """
    import jwt

    check_strong(secret, "a token of a role")
    claims: dict[str, Any] = {"sub": identity.role.value, "aud": identity.job, "jti": secrets.token_hex(8)}
    claims["exp"] = int(time.time() + lifetime_s)
    if identity.rank is not None:
        claims["rank"] = identity.rank
    return jwt.encode(claims, _signing_key(secret), _ALGORITHM)


def verified(token: str, known_secrets: Sequence[str], job: str) -> Claims:
    """Return the claims of a token, if it is valid and of this job.

    Args:
        token: the token.
        known_secrets: the job's secrets, any of which may have signed it.
        job: name of the job; empty = any.

    Raises:
        PermissionDenied: it is not; the message has the reason.
    """
    claims = _signed(token, known_secrets)
    if claims.expires_s <= time.time():
        raise PermissionDenied(f"the token expired at {as_text(claims.expires_s)}; get another one")
    if job and claims.identity.job != job:
        raise PermissionDenied(f"the token is of job {claims.identity.job!r}, and this is job {job!r}")
    return claims


def read_unverified(token: str) -> Claims:
    """Return the claims of a token without checking its signature.

    Raises:
        PermissionDenied: a claim is missing or malformed.
    """
    import jwt

    try:
        return _claims(jwt.decode(token, options={"verify_signature": False}))
    except jwt.PyJWTError as error:
        raise PermissionDenied(f"the token is malformed: {error}") from None


def as_text(time_s: float) -> str:
    """Format a time for messages."""
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _signed(token: str, known_secrets: Sequence[str]) -> Claims:
    import jwt

    options: Any = {"require": list(_REQUIRED), "verify_exp": False, "verify_aud": False}
    for secret in filter(is_strong, known_secrets):
        try:
            return _claims(jwt.decode(token, _signing_key(secret), [_ALGORITHM], options=options))
        except jwt.InvalidSignatureError:
            continue
        except jwt.PyJWTError as error:
            raise PermissionDenied(f"the token is malformed: {error}") from None
    raise PermissionDenied("the token is not signed by this job's secret; is it a token of this job?")


def _claims(found: dict[str, Any]) -> Claims:
    job, rank, role = found.get("aud"), found.get("rank"), found.get("sub")
    expires, token_id = found.get("exp"), found.get("jti")
    if not (isinstance(job, str) and isinstance(role, str) and isinstance(expires, int) and isinstance(token_id, str)):
        raise PermissionDenied("the token does not say its role (sub), job (aud), end (exp) and id (jti)")
    if rank is not None and not (isinstance(rank, int) and 0 <= rank < MAX_RANK):
        raise PermissionDenied(f"the token names rank {str(rank)[:40]!r}, which is none")
    return Claims(Identity(role_of(role, "the token"), job, rank), token_id, float(expires))


def _signing_key(secret: str) -> bytes:
    return derived_key(secret, "token v1")

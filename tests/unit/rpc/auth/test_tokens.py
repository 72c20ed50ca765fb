"""Tokens of a role: each refusal says which it was."""

from __future__ import annotations

import time

import jwt
import pytest

from axon_ps.errors import ConfigurationError, PermissionDenied
from axon_ps.rpc.auth.identity import Identity, Principal
from axon_ps.rpc.auth.tokens import derived_key, is_role_token, is_strong, mint, new_secret, read_unverified, verified

SECRET, OTHER = new_secret(), new_secret()
WORKER = Identity(Principal.WORKER, "j", 3)


def signed(claims: dict[str, object], algorithm: str = "HS256") -> str:
    return jwt.encode(claims, derived_key(SECRET, "token v1", 48 if algorithm == "HS384" else 32), algorithm)


def test_what_was_minted_is_verified_by_any_secret_of_the_job() -> None:
    token = mint(SECRET, WORKER, 60.0)
    for known in ((SECRET,), (OTHER, SECRET)):
        claims = verified(token, known, "j")
        assert (claims.identity, claims) == (WORKER, read_unverified(token))
    assert 50 < claims.expires_s - time.time() <= 60
    assert SECRET not in token


@pytest.mark.parametrize(
    ("token", "words"),
    [
        (mint(OTHER, WORKER, 3600.0), "not signed by this job's secret"),
        (mint(SECRET, WORKER, -60.0), r"expired at 20\d\d-\d\d-\d\d \d\d:\d\d:\d\d UTC"),
        (mint(SECRET, Identity(Principal.WORKER, "k"), 3600.0), "is of job 'k', and this is job 'j'"),
        (signed({"sub": "worker", "aud": "j", "jti": "1"}), 'missing the "exp" claim'),
        (signed({"sub": "king", "aud": "j", "jti": "1", "exp": 2**40}), "names the role 'king'"),
        (signed({"sub": "worker", "aud": ["j"], "jti": "1", "exp": 2**40}), "does not say its role"),
        (signed({"sub": "worker", "aud": "j", "jti": "1", "exp": 2**40, "rank": "3"}), "names rank '3', which is none"),
        (signed({"sub": "worker", "aud": "j", "jti": "1", "exp": 2**40}, "HS384"), "malformed"),
        (jwt.encode({"sub": "worker"}, None, "none"), "malformed"),
        ("ey.ey.ey", "malformed"),
    ],
)
def test_what_does_not_hold_is_refused_by_its_reason(token: str, words: str) -> None:
    with pytest.raises(PermissionDenied, match=words):
        verified(token, [SECRET], "j")


def test_a_secret_that_could_be_guessed_signs_nothing() -> None:
    for weak in ("", "change-me", "a" * 40, "short-secret-of-mine"):
        assert not is_strong(weak)
        with pytest.raises(ConfigurationError, match=r"at least 128 random bits, .*axon-ps auth init FILE"):
            mint(weak, WORKER, 60.0)
    token = mint(SECRET, WORKER, 60.0)
    assert is_role_token(token)
    with pytest.raises(ConfigurationError, match="is one of a role"):
        mint(token, WORKER, 60.0)
    with pytest.raises(PermissionDenied, match="not signed"):
        verified(token, ["change-me"], "j")


def test_keys_of_different_purposes_are_unrelated() -> None:
    keys = {derived_key(SECRET, purpose, size) for purpose in ("a", "b") for size in (32, 48)}
    assert len({key[:16] for key in keys}) == 2
    assert derived_key(SECRET, "a", 48).startswith(derived_key(SECRET, "a"))

"""Security options: what they refuse, and that the token stays secret."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from axon_ps.errors import ConfigurationError
from axon_ps.rpc import channels
from axon_ps.rpc.auth.loopback import is_loopback
from axon_ps.rpc.channels import connect
from axon_ps.rpc.security import Security
from rpc_fakes import run, serving

TOKEN = "very-secret-token"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cert_file": "c"}, "cert_file is given without key_file"),
        ({"key_file": "k"}, "key_file is given without cert_file"),
        ({"mutual": True, "cert_file": "c", "key_file": "k"}, "mutual TLS needs ca_file"),
        ({"token": "two words"}, "the token cannot be sent"),
        ({"token": "line\n"}, "the token cannot be sent"),
        ({"token": "schlüssel"}, "the token cannot be sent"),
        ({"observer_token": "two words"}, "the observer's token cannot be sent"),
    ],
)
def test_options_that_cannot_work(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        Security(**options)
    assert options.get("token", "###") not in str(caught.value)


def test_mutual_tls_needs_both_certificates() -> None:
    security = Security(mutual=True, ca_file="ca")
    with pytest.raises(ConfigurationError, match="on the server"):
        security.server_credentials()
    with pytest.raises(ConfigurationError, match="on the client"):
        security.channel_credentials()


def test_plaintext_is_the_default() -> None:
    assert Security().server_credentials() is None
    assert Security().channel_credentials() is None
    assert Security().metadata() == ()


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("localhost", True),
        ("LOCALHOST", True),
        ("::1", True),
        ("[::1]", True),
        ("0.0.0.0", False),
        ("::", False),
        ("localhost.example.org", False),
        ("127.0.0.1.example.org", False),
        ("", False),
    ],
)
def test_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


def test_the_token_is_in_no_repr_and_no_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="axon_ps")
    security = Security(token=TOKEN)
    assert security.metadata() == (("authorization", f"Bearer {TOKEN}"),)
    assert TOKEN not in repr(security)

    async def main() -> None:
        async with serving(security=security):
            pass
        await connect("192.0.2.1:1", security).close()

    run(main())
    assert TOKEN not in caplog.text


def test_a_token_that_would_travel_in_plaintext_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        for address, insecure in (("192.0.2.1:2", True), ("127.0.0.1:3", False), ("192.0.2.1:1", False)) * 2:
            await connect(address, Security(token=TOKEN, insecure=insecure)).close()

    channels._warn_plaintext.cache_clear()
    run(main())
    assert [r.getMessage() for r in caplog.records if r.name.startswith("axon_ps")] == [
        "the job's token leaves this machine in plaintext: use a secret that `axon-ps auth init` has made, or "
        "certificates of your own (--tls-ca, AXON_PS_TLS_CA), for TLS"
    ]


def test_a_certificate_without_an_authority_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    assert Security(cert_file="c", key_file="k").channel_credentials() is None
    assert "no authority (--tls-ca, AXON_PS_TLS_CA) to switch TLS on" in caplog.text

"""Every handshake is made with the newest certificate. Tests of `rpc/auth/tls_contexts.py`."""

from __future__ import annotations

import contextlib
import ssl

import pytest
import trustme

from axon_ps.errors import ConfigurationError
from axon_ps.rpc.auth.certificates import Chain
from axon_ps.rpc.auth.tls_contexts import client_context, server_context

NAME = "node0"


class Source:
    """A source whose certificate a test replaces."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain

    def current(self) -> Chain:
        return self.chain


def roots(ca: trustme.CA) -> bytes:
    return ca.cert_pem.bytes()


def chain(ca: trustme.CA, name: str = NAME, trusts: bytes | None = None) -> Chain:
    issued = ca.issue_cert(name)
    certificate = b"".join(pem.bytes() for pem in issued.cert_chain_pems)
    return Chain(roots(ca) if trusts is None else trusts, certificate, issued.private_key_pem.bytes())


def handshake(server: ssl.SSLContext, client: ssl.SSLContext, name: str = NAME) -> tuple[bytes, bytes]:
    """The certificates that the server and the client have shown, as DER; empty = none.

    Raises:
        ssl.SSLError: one of them refuses the other.
    """
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    at_client = client.wrap_bio(to_client, to_server, server_hostname=name)
    at_server = server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(3):
        for end in (at_client, at_server):
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
    return at_client.getpeercert(True) or b"", at_server.getpeercert(True) or b""


def der(made: Chain) -> bytes:
    return ssl.PEM_cert_to_DER_cert(made.certificate.decode().partition("-----END")[0] + "-----END CERTIFICATE-----\n")


def test_a_server_shows_the_certificate_that_it_has_at_the_handshake() -> None:
    ca = trustme.CA()
    source = Source(chain(ca, trusts=b""))
    server, client = server_context(source, required=False), client_context(Chain(roots(ca)))
    for _ in range(2):
        assert handshake(server, client) == (der(source.chain), b"")
        assert handshake(server, client)[0] == der(source.chain)
        source.chain = chain(ca, trusts=b"")


@pytest.mark.parametrize("required", [False, True])
def test_a_client_may_have_to_show_a_certificate(required: bool) -> None:
    ours, theirs = trustme.CA(), trustme.CA()
    server, mine = server_context(Source(chain(ours)), required=required), chain(ours, "worker")
    assert handshake(server, client_context(mine))[1] == der(mine)
    without = client_context(Chain(roots(ours)))
    if required:
        with pytest.raises(ssl.SSLError, match="PEER_DID_NOT_RETURN_A_CERTIFICATE"):
            handshake(server, without)
    else:
        assert handshake(server, without)[1] == b""
    with pytest.raises(ssl.SSLError, match="CERTIFICATE_VERIFY_FAILED"):
        handshake(server, client_context(chain(theirs, "worker", roots(ours))))


def test_a_client_verifies_the_authority_and_the_name() -> None:
    ours, theirs = trustme.CA(), trustme.CA()
    server = server_context(Source(chain(ours)), required=False)
    with pytest.raises(ssl.SSLError, match="CERTIFICATE_VERIFY_FAILED"):
        handshake(server, client_context(Chain(roots(theirs))))
    with pytest.raises(ssl.SSLError, match="Hostname mismatch"):
        handshake(server, client_context(Chain(roots(ours))), "node1")


def test_a_context_of_an_equal_chain_is_not_made_again() -> None:
    made = chain(trustme.CA())
    assert client_context(made) is client_context(Chain(made.roots, made.certificate, made.key))


def test_a_certificate_that_cannot_be_used_is_named() -> None:
    ca = trustme.CA()
    one, other = chain(ca), chain(ca)
    for broken in (Chain(one.roots, one.certificate, other.key), Chain(b"nothing", one.certificate, one.key)):
        with pytest.raises(ConfigurationError, match=r"the certificate \(cert_file, key_file\) cannot be used"):
            server_context(Source(broken), required=True)
        with pytest.raises(
            ConfigurationError, match=r"the certificate \(ca_file, cert_file, key_file\) cannot be used"
        ):
            client_context(broken)

"""TLS and mutual TLS with certificates made for the test."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trustme

from axon_ps.errors import AxonError, ConfigurationError, PermissionDenied, Unreachable
from axon_ps.rpc.security import Security
from axon_ps.wire.v1 import shard_pb2
from deadlines import HANG_S
from rpc_fakes import run, serving


@dataclass
class Files:
    """Paths of PEM files."""

    directory: Path

    def authority(self, name: str, ca: trustme.CA) -> str:
        return self._write(f"{name}.pem", ca.cert_pem.bytes())

    def pair(self, name: str, certificate: trustme.LeafCert) -> dict[str, str]:
        chain = b"".join(pem.bytes() for pem in certificate.cert_chain_pems)
        key = certificate.private_key_pem.bytes()
        return {"cert_file": self._write(f"{name}.crt", chain), "key_file": self._write(f"{name}.key", key)}

    def _write(self, name: str, content: bytes) -> str:
        path = self.directory / name
        path.write_bytes(content)
        return str(path)


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    files = Files(tmp_path_factory.mktemp("pki"))
    ours, theirs = trustme.CA(), trustme.CA()
    return {
        "ca": files.authority("ours", ours),
        "other_ca": files.authority("theirs", theirs),
        "server": files.pair("server", ours.issue_cert("127.0.0.1")),
        "elsewhere": files.pair("elsewhere", ours.issue_cert("example.org")),
        "client": files.pair("client", ours.issue_cert("worker")),
        "stranger": files.pair("stranger", theirs.issue_cert("worker")),
    }


def call(server: Security, client: Security) -> str:
    """Make a call and return whom the server saw: the client's certificate name, "" without one."""

    async def stats(request: Any, context: Any) -> shard_pb2.StatsReply:
        nonlocal seen
        seen = context._context.auth_context().get("x509_subject_alternative_name", [b""])[0].decode()
        return shard_pb2.StatsReply()

    async def main() -> None:
        async with serving(security=server, client=client, stats=stats) as s:
            await s.stub.call("Stats", shard_pb2.StatsRequest(), timeout_s=HANG_S)

    seen = "nobody"
    run(main())
    return seen


def test_tls(pki: dict[str, Any]) -> None:
    assert call(Security(**pki["server"]), Security(ca_file=pki["ca"])) == ""


def test_tls_with_a_token(pki: dict[str, Any]) -> None:
    server = Security(**pki["server"], token="secret")
    assert call(server, Security(ca_file=pki["ca"], token="secret")) == ""
    with pytest.raises(PermissionDenied, match="token"):
        call(server, Security(ca_file=pki["ca"]))


def test_mutual_tls(pki: dict[str, Any]) -> None:
    server = Security(**pki["server"], ca_file=pki["ca"], mutual=True)
    assert call(server, Security(ca_file=pki["ca"], **pki["client"])) == "worker"


@pytest.mark.parametrize(
    ("server", "client", "kind", "message"),
    [
        ({"pair": "server"}, {"ca": "other_ca"}, PermissionDenied, "no authority that we trust"),
        ({"pair": "elsewhere"}, {"ca": "ca"}, PermissionDenied, "does not name this host"),
        ({}, {"ca": "ca"}, PermissionDenied, "the server speaks plaintext"),
        ({"pair": "server"}, {}, Unreachable, "may want TLS"),
        ({"pair": "server", "ca": "ca", "mutual": True}, {"ca": "ca"}, Unreachable, "client's certificate"),
        (
            {"pair": "server", "ca": "ca", "mutual": True},
            {"ca": "ca", "pair": "stranger"},
            Unreachable,
            "client's certificate",
        ),
    ],
)
def test_what_does_not_fit_is_explained(
    pki: dict[str, Any], server: dict[str, Any], client: dict[str, Any], kind: type[AxonError], message: str
) -> None:
    def security(pair: str = "", ca: str = "", mutual: bool = False) -> Security:
        return Security(**pki.get(pair, {}), ca_file=pki.get(ca, ""), mutual=mutual)

    with pytest.raises(kind, match=message):
        call(security(**server), security(**client))


def test_files_are_named_when_they_cannot_be_used(pki: dict[str, Any], tmp_path: Path) -> None:
    not_pem = tmp_path / "not.pem"
    not_pem.write_bytes(b"hello")
    missing = str(tmp_path / "missing.pem")
    pair = pki["server"]
    with pytest.raises(ConfigurationError, match=f"ca_file '{missing}' cannot be read: No such file"):
        Security(ca_file=missing).channel_credentials()
    with pytest.raises(ConfigurationError, match=f"ca_file '{not_pem}' is not a PEM file"):
        Security(ca_file=str(not_pem)).channel_credentials()
    with pytest.raises(ConfigurationError, match=f"key_file '{missing}' cannot be read"):
        Security(cert_file=pair["cert_file"], key_file=missing).server_credentials()
    with pytest.raises(ConfigurationError, match=f"cert_file '{tmp_path}' cannot be read: Is a directory"):
        Security(cert_file=str(tmp_path), key_file=pair["key_file"]).server_credentials()
    with pytest.raises(ConfigurationError, match="ca_file"):
        Security(**pair, ca_file=missing, mutual=True).server_credentials()


def test_a_pem_file_of_nonsense_is_refused(pki: dict[str, Any], tmp_path: Path) -> None:
    nonsense = tmp_path / "nonsense.pem"
    nonsense.write_bytes(b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    key = pki["server"]["key_file"]
    with pytest.raises(ConfigurationError, match="cannot listen"):
        call(Security(cert_file=str(nonsense), key_file=key), Security(ca_file=pki["ca"]))

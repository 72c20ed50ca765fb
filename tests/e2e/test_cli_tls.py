"""TLS and mutual TLS by flag and environment, from coordinator to worker, with real certificates and processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import trustme

import axon_ps
from axon_ps.rpc.security import Security
from axon_ps.testing import LocalCluster
from command_line import axon_ps as run_cli
from deadlines import HANG_S


def meet() -> list[int]:
    with axon_ps.World.init(join_timeout_s=HANG_S) as world:
        return world.gather_json(world.rank)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> tuple[trustme.CA, Path]:
    directory = tmp_path_factory.mktemp("tls")
    ca = trustme.CA()
    ca.cert_pem.write_to_path(directory / "ca.pem")
    issue(ca, directory, "service")
    return ca, directory


def issue(ca: trustme.CA, directory: Path, name: str) -> None:
    """A certificate for 127.0.0.1 and its key, as NAME.pem and NAME.key."""
    certificate = ca.issue_cert("127.0.0.1", "localhost")
    certificate.private_key_pem.write_to_path(directory / f"{name}.key")
    for blob in certificate.cert_chain_pems:
        blob.write_to_path(directory / f"{name}.pem", append=True)


def test_a_cluster_over_mutual_tls(authority: tuple[trustme.CA, Path]) -> None:
    _, directory = authority
    files = {
        name: str(directory / file)
        for name, file in (("ca", "ca.pem"), ("cert", "service.pem"), ("key", "service.key"))
    }
    security = Security(ca_file=files["ca"], cert_file=files["cert"], key_file=files["key"], mutual=True)
    with LocalCluster(shards=2, world_size=2, security=security) as cluster:
        assert [result.value for result in cluster.run_workers(meet)] == [[0, 1], [0, 1]]
        status = ["status", "--coordinator", cluster.address, "--job", cluster.job, "--token", cluster.token]
        tls = ["--tls-ca", files["ca"], "--tls-cert", files["cert"], "--tls-key", files["key"]]
        assert run_cli(*status, *tls).returncode == 0
        assert run_cli("health", cluster.address, *tls).stdout == "SERVING\n"
        assert run_cli("health", cluster.address, **cluster.env(0)).stdout == "SERVING\n"
        for wrong in ([], tls[:2]):  # plaintext; a client without a certificate
            refused = run_cli(*status, *wrong)
            assert refused.returncode != 0
            assert refused.stderr.startswith("axon-ps: ")
            assert "TLS" in refused.stderr


def test_a_server_of_another_authority_is_not_trusted(authority: tuple[trustme.CA, Path], tmp_path: Path) -> None:
    _, directory = authority
    trustme.CA().cert_pem.write_to_path(tmp_path / "other.pem")
    security = Security(
        ca_file=str(directory / "ca.pem"),
        cert_file=str(directory / "service.pem"),
        key_file=str(directory / "service.key"),
    )
    with LocalCluster(shards=1, security=security) as cluster:
        status = ["status", "--coordinator", cluster.address, "--job", cluster.job, "--token", cluster.token]
        assert run_cli(*status, "--tls-ca", str(directory / "ca.pem")).returncode == 0
        refused = run_cli(*status, "--tls-ca", str(tmp_path / "other.pem"))
        assert refused.returncode != 0
        assert "certificate" in refused.stderr.lower()


def test_beyond_loopback_needs_tls_and_a_token_or_insecure(authority: tuple[trustme.CA, Path]) -> None:
    _, directory = authority
    tls = ["--tls-cert", str(directory / "service.pem"), "--tls-key", str(directory / "service.key")]
    for given, needed in (([], "needs a secret"), (["--token", "t"], "can be guessed"), (tls, "needs a token")):
        refused = run_cli("coordinator", "--host", "0.0.0.0", "--port", "0", "--state", "memory", *given)
        assert refused.returncode == 2
        assert needed in refused.stderr
    missing = run_cli("coordinator", "--state", "memory", "--tls-cert", "/no/such.pem", "--tls-key", "/no/such.key")
    assert missing.returncode == 2
    assert "/no/such" in missing.stderr

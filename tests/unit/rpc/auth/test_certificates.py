"""Certificates of the job's authority and from files: made, renewed, read, and what is in them."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
import trustme
from cryptography import x509

from axon_ps.errors import ConfigurationError, PermissionDenied
from axon_ps.rpc.auth import certificates, watched_file
from axon_ps.rpc.auth.authority import JobAuthority, authority_of, roots_of
from axon_ps.rpc.auth.certificates import AuthoritySource, FileSource, files_in, peer_certificate
from axon_ps.rpc.auth.identity import Identity, Principal
from axon_ps.rpc.auth.tokens import new_secret

SECRET = new_secret()
SHARD = Identity(Principal.SHARD, "j", 1)


def test_all_who_hold_the_secret_have_the_same_authority_and_nobody_else() -> None:
    issued = JobAuthority(SECRET).issue(SHARD, 60.0)
    certificate = x509.load_pem_x509_certificate(issued.chain)
    certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(JobAuthority(SECRET).certificate))
    with pytest.raises(Exception, match=r".*"):
        certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(JobAuthority(new_secret()).certificate))
    assert "PRIVATE" not in repr(issued)


def test_a_certificate_names_its_role_and_only_services_pass_for_one() -> None:
    def names(role: Principal) -> list[str]:
        pem = authority_of(SECRET).issue(Identity(role, "j"), 60.0, hosts=["node0", "10.0.0.1", "node0"]).chain
        found = (
            x509.load_pem_x509_certificate(pem).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        )
        return [*found.get_values_for_type(x509.DNSName), *map(str, found.get_values_for_type(x509.IPAddress))]

    assert names(Principal.SHARD) == ["shard.axon-ps.internal", "service.axon-ps.internal", "node0", "10.0.0.1"]
    assert names(Principal.WORKER) == ["worker.axon-ps.internal", "node0", "10.0.0.1"]


def test_what_a_peer_shows_is_read() -> None:
    issued = authority_of(SECRET).issue(SHARD, 60.0, process="abcd", itself=True)
    found = peer_certificate(issued.chain)
    assert (found.identity, found.process, found.makes_itself) == (SHARD, "abcd", True)
    assert found.expires_s == pytest.approx(issued.expires_s, abs=1.0)
    assert found.serial == f"{x509.load_pem_x509_certificate(issued.chain).serial_number:x}"


def test_a_certificate_of_somebody_elses_without_a_spiffe_id_names_nobody() -> None:
    theirs = trustme.CA(organization_name="x").issue_cert("node0", common_name="abcd")
    found = peer_certificate(theirs.cert_chain_pems[0].bytes())
    assert (found.identity, found.process, found.makes_itself) == (None, "", False)


def test_it_is_made_again_after_two_thirds_of_its_time_by_the_same_process(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1e9]
    monkeypatch.setattr(certificates.time, "time", lambda: now[0])
    source = AuthoritySource(lambda: (SECRET,), SHARD, 60.0)
    first = source.current()
    now[0] += 39.0
    assert source.current() is first
    now[0] += 2.0
    second = source.current()
    assert second is source.current() is not first
    assert peer_certificate(second.certificate).process == peer_certificate(first.certificate).process
    assert "PRIVATE" not in repr(second)


def test_a_rotated_secret_makes_another_certificate_and_both_authorities_are_trusted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    known = [(SECRET,)]
    source = AuthoritySource(lambda: known[0], SHARD, 60.0)
    first, new = source.current(), new_secret()
    known[0] = (new, SECRET)
    second = source.current()
    assert second.roots == roots_of((new, SECRET))
    assert first.certificate != second.certificate
    known[0] = ("weak",)
    assert source.current() is second  # rather than that the process falls silent
    assert "cannot be renewed: " in caplog.text


def test_files_are_read_again_when_they_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched_file, "LOOK_S", 0.0)
    authority = authority_of(SECRET)

    def write() -> bytes:
        issued = authority.issue(SHARD, 60.0)
        for name, content in (
            ("svid.pem", issued.chain),
            ("svid.key", issued.key),
            ("bundle.pem", authority.certificate),
        ):
            aside = tmp_path / f".{name}"
            aside.write_bytes(content)
            os.replace(aside, tmp_path / name)
        return issued.chain

    first = write()
    source = FileSource(**files_in(str(tmp_path)))
    assert source.current().certificate == first
    assert source.current() is source.current()
    second = write()
    assert source.current().certificate == second
    (tmp_path / "svid.pem").unlink()
    assert source.current().certificate == second


def test_a_directory_that_lacks_a_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"needs bundle\.pem, svid\.pem, svid\.key; there is no .*bundle\.pem"):
        files_in(str(tmp_path))


def test_a_secret_that_others_can_read_is_warned_about_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="axon_ps")
    for name, mode in (("open", 0o644), ("private", 0o600), ("group", 0o640)):
        (tmp_path / name).write_text(SECRET)
        (tmp_path / name).chmod(mode)
        for _ in range(2):
            assert watched_file.lines_of(str(tmp_path / name)) == (SECRET,)
    assert [r.getMessage() for r in caplog.records] == [
        f"every user of this machine can read the secret in {tmp_path / 'open'}: chmod 600 it"
    ]


def test_two_spiffe_ids_are_none() -> None:
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([])
    ids = [x509.UniformResourceIdentifier(Identity(role, "j").uri()) for role in (Principal.WORKER, Principal.SHARD)]
    pem = authority_of(SECRET).issue(SHARD, 60.0).chain
    like = x509.load_pem_x509_certificate(pem)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), 1, like.not_valid_before_utc, like.not_valid_after_utc)
        .add_extension(x509.SubjectAlternativeName(ids), critical=False)
        .sign(key, hashes.SHA256())
    )
    from cryptography.hazmat.primitives.serialization import Encoding

    with pytest.raises(PermissionDenied, match="has 2 SPIFFE IDs"):
        peer_certificate(made.public_bytes(Encoding.PEM))

"""Manifests are signed with the job's key, and what others have written is not loaded unless it is named."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from axon_ps.errors import CheckpointCorrupt, CheckpointError, ConfigurationError
from axon_ps.sharding.layout import Layout, build_unit
from axon_ps.sharding.plan import PlanOptions
from axon_ps.storage.manifest import FileEntry, Manifest, list_checkpoints, read_manifest, write_manifest
from axon_ps.storage.signature import ManifestKey, use_key
from axon_ps.types import DType

OURS, THEIRS = ManifestKey.derive(b"a" * 32), ManifestKey.derive(b"b" * 32)
MANIFEST = Manifest(
    job="job",
    version=3,
    layout=Layout(units=(build_unit("u", [("w", (4,), DType.F32)]),)),
    optimizer=None,
    num_servers=1,
    options=PlanOptions(),
    files=(FileEntry(name="shard-a", sha256="0" * 64, bytes=1),),
    extra={"note": "0" * 64},
)


@pytest.fixture(autouse=True)
def no_key() -> Iterator[None]:
    yield
    use_key(None)


def written(directory: Path, key: ManifestKey | None) -> str:
    use_key(key)
    write_manifest(str(directory), MANIFEST)
    return str(directory)


def test_the_key_is_hkdf_of_the_secret_for_this_purpose() -> None:
    hkdf = HKDF(algorithm=SHA256(), length=32, salt=None, info=b"axon_ps checkpoint manifest")
    assert ManifestKey.derive(b"secret").key == hkdf.derive(b"secret")
    assert "secret" not in repr(ManifestKey(b"secret"))


def test_what_is_signed_with_the_key_is_read_in_any_later_run(tmp_path: Path) -> None:
    uri = written(tmp_path, OURS)
    found = read_manifest(uri)
    assert OURS.signed(found.sha256, found.signature)
    use_key(ManifestKey.derive(b"a" * 32))
    assert read_manifest(uri).version == 3
    use_key(None)
    assert read_manifest(uri).version == 3, "without a key nothing is asked for"


@pytest.mark.parametrize(
    ("key", "words"), [(THEIRS, "is signed with another key"), (None, "is not signed, and this job has a key")]
)
def test_what_others_have_written_is_refused_unless_it_is_named(
    tmp_path: Path, key: ManifestKey | None, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    uri = written(tmp_path / "run", key)
    use_key(OURS)
    with pytest.raises(CheckpointError, match=rf"run {words}.* nothing was loaded.*--trust-checkpoint"):
        read_manifest(uri)
    refused: list[str] = []
    assert list_checkpoints(str(tmp_path), lambda where, _: refused.append(where)) == []
    assert refused == [uri]
    for trusted in (uri, str(tmp_path)):
        use_key(OURS, [trusted])
        with caplog.at_level(logging.WARNING):
            assert read_manifest(uri).version == 3
        assert "because --trust-checkpoint names it" in caplog.text
    use_key(OURS, [str(tmp_path / "ru")])
    with pytest.raises(CheckpointError, match=words):
        read_manifest(uri)


def test_a_signature_is_of_everything_in_the_manifest(tmp_path: Path) -> None:
    uri = written(tmp_path, OURS)
    text = (tmp_path / "manifest.json").read_text()
    signature = json.loads(text)["signature"]
    for before, after in (('"job": "job"', '"job": "jo2"'), ("shard-a", "shard-b")):
        (tmp_path / "manifest.json").write_text(text.replace(before, after))
        with pytest.raises(CheckpointCorrupt, match="was altered"):
            read_manifest(uri)
    use_key(None)
    write_manifest(uri, dataclasses.replace(MANIFEST, version=4))  # another one, with a hash of its own
    forged = json.loads((tmp_path / "manifest.json").read_text())
    sha256 = forged["sha256"]
    forged["signature"] = signature
    (tmp_path / "manifest.json").write_text(json.dumps(forged, indent=1))
    use_key(OURS)
    with pytest.raises(CheckpointError):
        read_manifest(uri)
    assert not OURS.signed(sha256, signature)


def test_the_key_is_read_from_a_file_of_enough_bytes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "key"
    with pytest.raises(ConfigurationError, match=r"key cannot be read: No such file"):
        ManifestKey.read(path)
    path.write_text("short")
    with pytest.raises(ConfigurationError, match="holds 5 bytes; a secret has at least 32"):
        ManifestKey.read(path)
    path.write_bytes(b"a" * 32 + b"\n")
    path.chmod(0o644)
    assert ManifestKey.read(path) == OURS
    assert "can be read by other users" in caplog.text
    caplog.clear()
    path.chmod(0o600)
    ManifestKey.read(path)
    assert not caplog.text

"""`axon-ps auth` without a job: what is written, for whom and until when. Tests of `cli/auth.py`."""

from __future__ import annotations

import stat
import time
from pathlib import Path
from typing import Self

import pytest
import trustme

from axon_ps.cli import operations
from axon_ps.cli.main import main
from axon_ps.rpc.auth.certificates import peer_certificate
from axon_ps.rpc.auth.identity import Identity, Principal
from axon_ps.rpc.auth.tokens import read_unverified
from axon_ps.wire.events import RevokeReply

SECRET = "4b1f0c9e7d2a8356-the-secret"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The standard output of a command that succeeds."""
    capsys.readouterr()
    assert main(["auth", *arguments]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The line of a command that finds a mistake of its user."""
    capsys.readouterr()
    assert main(["auth", *arguments]) == 2
    return " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(("expires", "seconds"), [("90s", 90), ("30m", 1800), ("12h", 43200), ("7d", 604800)])
def test_a_token_holds_as_long_as_it_is_told_to(expires: str, seconds: int, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--role", "worker", "--rank", "3", "--token", SECRET, "--job", "gpt", "--expires", expires]
    claims = read_unverified(shown(capsys, "token", *options).strip())
    assert claims.identity == Identity(Principal.WORKER, "gpt", 3)
    assert abs(claims.expires_s - time.time() - seconds) < 60


@pytest.mark.parametrize("expires", ["0s", "", "12", "1.5h", "-1h", "h", "36501d", "9" * 30 + "d"])
def test_a_time_that_is_none_is_refused(expires: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = refused(capsys, "token", "--role", "worker", "--token", SECRET, f"--expires={expires}")
    assert f"--expires is {expires!r}; it must be like 90s, 30m, 12h or 7d" in words


def test_a_token_for_a_file_is_not_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "token"
    printed = shown(capsys, "token", "--role", "observer", "--token", SECRET, "--out", str(file))
    assert mode(file) == 0o600
    assert file.read_text().strip() not in printed
    assert shown(capsys, "show", str(file)) == printed
    assert printed.startswith("a token: observer of job 'default'; until ")


def test_files_of_a_certificate_are_for_its_process_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "new" / "shard"
    options = ["--role", "shard", "--rank", "1", "--host", "gpu1", "--host", "10.0.0.1", "--token", SECRET]
    printed = shown(capsys, "issue", str(directory), *options)
    assert sorted(path.name for path in directory.iterdir()) == ["bundle.pem", "svid.key", "svid.pem"]
    assert (mode(directory), mode(directory / "svid.key")) == (0o700, 0o600)
    found = peer_certificate((directory / "svid.pem").read_bytes())
    assert found.identity == Identity(Principal.SHARD, "default", 1)
    assert found.serial in printed
    assert shown(capsys, "show", str(directory / "svid.pem")) == printed
    again = shown(capsys, "issue", str(directory), *options)
    assert again != printed, "another certificate in its place"


def test_what_is_in_a_file_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, foreign = tmp_path / "file", trustme.CA().issue_cert("example.org")
    for text, words in (
        ("", "nothing"),
        (SECRET, "a secret of a job, of 27 characters (good)"),
        ("a b", "a secret of a job, of 1 characters (too short"),
        (foreign.cert_chain_pems[0].bytes().decode(), "a certificate of no role (no SPIFFE ID); until "),
    ):
        file.write_text(text)
        assert words in shown(capsys, "show", str(file))
    token = shown(capsys, "token", "--role", "worker", "--token", SECRET, "--expires", "90s")
    file.write_text(token)
    monkeypatch.setattr(time, "time", lambda now=time.time: now() + 3600.0)
    assert "; expired at " in shown(capsys, "show", str(file))


def test_what_is_no_text_or_no_certificate_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.write_text("-----BEGIN CERTIFICATE-----\nxx")
    assert "holds no certificate that can be read" in refused(capsys, "show", str(file))
    file.write_bytes(b"\xff\xfe")
    assert "cannot be read" in refused(capsys, "show", str(file))
    assert "cannot be read" in refused(capsys, "init", str(file), "--add")
    assert file.read_bytes() == b"\xff\xfe"


def test_a_private_key_that_others_can_read_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = tmp_path / "key"
    key.write_bytes(trustme.CA().issue_cert("example.org").private_key_pem.bytes())
    for permissions, words in ((0o600, "a private key\n"), (0o640, "other users of this machine can read it")):
        key.chmod(permissions)
        assert words in shown(capsys, "show", str(key))


def test_a_file_is_neither_replaced_nor_added_to_by_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "token"
    assert "there is no such file to add to" in refused(capsys, "init", str(file), "--add")
    file.write_text(SECRET)
    assert "it is there already: another name, or --add" in refused(capsys, "init", str(file))
    assert "is there already" in shown(capsys, "init", str(file), "--if-missing")
    assert file.read_text() == SECRET
    assert "cannot be written: No such file" in refused(capsys, "init", str(tmp_path / "nothing" / "token"))
    assert "cannot be read" in refused(capsys, "show", str(tmp_path))


class Operator:
    """A coordinator that has revoked what it was told to."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, float]] = []
        self.reply = RevokeReply(names=("1f", "2a"), members=("worker 3",), has_secret=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def revoke(self, target: str, reason: str, timeout_s: float) -> RevokeReply:
        self.asked.append((target, reason, timeout_s))
        return self.reply


@pytest.mark.parametrize("has_secret", [False, True])
def test_what_was_revoked_and_who_was_ended_is_said(
    has_secret: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    operator = Operator()
    operator.reply = RevokeReply(names=("1f", "2a"), members=("worker 3",), has_secret=has_secret)
    monkeypatch.setattr(operations, "client", lambda settings: operator)
    options = ["--coordinator", "127.0.0.1:1", "--reason", "it leaked"]
    assert main(["auth", "revoke", "worker/3", *options]) == 0
    printed = capsys.readouterr()
    assert printed.out == "revoked 1f, 2a\nworker 3 was ended\n"
    assert ("rotate the secret" in printed.err) is has_secret
    assert operator.asked == [("worker/3", "it leaked", 10.0)]

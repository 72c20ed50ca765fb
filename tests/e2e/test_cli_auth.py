"""`axon-ps auth` as a user meets it: files that nobody else can read, and credentials that a job accepts.

Tests of `cli/auth.py`.
"""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from axon_ps.rpc.access import MAY_CALL, short
from axon_ps.rpc.security import Security
from axon_ps.testing import LocalCluster
from command_line import axon_ps


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_secret_is_made_shown_and_rotated_without_being_printed(tmp_path: Path) -> None:
    file, authority = tmp_path / "token", tmp_path / "ca.pem"
    made = axon_ps("auth", "init", str(file), "--authority", str(authority))
    secret = file.read_text().strip()
    assert made.returncode == 0, made.stderr
    assert mode(file) == 0o600
    assert "BEGIN CERTIFICATE" in authority.read_text()
    again = axon_ps("auth", "init", str(file))
    assert (again.returncode, file.read_text().strip()) == (2, secret)
    assert axon_ps("auth", "init", str(file), "--if-missing").returncode == 0
    added = axon_ps("auth", "init", str(file), "--add")
    assert file.read_text().split()[0] == secret
    assert len(file.read_text().split()) == 2
    assert mode(file) == 0o600
    shown = axon_ps("auth", "show", str(file))
    assert shown.stdout.count("a secret of a job, of 32 characters (good)") == 2
    assert secret not in made.stdout + again.stderr + added.stdout + shown.stdout


def test_what_is_issued_for_one_role_is_for_no_other(tmp_path: Path) -> None:
    with LocalCluster(shards=1, security=Security(tls=True)) as cluster:
        job = {"AXON_PS_JOB": cluster.job, "AXON_PS_TOKEN": cluster.token}
        directory = tmp_path / "watch"
        made = axon_ps("auth", "issue", str(directory), "--role", "observer", "--expires", "1h", **job)
        assert made.stdout.startswith("a certificate: observer of job 'test'; until "), made.stderr
        assert (mode(directory), mode(directory / "svid.key")) == (0o700, 0o600)
        asks = ["--coordinator", cluster.address, "--job", cluster.job, "--tls-dir", str(directory)]
        assert axon_ps("status", *asks).returncode == 0
        refused = axon_ps("drain", "0", *asks)
        assert refused.returncode == 2
        assert "the role of these credentials is observer" in refused.stderr
        serial = made.stdout.partition("serial number ")[2].partition(",")[0]
        operator = ["--coordinator", cluster.address, "--job", cluster.job, "--token", cluster.token, "--tls"]
        assert axon_ps("auth", "revoke", serial, "--reason", "it leaked", *operator).stdout == f"revoked {serial}\n"
        assert "were revoked: it leaked" in axon_ps("status", *asks).stderr


def test_a_token_is_for_services_without_mutual_tls(tmp_path: Path) -> None:
    with LocalCluster(shards=1, token="4b1f0c9e7d2a8356-the-secret") as cluster:
        job = {"AXON_PS_JOB": cluster.job, "AXON_PS_TOKEN": cluster.token}
        token = axon_ps("auth", "token", "--role", "observer", "--expires", "1h", **job).stdout.strip()
        asks = ["--coordinator", cluster.address, "--job", cluster.job, "--token", token]
        assert axon_ps("status", *asks).returncode == 0
        assert "needs the role" in axon_ps("drain", "0", *asks).stderr
        assert axon_ps("auth", "show", AXON_PS_TOKEN=token).stdout.startswith("a token: observer of job 'test'; until ")
        cannot = axon_ps("auth", "token", "--role", "worker", AXON_PS_TOKEN=token)
        assert (cannot.returncode, cannot.stdout) == (2, "")


def test_the_table_is_printed_whole() -> None:
    printed = json.loads(axon_ps("auth", "table", "--json").stdout)
    assert list(printed) == list(map(short, MAY_CALL))
    text = axon_ps("auth", "table", COLUMNS="200").stdout
    assert all(short(row) in text for row in MAY_CALL)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["token", "--role", "king", "--token", "4b1f0c9e7d2a8356-the-secret"], "--role is 'king'"),
        (["token", "--role", "worker", "--token", "change-me"], "at least 128 random bits"),
        (["token", "--role", "observer", "--rank", "1", "--token", "4b1f0c9e7d2a8356-the-secret"], "has none"),
        (["token", "--role", "worker", "--expires", "soon", "--token", "4b1f0c9e7d2a8356-the-secret"], "like 90s"),
        (["show"], "nothing is set"),
        (["revoke", "worker/1"], "which coordinator?"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], words: str) -> None:
    done = axon_ps("auth", *arguments)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert words in done.stderr

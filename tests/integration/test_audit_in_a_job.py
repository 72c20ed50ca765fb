"""A job's audit log is there without being asked for, at any log level, and has also those who were refused."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from axon_ps.coordinator.client.operator import OperatorClient
from axon_ps.errors import AxonError, PermissionDenied
from axon_ps.rpc.security import Security
from axon_ps.testing import LocalCluster
from deadlines import HANG_S

COORDINATOR = [sys.executable, "-P", "-m", "axon_ps.cli.main", "coordinator", "--port", "0"]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def ended(cluster: LocalCluster) -> list[dict[str, Any]]:
    """What the coordinator has written, once it has ended."""
    coordinator = cluster.process("coordinator")
    coordinator.send_signal(signal.SIGTERM)
    assert coordinator.wait(20) == 0
    return lines(cluster.directory / "audit.jsonl")


async def drain(address: str, security: Security) -> None:
    async with OperatorClient(address, security=security, job="test") as operator:
        await operator.drain(7)


def test_who_was_refused_is_in_it_with_the_role_and_strangers_are_not() -> None:
    with LocalCluster(shards=1, environment={"AXON_PS_LOG_LEVEL": "warning"}) as cluster:
        observer = dataclasses.replace(cluster.security, token=cluster.observer_token)
        stranger = dataclasses.replace(cluster.security, token="wrong")
        for security, refused in ((cluster.security, AxonError), (observer, PermissionDenied), (stranger, AxonError)):
            with pytest.raises(refused):
                asyncio.run(drain(cluster.address, security))
        found = ended(cluster)
        mode = stat.S_IMODE((cluster.directory / "audit.jsonl").stat().st_mode)
    assert mode == 0o600
    joined, failed, refused, *after = found
    assert joined["what"] == "joined"
    assert (failed["what"], failed["role"], failed["about"]) == ("drain", "any", {"rank": "7"})
    assert failed["result"].startswith("InvalidRequest: ")
    assert (refused["what"], refused["role"]) == ("Coordinator.Drain", "observer")
    assert refused["result"].startswith("PermissionDenied: the role of these credentials is observer")
    assert refused["peer"].startswith("ipv4:127.0.0.1:")
    assert not any("rank" in line.get("about", {}) or "Drain" in line["what"] for line in after), (
        "a stranger is not in it"
    )


def started(tmp_path: Path, *options: str) -> subprocess.Popen[str]:
    environment = os.environ | {"XDG_STATE_HOME": str(tmp_path / "xdg")}
    pipe = subprocess.PIPE
    return subprocess.Popen([*COORDINATOR, *options], env=environment, stderr=pipe, text=True)


@pytest.mark.parametrize(
    ("options", "place"),
    [
        (["--state", "{}/jobs/gpt.sqlite"], "jobs/gpt.audit.jsonl"),
        (["--state", "memory", "--job", "a.b"], "xdg/axon-ps/a.b.audit.jsonl"),
        (["--state", "sqlite:{}/own?synchronous=off", "--job", "c"], "xdg/axon-ps/c.audit.jsonl"),
        (["--state", "memory", "--audit-log", "{}/mine"], "mine"),
    ],
)
def test_where_it_is(tmp_path: Path, options: list[str], place: str) -> None:
    process = started(tmp_path, *(option.format(tmp_path) for option in options))
    with process:
        assert process.stderr is not None
        assert "listening" in process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=HANG_S)
    assert process.returncode == 0
    assert (tmp_path / place).is_file()


def test_a_file_that_cannot_be_written_is_refused_at_the_start() -> None:
    done = subprocess.run(
        [*COORDINATOR, "--state", "memory", "--audit-log", "/proc/no/audit"],
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 2
    assert "the audit log /proc/no/audit cannot be written" in done.stderr

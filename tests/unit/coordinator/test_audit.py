"""Who has changed a job, or tried to, is in the audit log, one JSON object a line, and it stops nobody."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from axon_ps.coordinator.server import audit as module
from axon_ps.coordinator.server.audit import STANDARD_ERROR, AuditLog, audited, opened
from axon_ps.coordinator.server.audit_file import OLDER_FILES, AuditFile
from axon_ps.errors import ConfigurationError, PermissionDenied
from axon_ps.rpc.auth.identity import Identity, Principal
from axon_ps.rpc.auth.tokens import mint, new_secret
from axon_ps.wire.v1 import checkpoint_pb2, common_pb2, coordinator_pb2


class Context:
    def peer(self) -> str:
        return "ipv4:10.0.0.7:40212"


class Servicer:
    def __init__(self, audit: AuditLog) -> None:
        self.audit = audit

    def job_and_name(self, incarnation: str) -> tuple[str, str]:
        return "gpt", f"worker 3, {incarnation}"

    @audited
    async def restore_checkpoint(self, request: Any, context: Any) -> Any:
        if request.uri == "/etc":
            raise PermissionDenied("not there")
        return checkpoint_pb2.CheckpointReply(uri=request.uri)

    @audited
    async def register(self, request: Any, context: Any) -> Any:
        return coordinator_pb2.RegisterReply(first=request.name == "new")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def written(log: AuditLog) -> list[dict[str, Any]]:
    """What is in the file, once all of it is."""
    log.close()
    return lines(Path(log.path))


def test_calls_are_recorded_with_who_what_and_result(tmp_path: Path) -> None:
    log = AuditLog(str(tmp_path / "audit.jsonl"))

    async def main() -> None:
        context = common_pb2.CallContext(incarnation="abc")
        servicer = Servicer(log)
        for uri in ("/run", "/etc"):
            try:
                await servicer.restore_checkpoint(
                    coordinator_pb2.RestoreCheckpointRequest(context=context, uri=uri), Context()
                )
            except PermissionDenied:
                assert uri == "/etc"
        for name in ("new", "known"):
            await servicer.register(coordinator_pb2.RegisterRequest(context=context, name=name), Context())

    asyncio.run(main())
    done, refused, registered = written(log)
    assert done.pop("time").endswith("Z")
    assert done == {
        "job": "gpt",
        "what": "restore_checkpoint",
        "who": "worker 3, abc",
        "role": "any",
        "peer": "ipv4:10.0.0.7:40212",
        "credentials": "a caller of this process, or without credentials",
        "about": {"uri": "/run", "models": "[]"},
        "result": "done",
    }
    assert refused["result"] == "PermissionDenied: not there"
    assert (registered["what"], registered["about"]["name"]) == ("register", "new"), "what changed nothing is not in it"


def test_what_happened_is_one_line_however_long_and_whatever_it_contains(tmp_path: Path) -> None:
    log = AuditLog(str(tmp_path / "audit.jsonl"))
    log.record("gpt", "left", text="worker 1 left: \n" + "x" * 1000, about={"uri": "y" * 1000})
    (line,) = written(log)
    assert len(line["text"]) == len(line["about"]["uri"]) == 500


def test_nothing_secret_is_in_it(tmp_path: Path) -> None:
    secret = new_secret()
    log = AuditLog(str(tmp_path / "audit.jsonl"), lambda: (secret,))
    token = mint(secret, Identity(Principal.WORKER, "gpt"), 60.0)
    about = {"uri": "s3://KEY:PASS@bucket/x", "target": secret, "name": token, "models": "Bearer abc"}
    log.record("gpt", "revoke", about=about)
    (line,) = written(log)
    assert line["about"] == {"uri": "s3://***@bucket/x", "target": "***", "name": "***", "models": "Bearer ***"}


def test_the_file_is_for_its_owner_alone_and_of_bounded_size(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "audit.jsonl"
    file = AuditFile(path, max_bytes=1000)
    for number in range(200):
        file.write(json.dumps({"number": number, "text": "x" * 50}))
    file.close()
    files = sorted(path.parent.iterdir())
    assert [f.name for f in files] == ["audit.jsonl", *(f"audit.jsonl.{i}" for i in range(1, OLDER_FILES + 1))]
    assert all(f.stat().st_size <= 1000 for f in files)
    assert {stat.S_IMODE(f.stat().st_mode) for f in files} == {0o600}
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    numbers = [line["number"] for f in (*reversed(files[1:]), path) for line in lines(f)]
    assert numbers == list(range(numbers[0], 200)), "the newest are there, in order"


def test_a_file_that_others_could_read_is_closed_to_them(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    path.write_text("{}\n")
    path.chmod(0o644)
    AuditFile(path).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_several_coordinators_write_one_file_and_no_line_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    files = [AuditFile(path, max_bytes=4000) for _ in range(3)]
    for number in range(150):
        files[number % 3].write(json.dumps({"number": number}))
    for file in files:
        file.close()
    found = [line["number"] for f in tmp_path.iterdir() for line in lines(f)]
    assert sorted(found) == list(range(150))


def test_a_line_that_was_written_in_part_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    path.write_text('{"torn": ')
    file = AuditFile(path)
    file.write('{"whole": 1}')
    file.close()
    assert path.read_text() == '{"torn": \n{"whole": 1}\n'


@pytest.mark.parametrize("kind", ["directory", "link", "fifo", "no permission"])
def test_what_cannot_be_written_is_refused_at_the_start(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "audit.jsonl"
    if kind == "directory":
        path.mkdir()
    elif kind == "link":
        path.symlink_to(tmp_path / "elsewhere")
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path = Path("/proc/no/audit.jsonl")
    with pytest.raises(ConfigurationError, match="the audit log .* cannot be written: .*--audit-log"):
        AuditLog(str(path))


def test_where_the_usual_place_cannot_be_written_it_goes_to_standard_error(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    log = opened("", Path("/proc/no/audit.jsonl"), tuple)
    log.record("gpt", "drain")
    log.close()
    assert log.path == STANDARD_ERROR
    assert json.loads(capsys.readouterr().err)["what"] == "drain"
    assert "goes to standard error" in caplog.text


class Disk:
    """Takes lines, or not."""

    def __init__(self) -> None:
        self.full = False
        self.lines: list[str] = []
        self.asked = threading.Semaphore(0)

    def write(self, line: str) -> None:
        self.asked.release()
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.lines.append(line)

    def close(self) -> None:
        pass


def on_disk(monkeypatch: pytest.MonkeyPatch, disk: object) -> AuditLog:
    monkeypatch.setattr(module, "_opened", lambda path: disk)
    return AuditLog("audit.jsonl")


def test_a_full_disk_is_said_once_and_counted_and_what_is_missing_is_said_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = Disk()
    log = on_disk(monkeypatch, disk)
    disk.full = True
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            log.record("gpt", "drain")
            assert disk.asked.acquire(timeout=10)
        disk.full = False
        log.record("gpt", "release")
        log.close()
    assert log.lost == 3
    missing, last = map(json.loads, disk.lines)
    assert (missing["lines"], last["what"]) == (3, "release")
    assert [r.levelname for r in caplog.records] == ["ERROR", "WARNING"]
    assert "No space left on device; the job goes on" in caplog.text


def test_a_disk_that_hangs_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    hangs, goes_on = threading.Event(), threading.Event()

    class Hanging(Disk):
        def write(self, line: str) -> None:
            hangs.set()
            goes_on.wait(60)

    monkeypatch.setattr(module, "MAX_QUEUED", 4)
    monkeypatch.setattr(module, "CLOSE_S", 0.01)
    log = on_disk(monkeypatch, Hanging())
    log.record("gpt", "drain")
    assert hangs.wait(10)
    for _ in range(10):
        log.record("gpt", "drain")
    assert log.lost == 6
    log.close()
    goes_on.set()

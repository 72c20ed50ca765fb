"""Files on S3, on a server of somebody else that fails as S3 does: whole or not at all, and nothing is left behind."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from axon_ps.errors import CheckpointError, CheckpointNotFound
from axon_ps.storage import files
from axon_ps.storage.files import FileStore, open_store
from s3_server import SECRET, Fault, S3Server, s3_server

MIB = 1 << 20
BOUND_S = 20.0
LARGE = os.urandom(MIB) * 20  # three parts


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as server:
        server.boto3().create_bucket(Bucket="bucket")
        yield server


@pytest.fixture
def store(server: S3Server, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[FileStore]:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(files, "_READ_TIMEOUT_S", 0.7)
    server.faults.clear()
    yield open_store(f"s3://bucket/{request.node.name}")
    server.faults.clear()


def put(store: FileStore, name: str, content: bytes) -> None:
    with store.create(name, len(content)) as sink:
        for begin in range(0, len(content), 4 * MIB):
            sink.write(memoryview(content)[begin : begin + 4 * MIB])


def get(store: FileStore, name: str) -> bytes:
    with store.open(name) as source:
        return b"".join(source.read(begin, 4 * MIB) for begin in range(0, source.size, 4 * MIB))


def uploads(store: FileStore, server: S3Server) -> list[str]:
    """The paths in the store of uploads that were begun and neither completed nor aborted."""
    prefix = store.uri.removeprefix("s3://bucket/") + "/"
    found = server.boto3().list_multipart_uploads(Bucket="bucket", Prefix=prefix)
    return sorted(upload["Key"].removeprefix(prefix) for upload in found.get("Uploads", []))


def test_a_large_file_goes_in_parts_and_a_small_one_in_one_request(store: FileStore, server: S3Server) -> None:
    put(store, "small", b"few bytes")
    assert not any("uploads" in url for _, url in server.faults.requests)
    put(store, "large", LARGE)
    parts = {match[0] for _, url in server.faults.requests if (match := re.search(r"partNumber=\d+", url))}
    assert len(parts) == 3  # a slow one may be sent again
    assert store.names() == ["large", "small"]
    assert get(store, "large") == LARGE
    assert get(store, "small") == b"few bytes"
    put(store.child("below"), "x", b"")
    assert store.directories() == ["below"]
    store.remove("large")
    store.remove("large")
    assert store.names() == ["small"]
    with pytest.raises(CheckpointNotFound), store.open("large"):
        pass


@pytest.mark.parametrize("fault", [Fault.RESET, Fault.HANG, Fault.SLOW_DOWN, Fault.INTERNAL, Fault.LOST_ANSWER])
def test_a_fault_that_passes_is_not_noticed(fault: Fault, store: FileStore, server: S3Server) -> None:
    server.faults.add("POST", "uploads", fault, times=1)
    server.faults.add("PUT", "partNumber=2", fault, times=2)
    put(store, "large", LARGE)
    server.faults.add("GET", "large", fault, times=1)
    assert get(store, "large") == LARGE
    assert store.names() == ["large"]
    store.discard_partial()  # where the answer was lost, nobody knows the first upload
    assert uploads(store, server) == []


@pytest.mark.parametrize("fault", [Fault.RESET, Fault.HANG, Fault.SLOW_DOWN, Fault.INTERNAL, Fault.DENIED])
def test_a_fault_that_lasts_is_an_error_in_bounded_time_and_leaves_nothing(
    fault: Fault, store: FileStore, server: S3Server
) -> None:
    put(store, "large", b"what was there")
    server.faults.add("PUT", "partNumber=2", fault)
    began_s = time.monotonic()
    with pytest.raises(CheckpointError, match="bucket/.*/large cannot be written: "):
        put(store, "large", LARGE)
    assert time.monotonic() - began_s < BOUND_S
    assert uploads(store, server) == []
    server.faults.clear()
    assert get(store, "large") == b"what was there"


def test_a_small_file_that_cannot_replace_another_leaves_it(store: FileStore, server: S3Server) -> None:
    put(store, "manifest.json", b"old")
    server.faults.add("PUT", "manifest.json", Fault.DENIED)
    with pytest.raises(CheckpointError, match=r"manifest\.json cannot be written: .*credentials and its policy"):
        put(store, "manifest.json", b"new")
    server.faults.clear()
    assert get(store, "manifest.json") == b"old"


def test_what_fails_half_way_is_not_there(store: FileStore, server: S3Server) -> None:
    with pytest.raises(ZeroDivisionError), store.create("large") as sink:
        sink.write(LARGE)
        raise ZeroDivisionError
    assert store.names() == []
    assert uploads(store, server) == []


def test_reading_is_denied(store: FileStore, server: S3Server) -> None:
    put(store, "a", b"x")
    server.faults.add("GET", "", Fault.DENIED)
    server.faults.add("HEAD", "", Fault.DENIED)
    with pytest.raises(CheckpointError, match=r"bucket/.*/a cannot be read: .*credentials"), store.open("a"):
        pass
    with pytest.raises(CheckpointError, match=r"bucket/.* cannot be read: .*credentials"):
        store.names()


def test_a_bucket_that_is_not_there(store: FileStore) -> None:
    nowhere = open_store("s3://no-such-bucket/run")
    with pytest.raises(CheckpointNotFound, match="there is no bucket 'no-such-bucket' for s3://no-such-bucket/run"):
        nowhere.names()
    with pytest.raises(CheckpointError, match=r"no-such-bucket/run/a cannot be written: .*does not exist"):
        put(nowhere, "a", b"x")


KILLED = """
import os, signal, sys
from axon_ps.storage.files import open_store
with open_store(sys.argv[1]).create("large") as sink:
    sink.write(bytes(20 << 20))
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_has_left_is_removed_and_nothing_else(store: FileStore, server: S3Server) -> None:
    for name in ("step-1", "mine"):
        subprocess.run([sys.executable, "-c", KILLED, store.child(name).uri], check=False, env=dict(os.environ))
    assert uploads(store, server) == ["mine/large", "step-1/large"]
    assert store.directories() == []
    store.discard_partial("step-")
    assert uploads(store, server) == ["mine/large"]
    store.discard_partial()
    assert uploads(store, server) == []


def test_no_credential_is_logged(
    store: FileStore, server: S3Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.DEBUG):
        put(store, "a", b"x")
        server.faults.add("GET", "", Fault.DENIED)
        with pytest.raises(CheckpointError) as raised:
            store.names()
    assert SECRET not in caplog.text
    assert SECRET not in str(raised.value)
    assert SECRET not in repr(store)

"""Stores of files: whole or not at all, on local disks and through fsspec."""

from __future__ import annotations

import errno
import io
import os
import sys
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from axon_ps.errors import CheckpointError, CheckpointNotFound, ConfigurationError, InvalidRequest, StorageFull
from axon_ps.storage.files import FileStore, FsspecStore, LocalFileStore, open_store
from axon_ps.storage.roots import allow_roots, default_roots


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FileStore]:
    if request.param == "local":
        yield LocalFileStore(tmp_path / "new" / "directory")
    else:
        yield open_store(f"memory://{uuid.uuid4().hex}/directory")


def put(store: FileStore, name: str, parts: Iterable[bytes]) -> None:
    with store.create(name) as sink:
        for part in parts:
            sink.write(part)


def get(store: FileStore, name: str) -> bytes:
    with store.open(name) as source:
        return source.read(0, source.size)


def test_what_is_written_can_be_read(store: FileStore) -> None:
    assert store.names() == []
    put(store, "a", [b"one ", b"two"])
    put(store, "b", [b""])
    assert store.names() == ["a", "b"]
    assert get(store, "a") == b"one two"
    assert get(store, "b") == b""


def test_ranges(store: FileStore) -> None:
    put(store, "a", [bytes(range(100))])
    with store.open("a") as source:
        assert source.size == 100
        assert source.read(10, 5) == bytes(range(10, 15))
        assert source.read(95, 50) == bytes(range(95, 100))
        assert source.read(100, 1) == b""
        assert source.read(200, 1) == b""
        out = bytearray(8)
        assert source.read_into(96, memoryview(out)) == 4
        assert out == bytes((96, 97, 98, 99, 0, 0, 0, 0))


def test_a_file_is_replaced_as_a_whole(store: FileStore) -> None:
    put(store, "a", [b"old and long"])
    with store.create("a") as sink:
        sink.write(b"new")
    assert get(store, "a") == b"new"


def test_what_fails_half_way_is_not_there(store: FileStore) -> None:
    def half() -> Iterator[bytes]:
        yield b"half"
        raise ZeroDivisionError

    put(store, "a", [b"old"])
    with pytest.raises(ZeroDivisionError):
        put(store, "new", half())
    assert store.names() == ["a"]
    assert get(store, "a") == b"old"


def test_remove_and_children(store: FileStore) -> None:
    put(store, "a", [b"1"])
    put(store.child("c"), "x", [b"2"])
    assert store.names() == ["a"]
    assert store.directories() == ["c"]
    assert get(store.child("c"), "x") == b"2"
    store.remove("a")
    store.remove("a")
    assert store.names() == []


def test_a_missing_file_is_not_found(store: FileStore) -> None:
    with pytest.raises(CheckpointNotFound, match="nothing-there"), store.open("nothing-there"):
        pass
    assert store.child("no").names() == []
    assert store.child("no").directories() == []


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../x", "a\\b", "a\0b"])
def test_names_do_not_lead_out(store: FileStore, name: str) -> None:
    with pytest.raises(InvalidRequest, match="not a file name"), store.create(name):
        pass
    with pytest.raises(InvalidRequest, match="not a file name"), store.open(name):
        pass


class FullDisk(io.FileIO):
    """A file that takes the first 1000 bytes, the last write in part, as a disk that runs full does."""

    def __init__(self, path: Path, error: int) -> None:
        super().__init__(path, "xb")
        self._error = error
        self._left = 1000

    def write(self, data: Any, /) -> int:
        if not self._left:
            raise OSError(self._error, "no")
        count = min(self._left, memoryview(data).nbytes)
        self._left -= count
        return super().write(memoryview(data)[:count])


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
def test_disk_full(tmp_path: Path, error: int) -> None:
    def open_file(path: Path) -> BinaryIO:
        return FullDisk(path, error)  # type: ignore[return-value]

    store = LocalFileStore(tmp_path, open_file)
    with pytest.raises(StorageFull, match=r"no space left for .*model"):
        put(store, "model", [bytes(900), bytes(900)])
    assert list(tmp_path.iterdir()) == []


def test_other_errors_name_the_file(tmp_path: Path) -> None:
    def open_file(path: Path) -> BinaryIO:
        return FullDisk(path, errno.EIO)  # type: ignore[return-value]

    with (
        pytest.raises(CheckpointError, match="model cannot be written") as raised,
        LocalFileStore(tmp_path, open_file).create("model") as sink,
    ):
        sink.write(bytes(2000))
    assert not isinstance(raised.value, StorageFull)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CheckpointError, match="cannot be written"), LocalFileStore(tmp_path / "file").create("a"):
        pass


def test_half_written_files_of_a_killed_process_are_no_files(tmp_path: Path) -> None:
    (tmp_path / ".a.0123.partial").write_bytes(b"half")
    assert LocalFileStore(tmp_path).names() == []


def test_uris(tmp_path: Path) -> None:
    assert isinstance(open_store(str(tmp_path)), LocalFileStore)
    assert open_store(f"file://{tmp_path}").uri == str(tmp_path)
    assert isinstance(open_store("memory://x"), FsspecStore)
    with pytest.raises(InvalidRequest, match="empty"):
        open_store("")
    with pytest.raises(ConfigurationError, match="nosuchscheme://x is not opened: .*AXON_PS_CHECKPOINT_ROOTS"):
        open_store("nosuchscheme://x")


@pytest.fixture
def roots() -> Iterator[None]:
    yield
    allow_roots(None)


@pytest.mark.parametrize("uri", ["http://x/y", "simplecache::s3://b/x", "zip://a::memory://b", "github://a:b@c", "::"])
def test_what_a_request_could_make_us_connect_to_is_not_opened(uri: str) -> None:
    with pytest.raises(ConfigurationError, match="is not opened"):
        open_store(uri)


def test_only_what_lies_in_the_roots_is_opened(tmp_path: Path, roots: None) -> None:
    (tmp_path / "in" / "way-out").mkdir(parents=True)
    (tmp_path / "in" / "link").symlink_to(tmp_path)
    allow_roots([str(tmp_path / "in"), "memory://bucket/run", "http://there"])
    for uri in (tmp_path / "in", tmp_path / "in/x/y", f"file://{tmp_path}/in/x", "memory://bucket/run/step-1/"):
        open_store(str(uri))
    for uri in (tmp_path, tmp_path / "inside", tmp_path / "in/../x", tmp_path / "in/link/x", "memory://bucket/running"):
        with pytest.raises(
            ConfigurationError, match="is not opened: this process opens checkpoints only in .*AXON_PS_CHECKPOINT_ROOTS"
        ):
            open_store(str(uri))
    with pytest.raises(InvalidRequest, match=r"'\.\.'"):
        open_store("memory://bucket/run/../other")


def test_half_written_files_of_killed_processes_can_be_removed(tmp_path: Path) -> None:
    store = LocalFileStore(tmp_path)
    put(store, "step-1", [b"whole"])
    for name in (".step-1.01.partial", ".mine.01.partial"):
        (tmp_path / name).write_bytes(b"half")
    store.discard_partial("step-")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".mine.01.partial", "step-1"]
    store.discard_partial()
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


def test_a_store_whose_package_is_missing_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    open_store("memory://x")
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)  # it was imported before
    with pytest.raises(ConfigurationError, match=r"s3://bucket/x cannot be reached: .*pip install 'axon-ps\[s3\]'"):
        open_store("s3://bucket/x")


def test_an_upload_that_fails_is_discarded(monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(f"memory://{uuid.uuid4().hex}")
    assert isinstance(store, FsspecStore)

    def full(self: Any, *_: Any) -> int:
        raise OSError(errno.ENOSPC, "no")

    from fsspec.implementations.memory import MemoryFile

    monkeypatch.setattr(MemoryFile, "write", full)
    with pytest.raises(StorageFull), store.create("a") as sink:
        sink.write(b"1")
    assert store.names() == []


class EndpointError(Exception):
    """Of a file system's own library, in no tree of Python's."""


class ObjectStore:
    """An object store in which nobody answers, or which has no buckets."""

    protocol = ("s3", "s3a")

    def __init__(self, error: Exception | None) -> None:
        self._error = error

    def invalidate_cache(self, path: str) -> None:
        pass

    def ls(self, path: str, detail: bool) -> list[Any]:
        raise self._error or FileNotFoundError(path)

    def exists(self, path: str) -> bool:
        return False

    def open(self, path: str, mode: str, block_size: int) -> Any:
        raise self._error or FileNotFoundError("The specified bucket does not exist")

    def rm_file(self, path: str) -> None:
        raise self._error or FileNotFoundError(path)


def object_store(monkeypatch: pytest.MonkeyPatch, error: Exception | None) -> FsspecStore:
    store = open_store("memory://bucket/x")
    assert isinstance(store, FsspecStore)
    monkeypatch.setattr(store, "_fs", ObjectStore(error))
    monkeypatch.setattr(store, "_path", "bucket/x")
    return store


def test_what_a_stores_library_raises_is_an_error_of_ours_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    store = object_store(monkeypatch, EndpointError("could not connect\nand more"))
    with pytest.raises(CheckpointError, match="^bucket/x cannot be read: could not connect$"):
        store.names()
    with pytest.raises(CheckpointError, match="^bucket/x/a cannot be read: could not connect$"), store.open("a"):
        pass
    with pytest.raises(CheckpointError, match="^bucket/x/a cannot be written: could not connect$"), store.create("a"):
        pass
    with pytest.raises(CheckpointError, match="^bucket/x/a cannot be written: could not connect$"):
        store.remove("a")


def test_a_bucket_that_is_not_there_is_an_error_and_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    store = object_store(monkeypatch, None)
    with pytest.raises(CheckpointNotFound, match="there is no bucket 'bucket' for memory://bucket/x"):
        store.names()
    with pytest.raises(CheckpointError, match="written: The specified bucket does not exist"), store.create("a"):
        pass


def test_without_roots_of_its_own_a_service_that_others_can_ask_opens_what_it_was_given_and_where_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert default_roots(private=True, configured=["/checkpoints"]) is None
    assert default_roots(private=False, configured=["", "/checkpoints"]) == ["/checkpoints", str(tmp_path)]
    monkeypatch.chdir("/")
    assert default_roots(private=False, configured=[""]) == []


def test_a_service_without_any_root_opens_nothing(tmp_path: Path, roots: None) -> None:
    allow_roots([])
    with pytest.raises(ConfigurationError, match="opens checkpoints nowhere; --checkpoint-dir or"):
        open_store(str(tmp_path))


def test_a_directory_that_is_exchanged_for_a_link_is_not_followed(tmp_path: Path, roots: None) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    for directory in (root / "run", outside):
        directory.mkdir(parents=True)
    (outside / "secret").write_bytes(b"secret")
    allow_roots([str(root)])
    store = open_store(str(root / "run"))
    (root / "run").rmdir()
    (root / "run").symlink_to(outside)
    for act in (
        lambda: put(store, "shard-0", [b"x"]),
        lambda: store.remove("secret"),
        store.names,
        lambda: get(store, "secret"),
    ):
        with pytest.raises(ConfigurationError, match="run is not opened: this process opens checkpoints only in"):
            act()
    assert [path.name for path in outside.iterdir()] == ["secret"]


def test_a_file_that_is_a_link_is_not_followed_out_of_a_root(tmp_path: Path, roots: None) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "manifest.json").symlink_to(tmp_path / "secret")
    store = LocalFileStore(tmp_path / "root")
    assert get(store, "manifest.json") == b"secret", "without roots links are the user's own"
    allow_roots([str(tmp_path / "root")])
    with pytest.raises(CheckpointError, match="it is a link"):
        get(store, "manifest.json")
    put(store, "manifest.json", [b"ours"])
    assert (tmp_path / "secret").read_bytes() == b"secret", "what is written replaces the link"


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="it is no file"):
        get(LocalFileStore(tmp_path), "pipe")

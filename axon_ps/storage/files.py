"""Directories of files behind one small interface: local disks and everything that fsspec reaches.

A file becomes visible when it is complete: locally it is written under a temporary name, synced and renamed; object
stores show a file when its upload is completed. A file that could not be completed is removed.

Errors are those of axon_ps: no space left is `StorageFull`, a missing file `CheckpointNotFound`, and everything else a
`CheckpointError` that names the file.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from axon_ps.errors import (
    AxonError,
    CheckpointError,
    CheckpointNotFound,
    ConfigurationError,
    InvalidRequest,
    StorageFull,
)

_FULL = (errno.ENOSPC, errno.EDQUOT)
_OBJECT_STORES = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"})
PARTIAL_SUFFIX = ".partial"
"""The end of the name of a local file that is still being written."""


class Sink(Protocol):
    """A file to write to."""

    def write(self, data: Any, /) -> object:
        """Append a contiguous buffer."""


class OpenFile(ABC):
    """An open file, to read at any offset."""

    size: int

    @abstractmethod
    def read_into(self, offset: int, out: memoryview) -> int:
        """Fill `out` from byte `offset` on; returns the number of bytes read, fewer only at the file's end.

        Raises:
            CheckpointError: the file could not be read.
        """

    def read(self, offset: int, length: int) -> bytes:
        """At most `length` bytes from byte `offset` on."""
        buffer = bytearray(max(0, min(length, self.size - offset)))
        return bytes(buffer[: self.read_into(offset, memoryview(buffer))])


class FileStore(ABC):
    """A directory of files.

    Attributes:
        uri: its path or URI, as the user would write it.
    """

    def __init__(self, uri: str) -> None:
        self.uri = uri

    @abstractmethod
    def create(self, name: str) -> contextlib.AbstractContextManager[Sink]:
        """Write a file, replacing one of that name; it becomes visible once the context ends without an error.

        Raises:
            StorageFull: no space left; nothing of the file remains.
            CheckpointError: it could not be written; nothing of the file remains.
        """

    @abstractmethod
    def open(self, name: str) -> contextlib.AbstractContextManager[OpenFile]:
        """Read a file.

        Raises:
            CheckpointNotFound: there is none of that name.
            CheckpointError: it could not be opened.
        """

    @abstractmethod
    def names(self) -> list[str]:
        """Names of the complete files in it, sorted; none when the directory does not exist."""

    @abstractmethod
    def directories(self) -> list[str]:
        """Names of the directories in it, sorted."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file; one that is not there is no error."""

    def prune(self) -> None:
        """Remove the directory itself if it is empty; where directories are only names there is nothing to do."""
        return

    @abstractmethod
    def child(self, name: str) -> FileStore:
        """A directory in it, which need not exist yet."""


class LocalFileStore(FileStore):
    """A directory of a local or mounted file system.

    Args:
        path: the directory; created by the first write.
        open_file: how a file is opened for writing (tests give one that runs full).
    """

    def __init__(self, path: str | Path, open_file: Callable[[Path], BinaryIO] | None = None) -> None:
        super().__init__(str(path))
        self._path = Path(path)
        self._open_file = open_file or _open_new

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[Sink]:
        """See `FileStore.create`: written under another name, synced, renamed, and the directory synced."""
        path = self._path / _checked(name)
        partial = self._path / f".{name}.{secrets.token_hex(4)}{PARTIAL_SUFFIX}"
        try:
            self._path.mkdir(parents=True, exist_ok=True)
            try:
                with self._open_file(partial) as file:
                    yield _CompleteWriter(file)
                    os.fsync(file.fileno())
                os.replace(partial, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    partial.unlink()
                raise
            self._sync_directory()
        except OSError as error:
            raise _written(path, error) from error

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[OpenFile]:
        """See `FileStore.open`."""
        path = self._path / _checked(name)
        try:
            with open(path, "rb", buffering=0) as file:
                yield _LocalFile(path, file.fileno())
        except OSError as error:
            raise _read(path, error) from error

    def names(self) -> list[str]:
        """See `FileStore.names`."""
        return [e.name for e in self._entries() if e.is_file() and not e.name.endswith(PARTIAL_SUFFIX)]

    def directories(self) -> list[str]:
        """See `FileStore.directories`."""
        return [e.name for e in self._entries() if e.is_dir()]

    def remove(self, name: str) -> None:
        """See `FileStore.remove`."""
        try:
            (self._path / _checked(name)).unlink(missing_ok=True)
        except OSError as error:
            raise _written(self._path / name, error) from error

    def prune(self) -> None:
        """See `FileStore.prune`."""
        with contextlib.suppress(OSError):  # it is not empty, or not there
            self._path.rmdir()

    def child(self, name: str) -> LocalFileStore:
        """See `FileStore.child`."""
        return LocalFileStore(self._path / _checked(name))

    def _entries(self) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(self._path) as entries:
                return sorted(entries, key=lambda e: e.name)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise _read(self._path, error) from error

    def _sync_directory(self) -> None:
        descriptor = os.open(self._path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class FsspecStore(FileStore):
    """A directory that fsspec reaches: object stores, remote file systems, memory.

    Args:
        uri: "scheme://...".

    Raises:
        ConfigurationError: the scheme is unknown, or the package it needs is not installed.
    """

    def __init__(self, uri: str) -> None:
        super().__init__(uri.rstrip("/"))
        try:
            fsspec = importlib.import_module("fsspec")
            self._fs, self._path = fsspec.core.url_to_fs(self.uri)
        except (ImportError, ValueError) as error:
            extra = "; pip install 'axon-ps[s3]'" if uri.startswith(("s3://", "s3a://")) else ""
            raise ConfigurationError(f"{uri} cannot be reached: {error}{extra}") from error

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[Sink]:
        """See `FileStore.create`: an upload is completed or discarded."""
        path = f"{self._path}/{_checked(name)}"
        with _translated(path, _written):
            if not self._bucket:
                self._fs.makedirs(self._path, exist_ok=True)
            file = self._fs.open(path, "wb")
        try:
            yield _FsspecSink(path, file)
        except BaseException:
            self._discard(file, path)
            raise
        with _translated(path, _written):
            try:
                file.close()
            except BaseException:
                with contextlib.suppress(Exception):
                    self._fs.rm_file(path)
                raise

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[OpenFile]:
        """See `FileStore.open`."""
        path = f"{self._path}/{_checked(name)}"
        with _translated(path, _read):
            file = self._fs.open(path, "rb")
            source = _FsspecFile(path, file)
        with contextlib.closing(file):
            yield source

    def names(self) -> list[str]:
        """See `FileStore.names`."""
        return self._listed("file")

    def directories(self) -> list[str]:
        """See `FileStore.directories`."""
        return self._listed("directory")

    def remove(self, name: str) -> None:
        """See `FileStore.remove`."""
        path = f"{self._path}/{_checked(name)}"
        with _translated(path, _written), contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(path)

    def child(self, name: str) -> FsspecStore:
        """See `FileStore.child`."""
        return FsspecStore(f"{self.uri}/{_checked(name)}")

    @property
    def _bucket(self) -> str:
        """The bucket of an object store, where directories are only names; else empty. Buckets are never created."""
        protocols = {self._fs.protocol} if isinstance(self._fs.protocol, str) else set(self._fs.protocol)
        return self._path.strip("/").partition("/")[0] if protocols & _OBJECT_STORES else ""

    def _listed(self, kind: str) -> list[str]:
        with _translated(self._path, _read):
            self._fs.invalidate_cache(self._path)
            try:
                entries = self._fs.ls(self._path, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                if self._bucket and not self._fs.exists(self._bucket):
                    raise CheckpointNotFound(f"there is no bucket {self._bucket!r} for {self.uri}") from None
                return []
            return sorted(e["name"].rstrip("/").rpartition("/")[2] for e in entries if e["type"] == kind)

    def _discard(self, file: Any, path: str) -> None:
        """Discard an upload that failed, as far as the store allows it."""
        with contextlib.suppress(Exception):
            if hasattr(file, "discard"):
                file.discard()
            else:
                file.close()
        with contextlib.suppress(Exception):
            self._fs.rm_file(path)


def absolute(uri: str) -> str:
    """Make a local path absolute, since servers may run in another directory; a URI stays unchanged."""
    return uri if "://" in uri else str(Path(uri).absolute())


def open_store(uri: str) -> FileStore:
    """The directory at `uri`: a path, or "scheme://..." for anything that fsspec reaches.

    Raises:
        InvalidRequest: `uri` is empty.
        ConfigurationError: the scheme is unknown, or the package it needs is not installed.
    """
    if not uri:
        raise InvalidRequest("the URI of a checkpoint is empty; give a directory or a URI")
    scheme, colon, rest = uri.partition("://")
    if not colon:
        return LocalFileStore(uri)
    return LocalFileStore(rest) if scheme == "file" else FsspecStore(uri)


class _CompleteWriter:
    """Writes a complete buffer to an unbuffered file, whose `write` may write less."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, data: Any, /) -> None:
        view = memoryview(data).cast("B")
        while len(view):
            view = view[self._file.write(view) :]


class _LocalFile(OpenFile):
    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor
        self.size = os.fstat(descriptor).st_size

    def read_into(self, offset: int, out: memoryview) -> int:
        done = 0
        while done < len(out):
            got = os.preadv(self._descriptor, [out[done:]], offset + done)
            if got == 0:
                break
            done += got
        return done


class _FsspecSink:
    """An upload."""

    def __init__(self, path: str, file: Any) -> None:
        self._path = path
        self._file = file

    def write(self, data: Any, /) -> None:
        with _translated(self._path, _written):
            self._file.write(data)


class _FsspecFile(OpenFile):
    def __init__(self, path: str, file: Any) -> None:
        self._path = path
        self._file = file
        self.size = int(file.seek(0, os.SEEK_END))

    def read_into(self, offset: int, out: memoryview) -> int:
        with _translated(self._path, _read):
            self._file.seek(offset)
            done = 0
            while done < len(out):
                got = self._file.read(len(out) - done)
                if not got:
                    break
                out[done : done + len(got)] = got
                done += len(got)
        return done


def _open_new(path: Path) -> BinaryIO:
    return open(path, "xb", buffering=0)


def _checked(name: str) -> str:
    """The name, which must not lead out of the directory."""
    if not name or "/" in name or "\\" in name or "\0" in name or name in (".", ".."):
        raise InvalidRequest(f"{name!r} is not a file name")
    return name


@contextlib.contextmanager
def _translated(path: object, into: Callable[[object, Exception], CheckpointError]) -> Iterator[None]:
    """Convert any error of a file system's library to one of axon_ps."""
    try:
        yield
    except AxonError:
        raise
    except Exception as error:
        raise into(path, error) from error


def _written(path: object, error: Exception) -> CheckpointError:
    if getattr(error, "errno", None) in _FULL:
        return StorageFull(f"no space left for {path}; it was not written, and what was half-written has been removed")
    return CheckpointError(f"{path} cannot be written: {_why(error)}")


def _read(path: object, error: Exception) -> CheckpointError:
    if isinstance(error, FileNotFoundError):
        return CheckpointNotFound(f"there is no {path}")
    return CheckpointError(f"{path} cannot be read: {_why(error)}")


def _why(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error).partition("\n")[0] or type(error).__name__

"""Directories of files behind one small interface: local disks and everything that fsspec reaches.

Locally a file is written under a temporary name, synced and renamed, so it becomes visible when it is complete. Object
stores show a file when its upload is completed. Large files are uploaded in parts. Other file systems may show a file
while it is written. A file that could not be completed is discarded, and its upload aborted. `discard_partial` removes
the remains of files that killed processes were writing.

Errors of a file system become those of axon_ps: no space left is `StorageFull`, a missing file is `CheckpointNotFound`,
and every other error is a `CheckpointError` that names the file.

The URIs that may be opened are in `storage.roots`. A local directory is opened once for each operation, and then
checked. Its files are reached through the open directory, so it cannot be exchanged for a link in between.

Note: [S3 requests]
    botocore sends a request up to `_REQUEST_TRIES` times, with growing pauses (after connection errors, time-outs, 5xx,
    "slow down"). s3fs repeats that up to `_CALL_TRIES` times. Each attempt ends after `_READ_TIMEOUT_S` without an
    answer. So a request without any answer ends after about 3 minutes, and reading a range after 6. Credentials are
    those of the environment or the user's AWS or fsspec configuration. Nothing here reads or logs them.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import secrets
import stat
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
from axon_ps.storage import roots

_FULL = (errno.ENOSPC, errno.EDQUOT)
_S3 = frozenset({"s3", "s3a"})
_SEGMENT_BYTES = 8 << 20
_MAX_SEGMENTS = 9000
"""S3 takes 10,000 parts of a file."""

_CONNECT_TIMEOUT_S = 10.0
_READ_TIMEOUT_S = 30.0
_REQUEST_TRIES = 3
_CALL_TRIES = 2
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
        """Read at most `length` bytes from byte `offset` on."""
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
    def create(self, name: str, size_bytes: int = 0) -> contextlib.AbstractContextManager[Sink]:
        """Write a file, replacing one of that name. It is complete once the context ends without an error.

        Args:
            name: its name.
            size_bytes: its size, if that is known: a large file's upload has larger parts.

        Raises:
            StorageFull: no space left. Nothing of the file remains.
            CheckpointError: it could not be written. Nothing of the file remains.
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
        """Return the names of the complete files in it, sorted; none when the directory does not exist.

        Raises:
            CheckpointNotFound: there is no such bucket.
            CheckpointError: it could not be read.
        """

    @abstractmethod
    def directories(self) -> list[str]:
        """Return the names of the directories in it, sorted. Raises as `names` does."""

    @abstractmethod
    def exists(self) -> bool:
        """Return True if the directory is there; where directories are only names, if something is in it."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file. A missing file is not an error."""

    def discard_partial(self, prefix: str = "") -> None:
        """Remove incomplete files of killed processes whose path in this directory begins with `prefix`.

        No process may be writing such a file. S3 is searched with its directories, a local directory without them.
        Elsewhere nothing is removed.

        Raises:
            CheckpointError: something cannot be removed.
        """
        return

    def prune(self) -> None:
        """Remove the directory itself if it is local and empty."""
        return

    @abstractmethod
    def child(self, name: str) -> FileStore:
        """Return a directory in it, which need not exist yet."""


class LocalFileStore(FileStore):
    """A directory of a local or mounted file system.

    Args:
        path: the directory; created by the first write.
        open_file: opens a file for writing (tests give a function whose files run full).
    """

    def __init__(self, path: str | Path, open_file: Callable[[Path], BinaryIO] | None = None) -> None:
        super().__init__(str(path))
        self._path = Path(path)
        self._open_file = open_file or _open_new

    @contextlib.contextmanager
    def create(self, name: str, size_bytes: int = 0) -> Iterator[Sink]:
        """See `FileStore.create`: the file is written under another name, synced, renamed, and its directory synced."""
        path, partial = self._path / _checked(name), f".{name}.{secrets.token_hex(4)}{PARTIAL_SUFFIX}"
        try:
            self._path.mkdir(parents=True, exist_ok=True)
            with self._directory() as directory:
                try:
                    with self._open_file(_in(directory) / partial) as file:
                        yield _CompleteWriter(file)
                        os.fsync(file.fileno())
                    os.replace(partial, name, src_dir_fd=directory, dst_dir_fd=directory)
                except BaseException:
                    with contextlib.suppress(OSError):
                        os.unlink(partial, dir_fd=directory)
                    raise
                os.fsync(directory)
        except OSError as error:
            raise _written(path, error) from error

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[OpenFile]:
        """See `FileStore.open`."""
        path, flags = self._path / _checked(name), os.O_RDONLY | (os.O_NOFOLLOW if roots.restricted() else 0)
        try:
            with self._directory() as directory:
                descriptor = os.open(name, flags | os.O_NONBLOCK, dir_fd=directory)
            with open(descriptor, "rb", buffering=0) as file:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise CheckpointError(f"{path} cannot be read: it is no file")
                yield _LocalFile(path, file.fileno())
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise CheckpointError(f"{path} is not read: it is a link, and the directory is one of roots") from error
            raise _read(path, error) from error

    def names(self) -> list[str]:
        """See `FileStore.names`."""
        return [name for name, is_file, _ in self._entries() if is_file and not name.endswith(PARTIAL_SUFFIX)]

    def directories(self) -> list[str]:
        """See `FileStore.directories`."""
        return [name for name, _, is_directory in self._entries() if is_directory]

    def exists(self) -> bool:
        """See `FileStore.exists`."""
        try:
            with self._directory():
                return True
        except FileNotFoundError:
            return False
        except OSError as error:
            raise _read(self._path, error) from error

    def remove(self, name: str) -> None:
        """See `FileStore.remove`."""
        try:
            with self._directory() as directory, contextlib.suppress(FileNotFoundError):
                os.unlink(_checked(name), dir_fd=directory)
        except FileNotFoundError:
            return
        except OSError as error:
            raise _written(self._path / name, error) from error

    def discard_partial(self, prefix: str = "") -> None:
        """See `FileStore.discard_partial`."""
        for name, _, _ in self._entries():
            if name.startswith(f".{prefix}") and name.endswith(PARTIAL_SUFFIX):
                self.remove(name)

    def prune(self) -> None:
        """See `FileStore.prune`."""
        with contextlib.suppress(OSError):  # it is not empty, or not there
            self._path.rmdir()

    def child(self, name: str) -> LocalFileStore:
        """See `FileStore.child`."""
        return LocalFileStore(self._path / _checked(name))

    def _entries(self) -> list[tuple[str, bool, bool]]:
        """Return (name, is a file, is a directory) of its entries, sorted. Links count as their targets."""
        try:
            with self._directory() as directory, os.scandir(directory) as entries:
                return sorted((e.name, *_kind(e)) for e in entries)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise _read(self._path, error) from error

    @contextlib.contextmanager
    def _directory(self) -> Iterator[int]:
        """Open the directory; see `storage.roots`.

        Raises:
            ConfigurationError: it lies in no root.
        """
        descriptor = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            roots.check_opened(descriptor, self.uri)
            yield descriptor
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
        scheme = uri.partition("://")[0]
        try:
            fsspec = importlib.import_module("fsspec")
            options = _s3_options(fsspec) if scheme in _S3 else {}
            self._fs, self._path = fsspec.core.url_to_fs(self.uri, **options)
        except (ImportError, ValueError) as error:
            extra = "; pip install 'axon-ps[s3]'" if scheme in _S3 else ""
            raise ConfigurationError(f"{uri} cannot be reached: {error}{extra}") from error
        if scheme in _S3:
            self._fs.retries = _CALL_TRIES

    @contextlib.contextmanager
    def create(self, name: str, size_bytes: int = 0) -> Iterator[Sink]:
        """See `FileStore.create`: an upload is completed, or aborted. Then the file that it would replace stays."""
        path = f"{self._path}/{_checked(name)}"
        options = {"block_size": max(_SEGMENT_BYTES, -(-size_bytes // _MAX_SEGMENTS))} if self._bucket else {}
        with _translated(path, _written):
            if not self._bucket:
                self._fs.makedirs(self._path, exist_ok=True)
            file = self._fs.open(path, "wb", **options)
        try:
            yield _FsspecSink(path, file)
            with _translated(path, _written):
                file.close()
        except BaseException:
            self._discard(file, path)
            raise

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[OpenFile]:
        """See `FileStore.open`."""
        path = f"{self._path}/{_checked(name)}"
        with _translated(path, _read):
            options = {"block_size": _SEGMENT_BYTES} if self._bucket else {}
            file = self._fs.open(path, "rb", **options)
            source = _FsspecFile(path, file)
        with contextlib.closing(file):
            yield source

    def names(self) -> list[str]:
        """See `FileStore.names`."""
        return self._listed("file")

    def directories(self) -> list[str]:
        """See `FileStore.directories`."""
        return self._listed("directory")

    def exists(self) -> bool:
        """See `FileStore.exists`."""
        with _translated(self._path, _read):
            return bool(self._fs.exists(self._path))

    def remove(self, name: str) -> None:
        """See `FileStore.remove`."""
        path = f"{self._path}/{_checked(name)}"
        with _translated(path, _written), contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(path)

    def discard_partial(self, prefix: str = "") -> None:
        """See `FileStore.discard_partial`: S3 charges for the parts of uploads that were never completed."""
        if self.uri.partition("://")[0] not in _S3:
            return
        bucket, _, key = self._path.strip("/").partition("/")
        found: dict[str, Any] = {"Bucket": bucket, "Prefix": f"{key}/{prefix}" if key else prefix}
        with _translated(f"{self._path}/{prefix}", _written):
            while True:
                page = self._fs.call_s3("list_multipart_uploads", **found)
                for upload in page.get("Uploads", ()):
                    self._fs.abort_mpu(bucket, upload["Key"], upload["UploadId"])
                if not page.get("IsTruncated"):
                    return
                found |= {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    def child(self, name: str) -> FsspecStore:
        """See `FileStore.child`."""
        return FsspecStore(f"{self.uri}/{_checked(name)}")

    @property
    def _bucket(self) -> str:
        """The bucket of an object store, where directories are only names; else empty. Buckets are never created."""
        protocols = {self._fs.protocol} if isinstance(self._fs.protocol, str) else set(self._fs.protocol)
        return self._path.strip("/").partition("/")[0] if protocols & roots.OBJECT_STORES else ""

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
        """Discard a file that could not be written, as far as the store allows it."""
        with contextlib.suppress(Exception):
            if hasattr(file, "discard"):
                file.discard()
            else:
                file.close()
        with contextlib.suppress(Exception):
            file.closed = True  # or its destructor completes it
        if not self._bucket:
            with contextlib.suppress(Exception):
                self._fs.rm_file(path)


def _s3_options(fsspec: Any) -> dict[str, Any]:
    """Return our options for S3. The user's `config_kwargs` of fsspec override ours. See Note: [S3 requests]."""
    theirs = fsspec.config.conf.get("s3", {}).get("config_kwargs", {})
    ours = {
        "connect_timeout": _CONNECT_TIMEOUT_S,
        "read_timeout": _READ_TIMEOUT_S,
        "retries": {"mode": "standard", "total_max_attempts": _REQUEST_TRIES},
    }
    return {"config_kwargs": ours | theirs, "use_listings_cache": False}


def absolute(uri: str) -> str:
    """Make a local path absolute, since servers may run in another directory. A URI stays unchanged."""
    return uri if "://" in uri else str(Path(uri).absolute())


def open_store(uri: str) -> FileStore:
    """Open the directory at `uri`: a path, or "scheme://..." for anything that fsspec reaches.

    Raises:
        InvalidRequest: `uri` is empty, or has a scheme and `..` in it.
        ConfigurationError: it may not be opened (see `storage.roots`), its scheme is unknown, or the package that it
            needs is not installed.
    """
    roots.check_allowed(uri)
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
            try:
                got = os.preadv(self._descriptor, [out[done:]], offset + done)
            except OSError as error:
                raise _read(self._path, error) from error
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


def _kind(entry: os.DirEntry[str]) -> tuple[bool, bool]:
    """Return (is a file, is a directory). A link that leads nowhere, or in a circle, is neither."""
    try:
        return entry.is_file(), entry.is_dir()
    except OSError:
        if entry.is_symlink():
            return False, False
        raise


def _in(directory: int) -> Path:
    """Return an open directory as a path."""
    return Path(f"/proc/self/fd/{directory}")


def _open_new(path: Path) -> BinaryIO:
    return open(path, "xb", buffering=0)


def _checked(name: str) -> str:
    """Return the name, which must not lead out of the directory."""
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
    why = getattr(error, "strerror", None) or str(error).partition("\n")[0] or type(error).__name__
    if isinstance(error, PermissionError) or "credentials" in why.lower():
        why += "; see to the permissions of this process: for an object store to its credentials and its policy"
    return why

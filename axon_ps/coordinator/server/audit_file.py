"""The file of an audit log: JSON lines, of bounded size, for its owner alone. Several coordinators may share one.

Note: [Rotation]
    A line is one write to a file that is open for appending, so lines of several processes do not mix. A process that
    finds the file full renames it to FILE.1, FILE.1 to FILE.2, and so on, unless another process is doing so. The other
    processes find another file under the name and open it. A process that writes during the rotation writes to the
    renamed file, so no line is lost.
"""

from __future__ import annotations

import errno
import fcntl
import io
import logging
import os
import stat
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, Final

MAX_BYTES: Final = 8 << 20
"""Most bytes of the file."""

OLDER_FILES: Final = 4
"""Number of older files that are kept."""


class AuditFile(RotatingFileHandler):
    """A file with lines.

    Args:
        path: the file. Directories that do not exist are made.
        max_bytes: its most bytes.

    Raises:
        OSError: it cannot be written, is not a regular file, or is a link.
    """

    def __init__(self, path: str | Path, *, max_bytes: int = MAX_BYTES) -> None:
        Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._is_torn = False
        super().__init__(path, maxBytes=max_bytes, backupCount=OLDER_FILES, encoding="utf-8")

    def write(self, line: str) -> None:
        """Append a line. After an error it is not in the file, or a part of it is.

        Raises:
            OSError: the disk is full, or the file cannot be written any more.
        """
        descriptor = self._followed()
        if self.shouldRollover(logging.makeLogRecord({"msg": line})):
            self._rotate(descriptor)
            descriptor = self._followed()
        data = b"\n" * self._is_torn + f"{line}\n".encode()
        written = os.write(descriptor, data)
        self._is_torn = written < len(data)
        if self._is_torn:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _open(self) -> Any:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(self.baseFilename, flags, 0o600)
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise OSError(errno.EINVAL, "it is no regular file")
            if stat.S_IMODE(found.st_mode) != 0o600:
                os.fchmod(descriptor, 0o600)
            self._is_torn = found.st_size > 0 and os.pread(descriptor, 1, found.st_size - 1) != b"\n"
        except OSError:
            os.close(descriptor)
            raise
        return io.FileIO(descriptor, "r+")

    def _followed(self) -> int:
        """Return the open file, opened again if its name leads to another one, or if it could not be opened before."""
        if self.stream is not None and not self._is_at(self.stream.fileno()):
            self.stream.close()
            self.stream = None
        if self.stream is None:
            self.stream = self._open()
        return int(self.stream.fileno())

    def _rotate(self, descriptor: int) -> None:
        """Begin a new file, unless another process is doing so, or has done so."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # closing the file unlocks it
        except BlockingIOError:
            return
        if self._is_at(descriptor):
            self.doRollover()

    def _is_at(self, descriptor: int) -> bool:
        """Return True if the name leads to this open file."""
        try:
            return os.path.samestat(os.stat(self.baseFilename), os.fstat(descriptor))
        except FileNotFoundError:
            return False

"""Files of secrets and certificates that are replaced while a job runs: read again when they have changed.

Note: [Rotation]
    A token file may have several lines. A service accepts each of them. It sends the first, and proves its identity by
    that. So a secret can be rotated such that all processes accept each other at any time: add the new one as a second
    line everywhere; then put it first, everywhere; then remove the old one.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Final

from axon_ps.errors import ConfigurationError

LOOK_S: Final = 1.0
"""Least seconds between two checks for changed files."""

_logger = logging.getLogger(__name__)


class WatchedFiles:
    """The contents of files, read again when one has changed. Any thread may use it.

    Args:
        files: their names in messages, and their paths.
        secret: the names of those that no other user of this machine should read.
        check: raises ConfigurationError for unusable contents, such as half of a file that is being written.

    Raises:
        ConfigurationError: one cannot be read or used.
    """

    def __init__(
        self,
        files: Sequence[tuple[str, str]],
        secret: Sequence[str] = (),
        check: Callable[[tuple[bytes, ...]], object] = len,
    ) -> None:
        self._files = tuple(files)
        self._check = check
        self._lock = threading.Lock()
        self._looked_s = time.monotonic()
        self._seen = self._signature()
        self._contents = self._read()
        self._failed = False
        for option, path in self._files:
            if option in secret:
                warn_of_readers(path)

    def contents(self) -> tuple[bytes, ...]:
        """Return the contents; the last valid ones, if the files cannot be read or used now, which is logged once."""
        with self._lock:
            if time.monotonic() - self._looked_s >= LOOK_S:
                self._look()
            return self._contents

    def _look(self) -> None:
        self._looked_s = time.monotonic()
        seen = self._signature()
        if seen == self._seen and not self._failed:
            return
        try:
            self._contents, self._seen, self._failed = self._read(), seen, False
            _logger.info("%s changed and was read again", " and ".join(path for _, path in self._files))
        except ConfigurationError as error:
            if not self._failed:
                _logger.warning("%s; what it had before stays in use", error)
            self._failed = True

    def _signature(self) -> tuple[object, ...]:
        return tuple(_signature(path) for _, path in self._files)

    def _read(self) -> tuple[bytes, ...]:
        contents = tuple(read(path, option) for option, path in self._files)
        self._check(contents)
        return contents


@cache
def token_file(path: str) -> WatchedFiles:
    """Return the file of tokens at a path: one object for the process, so that it is checked once a second.

    Raises:
        ConfigurationError: it cannot be read, is not text, or has no token.
    """
    what = "the token file"
    return WatchedFiles([(what, path)], secret=[what], check=lambda contents: _lines(path, contents[0]))


def lines_of(path: str) -> tuple[str, ...]:
    """Return the tokens in a file, one a line; this process uses the first. See Note: [Rotation].

    Raises:
        ConfigurationError: it cannot be read, is not text, or has no token.
    """
    return _lines(path, token_file(path).contents()[0])


def _lines(path: str, content: bytes) -> tuple[str, ...]:
    try:
        lines = content.decode().split()
    except UnicodeDecodeError:
        raise ConfigurationError(f"the token file {path} cannot be read: it is not text") from None
    if not lines:
        raise ConfigurationError(f"the token file {path} is empty")
    return tuple(lines)


def read(path: str, option: str) -> bytes:
    """Read a file.

    Raises:
        ConfigurationError: it cannot be read; the message names `option`.
    """
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{option} {path!r} cannot be read: {error.strerror or error}") from error


@cache
def warn_of_readers(path: str) -> None:
    """Warn, once per process, about a secret that every user of this machine can read."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return
    if stat.S_ISREG(mode) and mode & stat.S_IROTH:
        _logger.warning("every user of this machine can read the secret in %s: chmod 600 it", path)


def _signature(path: str) -> object:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size

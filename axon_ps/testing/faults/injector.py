"""The fault injector: processes that stop at a moment of a step until the test lets them go on.

The test's half is `Moments`, a process's half is `Injector`. They share a small file, mapped on both sides: two bytes
per process say at which moment, and from which version on, it has to stop. So a moment that nobody has armed costs one
look at memory. A process that stops connects to the test's Unix socket and waits until that connection says "go".

Invariants: an armed moment is hit once; a process goes on when the test is gone, or after `HOLD_S`.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import struct
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from axon_ps.errors import InvalidRequest
from axon_ps.observe import moments
from axon_ps.observe.moments import Moment

HOLD_S = 30.0
"""Seconds that a process stops at most."""

MOST_PROCESSES = 512

_RECORD = struct.Struct("<BBxx")  # moment, from which version on
_HIT = struct.Struct("<iiii")  # slot, process id, moment, version
_SOCKET, _TABLE = "moments.sock", "moments.table"


def install(directory: Path, slot: int) -> None:
    """Let this process stop at the moments that the test arms for `slot`."""
    moments.watch(Injector(directory, slot))


class Injector:
    """A process's half; a watcher of `observe.moments`.

    Args:
        directory: the one `Moments` was made with.
        slot: which process this is to the test.
    """

    def __init__(self, directory: Path, slot: int) -> None:
        self._path = str(directory / _SOCKET)
        self._slot = slot
        with open(directory / _TABLE, "r+b") as file:
            self._table = mmap.mmap(file.fileno(), 0)
        self._lock = threading.Lock()

    def __call__(self, moment: Moment, version: int) -> None:
        at = self._slot * _RECORD.size
        if self._table[at] == moment.value and self._claim(at, version):
            self._hold(moment, version)

    def _claim(self, at: int, version: int) -> bool:
        with self._lock:
            armed, least = _RECORD.unpack_from(self._table, at)
            if not armed or 0 <= version < least:
                return False
            _RECORD.pack_into(self._table, at, 0, 0)
            return True

    def _hold(self, moment: Moment, version: int) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as test, contextlib.suppress(OSError):
            test.settimeout(HOLD_S)
            test.connect(self._path)
            test.send(_HIT.pack(self._slot, os.getpid(), moment.value, version))
            test.recv(1)


@dataclass(frozen=True, kw_only=True)
class Hit:
    """A process that has stopped. It goes on when `release` is called.

    Attributes:
        slot: which process.
        pid: its process id.
        moment: where it is.
        version: the version it said it is at; -1 = it did not say.
        connection: what it waits on.
    """

    slot: int
    pid: int
    moment: Moment
    version: int
    connection: socket.socket

    def release(self) -> None:
        """Let it go on. Harmless when repeated, and when it is gone."""
        self.connection.close()


class Moments:
    """The test's half. One thread uses it.

    Args:
        directory: a directory of the test; its path must be short enough for a Unix socket.
    """

    def __init__(self, directory: Path) -> None:
        (directory / _TABLE).write_bytes(bytes(MOST_PROCESSES * _RECORD.size))
        with open(directory / _TABLE, "r+b") as file:
            self._table = mmap.mmap(file.fileno(), 0)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(str(directory / _SOCKET))
        self._socket.listen(64)

    def arm(self, slot: int, moment: Moment | None, *, version: int = 0) -> None:
        """Let a process stop when it reaches `moment` next, at `version` or later; None = at none.

        Raises:
            InvalidRequest: there are too many processes, or the version does not fit a byte.
        """
        if not (0 <= slot < MOST_PROCESSES and 0 <= version < 256):
            raise InvalidRequest(
                f"slot {slot} and version {version} were given; they must be below {MOST_PROCESSES} and 256"
            )
        # the version first: a process that sees the moment sees it too
        at = slot * _RECORD.size
        self._table[at + 1] = version
        self._table[at] = moment.value if moment is not None else 0

    def wait(self, timeout_s: float) -> Hit | None:
        """The next process that stops; None when none did in time."""
        deadline = time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            self._socket.settimeout(left_s)
            try:
                connection, _ = self._socket.accept()
                connection.settimeout(HOLD_S)
                message = connection.recv(_HIT.size)
            except TimeoutError:
                return None
            if len(message) == _HIT.size:
                slot, pid, moment, version = _HIT.unpack(message)
                return Hit(slot=slot, pid=pid, moment=Moment(moment), version=version, connection=connection)
            connection.close()  # it died between connecting and saying so
        return None

    def close(self) -> None:
        """Whoever waits to be heard goes on."""
        self._socket.close()
        self._table.close()

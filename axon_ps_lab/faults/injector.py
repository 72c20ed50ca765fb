"""The fault injector: processes stop at a moment of a step until the test releases them.

The test uses `ArmedMoments`, a process `Injector`. They share a small file, mapped by both. Two bytes per process
contain the moment at which it has to stop, and the first version, so a moment that is not armed costs one read of
memory. To stop, a process connects to the test's Unix socket and waits until the test closes that connection.

Invariants: an armed moment is hit once; a process continues when the test is gone, or after `MAX_STOP_S`.
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

MAX_STOP_S = 30.0
"""The longest time that a process stops, in seconds."""

MAX_PROCESSES = 1 << 14

_RECORD = struct.Struct("<BBxx")  # moment, first version
_HIT = struct.Struct("<iiii")  # slot, process id, moment, version
_SOCKET, _TABLE = "moments.sock", "moments.table"


def install(directory: Path, slot: int) -> None:
    """Make this process stop at the moments that the test arms for `slot`."""
    moments.watch(Injector(directory, slot))


class Injector:
    """The part of a process: a watcher of `observe.moments`.

    Args:
        directory: the directory of `ArmedMoments`.
        slot: the test's number of this process.
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
            self._stop(moment, version)

    def _claim(self, at: int, version: int) -> bool:
        with self._lock:
            armed, least = _RECORD.unpack_from(self._table, at)
            if not armed or 0 <= version < least:
                return False
            _RECORD.pack_into(self._table, at, 0, 0)
            return True

    def _stop(self, moment: Moment, version: int) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as test, contextlib.suppress(OSError):
            test.settimeout(MAX_STOP_S)
            test.connect(self._path)
            test.send(_HIT.pack(self._slot, os.getpid(), moment.value, version))
            test.recv(1)


@dataclass(frozen=True, kw_only=True)
class Hit:
    """A process that has stopped. It continues when `release` is called.

    Attributes:
        slot: number of the process.
        pid: its process id.
        moment: the moment that it has reached.
        version: the version it is at; -1 = unknown.
        connection: the process waits until this is closed.
    """

    slot: int
    pid: int
    moment: Moment
    version: int
    connection: socket.socket

    def release(self) -> None:
        """Let the process continue. Further calls do nothing, also after its end."""
        self.connection.close()


class ArmedMoments:
    """The part of the test. One thread uses it.

    Args:
        directory: a directory of the test; its path must be short enough for a Unix socket.
    """

    def __init__(self, directory: Path) -> None:
        (directory / _TABLE).write_bytes(bytes(MAX_PROCESSES * _RECORD.size))
        with open(directory / _TABLE, "r+b") as file:
            self._table = mmap.mmap(file.fileno(), 0)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(str(directory / _SOCKET))
        self._socket.listen(64)

    def arm(self, slot: int, moment: Moment | None, *, version: int = 0) -> None:
        """Make a process stop when it reaches `moment` next, at `version` or later; None = disarm.

        Raises:
            InvalidRequest: there are too many processes, or the version does not fit a byte.
        """
        if not (0 <= slot < MAX_PROCESSES and 0 <= version < 256):
            raise InvalidRequest(
                f"slot {slot} and version {version} were given; they must be below {MAX_PROCESSES} and 256"
            )
        # The version is written first: a process that sees the moment sees it, too.
        at = slot * _RECORD.size
        self._table[at + 1] = version
        self._table[at] = moment.value if moment is not None else 0

    def wait(self, timeout_s: float) -> Hit | None:
        """Wait for the next process that stops; None = none did in time."""
        deadline = time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            self._socket.settimeout(left_s)
            try:
                connection, _ = self._socket.accept()
                connection.settimeout(MAX_STOP_S)
                message = connection.recv(_HIT.size)
            except TimeoutError:
                return None
            if len(message) == _HIT.size:
                slot, pid, moment, version = _HIT.unpack(message)
                return Hit(slot=slot, pid=pid, moment=Moment(moment), version=version, connection=connection)
            connection.close()  # the process died before it had sent its message
        return None

    def close(self) -> None:
        """Release the processes that wait to connect."""
        self._socket.close()
        self._table.close()

"""`PeerProcess`: another process of this host, to detect its end."""

from __future__ import annotations

import contextlib
import os
import select
import time
from pathlib import Path


class PeerProcess:
    """One process of this host.

    Attributes:
        pid: its process id.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._started = _started(pid)
        self._pidfd = -1
        with contextlib.suppress(OSError):  # an old kernel, or a sandbox without it; /proc is used then
            self._pidfd = os.pidfd_open(pid)

    def alive(self) -> bool:
        """Return True if it runs. A process that ended and was not reaped does not."""
        if self._pidfd >= 0:
            return not self._ended(0)
        return bool(self._started) and _started(self.pid) == self._started

    def ends(self, within_s: float) -> bool:
        """Wait for its end; False if it does not end in time. It loses its memory a bit before it counts as ended."""
        deadline = time.monotonic() + within_s
        while self.alive():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            if self._pidfd >= 0:
                self._ended(left)
            else:
                time.sleep(min(left, 0.01))
        return True

    def _ended(self, within_s: float) -> bool:
        poll = select.poll()  # a new one, because a poll object serves one thread only
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(1000 * within_s))

    def close(self) -> None:
        """Release the handle. A repeated call is harmless."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


def stat_of(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat (proc(5)) after the command: state, parent, ...

    Raises:
        OSError: there is no such process, or no /proc.
    """
    return Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()


def _started(pid: int) -> str:
    """Return the start time of a process, in the kernel's ticks; "" when it does not run."""
    try:
        fields = stat_of(pid)
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]

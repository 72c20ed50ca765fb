"""Child processes that end with their parent and report when they are ready.

Owns: the command that ties a child's life to this process (`tether.py` runs first), and the pipe on which the child
reports one line. Refuses: to start and to reap; a test, a worker and the command line do that each in their own way.

Invariants: children are started by `exec`, never by a bare fork, which a process with open gRPC channels must not do.
A child's life is tied to the *thread* that starts it: start it from a thread that outlives it.
"""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Sequence
from pathlib import Path

_TETHER = Path(__file__).with_name("tether.py")


def tethered(command: Sequence[str], last_signal: int) -> list[str]:
    """`command` such that it gets `last_signal` when the thread that starts it is gone, even by kill -9."""
    return [sys.executable, "-I", "-S", str(_TETHER), str(os.getpid()), str(int(last_signal)), *command]


class LinePipe:
    """A pipe on which a child reports one line: where it listens.

    Attributes:
        fd: the child's end, which it must inherit.
    """

    def __init__(self) -> None:
        self._read_end, self.fd = os.pipe()

    def started(self) -> None:
        """Close our copy of the child's end, once the child has it, so that the child's death ends the pipe."""
        os.close(self.fd)

    def read(self, deadline: float) -> str:
        """The line; empty when the child died or `deadline` (of `time.monotonic`) passed. Closes the pipe."""
        content = b""
        try:
            while not content.endswith(b"\n"):
                left_s = deadline - time.monotonic()
                if left_s <= 0 or not select.select([self._read_end], [], [], left_s)[0]:
                    break
                data = os.read(self._read_end, 4096)
                if not data:
                    break
                content += data
        finally:
            self.close()
        return content.decode().strip() if content.endswith(b"\n") else ""

    def detach(self) -> int:
        """Give up our end: the caller reads it in another way, and closes it."""
        end, self._read_end = self._read_end, -1
        return end

    def close(self) -> None:
        """Close our end. Harmless when repeated."""
        if self._read_end >= 0:
            os.close(self.detach())

"""Only root can read the memory of a service, which has parameters and the job's secret.

ssh-agent protects its memory in the same way. Otherwise, processes of the same user could read it with a debugger, and
a crash would write it to a file. If that is wanted (gdb, py-spy, core dumps), services are started with `--debuggable`.
"""

from __future__ import annotations

import ctypes
import logging
import resource
from typing import Final

_PR_SET_DUMPABLE: Final = 4
_logger = logging.getLogger(__name__)


def make_memory_private() -> None:
    """Keep the user's other processes from reading this one's memory, and disable core dumps, until the next `exec`."""
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0):
        _logger.warning("the kernel refuses to keep this process's memory from others of its user (PR_SET_DUMPABLE)")

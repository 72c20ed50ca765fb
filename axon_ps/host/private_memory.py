"""The memory of a service, which holds parameters and the job's secret, is for root alone, as that of ssh-agent.

Other processes of the same user could read it with a debugger, and a crash would write it to a file. Where that is
wanted (gdb, py-spy, core dumps), services are started with `--debuggable`.
"""

from __future__ import annotations

import ctypes
import logging
import resource
from typing import Final

_PR_SET_DUMPABLE: Final = 4
_logger = logging.getLogger(__name__)


def make_memory_private() -> None:
    """Have no process of the same user read this one's memory, and no core dumps written. Until the next `exec`."""
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0):
        _logger.warning("the kernel refuses to keep this process's memory from others of its user (PR_SET_DUMPABLE)")

"""Lower priorities for processes that share a machine with others."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

LOW: Final = 8
"""A niceness that leaves a process a sixth of another's processor time."""

LOWER: Final = 12
"""A niceness that leaves a process a fifteenth of another's processor time."""


def give_way(pid: int, level: int) -> None:
    """Lower the priority of a process, also under a scheduler that weighs sessions (autogroups) first.

    Such a scheduler compares niceness only within a session. So begin the process in a session of its own; the session
    of another process is left as it is.
    """
    if os.getsid(pid) == pid:
        with contextlib.suppress(OSError):  # the file is missing without autogroups
            Path(f"/proc/{pid}/autogroup").write_text(str(level))
    with contextlib.suppress(OSError):  # the priority of a process may not be raised
        os.setpriority(os.PRIO_PROCESS, pid, level)

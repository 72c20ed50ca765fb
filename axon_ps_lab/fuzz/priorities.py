"""Processes that give way to others of their machine."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

LOW: Final = 8
"""A sixth of what others get."""

LOWER: Final = 12
"""A fifteenth of it."""


def give_way(pid: int, level: int) -> None:
    """Have a process get less, whether the scheduler weighs processes or sessions (autogroups) first.

    If it weighs sessions, a priority of the process itself does not count among those of other sessions: begin it in
    one of its own. A session that others have begun is left as it is.
    """
    if os.getsid(pid) == pid:
        with contextlib.suppress(OSError):  # there is no such file where it weighs processes alone
            Path(f"/proc/{pid}/autogroup").write_text(str(level))
    with contextlib.suppress(OSError):  # it may not be raised, and never is
        os.setpriority(os.PRIO_PROCESS, pid, level)

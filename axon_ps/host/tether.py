"""Become a command that dies with its parent: `tether.py PARENT SIGNAL COMMAND...`.

The kernel sends SIGNAL to this process when the thread that started it is gone, even by kill -9. The setting stays in
effect after `exec`, so the command itself contains nothing of it, and its tracebacks show nothing of this file. PARENT
is the process id of the starter. If it is no longer our parent after the setting was made, it died before, and we end
too.

This is a program because `preexec_fn` would fork, which a process with open gRPC channels must not do.
It imports nothing of ours and little of Python, since it runs before every process that is started.
"""

from __future__ import annotations

import os
import sys

_PR_SET_PDEATHSIG = 1


def tie(parent: int, number: int) -> bool:
    """Have the kernel send signal `number` to us when our parent's thread is gone; False if `parent` is gone."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    return os.getppid() == parent


def main(argv: list[str]) -> None:
    """Tie this process to its parent and replace it by the command."""
    parent, number, command = int(argv[1]), int(argv[2]), argv[3:]
    if not tie(parent, number):
        sys.exit(f"axon-ps: process {parent}, which started {command[0]}, is gone")
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv)

"""The command `axon-ps` until its imports are over: Ctrl-C in that time ends it without a traceback.

It is not in the package `axon_ps`: importing a module of a package imports the package, which takes most of the time.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Args:
        argv: the arguments; None = those of the process.
    """
    before = signal.getsignal(signal.SIGINT)
    interrupts = before is signal.default_int_handler
    if interrupts:  # not where a shell ignores Ctrl-C for it
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from axon_ps.cli.main import main as run

    if interrupts:
        signal.signal(signal.SIGINT, before)
    return run(argv)

"""Ctrl-C ends a campaign, also when its exception is lost on the way."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from typing import Any

from axon_ps_lab.chaos.campaign import parse
from axon_ps_lab.chaos.figures import Events
from axon_ps_lab.chaos.runner import Runner


class Swallowing:
    """A job in which Ctrl-C is pressed while a fault is dealt, and nobody hears of it."""

    def __init__(self) -> None:
        self.dealt = 0
        self.newest = time.monotonic() + 1e6

    def wait(self, done: Callable[[], bool], limit_s: float, what: str) -> None: ...

    def is_complete(self) -> bool:
        return True

    def deal(self, fault: Any) -> tuple[str, float, str]:
        self.dealt += 1
        if self.dealt == 3:
            with contextlib.suppress(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
        return "nobody", time.monotonic(), ""

    def weigh(self, number: int) -> None: ...

    def collected(self) -> Events:
        return Events()


def test_an_interrupt_that_is_lost_ends_it_with_the_next_fault() -> None:
    job, before = Swallowing(), signal.getsignal(signal.SIGINT)
    result = Runner(parse("faults = 50\n[kinds.kill]\n", "c.toml"), job, lambda line: None).run()
    assert result.interrupted
    assert result.stopped == "it was interrupted"
    assert job.dealt == 3
    assert signal.getsignal(signal.SIGINT) is before

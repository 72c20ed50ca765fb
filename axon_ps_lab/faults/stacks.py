"""On the signal `SHOW` a process writes the stacks of all threads and coroutines to its standard error."""

from __future__ import annotations

import faulthandler
import gc
import signal
import sys
from collections.abc import Iterator
from types import CoroutineType, FrameType
from typing import Any

SHOW = signal.SIGUSR2


def install() -> None:
    """Handle `SHOW`; call it on the main thread."""
    signal.signal(SHOW, _show)


def _show(number: int, frame: FrameType | None) -> None:
    faulthandler.dump_traceback(sys.stderr)
    waiting = [c for c in gc.get_objects() if isinstance(c, CoroutineType) and c.cr_frame is not None]
    inner = {id(c.cr_await) for c in waiting}
    for coroutine in waiting:
        if id(coroutine) not in inner:
            sys.stderr.write("\n  ".join(("\ncoroutine, outermost first:", *_frames(coroutine), "")))
    sys.stderr.flush()


def _frames(awaited: Any) -> Iterator[str]:
    while (frame := getattr(awaited, "cr_frame", None)) is not None:
        facts = ", ".join(f"{k}={v}" for k, v in frame.f_locals.items() if isinstance(v, int | float))
        yield f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_qualname} {facts}"
        awaited = awaited.cr_await

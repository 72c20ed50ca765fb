"""`OneThread`: a wrapped model runs in one thread at a time.

Note: [One thread]
    Units are gathered and resharded for one forward or backward at a time, so a second thread inside one is refused.
    After a forward or a backward raised, the runtime looks as if it were still under way; just after one has begun, the
    runtime does not show it yet. So in another thread, the stack of the thread that began the last forward decides.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Collection, Iterator
from types import FrameType

from torch.autograd.graph import _engine_run_backward
from torch.utils.checkpoint import CheckpointFunction

from axon_ps.errors import Misuse


class OneThread:
    """The thread that runs a model; see Note: [One thread].

    Args:
        runtime: the model's runtime; a thread that runs the model has it as `runtime` on its stack.
    """

    def __init__(self, runtime: object) -> None:
        self._runtime = weakref.ref(runtime)
        self._thread = threading.get_ident()  # the thread that began the last forward
        self._beginning = threading.Lock()

    def begin(self, what: str, *, busy: bool) -> None:
        """Begin a forward in this thread; errors as of `check`."""
        with self._beginning:
            self.check(what, ("forward", "backward"), busy=busy)
            self._thread = threading.get_ident()

    def check(self, what: str, during: Collection[str], *, busy: bool) -> None:
        """Refuse a second thread.

        Args:
            what: the action that this thread begins.
            during: the actions of the other thread that this one must not interrupt, of "forward" and "backward".
            busy: True if a forward or a backward seems to be under way. A backward without it is another model's.

        Raises:
            Misuse: the other thread is in the midst of one of these.
        """
        if self._thread == threading.get_ident():
            return
        if (doing := self._doing(busy=busy)) in during:
            other = next((t.name for t in threading.enumerate() if t.ident == self._thread), str(self._thread))
            raise Misuse(
                f"{what} in thread {threading.current_thread().name!r} while thread {other!r} is inside the model's "
                f"{doing}: the parameters of a wrapped model are gathered for one thread at a time. Hold one lock "
                "around forward and backward in all threads, or evaluate another module that was loaded from "
                "model.state_dict()"
            )

    def _doing(self, *, busy: bool) -> str | None:
        """Return the other thread's work with the model, by its stack: "forward", "backward" or None."""
        for frame in _stack(sys._current_frames().get(self._thread)):
            if busy and frame.f_code is _engine_run_backward.__code__:
                return "backward"
            if "_run_once" in frame.f_code.co_name and frame.f_locals.get("runtime") is self._runtime():
                return "forward"
        return None


def in_reentrant_checkpoint() -> bool:
    """Return True if this thread runs the backward of `torch.utils.checkpoint.checkpoint(use_reentrant=True)`."""
    return any(frame.f_code is CheckpointFunction.backward.__code__ for frame in _stack(sys._getframe()))


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and those that called it."""
    while frame is not None:
        yield frame
        frame = frame.f_back

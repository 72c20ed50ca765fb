"""The forwards of a wrapped model: in one thread at a time, and each of one version of the parameters.

Note: [One thread]
    Units are gathered and resharded for one forward or backward at a time, so a second thread inside one is refused.
    The runtime's state is not enough to tell. After a forward or a backward raised, the state still shows it as under
    way. Just after one has begun, the state does not show it yet. So another thread looks at the stack of the thread
    that began the last forward.

Note: [One version a step]
    While this worker is a member nothing commits without its vote, so all that a step reads is of one version. A worker
    that was frozen or cut off may not know that the coordinator has given it up. Then others commit, and units that it
    has mapped change while it reads them. Once it is back, the rest of its step would be of a later version. So a
    forward that was not of one version from its first to its last read is made again, before its output is seen. A step
    during which the version moved gets a void ticket: its gradients are not sent, and it aborts.
    A step begins at the end of the step before it. Its batch is drawn then, and others may have had the same samples
    since. It begins anew if this worker itself asked for other parameters, as `load_checkpoint` does.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from types import FrameType

from torch.autograd.graph import _engine_run_backward
from torch.utils.checkpoint import CheckpointFunction

from axon_ps.errors import Misuse, StepAborted
from axon_ps.parallel.fsdp.flat_unit import ModuleUnit
from axon_ps.parallel.fsdp.gathering import UnitGathering
from axon_ps.parallel.fsdp.stats import Counters
from axon_ps.parallel.fsdp.steps import Position
from axon_ps.parallel.fsdp.tensors.sharded_parameter import in_backward

_MAX_FORWARDS = 8
"""Runs of a forward before it raises. See Note: [One version a step]."""


class OneThread:
    """The thread that runs a model. See Note: [One thread].

    Args:
        runtime: the model's runtime; a thread that runs the model has it as `runtime` on its stack.
    """

    def __init__(self, runtime: object) -> None:
        self._runtime = weakref.ref(runtime)
        self._thread = threading.get_ident()  # the thread that began the last forward
        self._beginning = threading.Lock()

    def begin(self, what: str, *, busy: bool) -> None:
        """Begin a forward in this thread. It raises as `check` does."""
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
            if "_run" in frame.f_code.co_name and frame.f_locals.get("runtime") is self._runtime():
                return "forward"
        return None


class OneVersion:
    """The version of the values that a forward reads, from first to last. See Note: [One version a step].

    Args:
        units: module units; the first is the root.
        now: returns the (epoch, version) that this worker computes with.
        gathering: the units that are in memory.
        counters: counts the forwards that are made again.

    Attributes:
        at: (epoch, version) when the forward began.
    """

    def __init__(
        self, units: Sequence[ModuleUnit], now: Callable[[], Position], gathering: UnitGathering, counters: Counters
    ) -> None:
        self._units = units
        self._now = now
        self._gathering = gathering
        self._counters = counters
        self.at: Position = (0, 0)
        self._uses: list[int] = []  # of every unit, when the forward began
        self._forwards = 0  # attempts at this forward

    def begin(self) -> bool:
        """Begin the root's forward, and return True if it is made again."""
        self.renew()
        self._uses = [unit.uses for unit in self._units]
        return self._forwards > 0

    def renew(self) -> None:
        """Read the version of now from here on, and drop resident values whose memory was withdrawn."""
        self.at = self._now()
        for unit in self._units:
            for flat in unit.flats:
                flat.renew()

    @property
    def torn(self) -> bool:
        """True if the values read since the forward began are not of one version."""
        return self.at != self._now() or any(flat.source.torn(flat) for unit in self._units for flat in unit.flats)

    def again(self) -> bool:
        """Return True if the root's forward must be made again.

        Raises:
            StepAborted: it was made `_MAX_FORWARDS` times; the parameters change faster than it reads them.
        """
        if in_backward() or not self.torn:
            self._forwards = 0
            return False
        self._forwards += 1
        for unit, uses in zip(self._units, self._uses, strict=True):
            unit.uses = uses
            self._gathering.reshard(unit)
        if self._forwards == _MAX_FORWARDS:
            self._forwards = 0
            raise StepAborted(
                f"the parameters changed during each of {_MAX_FORWARDS} forwards: the job goes on without this worker"
            )
        self._counters.forwards_repeated += 1
        return True


def check_idle(units: Sequence[ModuleUnit], what: str) -> None:
    """Check that no forward of a model is under way, before an action of this name.

    Raises:
        Misuse: one is.
    """
    if any(unit.depth for unit in units):
        raise Misuse(f"{what}() was called inside a forward; call it between steps")


def in_reentrant_checkpoint() -> bool:
    """Return True if this thread runs the backward of `torch.utils.checkpoint.checkpoint(use_reentrant=True)`."""
    return any(frame.f_code is CheckpointFunction.backward.__code__ for frame in _stack(sys._getframe()))


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and those that called it."""
    while frame is not None:
        yield frame
        frame = frame.f_back

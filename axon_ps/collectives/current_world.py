"""The current world, which functions without a group use, and its interface for collectives. `worker.World` sets it.

A process has one current world; a thread that has entered a world of `World.mock` has its own.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from axon_ps.collectives.backends.base import Backend
from axon_ps.errors import Misuse


class JobWorld(Protocol):
    """A worker's membership in a job, as the collectives use it: an `axon_ps.World`."""

    @property
    def default_group(self) -> Any:
        """All workers, a `ProcessGroup`."""

    def new_group(self, ranks: Sequence[int], *, backend: str = "auto") -> Any:
        """Make a group of some workers, by world rank; return a `ProcessGroup`."""

    def close(self, *, finished: bool | None = None) -> None:
        """Leave the job."""


_of_process: JobWorld | None = None
_of_thread = threading.local()
_mock_world: Callable[[Backend], JobWorld] | None = None


def current() -> JobWorld | None:
    """Return this thread's world, else the world that this process joined last; None when that was closed."""
    own: weakref.ref[JobWorld] | None = getattr(_of_thread, "world", None)
    return (None if own is None else own()) or _of_process


def enter(world: JobWorld) -> None:
    """Make it the current world of this process."""
    global _of_process
    _of_process = world


def enter_thread(world: JobWorld) -> None:
    """Make it the current world of this thread, as long as the world is referenced elsewhere."""
    _of_thread.world = weakref.ref(world)


def leave(world: JobWorld) -> None:
    """Stop using it as the current world."""
    global _of_process
    if _of_process is world:
        _of_process = None
    if current() is world:
        del _of_thread.world


def register_mock_worlds(find: Callable[[Backend], JobWorld]) -> None:
    """Register the function that returns the world of a `MockBackend`'s rank; its first call starts the job."""
    global _mock_world
    _mock_world = find


def mock_world(backend: Backend) -> JobWorld:
    """Return the world of a `MockBackend`'s rank.

    Raises:
        Misuse: the module of `axon_ps.World` is not loaded.
    """
    if _mock_world is None:
        raise Misuse(f"group {backend.context.name!r} was made of a backend; load axon_ps.World to have a job with it")
    return _mock_world(backend)

"""Moments of a training step that a process says it has reached, so that a test can deal a fault exactly there.

A library call site says `reached(Moment.PUSH)`. Nobody watches in production: that is one comparison. A test installs a
watcher (`axon_ps.testing.faults`), which may block the thread that reached the moment; the calling code can take that,
as it can take any pause of its process.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum


class Moment(Enum):
    """Where a process is in a step.

    Each is reached in one kind of process: the first six and the last but one in a worker, `DECISION` in the
    coordinator, `CHECKPOINT` in a shard server.
    """

    GATHER = 1  # a request for a unit is sent and not answered
    FORWARD = 2  # a unit's parameters are there, its forward begins
    BACKWARD = 3  # a unit's parameters are there again, its backward begins
    PUSH = 4  # a gradient is sent to a server and not acknowledged
    VOTE = 5  # everything is pushed, the vote is about to be cast
    DECISION = 6  # a decision is durable and nobody has been told
    BETWEEN_STEPS = 7  # a step is over on this worker
    CHECKPOINT = 8  # a part of a checkpoint's file is written


Watcher = Callable[[Moment, int], None]

_watcher: Watcher | None = None


def watch(watcher: Watcher | None) -> None:
    """From now on call `watcher` with every moment this process reaches, and the version, where it is known (else -1).

    It is called on the thread that reached the moment, which may be the event loop's. None = nobody watches.
    """
    global _watcher
    _watcher = watcher


def reached(moment: Moment, version: int = -1) -> None:
    """Say that this process has reached a moment."""
    if _watcher is not None:
        _watcher(moment, version)

"""Moments of a training step that a process reports, so that a test can inject a fault exactly there.

The library calls `reached(Moment.PUSH)`. In production there is no watcher, and the call costs one comparison. A test
installs one (`axon_ps_lab.faults`), which may block the calling thread; the code handles that like any pause of its
process.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum


class Moment(Enum):
    """Moments of a step.

    Each is reached in one kind of process: `DECISION` and `REMOVE` in the coordinator, `CHECKPOINT` and `RESTORE` in a
    shard server, the others in a worker.
    """

    GATHER = 1  # a request for a unit is sent and not answered
    FORWARD = 2  # a unit's parameters have been gathered, its forward begins
    BACKWARD = 3  # a unit's parameters have been gathered again, its backward begins
    PUSH = 4  # a gradient is sent to a server and not acknowledged
    VOTE = 5  # everything is pushed, the vote is about to be cast
    DECISION = 6  # a decision is durable and not published yet
    BETWEEN_STEPS = 7  # a step is over on this worker
    CHECKPOINT = 8  # a part of a checkpoint's file is written
    RESTORE = 9  # a slice has the values of a checkpoint, others may not
    REMOVE = 10  # an old checkpoint is not valid any more, and its files are still there


Watcher = Callable[[Moment, int], None]

_watcher: Watcher | None = None


def watch(watcher: Watcher | None) -> None:
    """Have `watcher` called with every moment that this process reaches, and the version (-1 = unknown).

    It is called on the thread that reached the moment, which may be the event loop's. None = no watcher.
    """
    global _watcher
    _watcher = watcher


def reached(moment: Moment, version: int = -1) -> None:
    """Report that this process has reached a moment."""
    if _watcher is not None:
        _watcher(moment, version)

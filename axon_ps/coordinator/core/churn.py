"""Workers that join a job that trains and leave before a step has counted: each costs the others two steps. Pure.

Whoever does that often is made to wait before it joins again, with the reason. A worker that took part in a step, as
one on a preemptible machine has, is not counted, nor one that leaves while the others train nothing.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from axon_ps.errors import Busy

WINDOW_S: Final = 60.0
"""How long such a worker counts."""

MAX_OF_NODE: Final = 16
"""Such workers of one node in that time, after which further ones of it wait."""

MAX_OF_JOB: Final = 128
"""Likewise of the job, since a node is called what its worker says."""


class Churn:
    """The workers that have joined and left in vain lately."""

    def __init__(self) -> None:
        self._left: deque[tuple[float, str]] = deque(maxlen=MAX_OF_JOB)

    def left(self, node: str, now: float) -> None:
        """A worker of a node has left without having taken part in a step that counted."""
        self._left.append((now, node))

    def check(self, node: str, now: float) -> None:
        """Refuse a joiner for the present.

        Raises:
            Busy: too many have joined and left in vain; the message says until when.
        """
        while self._left and self._left[0][0] <= now - WINDOW_S:
            self._left.popleft()
        of_node = [left_s for left_s, of in self._left if of == node]
        of_job = [left_s for left_s, _ in self._left]
        for left, most, whose in ((of_node, MAX_OF_NODE, f"node {node}"), (of_job, MAX_OF_JOB, "the job")):
            if len(left) >= most:
                raise Busy(
                    f"{len(left)} workers of {whose} have joined and left within {WINDOW_S:g} s without taking part in "
                    f"a step, which aborts the others' steps; another may join in {left[0] + WINDOW_S - now:.0f} s"
                )

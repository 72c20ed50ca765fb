"""Trace of a worker's step: spans of its transfers and of its own blocking.

A transfer's span is from its request to its end, so it may include waiting for its order. The worker's own thread is
*blocked* while it waits for a transfer or for the decision on a step; the rest of a step it computes. The time of a
step in which some transfer is under way is its *communication*. The part of that in which the thread is not blocked is
*hidden* behind compute.
"""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from axon_ps.collectives.work import LoopWork, Work
from axon_ps.parallel.fsdp.memory import BufferPool
from axon_ps.worker.job_view import JobView

Span = tuple[float, float]
KINDS = {"gathering": "gather", "pushing": "push"}


class Trace:
    """Spans of this process since the object was made. A process has one, made before the model."""

    def __init__(self) -> None:
        self.transfers: list[tuple[str, float, float]] = []
        self.blocked: list[tuple[str, float, float]] = []
        self.steps: list[Span] = []
        self._main = threading.get_ident()
        self._watch_transfers()
        self._watch_waiting(Work, "wait", lambda work: KINDS.get(work.what.split()[0], "other"))
        self._watch_waiting(JobView, "wait_until", lambda _: "decision")
        self._watch_waiting(BufferPool, "wait_for_capacity", lambda _: "push")  # for capacity that earlier pushes use

    def _watch_transfers(self) -> None:
        begin = LoopWork.__init__
        transfers = self.transfers

        def watched(work: Any, loop: Any, coroutine: Any, what: str) -> None:
            asked_s = time.perf_counter()
            begin(work, loop, coroutine, what)
            work.add_done_callback(lambda _: transfers.append((what, asked_s, time.perf_counter())))

        LoopWork.__init__ = watched  # type: ignore[method-assign, assignment]

    def _watch_waiting(self, of: type, method: str, kind: Callable[[Any], str]) -> None:
        wait = getattr(of, method)

        def watched(it: Any, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._main:
                return wait(it, *args, **kwargs)
            begin_s = time.perf_counter()
            try:
                return wait(it, *args, **kwargs)
            finally:
                self.blocked.append((kind(it), begin_s, time.perf_counter()))

        setattr(of, method, watched)

    def step(self, begin_s: float, end_s: float) -> None:
        """Note the begin and the end of a step."""
        self.steps.append((begin_s, end_s))

    def summary(self) -> dict[str, float]:
        """Return seconds per step: communication, the part of it that is hidden, and the causes of blocking."""
        transfers = union([(b, e) for what, b, e in self.transfers if what.split()[0] in KINDS])
        blocked = union([(b, e) for _, b, e in self.blocked])
        by_kind: dict[str, list[Span]] = defaultdict(list)
        for kind, b, e in self.blocked:
            by_kind[kind].append((b, e))
        n = len(self.steps)
        communication = overlap(transfers, self.steps) / n
        exposed = overlap(transfers, intersection(blocked, self.steps)) / n
        whole = sum(e - b for b, e in self.steps) / n
        waits = {f"blocked_{kind}_s": overlap(union(spans), self.steps) / n for kind, spans in by_kind.items()}
        return {
            "step_s": whole,
            "communication_s": communication,
            "hidden": 1 - exposed / communication if communication else 1.0,
            "compute_s": whole - overlap(blocked, self.steps) / n,
            **waits,
        }

    def write(self, path: Path) -> None:
        """Write the spans, for chrome://tracing or ui.perfetto.dev."""
        rows = [("thread", kind, b, e) for kind, b, e in self.blocked]
        rows += [("transfers", what, b, e) for what, b, e in self.transfers]
        rows += [("steps", "step", b, e) for b, e in self.steps]
        events = [
            {"name": what, "ph": "X", "pid": 0, "tid": track, "ts": b * 1e6, "dur": (e - b) * 1e6}
            for track, what, b, e in rows
        ]
        path.write_text(json.dumps({"traceEvents": events}))


def union(spans: Sequence[Span]) -> list[Span]:
    """Return the same times as spans that do not touch, in order."""
    result: list[Span] = []
    for begin, end in sorted(spans):
        if result and begin <= result[-1][1]:
            result[-1] = result[-1][0], max(end, result[-1][1])
        else:
            result.append((begin, end))
    return result


def intersection(a: Sequence[Span], b: Sequence[Span]) -> list[Span]:
    """Return the times that are in both; each must be a union."""
    return [(max(x, u), min(y, v)) for x, y in a for u, v in b if max(x, u) < min(y, v)]


def overlap(a: Sequence[Span], b: Sequence[Span]) -> float:
    """Return the seconds that are in both; each must be a union."""
    return sum(e - s for s, e in intersection(a, b))

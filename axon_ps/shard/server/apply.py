"""Committed steps are applied by a few threads, in forward order of slices, without overtaking snapshots under way.

Note: [Apply and snapshot]
    In a snapshot, the live arrays of version v are written without a copy, while training goes on. That version is
    pinned, and slices are written in forward order, as they are applied. The threads that apply v+1 wait at each slice
    until the snapshot has written it. The snapshot's thread waits at each slice until v is applied to it. Each waits
    only for an earlier version of the other, so a deadlock is impossible. If a snapshot without progress has held up an
    apply for `STALLED_S`, the pin expires, so that hanging storage cannot stop the job.

Note: [Apply and copy]
    If a step of another model copies the values of version v, the live arrays are read as in a snapshot. The version is
    pinned until all of it is copied. A copy does not depend on storage, so its pin does not expire. Each model has its
    own threads, so a wait in one model does not delay another. Every wait is for something that was decided earlier.

Note: [Runs of chunks]
    A thread updates several neighbouring chunks in one call. The size of chunks suits the network. For a simple
    optimizer a chunk takes 0.1 ms, and two threads that contend for the GIL after each chunk lose up to a quarter of
    their time waking up. A run ends with its slice, and a slice too small for a run per thread is cut into equal ones.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from axon_ps.errors import CheckpointError
from axon_ps.observe.tracing.span import Span, SpanContext
from axon_ps.observe.tracing.tracer import Tracer
from axon_ps.shard.core.engine import ShardEngine
from axon_ps.shard.core.slices import OwnedSlice
from axon_ps.types import Array, Decision

RUN_NUMEL = 1 << 20
"""Elements that a thread updates in one call, if chunks are not larger. See Note: [Runs of chunks]."""

STALLED_S = 600.0
"""Seconds for which a snapshot without progress may hold up a step. See Note: [Apply and snapshot]."""

Work = Callable[[OwnedSlice, int, int, Array], None]
"""A function of a slice, its chunks [first, last), and a thread's scratch."""

_logger = logging.getLogger(__name__)


class Pin:
    """A snapshot or a copy that reads `version`, and has read slices up to `watermark`. See `VersionPins.pin`."""

    def __init__(self, version: int, *, expires: bool = True) -> None:
        self.version = version
        self.expires = expires
        self.watermark = -1
        self.expired = False


class VersionPins:
    """Versions that snapshots and copies still read, slice by slice. See Note: [Apply and snapshot]. Any thread.

    Args:
        stalled_s: seconds for which a snapshot without progress may hold up an apply.
    """

    def __init__(self, stalled_s: float = STALLED_S) -> None:
        self._changed = threading.Condition()
        self._pins: list[Pin] = []
        self._closed = False
        self._stalled_s = stalled_s

    def pin(self, version: int, *, expires: bool = True) -> Pin:
        """Keep each slice at `version` until `advance` has passed it. A pin that `expires` may be given up."""
        pin = Pin(version, expires=expires)
        with self._changed:
            self._pins.append(pin)
        return pin

    def advance(self, pin: Pin, number: int) -> None:
        """Record that the reader of a pin is done with every slice up to `number`.

        Raises:
            CheckpointError: it took too long, and the values may have changed meanwhile.
        """
        with self._changed:
            if pin.expired:
                raise CheckpointError(
                    f"slice {number} was not written within {self._stalled_s:g} s while a step waited for it; the "
                    f"checkpoint of version {pin.version} was given up, see to its storage"
                )
            pin.watermark = number
            self._changed.notify_all()

    def release(self, pin: Pin) -> None:
        """Release the pin of a snapshot or copy that has ended, with or without success."""
        with self._changed:
            if pin in self._pins:
                self._pins.remove(pin)
            self._changed.notify_all()

    def wait_for_pins(self, number: int, version: int) -> None:
        """Wait, before changing a slice to `version`, for pins of older versions. Those without progress may expire."""
        if not self._pins:
            return
        with self._changed:
            while not self._closed and (behind := self._behind(number, version)):
                if not self._changed.wait_for(partial(self._moved, behind, number, version), self._stalled_s):
                    self._expire(behind)

    def _behind(self, number: int, version: int) -> dict[Pin, int]:
        """Return the pins that hold up a slice, and the watermark of each."""
        return {p: p.watermark for p in self._pins if p.version < version and p.watermark < number}

    def _moved(self, before: dict[Pin, int], number: int, version: int) -> bool:
        return self._closed or self._behind(number, version) != before

    def _expire(self, pins: Iterable[Pin]) -> None:
        for pin in [p for p in pins if p.expires]:
            pin.expired = True
            self._pins.remove(pin)
            _logger.error(
                "the checkpoint of version %d has not moved for %.0f s while a step waited for it; it is given up",
                pin.version,
                self._stalled_s,
            )
        self._changed.notify_all()

    def wait_until(self, reached: Callable[[], bool]) -> bool:
        """Wait, before reading a slice, until it is at the pinned version; returns False if the server stops."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or reached())
            return not self._closed

    def notify(self) -> None:
        """Wake the waiters after a slice has reached a version."""
        if self._pins:
            with self._changed:
                self._changed.notify_all()

    def close(self) -> None:
        """End all waits: the server stops."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class ApplyPool:
    """Threads that apply chunks. See Note: [Runs of chunks].

    Args:
        engine: the engine that has the chunks.
        pins: versions that must not change yet.
        threads: number of threads; None = one per core this process may use.
        finished: called on the loop's thread when every chunk of a slice is done.
        failed: called on the loop's thread when a kernel raised. The engine is unusable then.
    """

    def __init__(
        self,
        engine: ShardEngine,
        pins: VersionPins,
        threads: int | None,
        finished: Callable[[OwnedSlice], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._engine = engine
        self._pins = pins
        self.threads = threads or len(os.sched_getaffinity(0))
        self._finished = finished
        self._failed = failed
        self._executor = ThreadPoolExecutor(self.threads, "axon-ps-apply")
        self._lock = threading.Lock()
        self._left: Counter[int] = Counter()

    def start(self, slices: Sequence[OwnedSlice], work: Work | None = None) -> None:
        """Apply all chunks of `slices`, earlier ones first; returns at once. Call it on the loop's thread.

        Args:
            slices: the slices.
            work: the function to call for chunks [first, last) of a slice; None = `SliceChange.apply`.
        """
        loop = asyncio.get_running_loop()
        runs = [(owned, first, last) for owned in slices for first, last in self._runs(owned)]
        self._left = Counter(owned.number for owned, _, _ in runs)
        longest = max((last - first for _, first, last in runs), default=0)
        tasks = iter(runs)
        for _ in range(min(self.threads, len(runs))):
            self._executor.submit(self._run, work or _apply, tasks, longest, self._engine.version, loop)

    def _runs(self, owned: OwnedSlice) -> list[tuple[int, int]]:
        """Return the runs of a slice, as (first chunk, one past the last)."""
        cut = owned.chunks
        chunks = len(cut.bounds)
        length = min(-(-chunks // self.threads), max(1, RUN_NUMEL // cut.chunk_numel))
        return [(first, min(first + length, chunks)) for first in range(0, chunks, length)]

    def close(self) -> None:
        """Wait for running calls and end the threads."""
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _run(
        self,
        work: Work,
        tasks: Iterator[tuple[OwnedSlice, int, int]],
        longest: int,
        version: int,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        try:
            scratch = self._engine.scratch(longest)
            for owned, first, last in tasks:  # a list's iterator: threads may share it
                self._pins.wait_for_pins(owned.number, version)
                work(owned, first, last, scratch)
                with self._lock:
                    self._left[owned.number] -= 1
                    done = self._left[owned.number] == 0
                if done:
                    loop.call_soon_threadsafe(self._finished, owned)
        except BaseException as error:
            loop.call_soon_threadsafe(self._failed, error)


def _apply(owned: OwnedSlice, first: int, last: int, scratch: Array) -> None:
    assert owned.change is not None
    owned.change.apply(first, last, scratch)


class ApplyTrace:
    """The span of the step that is being applied, if it is traced.

    Args:
        tracer: the server's.
        engine: the engine that has the slices.
    """

    def __init__(self, tracer: Tracer, engine: ShardEngine) -> None:
        self._tracer = tracer
        self._engine = engine
        self._span: Span | None = None

    def begin(self, decision: Decision, slices: int) -> None:
        """Begin the span of an apply of `slices` slices."""
        parent = SpanContext.parse(decision.traceparent) if self._tracer.active else None
        if parent is not None:
            self._span = self._tracer.begin("apply", parent, version=decision.version, slices=slices)

    def applied(self, owned: OwnedSlice, *, is_last: bool) -> None:
        """Record that a slice is applied."""
        span = self._span
        if span is None:
            return
        span.events.append((self._tracer.now(), f"{self._engine.unit_name(owned.chunks.unit)} is applied"))
        if is_last:
            self._span = None
            self._tracer.end(span)

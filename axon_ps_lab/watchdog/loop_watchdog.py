"""A watchdog of event loops: names the functions that held one for `BOUND_S` or more, in all processes of a test run.

Owns: measuring each callback and step of a task of every asyncio loop of this process, and the records of long ones.
`tests/conftest.py` turns it on with `--longest-hold`, and prints the findings.

Note: [Held, or not scheduled]
    On a busy machine most long callbacks were just not scheduled, which is no fault of the product. For each thread the
    kernel counts the time for which it was ready to run and did not (`/proc/self/task/TID/schedstat`). That time is
    subtracted. The rest is work, and waiting in a call that blocks: for a lock, a page, or Python's global lock. A
    thread with the global lock may not have been scheduled; so a record also has the functions of other threads.
    Python's garbage collector interrupts any function. If it took more than half of a hold, the record names it in the
    function's place.

Note: [Whose a loop is]
    A test's own task may take long, and hold only the test's loop. So a record counts only if its stack has a function
    of the product, and its outermost function is not of a test.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Final

VARIABLE: Final = "LOOP_WATCHDOG"
"""The environment variable with the folder of the records; without it no loop is watched."""

BOUND_S: Final = 0.05
SAMPLED_S: Final = 0.02
"""Seconds between two samples of the stack of a callback, once it has run for as long."""

BASELINE_S: Final = 0.005
"""The greatest age of a thread's scheduling figures when a callback begins, in seconds."""

FRAMES: Final = 12
COLLECTOR: Final = "gc:0 the collector of garbage"
_HERE: Final = str(Path(__file__).parent)
_TESTS: Final = tuple(str(Path(__file__).parents[2] / folder) + os.sep for folder in ("tests", "axon_ps_lab"))
_PACKAGE: Final = str(Path(__file__).parents[2] / "axon_ps") + os.sep
_ASYNCIO: Final = f"{os.sep}asyncio{os.sep}"


@dataclass(slots=True)
class RunningCallback:
    """The callback that a thread's loop runs.

    Attributes:
        thread: identifier of the thread.
        delay_fd: descriptor of the thread's `schedstat`.
        began_s: time at which the callback began; 0 = none is running.
        stack: its stack when last sampled, innermost last, as "file:line function".
        others: innermost functions of other threads at that time.
    """

    thread: int
    delay_fd: int
    began_s: float = 0.0
    stack: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    baseline_s: float = 0.0
    baseline: tuple[float, float] = (0.0, 0.0)

    def scheduled(self) -> tuple[float, float]:
        """Return the seconds that the thread has run, and those that it was ready to run and did not."""
        run_ns, delay_ns, _ = os.pread(self.delay_fd, 96, 0).split()
        return int(run_ns) / 1e9, int(delay_ns) / 1e9


class LoopWatchdog:
    """The watchdog of this process.

    Args:
        folder: folder for the records.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._local = threading.local()
        self._running: list[RunningCallback] = []
        self._sampling = False
        self._collected_s = 0.0  # by the collector of garbage, in all
        self._collects_since_s = 0.0
        gc.callbacks.append(self._on_collection)

    def _on_collection(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self._collects_since_s = time.perf_counter()
        else:
            self._collected_s += time.perf_counter() - self._collects_since_s

    def after_fork(self) -> None:
        """Forget the parent's threads and loops, in a child that has none of them."""
        self._local = threading.local()
        self._running = []
        self._sampling = False

    def run(self, handle: Any, call: Any) -> None:
        """Run a handle of a loop as `Handle._run` does, and record it if it was long."""
        running: RunningCallback | None = getattr(self._local, "running", None)
        if running is None:
            running = self._local.running = self._new_thread()
        if running.began_s:  # a loop in a callback of a loop
            call(handle)
            return
        began_s = time.perf_counter()
        if began_s - running.baseline_s > BASELINE_S:
            running.baseline, running.baseline_s = running.scheduled(), began_s
        running.began_s = began_s
        collected_s = self._collected_s
        try:
            call(handle)
        finally:
            running.began_s = 0.0
            wall_s = time.perf_counter() - began_s
            if wall_s >= BOUND_S:
                stack = running.stack or [_callback(handle)]
                if self._collected_s - collected_s > wall_s / 2:
                    stack = [*stack, COLLECTOR]
                self.was_long(stack, running.others, wall_s, running.baseline, running.scheduled())
                running.baseline_s = 0.0
            if running.stack:
                running.stack, running.others = [], []

    def _new_thread(self) -> RunningCallback:
        path = f"/proc/self/task/{threading.get_native_id()}/schedstat"
        running = RunningCallback(threading.get_ident(), os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        self._running.append(running)
        if not self._sampling:
            self._sampling = True
            threading.Thread(target=self._sample, name="loop-watchdog", daemon=True).start()
        return running

    def _sample(self) -> None:
        never = threading.Event()
        while not never.wait(SAMPLED_S):
            now_s = time.perf_counter()
            for running in self._running:
                if running.began_s and now_s - running.began_s >= SAMPLED_S:
                    frames = sys._current_frames()
                    if (frame := frames.get(running.thread)) is not None and running.began_s:
                        running.stack = _described(frame)
                        mine = {running.thread, threading.get_ident()}
                        others = (_described(f) for t, f in frames.items() if t not in mine)
                        running.others = [stack[-1] for stack in others if stack]

    def was_long(
        self,
        stack: list[str],
        others: list[str],
        wall_s: float,
        before: tuple[float, float],
        after: tuple[float, float],
    ) -> None:
        """Record a callback, unless it lasted only because its thread was not scheduled.

        Args:
            stack: its stack, innermost last.
            others: innermost functions of other threads.
            wall_s: its duration.
            before: the kernel's figures at its begin; see `RunningCallback.scheduled`.
            after: the kernel's figures at its end.
        """
        ran_s, delayed_s = after[0] - before[0], after[1] - before[1]
        held_s = wall_s - delayed_s
        if held_s < BOUND_S:
            return
        record = {
            "held_s": round(held_s, 4),
            "ran_s": round(ran_s, 4),
            "delayed_s": round(delayed_s, 4),
            "stack": stack[-FRAMES:],
            "ours": any(line.startswith(_PACKAGE) for line in stack) and not stack[0].startswith(_TESTS),
            "others": [other for other in others if "threading.py" not in other][:FRAMES],
            "process": " ".join(sys.argv[:4])[-120:],
            "test": os.environ.get("PYTEST_CURRENT_TEST", "").partition(" ")[0],
        }
        with contextlib.suppress(OSError), open(self._folder / f"{os.getpid()}.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def _described(frame: FrameType | None) -> list[str]:
    """Return a stack from the callback or task inwards; for a thread without a loop, all of it."""
    frames: list[FrameType] = []
    while frame is not None:
        if frame.f_code.co_filename.startswith(_HERE):
            break
        frames.append(frame)
        frame = frame.f_back
    while len(frames) > 1 and _ASYNCIO in frames[-1].f_code.co_filename:
        frames.pop()
    return [f"{f.f_code.co_filename}:{f.f_lineno} {f.f_code.co_qualname}" for f in reversed(frames)]


def _callback(handle: Any) -> str:
    """Return the function of a handle without a sample: Python's global lock was held all the time."""
    callback = handle._callback
    task = getattr(callback, "__self__", None)
    code = getattr(callback, "__code__", None)
    if isinstance(task, asyncio.Task) and (coro := task.get_coro()) is not None:
        code = getattr(coro, "cr_code", None)
    if code is None:
        return f"?:0 {callback!r}"
    return f"{code.co_filename}:{code.co_firstlineno} {code.co_qualname}"


def install() -> None:
    """Watch all loops of this process and its forks if the environment has `VARIABLE`."""
    folder = os.environ.get(VARIABLE, "")
    if not folder or getattr(asyncio.Handle._run, "is_watched", False):
        return
    watchdog, call = LoopWatchdog(Path(folder)), asyncio.Handle._run

    @functools.wraps(call)
    def run(handle: Any) -> None:
        watchdog.run(handle, call)

    run.is_watched = True  # type: ignore[attr-defined]
    asyncio.Handle._run = run  # type: ignore[method-assign, assignment]
    os.register_at_fork(after_in_child=watchdog.after_fork)


# ---------------------------------------------------------------------- findings


@dataclass(frozen=True)
class SlowCallback:
    """The longest hold by one function of the product.

    Attributes:
        where: the innermost function of the product and its caller in the product, or the garbage collector.
        held_s: seconds for which it held its loop.
        ran_s: the seconds of these in which it ran; in the others it waited.
        count: number of holds with this `where`.
        test: the test that the process belonged to.
        record: the whole record.
    """

    where: str
    held_s: float
    ran_s: float
    count: int
    test: str
    record: dict[str, Any]


def found(folder: Path) -> list[SlowCallback]:
    """Return the functions of the product that held loops, the longest hold first."""
    at: dict[str, list[dict[str, Any]]] = {}
    for record in _records(folder):
        if record["ours"]:
            at.setdefault(_where(record["stack"]), []).append(record)
    slow_callbacks = []
    for where, records in at.items():
        longest = max(records, key=lambda record: record["held_s"])
        slow_callbacks.append(
            SlowCallback(where, longest["held_s"], longest["ran_s"], len(records), longest["test"], longest)
        )
    return sorted(slow_callbacks, key=lambda slow: -slow.held_s)


def _records(folder: Path) -> Iterator[dict[str, Any]]:
    for file in sorted(folder.glob("*.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):  # the last line of a process that was killed
                yield json.loads(line)


def _where(stack: list[str]) -> str:
    if stack[-1] == COLLECTOR:
        return COLLECTOR.partition(" ")[2]
    ours = [line.removeprefix(_PACKAGE) for line in stack if line.startswith(_PACKAGE)]
    functions = [f"{line.partition(':')[0]} {line.rpartition(' ')[2]}" for line in ours]
    return " <- ".join(reversed(list(dict.fromkeys(functions))[-2:]))


def report(folder: Path, rows: int = 20) -> list[str]:
    """Return the findings as lines of text, the longest hold first."""
    slow_callbacks = found(folder)
    if not slow_callbacks:
        return [f"event loops: none was held for {BOUND_S * 1e3:.0f} ms"]
    count = len(slow_callbacks)
    lines = [f"event loops: held for {BOUND_S * 1e3:.0f} ms and more at {count} places (held, ran, times, where)"]
    for h in slow_callbacks[:rows]:
        lines.append(f"  {h.held_s * 1e3:6.0f} ms {h.ran_s * 1e3:6.0f} ms {h.count:4d}  {h.where}  [{h.test}]")
    return lines

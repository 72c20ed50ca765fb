"""What the main job shows of itself: a bar that moves on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column

PLAIN_EVERY_S = 5.0
BAR_WIDTH = 10
LEFT_WIDTH = 8  # the time that is left, and the spaces between the columns
MB = 1e6
PAGE_BYTES = 4096
Statistics = Mapping[str, float]


def resident_bytes() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


class Report:
    """Progress of one worker.

    Args:
        on: whether it says anything; one worker of the job does.

    Attributes:
        loss: a running mean over about ten steps of this worker's batches.
    """

    def __init__(self, *, on: bool) -> None:
        self._on = on
        behind_a_pipe = "COLUMNS" in os.environ  # `axon-ps run` says so when there is a terminal at its other end
        self._console = Console(highlight=False, soft_wrap=True, force_terminal=behind_a_pipe or None)
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self.loss = 0.0
        self._tokens = 0
        self._before: tuple[float, int, float] | None = None
        self._said_s = 0.0

    def say(self, text: str) -> None:
        """One line, above the bar."""
        if self._on:
            self._console.print(text, markup=False)

    @property
    def tokens_per_s(self) -> float:
        """What all workers compute, at present."""
        then_s, tokens, _ = self._before or (time.monotonic(), self._tokens, 0.0)
        return (self._tokens - tokens) / max(time.monotonic() - then_s, 1e-9)

    def start(self, first: int, steps: int | None) -> None:
        """Training begins at version `first`; how many steps there will be may not be known yet."""
        self._before = (time.monotonic(), 0, 0.0)
        self._said_s = time.monotonic()
        if not self._on or not self._console.is_terminal:
            return
        left = TimeRemainingColumn(compact=True, table_column=Column(min_width=5, no_wrap=True))
        columns = (BarColumn(bar_width=BAR_WIDTH), left, TextColumn("{task.description}"))
        self._bar = Progress(*columns, console=self._console)
        self._task = self._bar.add_task(f"step {first}", total=steps, completed=first)
        self._bar.start()

    def step(self, version: int, steps: int | None, loss: float, tokens: int, statistics: Statistics) -> None:
        """A step committed."""
        first = self._tokens == 0
        self.loss = loss if first else 0.9 * self.loss + 0.1 * loss
        self._tokens += tokens
        now_s = time.monotonic()
        last = version == steps
        if not self._on or not (self._bar or first or last or now_s - self._said_s >= PLAIN_EVERY_S):
            return
        line = f"step {version}{f'/{steps}' if steps else ''}  {self._line(now_s, statistics)}"
        if self._bar:  # of a line that is too long rich would leave out the columns, not the line's end
            line = line[: max(0, self._console.width - BAR_WIDTH - LEFT_WIDTH)]
            self._bar.update(self._task, completed=version, total=steps, description=line)
        else:
            self._said_s = now_s
            self.say(line)

    def stop(self) -> None:
        """Training is over."""
        if self._bar:
            self._bar.stop()
            self._bar = None

    def summary(self, facts: Mapping[str, str], statistics: Statistics) -> None:
        """The last word: what came out, and what it cost this worker."""
        wire = statistics["wire_bytes_in"] + statistics["wire_bytes_out"]
        costs = {
            "worker memory": f"{resident_bytes() / MB:.0f} MB, of it parameters at most "
            f"{statistics['peak_param_memory_bytes'] / MB:.1f} MB",
            "worker traffic": f"{wire / MB:.0f} MB; waited {statistics['gather_wait_s']:.1f} s for parameters, "
            f"{statistics['push_wait_s']:.1f} s to push, {statistics['step_wait_s']:.1f} s for decisions",
        }
        for name, value in {**facts, **costs}.items():
            self.say(f"{name:>16}: {value}")

    def _line(self, now_s: float, statistics: Statistics) -> str:
        wire = statistics["wire_bytes_in"] + statistics["wire_bytes_out"]
        assert self._before is not None
        then_s, tokens, bytes_ = self._before
        span_s = max(now_s - then_s, 1e-9)
        if span_s > 2.0:
            self._before = (now_s, self._tokens, wire)
        return (
            f"loss {self.loss:.3f}  {(self._tokens - tokens) / span_s:,.0f} tokens/s  "
            f"wire {(wire - bytes_) / span_s / MB:.0f} MB/s  "
            f"memory {resident_bytes() / MB:.0f} MB (parameters {statistics['param_memory_bytes'] / MB:.1f})"
        )

"""The bar of long work: bytes done, rate and time left, on standard error.

On a terminal it is redrawn in place; elsewhere a line is written every `LINE_S`, so that a log shows that something
goes on. The caller or another thread advances the `LongWork` that is shown.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final, TextIO

from axon_ps.cli.terminal.quantities import duration, size
from axon_ps.observe.work import LongWork

LINE_S: Final = 5.0
"""Seconds between two lines where there is no terminal."""

_REDRAW_S: Final = 0.2


class Progress:
    """Shows `work` while the context lasts; a thread of its own draws, so the work is not slowed down.

    Args:
        what: a word for the work: "verifying".
        work: the work, which the caller or another thread advances.
        out: the destination; None = nothing is shown.
        line_s: pause between lines where `out` is not a terminal, in seconds.
        clock: returns monotonic seconds.
    """

    def __init__(
        self,
        what: str,
        work: LongWork,
        out: TextIO | None,
        *,
        line_s: float = LINE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what, self._work, self._out, self._line_s, self._clock = what, work, out, line_s, clock
        self._began_s = clock()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def line(self) -> str:
        """Return its progress as text: name, bytes, per cent, rate and time left, as far as they are known."""
        done, total = self._work.done_bytes, self._work.total_bytes
        rate = done / max(1e-9, self._clock() - self._began_s)
        fields = [f"{size(done)} of {size(total)} ({100 * done // total} %)" if total else size(done)]
        if done:
            fields.append(f"{size(rate)}/s")
        if 0 < done < total:
            fields.append(f"{duration((total - done) / rate)} left")
        return f"{self._what}: {', '.join(fields)}"

    def __enter__(self) -> Progress:
        if self._out is not None:
            draw = self._redraw if self._out.isatty() else self._write_lines
            self._thread = threading.Thread(target=draw, args=(self._out,), name="axon-ps progress", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join(1.0)

    def _write_lines(self, out: TextIO) -> None:
        while not self._over.wait(self._line_s):
            out.write(f"{self.line()}\n")
            out.flush()

    def _redraw(self, out: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        def drawn() -> Table:
            row = Table.grid(padding=(0, 1))
            total = self._work.total_bytes
            row.add_row(ProgressBar(total or None, self._work.done_bytes, width=20, pulse=not total), self.line())
            return row

        with Live(drawn(), console=Console(file=out), auto_refresh=False, transient=True) as live:
            while not self._over.wait(_REDRAW_S):
                live.update(drawn(), refresh=True)

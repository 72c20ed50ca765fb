"""One terminal for many processes: every line under the name of the process that wrote it.

Whole lines only, so that lines of two processes never mix. A line that a process keeps rewriting with carriage returns
(a progress bar) is shown on a terminal as the last line, redrawn below whatever else is written; elsewhere only its
final state is. After an interrupt the tracebacks of `KeyboardInterrupt` are left out: the user knows.
"""

from __future__ import annotations

import codecs
import os
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO

TRACEBACK = "Traceback (most recent call last):"
_KEPT_LINES = 200
_LONGEST_LINE = 1 << 16
_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
_CURSOR = re.compile(r"\x1b\[(?:\?25[lh]|[0-9]*[KAJG])")
_CHAINED = ("During handling of the above", "The above exception was", TRACEBACK)


class Console:
    """Where the lines of all processes end up.

    Args:
        out: where their standard output goes.
        err: where their standard error goes, and what we say ourselves.
        colour: whether names are coloured and progress is redrawn; in `out` only if that is a terminal too.

    Attributes:
        interrupted: whether Ctrl-C was pressed.
        lines: how many were written.
        last_writer: whose line was the last one; None when it was ours.
        on_broken_pipe: called when the reader of `out` or `err` has gone; what is written to it then is dropped.
    """

    def __init__(self, out: TextIO, err: TextIO, *, colour: bool) -> None:
        self._out, self._err, self._colour = out, err, colour
        self._colours_out = colour and out.isatty()
        self._sources: list[Source] = []
        self._progress = ""
        self.interrupted = False
        self.lines = 0
        self.last_writer: Source | None = None
        self.on_broken_pipe: Callable[[], None] = lambda: None

    def source(self, name: str) -> Source:
        """A new process by this name; one that takes the place of another has its colour."""
        earlier = next((source.colour for source in self._sources if source.name == name), None)
        source = Source(self, name, earlier or _COLOURS[len(self._sources) % len(_COLOURS)])
        self._sources.append(source)
        return source

    def say(self, text: str, *, error: bool = False) -> None:
        """Write a line of our own to `err`."""
        self._write(f"\x1b[31m{text}\x1b[0m" if error and self._colour else text, self._err)
        self.last_writer = None

    def line(self, source: Source, text: str, *, error: bool) -> None:
        """Write a line of a process."""
        prefix = self._prefix(source, colour=self._colour if error else self._colours_out)
        self._write(f"{prefix} {text}", self._err if error else self._out)
        self.last_writer = source

    def progress(self, source: Source, text: str) -> None:
        """Show the line that a process is rewriting; nothing where there is no terminal."""
        if self._colour:
            self._progress = f"{self._prefix(source, colour=True)} {text}"
            self._err.write(f"\r\x1b[2K{self._progress}")
            self._err.flush()

    def end_progress(self) -> None:
        """The process has finished the line it was rewriting."""
        if self._progress:
            self._progress = ""
            self._err.write("\r\x1b[2K")

    def _write(self, text: str, stream: TextIO) -> None:
        clear = "\r\x1b[2K" if self._progress else ""
        self.lines += 1
        try:
            stream.write(f"{clear}{text}\n")
            stream.flush()
        except BrokenPipeError:
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), stream.fileno())
            self.on_broken_pipe()
        if self._progress:
            self._err.write(self._progress)
            self._err.flush()

    def _prefix(self, source: Source, *, colour: bool) -> str:
        return f"\x1b[{source.colour}m[{source.name}]\x1b[0m" if colour else f"[{source.name}]"


class Source:
    """The two streams of one process, cut into lines.

    Attributes:
        name: what its lines are marked with.
        first_trouble: the number, among all lines of the console, of its first traceback or error line (ours begin with
            "axon-ps: "); None when there is none. Tells cause from effect.
    """

    def __init__(self, console: Console, name: str, colour: int) -> None:
        self.name, self.colour = name, colour
        self.first_trouble: int | None = None
        self._console = console
        self._streams = {False: _Stream(), True: _Stream()}
        self._rewriting = False
        self._errors: deque[str] = deque(maxlen=_KEPT_LINES)
        self._held: list[str] = []

    def feed(self, data: bytes, *, error: bool) -> None:
        """Take what the process wrote to its standard error or output; empty data ends the stream."""
        stream = self._streams[error]
        for line in stream.lines(data):
            self._line(line, error=error)
        if stream.rewritten:
            self._rewriting = True
            self._console.progress(self, stream.rewritten)

    def last_words(self) -> Sequence[str]:
        """The end of its standard error, from the last traceback on, else the last few lines."""
        lines = list(self._errors)
        starts = [i for i, line in enumerate(lines) if line.startswith(TRACEBACK)]
        return lines[starts[-1] :] if starts else lines[-10:]

    def _line(self, line: str, *, error: bool) -> None:
        if self._rewriting:
            self._rewriting = False
            self._console.end_progress()
        if error:
            self._errors.append(line)
            if line.startswith((TRACEBACK, "axon-ps: ")) and self.first_trouble is None:
                self.first_trouble = self._console.lines
            if self._console.interrupted and self._hold(line):
                return
        self._console.line(self, line, error=error)

    def _hold(self, line: str) -> bool:
        """Keep back a traceback until its last line says what it is of; whether `line` is kept back."""
        if not self._held and not line.startswith(TRACEBACK):
            return False
        self._held.append(line)
        if line and not line[0].isspace() and not line.startswith(_CHAINED):
            held, self._held = self._held, []
            for kept in [] if line.startswith("KeyboardInterrupt") else held:
                self._console.line(self, kept, error=True)
        return True


class _Stream:
    """Bytes in, lines out; of a line that is being rewritten only the present state is kept."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""
        self.rewritten = ""

    def lines(self, data: bytes) -> Iterator[str]:
        """The lines that `data` completes; what is left over is one when `data` is empty, the end."""
        text = self._rest + self._decoder.decode(data, final=not data)
        *whole, rest = text.split("\n")
        self.rewritten = _shown(rest) if "\r" in rest else ""
        self._rest = rest[rest.rstrip("\r").rfind("\r") + 1 :]
        if self._rest and (not data or len(self._rest) > _LONGEST_LINE):
            whole.append(self._rest)
            self._rest = self.rewritten = ""
        return (_shown(line) for line in whole)


def _shown(line: str) -> str:
    """What a terminal shows of a line after its carriage returns."""
    return _CURSOR.sub("", line.rstrip("\r").rpartition("\r")[2])

"""One terminal for many processes: every line under the name of the process that wrote it.

Only complete lines are written, so that lines of two processes never mix. A line that a process keeps rewriting with
carriage returns (a progress bar) is shown on a terminal as the last line, redrawn below all other output; elsewhere
only its final state is written. After an interrupt the tracebacks of `KeyboardInterrupt` are left out.
"""

from __future__ import annotations

import codecs
import os
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO

OURS = "axon-ps: "
TRACEBACK = "Traceback (most recent call last):"
_MAX_ERROR_LINES = 200
_MAX_LINE = 1 << 16
_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
_CURSOR = re.compile(r"\x1b\[(?:\?25[lh]|[0-9]*[KAJG])")
_RANK = re.compile(r"\[rank\d+\]: ")
"""The prefix of torch.distributed before each line of a traceback."""
_CHAINED = ("During handling of the above", "The above exception was", TRACEBACK)


class Console:
    """Writes the lines of all processes to one terminal.

    Args:
        out: gets their standard output.
        err: gets their standard error, and the launcher's own lines.
        colour: whether names are coloured and progress is redrawn; in `out` only if that is a terminal too.

    Attributes:
        interrupted: whether Ctrl-C was pressed.
        lines: the number of lines written.
        last_writer: the process whose line was the last one; None when it was the launcher's.
        on_broken_pipe: called when the reader of `out` or `err` has closed it; later output to it is dropped.
    """

    def __init__(self, out: TextIO, err: TextIO, *, colour: bool) -> None:
        self._out, self._err, self._colour = out, err, colour
        self._colours_out = colour and out.isatty()
        self._sources: list[ProcessOutput] = []
        self._progress = ""
        self.interrupted = False
        self.lines = 0
        self.last_writer: ProcessOutput | None = None
        self.on_broken_pipe: Callable[[], None] = lambda: None

    def source(self, name: str) -> ProcessOutput:
        """Add a process of this name; the replacement of an earlier one gets its colour."""
        earlier = next((source.colour for source in self._sources if source.name == name), None)
        source = ProcessOutput(self, name, earlier or _COLOURS[len(self._sources) % len(_COLOURS)])
        self._sources.append(source)
        return source

    def print(self, text: str, *, error: bool = False) -> None:
        """Write a line of the launcher to `err`."""
        self._write(f"\x1b[31m{text}\x1b[0m" if error and self._colour else text, self._err)
        self.last_writer = None

    def line(self, source: ProcessOutput, text: str, *, error: bool) -> None:
        """Write a line of a process."""
        prefix = self._prefix(source, colour=self._colour if error else self._colours_out)
        self._write(f"{prefix} {text}", self._err if error else self._out)
        self.last_writer = source

    def progress(self, source: ProcessOutput, text: str) -> None:
        """Show the line that a process is rewriting; nothing if there is no terminal."""
        if self._colour:
            self._progress = f"{self._prefix(source, colour=True)} {text}"
            self._put(f"\r\x1b[2K{self._progress}", self._err)

    def end_progress(self) -> None:
        """Remove the line that a process was rewriting, since it is finished."""
        if self._progress:
            self._progress = ""
            self._put("\r\x1b[2K", self._err)

    def _write(self, text: str, stream: TextIO) -> None:
        clear = "\r\x1b[2K" if self._progress else ""
        self.lines += 1
        self._put(f"{clear}{text}\n", stream)
        if self._progress:
            self._put(self._progress, self._err)

    def _put(self, text: str, stream: TextIO) -> None:
        try:
            stream.write(text)
            stream.flush()
        except BrokenPipeError:
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), stream.fileno())
            self.on_broken_pipe()

    def _prefix(self, source: ProcessOutput, *, colour: bool) -> str:
        return f"\x1b[{source.colour}m[{source.name}]\x1b[0m" if colour else f"[{source.name}]"


class ProcessOutput:
    """The two streams of one process, split into lines.

    Attributes:
        name: the prefix of its lines.
        failed_at: the number, among all lines of the console, of its first traceback or error line (those of axon_ps
            begin with "axon-ps: "). If it wrote none, it is the number of the next line when it ended; None before
            that. The process with the lowest number failed first.
    """

    def __init__(self, console: Console, name: str, colour: int) -> None:
        self.name, self.colour = name, colour
        self.failed_at: int | None = None
        self._console = console
        self._streams = {False: _Stream(), True: _Stream()}
        self._rewriting = False
        self._errors: deque[str] = deque(maxlen=_MAX_ERROR_LINES)
        self._buffered: list[str] = []

    def feed(self, data: bytes, *, error: bool) -> None:
        """Process output that was written to standard error or output; empty data ends the stream."""
        stream = self._streams[error]
        for line in stream.lines(data):
            self._line(line, error=error)
        if stream.rewritten:
            self._rewriting = True
            self._console.progress(self, stream.rewritten)

    def last_errors(self) -> Sequence[str]:
        """Return the end of its standard error, from the last traceback on, else the last few lines."""
        lines = list(self._errors)
        starts = [i for i, line in enumerate(lines) if _bare(line).startswith(TRACEBACK)]
        return lines[starts[-1] :] if starts else lines[-10:]

    def error(self) -> str:
        """Return the error that ended it, in one line: of its last traceback, or of axon_ps; empty if it wrote none."""
        first, *rest = [_bare(line) for line in self.last_errors()] or [""]
        if first.startswith(TRACEBACK):
            return next((line for line in rest if line and not line[0].isspace()), "")
        return next((line.removeprefix(OURS) for line in (*reversed(rest), first) if line.startswith(OURS)), "")

    def ended(self) -> None:
        """Note that the process has ended; its last output may still come."""
        if self.failed_at is None:
            self.failed_at = self._console.lines

    def _line(self, line: str, *, error: bool) -> None:
        if self._rewriting:
            self._rewriting = False
            self._console.end_progress()
        if error:
            self._errors.append(line)
            if _bare(line).startswith((TRACEBACK, OURS)) and self.failed_at is None:
                self.failed_at = self._console.lines
            if self._console.interrupted and self._buffer(line):
                return
        self._console.line(self, line, error=error)

    def _buffer(self, line: str) -> bool:
        """Buffer a traceback until its last line, which names the error; returns whether `line` was buffered."""
        line = _bare(line)
        if not self._buffered and not line.startswith(TRACEBACK):
            return False
        self._buffered.append(line)
        if line and not line[0].isspace() and not line.startswith(_CHAINED):
            buffered, self._buffered = self._buffered, []
            for each in [] if line.startswith("KeyboardInterrupt") else buffered:
                self._console.line(self, each, error=True)
        return True


class _Stream:
    """Converts bytes to lines; of a line that is being rewritten only the present state is stored."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""
        self.rewritten = ""

    def lines(self, data: bytes) -> Iterator[str]:
        """Return the lines that `data` completes; empty `data` is the end, which completes the last line."""
        text = self._rest + self._decoder.decode(data, final=not data)
        *complete, rest = text.split("\n")
        self.rewritten = _visible(rest) if "\r" in rest else ""
        self._rest = rest[rest.rstrip("\r").rfind("\r") + 1 :]
        if self._rest and (not data or len(self._rest) > _MAX_LINE):
            complete.append(self._rest)
            self._rest = self.rewritten = ""
        return (_visible(line) for line in complete)


def _bare(line: str) -> str:
    """Return a line of a traceback without the rank that torch.distributed writes before it."""
    return _RANK.sub("", line, count=1) if _RANK.match(line) else line


def _visible(line: str) -> str:
    """Return the part of a line that a terminal shows after its carriage returns."""
    return _CURSOR.sub("", line.rstrip("\r").rpartition("\r")[2])

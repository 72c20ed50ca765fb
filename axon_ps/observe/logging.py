"""The log of a process: one line per record, with time, level, role and rank.

Owns: the handler of the logger "axon_ps". Refuses: to change the root logger, which belongs to the user's program.
Importing the library configures nothing: only services call `configure`, those of the command line and of Ray.

| style | format |
|---|---|
| `rich` | coloured, for a terminal |
| `plain` | one line a record; a traceback follows on lines of its own, indented |
| `json` | one JSON object a record; a traceback is a field of it |
| `auto` | `rich` on a terminal, else `plain` |
"""

from __future__ import annotations

import json
import logging
import sys
import time
from enum import Enum
from typing import TextIO

from axon_ps.texts import printable

ROOT = "axon_ps"
"""Name of the parent of all loggers of axon_ps."""


class LogStyle(Enum):
    """The format of log records."""

    AUTO = "auto"
    RICH = "rich"
    PLAIN = "plain"
    JSON = "json"


class IdentityFilter(logging.Filter):
    """Adds role and rank to every record. The rank is known only after joining, so `rank` may be set later.

    Args:
        role: "coordinator", "shard" or "proxy"; the name of the service under Ray.
        rank: the rank; None until it is known.
    """

    def __init__(self, role: str, rank: int | None = None) -> None:
        super().__init__()
        self.role = role
        self.rank = rank

    @property
    def who(self) -> str:
        """The role and, when known, the rank: "shard 1"."""
        return self.role if self.rank is None else f"{self.role} {self.rank}"

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the attributes; never drops a record."""
        record.who, record.role, record.rank = self.who, self.role, self.rank
        return True


class PlainFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.123Z INFO shard 1 shard.server.server: message`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line, and the traceback indented below it."""
        name = record.name.removeprefix(f"{ROOT}.")
        line = f"{_timestamp(record)} {record.levelname} {_who(record)} {name}: {_one_line(record)}"
        if traceback := _traceback(self, record):
            line += "\n" + "\n".join(f"    {printable(traced)}" for traced in traceback.splitlines())
        return line


class _RichFormatter(logging.Formatter):
    """`shard 1: message`; rich adds time and level, and does not escape control sequences."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record), lines=True)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, role, rank, logger, message, traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one JSON object."""
        value: dict[str, object] = {
            "time": _timestamp(record),
            "level": record.levelname,
            "role": getattr(record, "role", ""),
            "rank": getattr(record, "rank", None),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if traceback := _traceback(self, record):
            value["traceback"] = traceback
        return json.dumps(value)


def configure(
    role: str,
    *,
    rank: int | None = None,
    style: LogStyle = LogStyle.AUTO,
    level: str = "INFO",
    stream: TextIO | None = None,
) -> IdentityFilter:
    """Send all records of axon_ps to `stream`; a later call replaces the configuration of an earlier one.

    Args:
        role: the role of this process.
        rank: its rank, if known.
        style: the format of records.
        level: the lowest level that is written; the job's log (`observe.log_buffer`) has INFO in any case.
        stream: the output; None = standard error as it is now.

    Returns:
        The identity in every record; set its `rank` once it is known.
    """
    stream = stream if stream is not None else sys.stderr
    if style is LogStyle.AUTO:
        style = LogStyle.RICH if stream.isatty() else LogStyle.PLAIN
    identity = IdentityFilter(role, rank)
    handler = _handler(style, stream)
    handler.addFilter(identity)
    handler.setLevel(level.upper())
    logger = logging.getLogger(ROOT)
    logger.handlers[:] = [handler]
    logger.setLevel(min(handler.level, logging.INFO))
    logger.propagate = False
    return identity


def _handler(style: LogStyle, stream: TextIO) -> logging.Handler:
    if style is LogStyle.RICH:
        from rich.console import Console
        from rich.logging import RichHandler

        rich_handler = RichHandler(console=Console(file=stream), show_path=False, log_time_format="%H:%M:%S")
        rich_handler.setFormatter(_RichFormatter("%(who)s: %(message)s"))
        return rich_handler
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if style is LogStyle.JSON else PlainFormatter())
    return handler


def _timestamp(record: logging.LogRecord) -> str:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03d}Z"


def _who(record: logging.LogRecord) -> str:
    return str(getattr(record, "who", "-"))


def _one_line(record: logging.LogRecord) -> str:
    return printable(record.getMessage())


def _traceback(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    return formatter.formatException(record.exc_info) if record.exc_info else ""

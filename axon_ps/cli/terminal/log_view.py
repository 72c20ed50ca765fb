"""The records of a job's log: the selection that is shown, and its form."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from axon_ps.cli.terminal.quantities import seconds_of
from axon_ps.errors import ConfigurationError
from axon_ps.texts import printable
from axon_ps.wire.v1 import common_pb2, logs_pb2

LEVELS: Final = ("debug", "info", "warning", "error", "critical")
_ROLES: Final = {common_pb2.ROLE_WORKER: "worker", common_pb2.ROLE_SHARD: "shard"}
_COLOURS: Final = (36, 32, 35, 34, 96, 92, 95, 94)
_LEVEL_COLOURS: Final = ((logging.ERROR, 31), (logging.WARNING, 33))


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The records that are shown.

    Attributes:
        level: the lowest, as Python's logging has it.
        since_s: the earliest time, in seconds since 1970.
        processes: role, as of the schema, and rank; empty = all.
    """

    level: int = 0
    since_s: float = 0.0
    processes: Sequence[tuple[int, int]] = ()

    @classmethod
    def of(cls, level: str, since: str, workers: Sequence[int], servers: Sequence[int], now_s: float) -> Wanted:
        """Make it from options.

        Raises:
            ConfigurationError: the level or the time is malformed.
        """
        if level.lower() not in LEVELS:
            raise ConfigurationError(f"--level is {level!r}; it must be one of {', '.join(LEVELS)}")
        return cls(
            level=logging.getLevelNamesMapping()[level.upper()],
            since_s=now_s - seconds_of(since, "--since") if since else 0.0,
            processes=[
                *((common_pb2.ROLE_WORKER, rank) for rank in workers),
                *((common_pb2.ROLE_SHARD, rank) for rank in servers),
            ],
        )

    def has(self, record: logs_pb2.LogRecord) -> bool:
        """Return True if a record is one of them."""
        named = not self.processes or (record.role, record.rank) in self.processes
        return named and record.level >= self.level and record.at_s >= self.since_s


def line(record: logs_pb2.LogRecord, *, colour: bool) -> str:
    """Return a record as text; its further lines are indented, and nothing in it can move the cursor."""
    first, *others = printable(record.text, lines=True).split("\n")
    level = logging.getLevelName(record.level)
    if colour:
        clock = time.strftime("%H:%M:%S", time.localtime(record.at_s))
        painted = next((paint for lowest, paint in _LEVEL_COLOURS if record.level >= lowest), 0)
        head = f"{clock} {_painted(_who(record), _colour_of(record))} {_painted(level, painted)} "
    else:
        head = f"{_timestamp(record)} {level} {_who(record)} {printable(record.logger).removeprefix('axon_ps.')}: "
    return "\n".join([head + first, *(f"    {other}" for other in others)])


def as_dict(record: logs_pb2.LogRecord) -> dict[str, object]:
    """Return a record for programs, with the names of `--log json`."""
    member = record.role in _ROLES
    return {
        "time": _timestamp(record),
        "level": logging.getLevelName(record.level),
        "role": _ROLES[record.role] if member else "coordinator",
        "rank": record.rank if member else None,
        "node": record.node,
        "logger": record.logger,
        "message": record.text,
    }


def _who(record: logs_pb2.LogRecord) -> str:
    """Return the process of a record: "worker 1"."""
    return f"{_ROLES[record.role]} {record.rank}" if record.role in _ROLES else "coordinator"


def _timestamp(record: logs_pb2.LogRecord) -> str:
    at_s = min(max(0.0, record.at_s), _LATEST_S)
    return datetime.fromtimestamp(at_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


_LATEST_S: Final = 253402300799.0  # the latest that has a date


def _colour_of(record: logs_pb2.LogRecord) -> int:
    """Return the colour of a process; coordinator, shard servers and workers begin at different colours."""
    return _COLOURS[(2 * record.role + record.rank) % len(_COLOURS)]


def _painted(text: str, colour: int) -> str:
    return f"\x1b[{colour}m{text}\x1b[0m" if colour else text

"""Progress of long work, counted in bytes that are really done: uploads, checkpoints, copies.

The thread that does the work calls `advance`. A display reads `done_bytes` and `total_bytes`, here or, as a member's
measures, in another process. The library prints nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

KINDS: Final = ("upload", "snapshot", "restore", "copy")
"""Kinds of work of a shard server."""


@dataclass
class LongWork:
    """Work under way. One thread advances it, others may read.

    Attributes:
        kind: one of `KINDS`, or a caller's own name.
        total_bytes: bytes of all the work; 0 = not known yet.
        done_bytes: bytes that are done.
    """

    kind: str = ""
    total_bytes: int = 0
    done_bytes: int = 0

    def advance(self, count_bytes: int) -> None:
        """Count further bytes as done."""
        self.done_bytes += count_bytes


def to_measures(works: Iterable[LongWork]) -> dict[str, float]:
    """Return work as measures of a member; several of a kind are added up."""
    measures: dict[str, float] = {}
    for work in works:
        for name, count in (("done", work.done_bytes), ("total", work.total_bytes)):
            key = f"{work.kind}_{name}_bytes"
            measures[key] = measures.get(key, 0.0) + count
    return measures


def from_measures(members: Iterable[Mapping[str, float]]) -> list[LongWork]:
    """Return the work that is under way on all members together, by kind."""
    found = []
    known = list(members)
    for kind in KINDS:
        done, total = (sum(m.get(f"{kind}_{name}_bytes", 0.0) for m in known) for name in ("done", "total"))
        if total > 0:
            found.append(LongWork(kind, int(total), int(done)))
    return found


def process_measures(statistics: Mapping[str, float]) -> dict[str, float]:
    """Return the measures that every member has: bytes sent and received, memory, seconds of CPU used.

    Args:
        statistics: statistics of its data plane, with the totals `bytes_in` and `bytes_out`.
    """
    return {
        "sent_bytes": statistics.get("bytes_out", 0.0),
        "received_bytes": statistics.get("bytes_in", 0.0),
        "memory_bytes": float(resident_bytes()),
        "cpu_s": time.process_time(),
    }


def resident_bytes() -> int:
    """Return the memory of this process that is in RAM; 0 if unknown."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0

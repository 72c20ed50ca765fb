"""The log of the job's processes, in bounded memory. Pure.

When it is full, the oldest records of the process with most bytes are dropped. So a process that logs without end loses
its own records, and not the others'. The records of former members stay.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Sequence
from typing import Final

from axon_ps.texts import printable
from axon_ps.wire.v1 import logs_pb2

MAX_BYTES: Final = 8 << 20
MAX_TEXT: Final = 8000
MAX_NAME: Final = 128
PAGE_RECORDS: Final = 500
PAGE_BYTES: Final = 1 << 19

_RECORD_BYTES: Final = 512
"""Approximate bytes of a record beside its contents."""

_WARNING: Final = 30
_MAX_LEVEL: Final = 1000

Process = tuple[int, int]
"""Role, with the numbers of the schema, and rank."""

COORDINATOR: Final[Process] = (0, 0)


class Logs:
    """The log of a job since this coordinator leads.

    Attributes:
        dropped: number of dropped records.
    """

    def __init__(self) -> None:
        self.dropped = 0
        self._records: list[logs_pb2.LogRecord] = []
        self._of: dict[Process, deque[logs_pb2.LogRecord]] = {}
        self._bytes: Counter[Process] = Counter()
        self._total = 0
        self._number = 0

    def add(self, process: Process, node: str, records: Sequence[logs_pb2.LogRecord], dropped: int = 0) -> None:
        """Add records of a process.

        Args:
            process: role and rank; see `COORDINATOR`.
            node: its node.
            records: its newest records.
            dropped: the number of records that it has dropped before these.
        """
        if dropped:
            text = f"{dropped} records of this process are missing here: it logs more than the job's log takes"
            at_s = records[0].at_s if records else 0.0
            records = [logs_pb2.LogRecord(at_s=at_s, level=_WARNING, logger="axon_ps", text=text), *records]
        role, rank = process
        for given in records:
            self._number += 1
            record = logs_pb2.LogRecord(
                at_s=given.at_s if math.isfinite(given.at_s) else 0.0,
                level=min(given.level, _MAX_LEVEL),
                logger=printable(given.logger, MAX_NAME),
                text=printable(given.text, MAX_TEXT, lines=True),
                number=self._number,
                role=role,  # type: ignore[arg-type]
                rank=rank,
                node=node,
            )
            self._records.append(record)
            self._of.setdefault(process, deque()).append(record)
            self._bytes[process] += _size(record)
            self._total += _size(record)
        if self._total > MAX_BYTES:
            self._drop_oldest()

    def after(self, number: float) -> tuple[Sequence[logs_pb2.LogRecord], bool]:
        """Return the records after a number that fit into a reply, and True if there are more."""
        begin = end = bisect_right(self._records, number, key=lambda record: record.number)
        size = 0
        while end < len(self._records) and end - begin < PAGE_RECORDS and size < PAGE_BYTES:
            size += _size(self._records[end])
            end += 1
        return self._records[begin:end], end < len(self._records)

    def _drop_oldest(self) -> None:
        """Drop the oldest records of the process with most bytes, until a tenth of the capacity is free."""
        dropped = set()
        while self._total > 0.9 * MAX_BYTES:
            process = max(self._bytes, key=self._bytes.__getitem__)
            record = self._of[process].popleft()
            self._bytes[process] -= _size(record)
            self._total -= _size(record)
            dropped.add(record.number)
        self._records = [record for record in self._records if record.number not in dropped]
        self.dropped += len(dropped)


def _size(record: logs_pb2.LogRecord) -> int:
    return _RECORD_BYTES + record.ByteSize()

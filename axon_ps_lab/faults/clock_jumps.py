"""Wall clocks that jump: `time.time` of a process is the host's time, plus an offset that the test sets.

Test and processes map a small file with an offset for each process. Only the wall clock jumps, as by NTP or by hand;
monotonic clocks do not.
"""

from __future__ import annotations

import mmap
import struct
import time
from pathlib import Path

from axon_ps.errors import InvalidRequest
from axon_ps_lab.faults.injector import MAX_PROCESSES

_TABLE = "clocks.table"
_OFFSET = struct.Struct("<d")


def install(directory: Path, slot: int) -> None:
    """Add the offset that the test sets for `slot` to this process's wall clock."""
    with open(directory / _TABLE, "r+b") as file:
        table = mmap.mmap(file.fileno(), 0)
    true_time, at = time.time, slot * _OFFSET.size

    def shifted_time() -> float:
        return true_time() + float(_OFFSET.unpack_from(table, at)[0])

    time.time = shifted_time


class Clocks:
    """The test's side: the offset of each process's wall clock.

    Args:
        directory: a directory of the test.
    """

    def __init__(self, directory: Path) -> None:
        (directory / _TABLE).write_bytes(bytes(MAX_PROCESSES * _OFFSET.size))
        with open(directory / _TABLE, "r+b") as file:
            self._table = mmap.mmap(file.fileno(), 0)

    def jump(self, slot: int, seconds: float) -> None:
        """Set the offset of a process's wall clock to the host's, in seconds; negative = it is slow.

        Raises:
            InvalidRequest: there are too many processes.
        """
        if not 0 <= slot < MAX_PROCESSES:
            raise InvalidRequest(f"slot {slot} was given; it must be below {MAX_PROCESSES}")
        _OFFSET.pack_into(self._table, slot * _OFFSET.size, seconds)

    def close(self) -> None:
        """Close the file; the offsets remain."""
        self._table.close()

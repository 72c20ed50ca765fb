"""A coordinator's state on disk, as disks and people leave it: it cannot be written, is a copy, or has lost its end."""

from __future__ import annotations

import os
import random
import resource
import signal
from collections.abc import Mapping
from pathlib import Path

from axon_ps.host.children import Child


def cannot_write(process: Child) -> None:
    """From now on what a process writes to files fails: sqlite tells of an input/output error."""
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (0, 0))


def copy(process: Child, state: Path) -> Mapping[Path, bytes]:
    """The files of a process's state, which it does not write to meanwhile."""
    process.send_signal(signal.SIGSTOP)
    try:
        return {path: path.read_bytes() for path in _files(state)}
    finally:
        process.send_signal(signal.SIGCONT)


def put_back(files: Mapping[Path, bytes], state: Path) -> str:
    """Put a copy in the place of what there is; what there is to note."""
    size = 0
    for path in _files(state):
        size += path.stat().st_size
        path.unlink()
    for path, content in files.items():
        path.write_bytes(content)
    return f"a copy of {sum(map(len, files.values()))} bytes in place of {size}"


def cut_journal(state: Path, seed: int) -> str:
    """Cut the end of a state's journal; what there is to note."""
    journal = _journal(state)
    if not journal.exists() or not (size := journal.stat().st_size):
        return "there was no journal"
    remaining = random.Random(seed).randrange(size)
    os.truncate(journal, remaining)
    return f"the journal has {remaining} of {size} bytes"


def _journal(state: Path) -> Path:
    return state.with_name(f"{state.name}-wal")  # sqlite's


def _files(state: Path) -> list[Path]:
    return [path for path in (state, _journal(state)) if path.exists()]

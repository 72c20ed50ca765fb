"""Faults of a coordinator's state on disk: it cannot be written, is replaced by an old copy, or has lost its end."""

from __future__ import annotations

import os
import random
import resource
import signal
from collections.abc import Mapping
from pathlib import Path

from axon_ps.host.children import Child


def cannot_write(process: Child) -> None:
    """Make all further writes of a process to files fail: sqlite reports an input/output error."""
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (0, 0))


def copy(process: Child, state: Path) -> Mapping[Path, bytes]:
    """Return the files of a process's state; the process is stopped meanwhile."""
    process.send_signal(signal.SIGSTOP)
    try:
        return {path: path.read_bytes() for path in _files(state)}
    finally:
        process.send_signal(signal.SIGCONT)


def put_back(files: Mapping[Path, bytes], state: Path) -> str:
    """Replace a state by a copy; returns a note for the report."""
    size = 0
    for path in _files(state):
        size += path.stat().st_size
        path.unlink()
    for path, content in files.items():
        path.write_bytes(content)
    return f"a copy of {sum(map(len, files.values()))} bytes in place of {size}"


def cut_journal(state: Path, seed: int) -> str:
    """Cut the end of a state's journal; returns a note for the report."""
    journal = _journal(state)
    if not journal.exists() or not (size := journal.stat().st_size):
        return "there was no journal"
    remaining = random.Random(seed).randrange(size)
    os.truncate(journal, remaining)
    return f"the journal has {remaining} of {size} bytes"


def _journal(state: Path) -> Path:
    return state.with_name(f"{state.name}-wal")  # sqlite's name


def _files(state: Path) -> list[Path]:
    return [path for path in (state, _journal(state)) if path.exists()]

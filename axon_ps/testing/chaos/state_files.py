"""A coordinator's state on disk, as disks and people leave it: it cannot be written, is a copy, or has lost its end."""

from __future__ import annotations

import os
import random
import resource
import signal
from collections.abc import Mapping
from pathlib import Path

from axon_ps.host.children import Child

JOURNAL = "-wal"
"""The end of the name of sqlite's journal."""


def cannot_write(process: Child) -> None:
    """From now on what a process writes to files fails: sqlite tells of an input/output error."""
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (0, 0))


def copy(process: Child, directory: Path) -> Mapping[Path, bytes]:
    """The files of a process's state, which it does not write to meanwhile."""
    process.send_signal(signal.SIGSTOP)
    try:
        return {path: path.read_bytes() for path in directory.iterdir() if path.is_file()}
    finally:
        process.send_signal(signal.SIGCONT)


def put_back(files: Mapping[Path, bytes], directory: Path) -> str:
    """Put a copy in the place of what there is; what there is to note."""
    size = 0
    for path in [path for path in directory.iterdir() if path.is_file()]:
        size += path.stat().st_size
        path.unlink()
    for path, content in files.items():
        path.write_bytes(content)
    return f"a copy of {sum(map(len, files.values()))} bytes in place of {size}"


def cut_journal(directory: Path, seed: int) -> str:
    """Cut the end of sqlite's journal; what there is to note."""
    journals = [path for path in directory.iterdir() if path.name.endswith(JOURNAL) and path.stat().st_size]
    if not journals:
        return "there was no journal"
    size = journals[0].stat().st_size
    remaining = random.Random(seed).randrange(size)
    os.truncate(journals[0], remaining)
    return f"the journal has {remaining} of {size} bytes"

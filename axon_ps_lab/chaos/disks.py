"""A small disk that can be filled: a tmpfs that root can mount, or a directory of a file system that exists."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from axon_ps.errors import ConfigurationError

BALLAST: Final = "ballast"
_BLOCK_BYTES: Final = 1 << 20
_MOST_BYTES: Final = 1 << 30
_MOUNT_S: Final = 10.0


@contextlib.contextmanager
def small_disk(directory: Path, size_bytes: int) -> Iterator[Path]:
    """Mount a file system of that size on a new directory, for a `with` block.

    Raises:
        ConfigurationError: this user, or this machine, cannot mount a file system.
    """
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes},mode=700", "axon-ps-chaos", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_MOUNT_S)
    if done.returncode:
        raise ConfigurationError(
            f"full_disk needs a small file system, and none can be mounted here ({done.stderr.strip()}); run the "
            "campaign as root, give [embedded] disk, an empty directory of a small one, or leave full_disk out"
        )
    try:
        yield directory
    finally:
        subprocess.run(["umount", "-l", str(directory)], capture_output=True, timeout=_MOUNT_S)


def fill(directory: Path) -> int:
    """Write a file until the disk is full; returns its bytes.

    Raises:
        ConfigurationError: the disk is not small.
    """
    written = 0
    with open(directory / BALLAST, "wb", buffering=0) as file:
        for size in (_BLOCK_BYTES, 4096):
            with contextlib.suppress(OSError):
                while written < _MOST_BYTES:
                    written += file.write(bytes(size))
    if written >= _MOST_BYTES:
        empty(directory)
        raise ConfigurationError(
            f"disk = {os.fspath(directory)!r} has more than {_MOST_BYTES >> 30} GiB free, which is too much to fill; "
            "give a directory of a small file system"
        )
    return written


def empty(directory: Path) -> None:
    """Remove the file that fills the disk."""
    (directory / BALLAST).unlink(missing_ok=True)

"""The memory of a process."""

from __future__ import annotations

from pathlib import Path


def resident_bytes(pid: int) -> int:
    """Return the bytes of a process that are in RAM and do not belong to a file; 0 = the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "RssShmem:")))

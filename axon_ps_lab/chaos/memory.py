"""The memory of a process."""

from __future__ import annotations

from pathlib import Path


def resident_bytes(pid: int) -> int:
    """Memory of a process that is in RAM and is no file's; 0 = it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "RssShmem:")))

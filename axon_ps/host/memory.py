"""The memory that this process could still get, by the limits of the machine, its control groups and its own."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_CGROUPS: Final = Path("/sys/fs/cgroup")
_UNLIMITED: Final = 1 << 60


def available_bytes() -> int:
    """Return the bytes that this process could allocate and use now; 0 if unknown."""
    found = [free for _, free in _pools()]
    soft = resource.getrlimit(resource.RLIMIT_AS)[0]
    if soft != resource.RLIM_INFINITY:
        found.append(max(0, soft - _size_bytes()))
    return min(found, default=0)


def oom_kills() -> int:
    """Return the number of processes that the kernel has killed for lack of memory; 0 if unknown."""
    counts = dict(line.split() for line in _text(Path("/proc/vmstat")).splitlines())
    return int(counts.get("oom_kill", 0))


def pool() -> str:
    """Return a name of the memory that limits `available_bytes`: processes with the same name share it."""
    pools = sorted(_pools(), key=lambda pool: pool[1])
    return pools[0][0] if pools else ""


def _pools() -> Iterator[tuple[str, int]]:
    """Yield name and free bytes of the machine's memory, and of each of our control groups that has a limit."""
    machine = _text(Path("/proc/sys/kernel/random/boot_id"))
    for line in _text(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            yield machine, int(line.split()[1]) * 1024
    for group in _groups():
        with contextlib.suppress(OSError, ValueError):
            limit, used = _group_limit(group)
            if limit < _UNLIMITED:
                yield f"{machine}/{os.stat(group).st_ino}", max(0, limit - used)


def _groups() -> Iterator[Path]:
    """Yield the control groups of this process, of both versions, each with its ancestors up to the root."""
    for line in _text(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            root = _CGROUPS / controllers
            group = root / path.lstrip("/")
            while group.is_relative_to(root):
                yield group
                if group == root:
                    break
                group = group.parent


def _group_limit(group: Path) -> tuple[int, int]:
    """Return limit and use of a control group. Pages of files that can be dropped do not count as used."""
    second = (group / "memory.max").exists()
    limit, used = ("memory.max", "memory.current") if second else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    text = (group / limit).read_text().strip()
    if text == "max":
        return _UNLIMITED, 0
    counted = dict(line.split() for line in _text(group / "memory.stat").splitlines())
    return int(text), int((group / used).read_text()) - int(counted.get("inactive_file", 0))


def _size_bytes() -> int:
    """Return the size of our address space."""
    try:
        return int(_text(Path("/proc/self/statm")).split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, IndexError):
        return 0


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""

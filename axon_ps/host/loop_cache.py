"""The folder in which numba keeps this package's compiled loops, and the record that all of them are in it.

Owns: which folder that is, by numba's own rule, and when a record counts. Refuses: to compile; `shard.loops` does that.
Importing this imports no numba, so a command can look before it starts anything.

Invariant: a record names the files that it speaks of, and the machine and sources that they are of. Where one of them
is gone, or anything is different, it does not count.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Final

_PACKAGE: Final = Path(__file__).parents[1]
_SOURCES: Final = ("kernels", "optim", "compress", "shard/loops.py")
"""The files that decide which loops there are, and with which types they are called."""
_CPU: Final = ("vendor_id", "cpu family", "model", "stepping", "flags", "cpu implementer", "cpu part", "features")
"""The fields of /proc/cpuinfo on the kind of a processor, and not on its clock."""


def folder() -> Path | None:
    """The folder of numba's loops: NUMBA_CACHE_DIR, one beside the sources, or the user's cache.

    It is the first of them that can be written. None where none can: then every process compiles what it calls.
    """
    return next((place for place in _places() if _can_be_written(place)), None)


def is_complete() -> bool:
    """Whether every loop is compiled for this machine, as a record says; True where nothing can be kept."""
    if (place := folder()) is None:
        return True
    try:
        names = json.loads((place / record_name()).read_text(encoding="utf-8"))
        return all((place / name).exists() for name in names)
    except (OSError, ValueError):
        return False


def record(place: Path, sources: str) -> None:
    """Write that all loops are in a folder.

    Args:
        place: the folder.
        sources: the hash that is in the names of their files.
    """
    names = sorted(str(path.relative_to(place)) for path in place.rglob("*.nb[ic]") if sources in path.name)
    if not names:
        return
    with contextlib.suppress(OSError):  # it is only asked again
        fd, written = tempfile.mkstemp(dir=place)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            json.dump(names, file)
        os.replace(written, place / record_name())


def fill(source: Path) -> None:
    """Copy another folder's loops to this machine's, if it has none: those of a container's image into its memory.

    Each file is there as a whole or not at all, and the indexes come after what they name.

    Args:
        source: a folder that was NUMBA_CACHE_DIR when the loops were compiled; nothing is copied where there is none.
    """
    if (place := folder()) is None or next(place.rglob("*.nbi"), None):
        return
    for suffix in ("nbc", "nbi", "loops"):
        for file in source.rglob(f"*.{suffix}"):
            target = place / file.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            fd, copy = tempfile.mkstemp(dir=target.parent)
            os.close(fd)
            shutil.copyfile(file, copy)
            os.replace(copy, target)


def compiler_environment() -> dict[str, str]:
    """The environment of the program that compiles: without threads of numpy's, which a fork does not have."""
    return {**os.environ, "OPENBLAS_NUM_THREADS": "1"}


def record_name() -> str:
    """The name of a record's file: of these sources, in this place, compiled by this numba for this processor."""
    settings = [f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith("NUMBA_") and "CACHE" not in k]
    digest = hashlib.sha256("\n".join((_compiled_from(), *settings)).encode()).hexdigest()
    return f"axon-ps-{digest[:16]}.loops"


@functools.cache
def _compiled_from() -> str:
    """The sources, the compiler, and the kind of processor."""
    contents = hashlib.sha256()
    for path in (_PACKAGE / source for source in _SOURCES):
        for file in sorted(path.glob("*.py")) if path.is_dir() else [path]:
            contents.update(file.read_bytes())
    versions = [metadata.version(library) for library in ("numba", "llvmlite", "numpy")]
    of_python = str(sys.implementation.cache_tag)
    return "\n".join((str(_PACKAGE), contents.hexdigest(), of_python, *versions, platform.machine(), *_processor()))


def _places() -> Iterator[Path]:
    if configured := os.environ.get("NUMBA_CACHE_DIR"):
        yield Path(configured)
    yield _PACKAGE / "kernels" / "__pycache__"
    with contextlib.suppress(RuntimeError):  # a user without a home, as some containers have
        yield Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "numba"


def _can_be_written(place: Path) -> bool:
    existing = next((path for path in (place, *place.parents) if path.exists()), place)
    return existing.is_dir() and os.access(existing, os.W_OK)


def _processor() -> list[str]:
    """The kind of this processor."""
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
    except OSError:
        return [platform.processor()]
    return [line for line in first.splitlines() if line.partition("\t")[0].strip().lower().startswith(_CPU)]

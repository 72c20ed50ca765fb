"""The folder in which numba keeps this package's compiled loops, and the record that all of them are in it.

Owns: the choice of the folder, by numba's own rule, and the validity of a record. Refuses: to compile. `shard.loops`
does that. Importing this imports no numba, so a command can check the record before it starts anything.

Invariant: a record names the files that it covers, and their machine and sources. If a file is gone, or anything is
different, the record is not valid.
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
"""The files that define the loops, and the types with which they are called."""
_CPU: Final = ("vendor_id", "cpu family", "model", "stepping", "flags", "cpu implementer", "cpu part", "features")
"""The fields of /proc/cpuinfo that describe the kind of a processor, and not its clock."""


def folder() -> Path | None:
    """Return the folder of numba's loops: NUMBA_CACHE_DIR, a folder beside the sources, or the user's cache.

    It is the first of them that is writable. None if none is: then every process compiles the loops that it calls.
    """
    return next((directory for directory in _candidates() if _can_be_written(directory)), None)


def is_complete() -> bool:
    """Return True if a record shows that every loop is compiled for this machine, or if no folder is writable."""
    if (directory := folder()) is None:
        return True
    try:
        names = json.loads((directory / record_name()).read_text(encoding="utf-8"))
        return all((directory / name).exists() for name in names)
    except (OSError, ValueError):
        return False


def record(directory: Path, sources: str) -> None:
    """Write the record that all loops are in a folder.

    Args:
        directory: the folder.
        sources: the hash of the sources, which is in the names of the loops' files.
    """
    names = sorted(str(path.relative_to(directory)) for path in directory.rglob("*.nb[ic]") if sources in path.name)
    if not names:
        return
    with contextlib.suppress(OSError):  # without a record, the folder is only checked again
        fd, written = tempfile.mkstemp(dir=directory)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            json.dump(names, file)
        os.replace(written, directory / record_name())


def fill(source: Path) -> None:
    """Copy another folder's loops to this machine's folder, if that has none: for example those of a container's image.

    Each file appears complete or not at all, and an index is copied after the files that it names.

    Args:
        source: a folder that was NUMBA_CACHE_DIR when the loops were compiled. If it does not exist, nothing is copied.
    """
    if (directory := folder()) is None or next(directory.rglob("*.nbi"), None):
        return
    for suffix in ("nbc", "nbi", "loops"):
        for file in source.rglob(f"*.{suffix}"):
            target = directory / file.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            fd, copy = tempfile.mkstemp(dir=target.parent)
            os.close(fd)
            shutil.copyfile(file, copy)
            os.replace(copy, target)


def compiler_environment() -> dict[str, str]:
    """Return the environment of the compiling program: numpy starts no threads in it, since a fork would lack them."""
    return {**os.environ, "OPENBLAS_NUM_THREADS": "1"}


def record_name() -> str:
    """Return the name of the record's file: it depends on the sources, their folder, numba and the processor."""
    settings = [f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith("NUMBA_") and "CACHE" not in k]
    digest = hashlib.sha256("\n".join((_compiled_from(), *settings)).encode()).hexdigest()
    return f"axon-ps-{digest[:16]}.loops"


@functools.cache
def _compiled_from() -> str:
    """Describe the sources, the compiler, and the kind of processor."""
    contents = hashlib.sha256()
    for path in (_PACKAGE / source for source in _SOURCES):
        for file in sorted(path.glob("*.py")) if path.is_dir() else [path]:
            contents.update(file.read_bytes())
    versions = [metadata.version(library) for library in ("numba", "llvmlite", "numpy")]
    of_python = str(sys.implementation.cache_tag)
    return "\n".join((str(_PACKAGE), contents.hexdigest(), of_python, *versions, platform.machine(), *_processor()))


def _candidates() -> Iterator[Path]:
    if configured := os.environ.get("NUMBA_CACHE_DIR"):
        yield Path(configured)
    yield _PACKAGE / "kernels" / "__pycache__"
    with contextlib.suppress(RuntimeError):  # a user without a home directory, as in some containers
        yield Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "numba"


def _can_be_written(directory: Path) -> bool:
    existing = next((path for path in (directory, *directory.parents) if path.exists()), directory)
    return existing.is_dir() and os.access(existing, os.W_OK)


def _processor() -> list[str]:
    """Describe the kind of this processor."""
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
    except OSError:
        return [platform.processor()]
    return [line for line in first.splitlines() if line.partition("\t")[0].strip().lower().startswith(_CPU)]

"""Removes from an image what its service does not run: shells, package managers, perl, pip, and all other programs.

Python stays, with its libraries, our command and torchrun, and the list of packages (/var/lib/dpkg/status), which
scanners read. It is started as root, without a shell, as the last instruction of a Dockerfile:

    RUN ["python3", "/app/only_python.py"]
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

PROGRAMS = ("/bin", "/sbin", "/usr/bin", "/usr/sbin", "/usr/local/bin", "/usr/local/sbin", "/opt/venv/bin")
KEPT = ("python*", "axon-ps", "torchrun", "ldconfig*")  # ldconfig finds libraries
TREES = (
    "/usr/lib/apt",
    "/usr/lib/dpkg",
    "/usr/libexec",
    "/usr/lib/*/perl*",
    "/usr/share/perl*",
    "/usr/share/python-wheels",
    "/usr/lib/python3/dist-packages/pip*",
    "/usr/lib/python3*/ensurepip",
    "/usr/local/lib/python3*/ensurepip",
    "/usr/local/lib/python3*/site-packages/*",  # the base's: pip; the environment is /opt/venv
    "/var/cache/apt",
    "/var/lib/apt",
)


def programs() -> Iterator[Path]:
    """Yield the programs that would be found by their names, and are not kept."""
    folders = {Path(folder).resolve() for folder in PROGRAMS if Path(folder).is_dir()}
    for program in (each for folder in sorted(folders) for each in folder.iterdir()):
        if not any(program.match(kept) for kept in KEPT):
            yield program


def removed(path: Path) -> None:
    """Remove a file, link or tree."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def main() -> None:
    """Remove everything, and this file last."""
    trees = [path for pattern in TREES for path in Path("/").glob(pattern.lstrip("/"))]
    for path in [*programs(), *trees]:
        removed(path)
    Path(__file__).unlink()


if __name__ == "__main__":
    main()

"""The oldest axon_ps of this protocol version, from the history of the repository, and one of the version before it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from axon_ps.errors import ConfigurationError
from axon_ps.wire.build import PROTOCOL

ROOT = Path(__file__).parents[2]
_NUMBER = re.compile(r"^(PROTOCOL|OLDEST): Final = \d+$", re.MULTILINE)


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigurationError(
            f"the history of {ROOT} is needed and cannot be read ({done.stderr.strip()}); use a clone that has all of "
            "it (git fetch --unshallow)"
        )
    return done.stdout


def oldest_commit() -> str:
    """The first commit that speaks the protocol of this tree.

    It is found by what it contains: ids change when commits are moved to another branch.

    Raises:
        ConfigurationError: there is no history, or not enough of it.
    """
    line = f"^PROTOCOL: Final = {PROTOCOL}$"
    commits = _git("log", "--format=%H", "--reverse", "-G", line, "--", "axon_ps").split()
    if not commits or (ROOT / ".git" / "shallow").exists():
        raise ConfigurationError(
            f"the history has no first commit of protocol {PROTOCOL}; use a clone that has all of it (git fetch "
            "--unshallow), in which the change of the protocol is committed"
        )
    return commits[0]


def extract(commit: str, directory: Path) -> Path:
    """The package of a commit in a directory, which goes to PYTHONPATH; returns that."""
    archive = directory / "older.tar"
    _git("archive", "--output", str(archive), commit, "axon_ps")
    subprocess.run(["tar", "-xf", str(archive), "-C", str(directory)], check=True)
    archive.unlink()
    return directory


def set_protocol(directory: Path, number: int) -> None:
    """Have an extracted package be of another protocol, and refuse no one."""
    numbers = {"PROTOCOL": number, "OLDEST": 0}
    (path,) = [path for path in directory.rglob("build.py") if _NUMBER.search(path.read_text(encoding="utf-8"))]
    text, count = _NUMBER.subn(lambda m: f"{m[1]}: Final = {numbers[m[1]]}", path.read_text(encoding="utf-8"))
    assert count == len(numbers)
    path.write_text(text, encoding="utf-8")

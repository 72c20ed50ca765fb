"""The oldest axon_ps of this protocol version, from the history of the repository; its protocol can be changed."""

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
    """Return the first commit with the protocol of this tree.

    It is found by its content, since ids change when commits are moved to another branch.

    Raises:
        ConfigurationError: the history is missing or not complete, or the protocol's change is not committed.
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
    """Write the package of a commit to a directory, for PYTHONPATH; returns the directory."""
    archive = directory / "older.tar"
    _git("archive", "--output", str(archive), commit, "axon_ps")
    subprocess.run(["tar", "-xf", str(archive), "-C", str(directory)], check=True)
    archive.unlink()
    return directory


def set_protocol(directory: Path, number: int) -> None:
    """Give an extracted package another protocol, and let it accept all older ones."""
    numbers = {"PROTOCOL": number, "OLDEST": 0}
    (path,) = [path for path in directory.rglob("build.py") if _NUMBER.search(path.read_text(encoding="utf-8"))]
    text, count = _NUMBER.subn(lambda m: f"{m[1]}: Final = {numbers[m[1]]}", path.read_text(encoding="utf-8"))
    assert count == len(numbers)
    path.write_text(text, encoding="utf-8")

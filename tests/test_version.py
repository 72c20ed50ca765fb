"""The version is in one place, `axon_ps.__version__`, and agrees with the changelog and with git's tags."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

from axon_ps import __version__

ROOT = Path(__file__).parents[1]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
RELEASES = re.findall(r"^## \[(\d+\.\d+\.\d+)\] - \d{4}-\d\d-\d\d$", CHANGELOG, flags=re.MULTILINE)


def key(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.removesuffix(".dev0").split(".")))


def test_builds_read_the_version_from_the_package_so_that_they_need_no_git_history() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["tool"]["hatch"]["version"] == {"path": "axon_ps/version.py"}
    assert project["project"]["dynamic"] == ["version"]
    source = (ROOT / "axon_ps" / "version.py").read_text(encoding="utf-8")
    assert re.findall(r'^__version__ = "(.*)"$', source, flags=re.MULTILINE) == [__version__]


def test_the_changelog_has_a_section_for_every_release_and_the_version_follows_them() -> None:
    titles = re.findall(r"^## (.*)$", CHANGELOG, flags=re.MULTILINE)
    assert titles[0] == "[Unreleased]"
    assert len(RELEASES) == len(titles) - 1, f"a title is not in the form of Keep a Changelog: {titles}"
    assert sorted(RELEASES, key=key, reverse=True) == RELEASES
    kinds = set(re.findall(r"^### (.*)$", CHANGELOG, flags=re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    if __version__.endswith(".dev0"):
        assert key(__version__) > key(RELEASES[0])
    else:
        assert __version__ == RELEASES[0], "a release has its own section in the changelog"


def test_a_commit_with_a_tag_has_the_version_of_the_tag() -> None:
    try:
        asked = subprocess.run(
            ["git", "tag", "--points-at", "HEAD", "v*"], cwd=ROOT, capture_output=True, text=True, timeout=120
        )
    except FileNotFoundError:  # no git where an sdist is tested
        return
    tags = asked.stdout.split() if asked.returncode == 0 else []
    assert tags in ([], [f"v{__version__}"])

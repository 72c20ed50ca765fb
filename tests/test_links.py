"""Every link of a page leads to a file, and to a heading of it; every page is on the documentation site."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
SITE = ROOT / "docs" / "site" / "mkdocs.yml"
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]*))?\)")
FENCED = re.compile(r"^(```+).*?^\1", re.MULTILINE | re.DOTALL)


def pages() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.split()]


@cache
def headings(page: Path) -> frozenset[str]:
    """Anchors of a page, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text("utf-8")), re.MULTILINE)
    return frozenset(re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles)


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in LINK.findall(FENCED.sub("", page.read_text("utf-8"))):
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), f"{target} is not there"
        if anchor and path.suffix == ".md":
            assert anchor in headings(path), f"{target} has no heading #{anchor}; it has {sorted(headings(path))}"


def test_the_site_has_every_page() -> None:
    shown = set(named(yaml.safe_load(SITE.read_text("utf-8"))["nav"]))
    assert shown == {page.name for page in (ROOT / "docs").glob("*.md")}


def named(menu: Any) -> Iterator[str]:
    """The pages of a menu."""
    if isinstance(menu, str):
        yield menu
    else:
        for entry in menu.values() if isinstance(menu, dict) else menu:
            yield from named(entry)

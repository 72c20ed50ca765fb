"""The documentation is short: the README in words, every page in lines, and the glossary has no private words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAX_README_WORDS = 900
"""As `wc -w` counts them."""

MAX_PAGE_LINES = 200
PAGES = sorted(ROOT.glob("docs/*.md"))
PRIVATE = re.compile(r"\b(rooms?|turns?|places?|standing|marks|churn|due|whole)\b", re.IGNORECASE)
"""Words for which the field has others: capacity, order, destination, rank, cursor, deadline, full."""


def too_many_words(page: Path) -> bool:
    return len(page.read_text(encoding="utf-8").split()) > MAX_README_WORDS


def too_many_lines(page: Path) -> bool:
    return page.read_text(encoding="utf-8").count("\n") > MAX_PAGE_LINES


def test_the_readme_is_read_in_five_minutes() -> None:
    assert not too_many_words(ROOT / "README.md"), "move what not every reader needs to a page of docs/"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_is_about_one_idea(page: Path) -> None:
    assert not too_many_lines(page), "split it by task or idea, and link the parts in docs/index.md"


def test_every_page_is_found_from_the_index() -> None:
    index, operations = (
        page.read_text(encoding="utf-8") for page in (ROOT / "docs/index.md", ROOT / "docs/operations.md")
    )
    linked = set(re.findall(r"\]\((\w+\.md)\)", index + operations))
    assert {page.name for page in PAGES} - linked == {"index.md"}


def test_the_glossary_uses_the_words_of_the_field() -> None:
    assert PRIVATE.findall((ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")) == []


def test_what_is_too_long_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("word\n" * MAX_PAGE_LINES)
    assert not too_many_lines(page)
    assert not too_many_words(page)
    page.write_text("word " * (MAX_README_WORDS + 1) + "\n" * (MAX_PAGE_LINES + 1))
    assert too_many_lines(page)
    assert too_many_words(page)
    assert PRIVATE.findall("There is no room, and the whole place waits its turn.") == [
        "room",
        "whole",
        "place",
        "turn",
    ]

"""What the documentation tells to type, where that needs a library of an extra; `make pages` has the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from page import Block, blocks

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
TRIED = [(page.name, block) for page in PAGES for block in blocks(page.read_text()) if block.needs_extras]
ALONE = {"RAY_OVERRIDE_RESOURCES": '{"CPU": 8}', "RAY_ADDRESS": "local"}
"""As many CPUs as docs/ray.md says that it takes, and not the Ray cluster of another test."""


def label(value: str | Block) -> str:
    return value.scripts[-1][0] if isinstance(value, Block) else value


@pytest.mark.parametrize(("page", "block"), TRIED, ids=label)
def test_what_a_page_tells_to_type_ends_well(page: str, block: Block, tmp_path: Path) -> None:
    block.run(tmp_path, 200.0, ALONE)

"""What the documentation tells to type, page by page.

Scripts of libraries that an extra installs are tried by `make lab NAME=integrations`.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from page import Block, label, shell_blocks

SAYS = {"README.md": ("train.py", r"epoch 1: \d+ steps, loss \d\.\d+")}
"""By page, a program of it and what it prints: a newcomer's first program says that it trains."""

TRIED = [found for found in shell_blocks() if found[1].is_run]


@pytest.mark.parametrize(("page", "block"), TRIED, ids=label)
def test_what_a_page_tells_to_type_ends_well(page: Path, block: Block, tmp_path: Path) -> None:
    output = block.try_in(tmp_path)
    program, says = SAYS.get(page.name, ("", ""))
    if program in dict(block.scripts):
        assert re.search(says, output), output

"""What the documentation tells to type, page by page.

Scripts of libraries that an extra installs are tried by `make integrations`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from page import Block, label, shell_blocks

TRIED = [found for found in shell_blocks() if found[1].is_run]


@pytest.mark.parametrize(("page", "block"), TRIED, ids=label)
def test_what_a_page_tells_to_type_ends_well(page: Path, block: Block, tmp_path: Path) -> None:
    block.try_in(tmp_path)

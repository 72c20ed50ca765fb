"""docs/limits.md has the limits of the code: every number there is that of the constant that its row names."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "limits.md"
ROW = re.compile(r"^\| (?P<what>.+) \| (?P<most>\d+) \| `(?P<module>[a-z0-9_.]+)\.(?P<name>[A-Z_]+)` \|", re.MULTILINE)
ROWS = [(row["module"], row["name"], float(row["most"])) for row in ROW.finditer(PAGE.read_text(encoding="utf-8"))]


@pytest.mark.parametrize(("module", "name", "most"), ROWS, ids=[f"{module}.{name}" for module, name, _ in ROWS])
def test_a_row_has_the_number_of_the_code(module: str, name: str, most: float) -> None:
    assert getattr(importlib.import_module(f"axon_ps.{module}"), name) == most


def test_every_row_is_compared() -> None:
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if re.match(r"\| .* \| `", line)]
    assert len(lines) == len(ROWS) > 40


def test_every_limit_of_the_connections_is_on_the_page() -> None:
    from axon_ps.rpc import limits

    assert {n for n in vars(limits) if n.isupper()} == {name for module, name, _ in ROWS if module == "rpc.limits"}

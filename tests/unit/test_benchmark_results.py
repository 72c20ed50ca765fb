"""The kept results of benchmarks: the lines of a difference are the rows that have changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from axon_ps_lab.report import dumped

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_each_row_has_a_line() -> None:
    content = {"name": "a", "rows": [{"ms": [1.5, 2]}, {"ms": []}], "sizes": [1, 2], "machine": {"cpu": "é"}}
    text = dumped(content)
    assert text == (
        '{\n"name": "a",\n"rows": [\n{"ms": [1.5, 2]},\n{"ms": []}\n],\n"sizes": [1, 2],\n"machine": {"cpu": "é"}\n}\n'
    )
    assert json.loads(text) == content


@pytest.mark.parametrize("path", sorted((BENCHMARKS / "results").rglob("*.*")), ids=lambda path: path.name)
def test_a_result_is_written_so(path: Path) -> None:
    assert path.suffix == ".json", "reports for people are written to build/"
    text = path.read_text(encoding="utf-8")
    assert text == dumped(json.loads(text))

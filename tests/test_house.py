"""What must not rot in the package's order. `make house` prints all of the measures."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import house
from deadlines import WHOLE_S

pytestmark = pytest.mark.usefixtures("without_collector")
GLOSSARY = house.ROOT / "docs" / "glossary.md"


@pytest.fixture(scope="module")
def package() -> dict[str, house.Module]:
    return house.modules()


def test_no_module_imports_itself_in_a_circle(package: Mapping[str, house.Module]) -> None:
    assert house.circles(house.imports(package)) == []


def test_a_circle_is_found() -> None:
    edges = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"a"}}
    assert house.circles(edges) == [["b", "c"]]


def test_a_folder_can_be_read_at_once(package: Mapping[str, house.Module]) -> None:
    assert {k: n for k, n in house.folder_sizes(package).items() if n > house.MAX_FILES} == {}


def test_a_class_is_one_idea(package: Mapping[str, house.Module]) -> None:
    assert {k: n for k, (n, _) in house.class_sizes(package).items() if n > house.MAX_CLASS} == {}


def test_a_module_is_one_job(package: Mapping[str, house.Module]) -> None:
    assert {k: n for k, n in house.module_sizes(package).items() if n > house.MAX_MODULE} == {}


def test_a_walk_is_short() -> None:
    walks = house.ROOT / "tests" / "walks.py"
    done = subprocess.run([sys.executable, str(walks)], capture_output=True, text=True, timeout=WHOLE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_names_use_the_words_of_the_field(package: Mapping[str, house.Module]) -> None:
    assert house.private_words(package) == [], "docs/glossary.md has the words of the field"


@pytest.mark.parametrize(
    "line", ["seat = 1", "class Meeting: ...", "def tell(): ...", "def f(lane): ...", "a.is_ahead = 1", "PIECES = 1"]
)
def test_a_private_word_is_found(line: str, tmp_path: Path) -> None:
    (tmp_path / "axon_ps").mkdir()
    (tmp_path / "axon_ps" / "room.py").write_text(line)
    assert len(house.private_words(house.modules(tmp_path))) == 1


def test_code_is_counted_without_docstrings_comments_and_empty_lines(tmp_path: Path) -> None:
    (tmp_path / "axon_ps").mkdir()
    (tmp_path / "axon_ps" / "room.py").write_text(
        '"""Two\n\nlines."""\n\n\nclass A:\n    """One."""\n\n    # why\n    x = 1  # that\n'
    )
    found = house.modules(tmp_path)
    assert house.module_sizes(found) == {"axon_ps.room": 2}
    assert house.class_sizes(found) == {"axon_ps.room.A": (2, 5)}


def test_the_glossary_has_every_word_once() -> None:
    terms = re.findall(r"^\| ([^|]+?) \|", GLOSSARY.read_text(encoding="utf-8"), re.MULTILINE)
    words = [term for term in terms if term not in ("word", "---")]
    assert len(words) > 60
    assert sorted({w for w in words if words.count(w) > 1}) == []

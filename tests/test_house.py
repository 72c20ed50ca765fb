"""Measures of the packages that must not get worse. `make lab NAME=house` prints all of the measures."""

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


@pytest.fixture(scope="module")
def debts(package: Mapping[str, house.Module]) -> dict[str, list[str]]:
    return house.debts(package)


@pytest.mark.parametrize("debt", house.DEBTS)
def test_a_debt_is_what_it_was_or_less(debt: str, debts: Mapping[str, list[str]]) -> None:
    found, known = debts[debt], house.DEBTS[debt]
    assert len(found) <= known, f"{len(found) - known} more than DEBTS says; see `python tests/house.py --debts {debt}`"
    assert len(found) == known, f"there are fewer: let DEBTS[{debt!r}] in tests/house.py be {len(found)}"


@pytest.mark.parametrize(
    ("debt", "room", "text"),
    [
        ("circles", "b", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from axon_ps.a import one"),
        ("cores", "b", "def f():\n    from axon_ps.a.core import two"),
        ("classes", "b", "class Long:\n" + "    # why\n" * house.MAX_CLASS + "    x = 1"),
        ("names", "b", "class Thing: ..."),
        ("docstrings", "b", 'def f():\n    """Whose file it is."""'),
        ("docstrings", "b", '"""`Who` is asked."""'),
        ("phrases", "b", "# nobody reads it\nx = 1"),
        ("unnamed", "c", ""),
    ],
)
def test_a_planted_fault_is_found(debt: str, room: str, text: str, tmp_path: Path) -> None:
    for path, content in {
        "a/__init__.py": "",
        "a/one.py": "from axon_ps.b import three\nclass Thing: ...\n",
        "a/core/__init__.py": "",
        "a/core/two.py": "",
        "b/__init__.py": "",
        f"{room}/three.py": text,
    }.items():
        (tmp_path / "axon_ps" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "axon_ps" / path).write_text(content)
    (tmp_path / "tests" / "unit").mkdir(parents=True)
    (tmp_path / "tests" / "unit" / "test_a.py").write_text(
        '"""`a/one.py`, `b/three.py`."""\nfrom axon_ps.a.core import two\n'
    )
    found = house.debts(house.modules(tmp_path), tmp_path)
    assert {name: len(places) for name, places in found.items() if places} == {debt: 1}


def test_a_long_subject_is_found_until_it_is_on_main(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True)

    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "Begin")
    assert house.long_subjects(tmp_path) == [], "there is no main to compare with"
    git("update-ref", "refs/remotes/origin/main", "HEAD")
    git("commit", "-q", "--allow-empty", "-m", "a" * house.MAX_SUBJECT)
    git("commit", "-q", "--allow-empty", "-m", "b" * (house.MAX_SUBJECT + 1))
    assert house.long_subjects(tmp_path) == ["b" * (house.MAX_SUBJECT + 1)]
    git("update-ref", "refs/remotes/origin/main", "HEAD")
    assert house.long_subjects(tmp_path) == []


def test_a_circle_is_found() -> None:
    edges = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"a"}}
    assert house.circles(edges) == [["b", "c"]]


def test_a_folder_can_be_read_at_once(package: Mapping[str, house.Module]) -> None:
    assert {k: n for k, n in house.folder_sizes(package).items() if n > house.MAX_FILES} == {}


def test_a_class_is_one_idea(package: Mapping[str, house.Module]) -> None:
    assert {k: n for k, (n, _) in house.class_sizes(package).items() if n > house.MAX_CLASS_CODE} == {}


def test_a_module_is_one_job(package: Mapping[str, house.Module]) -> None:
    assert {k: n for k, n in house.module_sizes(package).items() if n > house.MAX_MODULE} == {}


def test_a_walk_is_short() -> None:
    walks = house.ROOT / "tests" / "walks.py"
    done = subprocess.run([sys.executable, str(walks)], capture_output=True, text=True, timeout=WHOLE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_detour_of_a_gradient_is_seen() -> None:
    walks = [sys.executable, str(house.ROOT / "tests" / "walks.py"), "--detour"]
    done = subprocess.run(walks, capture_output=True, text=True, timeout=WHOLE_S, check=False)
    gradient = done.stdout.partition("a vote, ")[0]
    assert "shard/core/detour.py around" in gradient, done.stdout + done.stderr


def test_names_use_the_words_of_the_field(package: Mapping[str, house.Module]) -> None:
    assert house.private_words(package) == [], "docs/glossary.md has the words of the field"


@pytest.mark.parametrize(
    "line", ["seat = 1", "class Place: ...", "def tell(): ...", "def f(lane): ...", "a.is_due = 1", "PIECES = 1"]
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


def test_the_signatures_of_overloads_are_lines_of_a_class_and_no_code(tmp_path: Path) -> None:
    (tmp_path / "axon_ps").mkdir()
    (tmp_path / "axon_ps" / "room.py").write_text(
        "class A:\n    @overload\n    def f(\n        self\n    ) -> int: ...\n    def f(self):\n        return 1\n"
    )
    assert house.class_sizes(house.modules(tmp_path)) == {"axon_ps.room.A": (3, 7)}


def test_the_glossary_has_every_word_once() -> None:
    terms = re.findall(r"^\| ([^|]+?) \|", GLOSSARY.read_text(encoding="utf-8"), re.MULTILINE)
    words = [term for term in terms if term not in ("word", "---")]
    assert len(words) > 60
    assert sorted({w for w in words if words.count(w) > 1}) == []

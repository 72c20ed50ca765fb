"""docs/features.md names what there is; everything it names exists, says what it is, and a test takes that very thing.

What a test names is looked up by its imports, so a word that happens to be the same does not count. Of methods and
attributes of objects only that they exist and are described is checked: source text does not say whose they are.
"""

from __future__ import annotations

import ast
import contextlib
import enum
import importlib
import inspect
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("without_collector")
ROOT = Path(__file__).parent.parent
FEATURES = ROOT / "docs" / "features.md"
NAME = re.compile(r"`(axon_ps(?:_lab)?(?:\.\w+)+)`")
PACKAGES = ("axon_ps", "axon_ps_lab")


def names() -> list[str]:
    return list(dict.fromkeys(NAME.findall(FEATURES.read_text())))


def resolve(path: str) -> tuple[Any, Any]:
    """What a dotted path names, and what it was found in."""
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError as error:
            if not path.startswith(error.name or " "):
                raise  # what it needs, a library of an extra, is not installed
            continue
        holder = None
        for part in parts[count:-1]:
            found = getattr(found, part)
        if count < len(parts):
            holder, found = found, attribute(found, parts[-1])
        return found, holder
    raise AssertionError(f"nothing of {path} can be imported")


def attribute(holder: Any, name: str) -> Any:
    """An attribute of a module or class; of instances only, what their class's docstring says of it."""
    if hasattr(holder, name):
        return inspect.getattr_static(holder, name) if inspect.isclass(holder) else getattr(holder, name)
    for line in (inspect.getdoc(holder) or "").splitlines():
        if line.strip().startswith(f"{name}:"):
            return line
    raise AssertionError(f"{holder} has no {name}, and its docstring none among its attributes")


def said_of(found: Any, holder: Any, name: str) -> str:
    """The docstring: its own, or the line of its class's docstring that describes it."""
    if isinstance(found, str):
        return found
    own = inspect.getdoc(found) if callable(found) or isinstance(found, (property, staticmethod, classmethod)) else ""
    if own:
        return own
    for text in (inspect.getdoc(holder), inspect.getsource(holder) if inspect.isclass(holder) else ""):
        for line in (text or "").splitlines():
            if re.match(rf"\s*{name}(:|\s*=)", line):
                return line
    return ""


def imported(tree: ast.AST) -> dict[str, Any]:
    """What a test's names stand for that it imports from us."""
    bound: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in (n for n in node.names if n.name.split(".")[0] in PACKAGES):
                with contextlib.suppress(ModuleNotFoundError):  # what needs a library of an extra
                    module = importlib.import_module(name.name)
                    first = name.name.partition(".")[0]
                    bound[name.asname or first] = module if name.asname else importlib.import_module(first)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PACKAGES:
            for name in node.names:
                with contextlib.suppress(ModuleNotFoundError):  # what needs a library of an extra
                    bound[name.asname or name.name] = resolve(f"{node.module}.{name.name}")[0]
    return bound


def value_of(node: ast.AST, bound: dict[str, Any]) -> Any:
    """What an expression of names and dots stands for; None if that is nothing of ours."""
    if isinstance(node, ast.Name):
        return bound.get(node.id)
    if isinstance(node, ast.Attribute):
        return getattr(value_of(node.value, bound), node.attr, None)
    return None


@cache
def taken() -> tuple[dict[int, Any], set[tuple[int, str]]]:
    """What tests name of ours: the things themselves by id, and attributes as (what it is an attribute of, name)."""
    things: dict[int, Any] = {}  # kept, so that nothing else gets their ids
    attributes: set[tuple[int, str]] = set()
    for pattern in ("tests/**/*.py", "axon_ps/testing/**/*.py", "axon_ps_lab/**/*.py"):
        for file in ROOT.glob(pattern):
            tree = ast.parse(file.read_text())
            bound = imported(tree)
            for node in ast.walk(tree):
                if isinstance(node, (ast.Name, ast.Attribute)) and (value := value_of(node, bound)) is not None:
                    things[id(value)] = value
                if isinstance(node, ast.Attribute) and (owner := value_of(node.value, bound)) is not None:
                    attributes.add((id(owner), node.attr))
    return things, attributes


def is_of_instances(found: Any, holder: Any) -> bool:
    """Whether only objects of a class have it: source text does not say what a test calls it on."""
    return inspect.isclass(holder) and not isinstance(found, (staticmethod, classmethod, type, enum.Enum))


@pytest.mark.parametrize("name", names())
def test_a_feature_exists_is_described_and_a_test_names_it(name: str) -> None:
    found, holder = resolve(name)
    last = name.rpartition(".")[2]
    assert said_of(found, holder, last), f"{name} has no docstring"
    things, attributes = taken()
    if isinstance(holder, enum.EnumMeta):  # tests go through all of them
        assert id(holder) in things, f"no test names {holder}"
    elif not is_of_instances(found, holder):
        assert id(found) in things or (id(holder), last) in attributes, f"no test names {name}"


def test_a_word_is_not_a_use(tmp_path: Path) -> None:
    tree = ast.parse(
        "from axon_ps.parallel import SGD as Plain\nimport axon_ps\nbarrier = 1\naxon_ps.World.mock(2)\nPlain"
    )
    bound = imported(tree)
    named = {id(v) for node in ast.walk(tree) if (v := value_of(node, bound)) is not None}
    assert id(resolve("axon_ps.parallel.SGD")[0]) in named
    assert id(resolve("axon_ps.World")[0]) in named
    assert id(resolve("axon_ps.barrier")[0]) not in named


def test_documents_named_exist() -> None:
    linked = re.findall(r"\]\(([\w./-]+\.md)\)", FEATURES.read_text())
    assert linked
    assert [link for link in linked if not (FEATURES.parent / link).exists()] == []

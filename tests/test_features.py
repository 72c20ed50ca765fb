"""docs/features.md names what there is; everything it names exists, says what it is, is tested and documented."""

from __future__ import annotations

import enum
import importlib
import inspect
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
FEATURES = ROOT / "docs" / "features.md"
NAME = re.compile(r"`(axon_ps(?:\.\w+)+)`")


def names() -> list[str]:
    return list(dict.fromkeys(NAME.findall(FEATURES.read_text())))


def resolve(path: str) -> tuple[Any, Any]:
    """What a dotted path names, and what it was found in."""
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
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


@cache
def text_of(*patterns: str) -> str:
    files = [file for pattern in patterns for file in ROOT.glob(pattern) if file not in (FEATURES, Path(__file__))]
    return "\n".join(file.read_text() for file in files)


@pytest.mark.parametrize("name", names())
def test_a_feature_exists_is_described_and_tested(name: str) -> None:
    found, holder = resolve(name)
    last = name.rpartition(".")[2]
    assert said_of(found, holder, last), f"{name} has no docstring"
    if isinstance(holder, enum.EnumMeta):  # tests go through all of them
        last = holder.__name__
    assert re.search(rf"\b{last}\b", text_of("tests/**/*.py", "axon_ps/testing/**/*.py")), f"no test uses {name}"


def test_documents_named_exist() -> None:
    linked = re.findall(r"\]\(([\w./-]+\.md)\)", FEATURES.read_text())
    assert linked
    assert [link for link in linked if not (FEATURES.parent / link).exists()] == []

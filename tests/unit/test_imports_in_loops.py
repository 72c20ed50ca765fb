"""No `import` statement is inside an `async def`: an event loop that imports is held, by gRPC and rich for 0.25 s.

An import is made before the loop runs, in the function that starts it or at the top of a module that this function
imports. `tests/integration/test_loops_import_nothing.py` runs the commands, and finds imports that coroutines reach by
calls.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

_AIOHTTP = "it was imported when the `HttpServer` was made"

ALLOWED: Mapping[str, str] = {
    "axon_ps/coordinator/server/page/routes.py": _AIOHTTP,
    "axon_ps/rpc/http.py": _AIOHTTP,
    "axon_ps/rpc/server.py": "it was imported when the server was started",
}
"""Files that have such statements, and why none of them holds a loop."""


def imports_of_coroutines(tree: ast.AST, inside: bool = False) -> Iterator[int]:
    """Lines of the statements that a coroutine performs itself, and not a function that is defined in it."""
    for node in ast.iter_child_nodes(tree):
        if inside and isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node.lineno
        function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef))
        yield from imports_of_coroutines(node, isinstance(node, ast.AsyncFunctionDef) if function else inside)


def test_no_coroutine_imports() -> None:
    found: dict[str, list[int]] = {}
    for package in ("axon_ps", "axon_ps_lab"):
        for path in sorted((ROOT / package).rglob("*.py")):
            if lines := list(imports_of_coroutines(ast.parse(path.read_text(encoding="utf-8")))):
                found[path.relative_to(ROOT).as_posix()] = lines
    assert {file: lines for file, lines in found.items() if file not in ALLOWED} == {}
    assert ALLOWED.keys() <= found.keys(), "these have no such statement any more"


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("async def f():\n    import rich", [2]),
        ("async def f():\n    if True:\n        from rich import box", [3]),
        ("def f():\n    async def g():\n        import rich", [3]),
        ("async def f():\n    def g():\n        import rich", []),
        ("def f():\n    import rich\n    async def g(): ...", []),
    ],
)
def test_a_planted_import_is_found(source: str, lines: list[int]) -> None:
    assert list(imports_of_coroutines(ast.parse(source))) == lines

"""docs/environment.md has one table of every environment variable that is read; the sources have the same ones."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from axon_ps.cli.settings import PREFIX, Settings

pytestmark = pytest.mark.usefixtures("without_collector")
ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "environment.md"
OF_LAUNCHERS = re.compile(
    r"(AXON_PS|OMPI|PMI|PMIX|SLURM|MPI|TORCHELASTIC|MASTER|GROUP|LOCAL|TORCH|GRPC|NUMBA|OMP)_[A-Z_]+"
    r"|RANK|WORLD_SIZE|https?_proxy"
)
SET_ONLY = {
    *("TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RESTART_COUNT"),  # by `axon-ps run`, for scripts
    *("PATH", "PYTEST_CURRENT_TEST"),  # by shells and pytest, for campaigns and the watchdog of event loops
}


def table() -> list[str]:
    return re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), flags=re.MULTILINE)


def named(tree: ast.AST) -> Iterator[str]:
    """Strings that are variables' names, and whatever else an environment is asked for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and OF_LAUNCHERS.fullmatch(node.value):
            yield node.value
        asked: ast.expr | None = None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("get", "pop"):
            asked, of = (node.args[0] if node.args else None), node.func.value
        elif isinstance(node, ast.Subscript):
            asked, of = node.slice, node.value
        if isinstance(asked, ast.Constant) and re.search(r"env(iron(ment)?)?$", ast.unparse(of)):
            yield str(asked.value)


def test_the_table_has_every_variable_that_the_sources_name_and_no_other() -> None:
    found = {f"{PREFIX}{field.upper()}" for field in Settings.model_fields}
    for path in (*(ROOT / "axon_ps").rglob("*.py"), *(ROOT / "axon_ps_lab").rglob("*.py")):
        if path.parent.name != "v1" and path.parts[-2] != "testing":
            found |= set(named(ast.parse(path.read_text())))
    listed = table()
    assert sorted(set(listed)) == sorted(listed), "a variable stands twice"
    assert sorted(found - SET_ONLY) == sorted(listed)


def test_a_variable_that_is_read_is_found() -> None:
    source = "env.get('FOO')\nos.environ['BAR']\nx = 'SLURM_NEW'\nenvironment.pop('BAZ', '')\n{}.get('NO')\n"
    assert set(named(ast.parse(source))) == {"FOO", "BAR", "SLURM_NEW", "BAZ"}

"""Scripts as users write them pass mypy and pyright, both strict, without a cast or an ignore; and they run.

`assert_type` in them holds the types of results. mypy runs here, on the types that a user gets: those of the package
in this environment. pyright has to be installed for that: `pip install 'pyright[nodejs]'`, which downloads it from npm.
"""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import axon_ps
from axon_ps.testing import run_threads

HERE = Path(__file__).parent
PYRIGHT = shutil.which("pyright", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
SCRIPTS = sorted(path for path in HERE.glob("*.py") if path.name != Path(__file__).name)


def checked(command: list[str], directory: Path) -> None:
    """Copy the scripts away from our own settings, and check them there."""
    for script in SCRIPTS:
        shutil.copy(script, directory)
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr


def test_there_are_ten_without_an_ignore_or_a_cast() -> None:
    assert len(SCRIPTS) >= 10
    for script in SCRIPTS:
        text = script.read_text(encoding="utf-8")
        assert "assert_type" in text, script
        assert not re.search(r"#\s*(type|pyright|mypy):|\bcast\(", text), script
    assert Path(axon_ps.__file__).with_name("py.typed").exists()


def test_mypy_is_content(tmp_path: Path) -> None:
    cache = ["--cache-dir", str(tmp_path / "cache"), "--config-file", "/dev/null"]
    checked([sys.executable, "-m", "mypy", "--strict", *cache, *(script.name for script in SCRIPTS)], tmp_path)


@pytest.mark.skipif(PYRIGHT is None, reason="pyright is not installed")
def test_pyright_is_content(tmp_path: Path) -> None:
    assert PYRIGHT is not None
    (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "strict"}')
    checked([PYRIGHT, "--pythonpath", sys.executable], tmp_path)


@pytest.mark.parametrize("script", SCRIPTS, ids=[script.stem for script in SCRIPTS])
def test_it_runs(script: Path) -> None:
    first, second = run_threads(runpy.run_path(str(script), run_name=script.stem)["main"], 2)
    assert type(first) is type(second)
    assert first is not None

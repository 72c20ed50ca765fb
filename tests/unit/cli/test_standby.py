"""A standby imports what a script will, and then is the worker. Tests of `cli/launch/standby.py`."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from axon_ps.cli.launch import standby
from axon_ps.cli.launch.standby import imports_of


def test_modules_that_are_installed_are_imported_and_the_users_own_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    script = tmp_path / "train.py"
    script.write_text(
        "'''Trains.'''\n"
        "from __future__ import annotations\n"
        "import json, os.path as path, mine\n"
        "import numpy as np\n"
        "from axon_ps.parallel import FSDP\n"
        "from mine import model\n"
        "from . import beside\n"
        "import not_installed_anywhere\n"
        "if True:\n    import socket\n"
        "def late():\n    import ssl\n"
    )
    assert list(imports_of(str(script))) == ["__future__", "json", "os.path", "numpy", "axon_ps.parallel"]


@pytest.mark.parametrize("content", [b"import json\n1 +", b"import json\0", None], ids=["syntax", "binary", "missing"])
def test_a_script_that_python_cannot_read_has_no_imports(content: bytes | None, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    if content is not None:
        script.write_bytes(content)
    assert list(imports_of(str(script))) == []


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """This process, as far as a standby changes it; the standby has nothing to import."""
    monkeypatch.setattr(standby, "_prepare", lambda script: None)
    monkeypatch.setattr(os, "dup2", lambda source, target: None)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setenv("RANK", "")
    found: dict[str, object] = {}
    monkeypatch.setattr(sys, "found", found, raising=False)
    return found


def given(monkeypatch: pytest.MonkeyPatch, line: bytes) -> None:
    """The launcher writes a line to the standby's input, or ends."""
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(line), fileno=lambda: 0))


SCRIPT = (
    "import os, sys\nsys.found.update(rank=os.environ['RANK'], name=__name__, argv=list(sys.argv), path=sys.path[0])\n"
)


def test_a_standby_is_the_worker_whose_rank_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, process: dict[str, object]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    given(monkeypatch, json.dumps({"RANK": "3"}).encode() + b"\n")
    standby.main([str(script), "--lr", "0.1"])
    argv = [str(script), "--lr", "0.1"]
    assert process == {"rank": "3", "name": "__main__", "argv": argv, "path": str(tmp_path.resolve())}
    assert sys.modules["__main__"].__file__ == str(script), "for pickles and children"


def test_a_standby_may_be_of_a_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, process: dict[str, object]
) -> None:
    (tmp_path / "trained_as_module.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    given(monkeypatch, json.dumps({"RANK": "3"}).encode() + b"\n")
    standby.main(["-m", "trained_as_module", "--lr", "0.1"])
    assert (process["rank"], process["name"], process["path"]) == ("3", "__main__", os.getcwd())
    assert process["argv"] == [str(tmp_path / "trained_as_module.py"), "--lr", "0.1"]


def test_a_standby_that_is_not_needed_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, process: dict[str, object]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    given(monkeypatch, b"")
    standby.main([str(script)])
    assert not process


def test_a_traceback_begins_with_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, process: dict[str, object]
) -> None:
    script = tmp_path / "train.py"
    script.write_text("def train():\n    1 / 0\ntrain()\n")
    given(monkeypatch, b"{}\n")
    shown: list[list[str]] = []

    def hook(kind: object, error: BaseException, trace: object) -> None:
        at, names = error.__traceback__, []
        while at is not None:
            names.append(at.tb_frame.f_code.co_name)
            at = at.tb_next
        shown.append(names)

    monkeypatch.setattr(sys, "__excepthook__", hook)
    with pytest.raises(ZeroDivisionError) as raised:
        standby.main([str(script)])
    trace = raised.value.__traceback__
    assert trace is not None
    sys.excepthook(ZeroDivisionError, raised.value, trace.tb_next)
    assert shown == [["<module>", "train"]]

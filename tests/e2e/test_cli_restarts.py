"""`axon-ps run --max-restarts --standby`: a worker that fails is replaced in its place, and nobody else is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from command_line import axon_ps

DIES_FIRST = """
import json, os, pickle, signal, sys
if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os.kill(os.getpid(), signal.SIGKILL)
class Mine: pass
assert type(pickle.loads(pickle.dumps(Mine()))) is Mine
print(json.dumps({
    "rank": os.environ["RANK"], "local": os.environ["LOCAL_RANK"], "restarts": os.environ["TORCHELASTIC_RESTART_COUNT"],
    "name": __name__, "file": __file__, "argv": sys.argv, "path": sys.path[0], "main": sys.modules["__main__"].__file__,
    "stdin": sys.stdin.read(), "standby": "axon_ps.cli.standby" in sys.orig_argv,
}))
"""

FAILS = """
import json
raise ValueError("never happy")
"""


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        (tmp_path / "train.py").write_text(text)
        return str(tmp_path / "train.py")

    return write


@pytest.mark.parametrize("standby", [0, 1])
def test_a_worker_that_dies_is_replaced_in_its_place(standby: int, script: Callable[[str], str]) -> None:
    path = script(DIES_FIRST)
    options = ["--standby", "1"] if standby else ["--max-restarts", "1"]
    done = axon_ps("run", "--nproc-per-node", "2", *options, path, "--lr", "1")
    assert done.returncode == 0, done.stderr
    told = {}
    for line in done.stdout.splitlines():
        name, _, text = line.partition("] ")
        told[name.strip("[")] = json.loads(text)
    assert sorted(told) == ["worker 0", "worker 1"]
    zero, one = told["worker 0"], told["worker 1"]
    assert (one["rank"], one["local"], one["restarts"], one["standby"]) == ("1", "1", "1", bool(standby))
    assert (zero["rank"], zero["local"], zero["restarts"], zero["standby"]) == ("0", "0", "0", False)
    for same in ("name", "file", "argv", "path", "main", "stdin"):
        assert one[same] == zero[same], same
    assert one["argv"] == [path, "--lr", "1"]
    how = "a standby takes its place" if standby else "it is started again"
    assert f"axon-ps: worker 1 was ended by SIGKILL; {how} (restart 1 of 1)" in done.stderr.splitlines()


def test_when_restarts_are_used_up_the_run_ends_with_the_workers_error(script: Callable[[str], str]) -> None:
    done = axon_ps("run", "--standby", "1", script(FAILS))
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert "axon-ps: worker 0 exited with code 1 after 1 restart" in lines
    tracebacks = [i for i, line in enumerate(lines) if line == "[worker 0] Traceback (most recent call last):"]
    first, second = (lines[i : i + 4] for i in tracebacks[:2])
    assert first == second, "a standby's traceback shows nothing of us"
    assert second[-1] == "[worker 0] ValueError: never happy"

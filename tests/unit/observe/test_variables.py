"""observe.variables: what is read is known and documented, and what is nearly one of them is noticed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from axon_ps.cli.main import main
from axon_ps.observe.variables import KNOWN, PREFIX, misspelt
from axon_ps.worker.bootstrap.job import find_job

PAGE = Path(__file__).parents[3] / "docs" / "environment.md"


def test_every_variable_of_ours_is_known() -> None:
    """The table has those that the sources name: `tests/test_environment_variables.py`."""
    table = re.findall(r"^\| `(\w+)` \|", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert {name for name in table if name.startswith(PREFIX)} == KNOWN


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("CORDINATOR", "COORDINATOR"),
        ("TOKENFILE", "TOKEN_FILE"),
        ("CHECKPOINTS_DIR", "CHECKPOINT_DIR"),
        ("LOGLEVEL", "LOG_LEVEL"),
        ("COORDINATOR", ""),
        ("COORDINATOR_PORT", ""),
        ("COORDINATOR_SERVICE_HOST", ""),
        ("SHARD_PORT_7078_TCP_ADDR", ""),
        ("MY_OWN", ""),
    ],
)
def test_a_name_that_is_nearly_known_is_noticed(name: str, meant: str) -> None:
    found = misspelt([f"{PREFIX}{name}", "PATH"])
    assert list(found) == ([f"{PREFIX}{name}"] if meant else [])
    assert all(message.endswith(f"; is '{PREFIX}{meant}' meant?") for message in found.values())


def test_every_known_name_is_noticed_without_one_of_its_letters() -> None:
    for name in KNOWN:
        if len(name) > len(PREFIX) + 3:
            assert misspelt([name[:-2] + name[-1]]) or name[:-2] + name[-1] in KNOWN, name


def test_the_command_line_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("AXON_PS_COORDINATOR", raising=False)
    monkeypatch.setenv("AXON_PS_CORDINATOR", "h:1")
    assert main(["status"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first == "axon-ps: AXON_PS_CORDINATOR is set, and nothing reads it; is 'AXON_PS_COORDINATOR' meant?"
    assert second.startswith("axon-ps: which coordinator?")


@pytest.mark.parametrize(("rank", "says"), [("0", True), ("1", False)])
def test_one_worker_says_so(rank: str, says: bool, caplog: pytest.LogCaptureFixture) -> None:
    env = {"RANK": rank, "WORLD_SIZE": "2", "AXON_PS_COORDINATOR": "h:1", "AXON_PS_BACKENDS": "gloo"}
    find_job(env, 1.0).close()
    assert ("AXON_PS_BACKENDS is set, and nothing reads it; is 'AXON_PS_BACKEND' meant?" in caplog.text) == says

"""`axon-ps chaos run`: mistakes are found before anything is started, and what it prints in the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from axon_ps.cli.main import main
from axon_ps_lab.commands.chaos import summary


@pytest.fixture(autouse=True)
def _no_variables_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COORDINATOR", "TOKEN", "TOKEN_FILE", "JOB", "INSECURE", "CONFIG"):
        monkeypatch.delenv(f"AXON_PS_{name}", raising=False)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("seed = ", "is no TOML"),
        ("[kinds.meteor]", "there is no kind 'meteor'"),
        ("[kinds.reset]\n[job]", "reset cannot be had in a running job"),
        ("[kinds.kill]\nroles = ['shard']\n[job]", "which job? Give coordinator"),
    ],
)
def test_a_mistake_is_one_line(text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "campaign.toml"
    file.write_text(text)
    assert main(["chaos", "run", str(file), "--out", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert words in err
    assert [path.name for path in tmp_path.iterdir()] == ["campaign.toml"]


def test_a_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", "run", str(tmp_path / "none.toml")]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_a_job_that_does_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "campaign.toml"
    file.write_text("[kinds.kill]\nroles = ['shard']\n[job]\ncoordinator = '127.0.0.1:1'")
    assert main(["chaos", "run", str(file), "--out", str(tmp_path)]) == 1
    assert "no coordinator answers at 127.0.0.1:1" in capsys.readouterr().err


REPORT: dict[str, Any] = {
    "faults": 3, "planned": 5, "seed": 1, "seconds": 7.4, "steps": 40, "steps_lost": 0, "samples_lost": None,
    "samples_doubled": None, "bits_different": None, "next_commit_median_s": 0.2, "next_commit_worst_s": 1.5,
    "memory": [{"process": "shard-0 (7)", "growth": 1.5, "is_flat": False}], "problems": ["a service ended"],
    "stopped": "it was interrupted",
}  # fmt: skip


def test_the_summary_has_what_is_wrong_and_what_is_not_known() -> None:
    assert summary(REPORT) == [
        "3 of 5 faults (seed 1) in 7 s, 40 steps",
        "steps lost: 0; samples lost: not known, doubled: not known; bits different: not known",
        "next commit: median 0.2 s, worst 1.5 s",
        "memory of shard-0 (7) grew to 1.50 of what it was",
        "WRONG: a service ended",
        "it ended early: it was interrupted",
    ]

"""`axon-ps doctor --measure`: what the library costs on a machine, measured small."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from axon_ps.cli.main import main
from axon_ps_lab.commands.measure import FLOOR_S, Sizes
from axon_ps_lab.simulate.profile import DEFAULT, Profile
from deadlines import HANG_S


def small(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = partial(Sizes, large_numel=1 << 16, calls=4, repetitions=3)
    monkeypatch.setattr("axon_ps_lab.commands.measure.Sizes", sizes)


def test_the_measured_profile_is_written_and_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small(monkeypatch)
    path = tmp_path / "profile.json"
    path.write_text("something before")
    assert main(["doctor", "--measure", str(path), "--json"]) == 0
    out, err = capsys.readouterr()
    profile = Profile.read(path)
    assert Profile.of(json.loads(out)) == profile
    assert [entry.name for entry in tmp_path.iterdir()] == ["profile.json"]
    assert profile.cores == len(os.sched_getaffinity(0))
    assert profile.wires.keys() == DEFAULT.wires.keys()
    assert profile.update_s.keys() >= DEFAULT.update_s.keys()
    for each in (profile.worker_call_s, profile.server_call_s, profile.decision_s, *profile.update_s.values()):
        assert FLOOR_S < each < 1.0
    for wire in profile.wires:
        assert f"\n{wire}: " in err


def test_the_figures_are_shown_as_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("axon_ps_lab.commands.measure.measure", lambda *_: DEFAULT)
    assert main(["doctor", "--measure", str(tmp_path / "profile.json")]) == 0
    out = capsys.readouterr().out
    for name in (*DEFAULT.wires, *DEFAULT.update_s):
        assert name in out
    assert Profile.read(tmp_path / "profile.json") == DEFAULT


@pytest.mark.parametrize(
    ("file", "words"), [("nowhere/profile.json", "there is no directory"), (".", "it is a directory")]
)
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    file: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unexpected(*_: object) -> None:
        raise AssertionError("it was measured")

    monkeypatch.setattr("axon_ps_lab.commands.measure.measure", unexpected)
    assert main(["doctor", "--measure", str(tmp_path / file)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err


def test_no_torch_is_needed() -> None:
    script = "import sys, axon_ps_lab.commands.measure; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=HANG_S).returncode == 0

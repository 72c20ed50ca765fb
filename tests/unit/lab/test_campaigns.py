"""`make lab`: every campaign is there, and is run as its row says."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from axon_ps_lab import __main__ as lab


@pytest.mark.parametrize("name", lab.campaigns())
def test_the_files_of_a_campaign_are_there(name: str) -> None:
    campaign = lab.campaigns()[name]
    files = [word for word in campaign.command if "/" in word]
    modules = [word for word in campaign.command if word.startswith("axon_ps_lab.")]
    assert files or modules, campaign
    assert [module for module in modules if importlib.util.find_spec(module) is None] == []
    assert [file for file in files if not (lab.ROOT / file).exists()] == []
    assert campaign.does


def test_benchmarks_are_listed_and_their_parts_are_not() -> None:
    found = lab.campaigns()
    assert "whole_step" in found
    assert "step_worker" not in found


def test_a_campaign_gets_its_arguments_and_its_exit_code_is_returned(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code = "import sys; print(sys.argv[1:]); sys.exit(3)"
    monkeypatch.setattr(lab, "campaigns", lambda: {"mine": lab.Campaign(command=("-c", code, "first"), does="it")})
    assert lab.main(["mine", "--seconds", "6 0"]) == 3
    assert capfd.readouterr().out.strip() == "['first', '--seconds', '6 0']"


def test_an_unknown_name_gets_the_list() -> None:
    run = subprocess.run([sys.executable, "-m", "axon_ps_lab", "fuz"], capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert "there is no fuz" in run.stderr
    assert "\nfuzz " in run.stdout


def test_an_installation_says_that_scripts_are_of_a_checkout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lab, "ROOT", tmp_path)
    assert lab.main([]) == 2
    assert "a checkout" in capsys.readouterr().err

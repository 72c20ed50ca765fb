"""`make gpu` where there is no GPU: one line that says so, nothing run, a failure."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from axon_ps_lab.device import stand_in

ROOT = Path(__file__).parents[2]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmarks/gpu.py, called without arguments."""
    spec = importlib.util.spec_from_file_location("gpu", ROOT / "benchmarks" / "gpu.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    return module


def cuda_of_torch(monkeypatch: pytest.MonkeyPatch, available: bool) -> None:
    torch: Any = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)


@pytest.mark.parametrize(("torchs", "cupys"), [(False, 8), (True, 0)])
def test_without_a_gpu_it_says_so_in_one_line(
    gpu: ModuleType, torchs: bool, cupys: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cuda_of_torch(monkeypatch, torchs)
    with stand_in(devices=cupys):
        assert gpu.main() == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert said.err.startswith("make gpu: there is no GPU to use on this machine, so nothing was run (")


def test_with_one_it_does_every_part_and_says_which_failed(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cuda_of_torch(monkeypatch, True)
    done: list[str] = []
    parts = {part: lambda options, part=part: done.append(part) or part != "job" for part in gpu.DO}
    monkeypatch.setattr(gpu, "DO", parts)
    with stand_in():
        assert gpu.main() == 1
    assert tuple(done) == gpu.PARTS
    assert capsys.readouterr().err == "make gpu: failed: job\n"

"""`import torch` alone knows "axon", at next to no cost, and nothing of ours can break it.

torch looks for entry points in the metadata of what is installed; here it is made of pyproject.toml, in a folder.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import axon_ps_torch
from deadlines import HANG_S

ROOT = Path(__file__).parents[3]
GROUPS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]

KNOWN = """
import os, sys
import torch
import torch.distributed as dist
print(dist.is_backend_available("axon"), dist.Backend.backend_capability.get("axon"), sep=" ")
print(sorted(m for m in sys.modules if m.startswith("axon_ps")), "grpc" in sys.modules, end=" ")
print(os.environ.get("GRPC_ENABLE_FORK_SUPPORT"))
"""

ALONE = """
import torch
import torch.distributed as dist
dist.init_process_group("axon", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
value = torch.ones(2)
dist.all_reduce(value)
print(dist.get_backend(), value.tolist())
dist.destroy_process_group()
"""


def run(program: str, folder: Path, **values: str) -> subprocess.CompletedProcess[str]:
    """Run a program where axon_ps is installed as pyproject.toml says."""
    metadata = folder / "axon_ps-0.dist-info"
    if not metadata.exists():
        metadata.mkdir()
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: axon-ps\nVersion: 0\n")
        sections = (
            f"[{group}]\n" + "\n".join(f"{k} = {v}" for k, v in names.items()) for group, names in GROUPS.items()
        )
        (metadata / "entry_points.txt").write_text("\n\n".join(sections) + "\n")
    ours = {k: v for k, v in os.environ.items() if not k.startswith(("AXON_PS_", "GRPC_", "TORCH_DEVICE_"))}
    environment = ours | {"PYTHONPATH": f"{folder}:{ROOT}"} | values
    return subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=folder, capture_output=True, text=True, timeout=HANG_S
    )


def test_import_torch_knows_axon_and_loads_neither_us_nor_grpc(tmp_path: Path) -> None:
    done = run(KNOWN, tmp_path)
    assert done.stdout.splitlines() == ["True ['cpu', 'cuda']", "['axon_ps_torch'] False None"], done.stderr
    assert done.stderr == ""


def test_a_process_group_is_made_by_a_program_that_never_imports_us(tmp_path: Path) -> None:
    done = run(ALONE, tmp_path)
    assert done.stdout == "axon [1.0, 1.0]\n", done.stderr


def test_torchs_own_variable_turns_it_off_and_then_importing_us_registers_it(tmp_path: Path) -> None:
    program = KNOWN + "import axon_ps.parallel\n" + "print(dist.is_backend_available('axon'))"
    done = run(program, tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.stdout.splitlines() == ["False None", "[] False None", "True"], done.stderr


def test_what_goes_wrong_is_logged_and_torch_is_imported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> None:  # as a registry of another torch may
        raise TypeError("no such argument")

    monkeypatch.setattr(axon_ps_torch, "register", refuse)
    axon_ps_torch.autoload()
    assert "TypeError('no such argument')" in caplog.text

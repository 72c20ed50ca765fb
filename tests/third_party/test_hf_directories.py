"""Hugging Face directories: what the servers have is what transformers and DCP read, and the other way round.

Tests of `huggingface/directory.py`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import library_runs as library

WORKER = Path(__file__).with_name("hf_directory_worker.py")


@pytest.mark.parametrize("weights", ["tied", "untied"])
def test_directories_go_in_and_out_and_dcp_has_both_sides(weights: str, tmp_path: Path) -> None:
    run = ["-m", "axon_ps.cli.main", "run", "--nproc-per-node", "2", "--shards", "2"]
    done = subprocess.run(
        [sys.executable, *run, str(WORKER), str(tmp_path), weights],
        cwd=tmp_path, env=library.ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:]
    assert done.stdout.count("the same") == 2
    assert not list(tmp_path.glob(".*.checkpoint"))

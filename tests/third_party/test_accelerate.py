"""Accelerate over our shard servers, and its DDP and FSDP2 over "axon": the losses over gloo.

Tests of `huggingface/accelerator.py`.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from accelerate import FullyShardedDataParallelPlugin

import library_runs as library
from axon_ps.errors import InvalidRequest
from axon_ps.huggingface import Accelerator

RUNS = {
    "f32": ["--save-every", 11],
    "accumulate": ["--accumulate", 2, "--steps", 8],
    "bf16": ["--bf16"],
    "compile": ["--compile", "aot_eager", "--steps", 8],
    "checkpointing": ["--checkpointing", "--steps", 8],
}


WAYS = {
    "servers": ("accelerate_gpt2.py", []),
    "ddp": ("accelerate_over_axon.py", ["--parallel", "ddp"]),
    "fsdp2": ("accelerate_over_axon.py", ["--parallel", "fsdp2"]),
}


@pytest.mark.parametrize("way", WAYS)
def test_losses_are_those_of_gloo_and_a_saved_state_goes_on(way: str, tmp_path: Path) -> None:
    script, chosen = WAYS[way]
    assert library.plain(library.EXAMPLES / script)[1] <= library.MOST_CHANGED
    ours, theirs = tmp_path / "axon", tmp_path / "gloo"
    for where in (ours, theirs):
        library.run(script, [[*chosen, *a, "--out", name] for name, a in RUNS.items()], where, gloo=where == theirs)
    rows = [(n, library.losses(ours / n), library.losses(theirs / n)) for n in RUNS]
    library.run(script, [[*chosen, "--resume", "--out", "f32"]], ours)
    assert sorted(library.by_step(ours / "f32")) == [12, 13, 14, 15, 16]
    rows.append(("resumed", library.losses(ours / "f32"), rows[0][2][11:]))
    found = library.report(f"accelerate {way}", rows)
    assert found.pop("bf16") < 2e-2
    assert max(found.values()) < 1e-6, found
    if way == "servers":
        auto = pytest.importorskip("transformers").AutoModelForCausalLM
        assert sum(p.numel() for p in auto.from_pretrained(ours / "f32" / "model").parameters()) > 1e5


def test_the_state_says_axon(tmp_path: Path) -> None:
    worker = Path(__file__).with_name("accelerate_state_worker.py")
    command = ["-m", "axon_ps.cli.main", "run", "--nproc-per-node", "2", "--shards", "1", str(worker)]
    done = subprocess.run(
        [sys.executable, *command], env=library.ENVIRONMENT, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-8000:]
    assert re.search(r"Distributed environment: DistributedType\.MULTI_[CG]PU  Backend: axon\n", done.stdout)


def test_the_plugin_of_another_way_to_shard_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"fsdp_plugin was given.*init_process_group"):
        Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))

"""Accelerate over our shard servers: the losses that it has over gloo, whatever it is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

import library_runs as library

SCRIPT = "accelerate_gpt2.py"
RUNS = {
    "f32": ["--save-at", 5],
    "accumulate": ["--accumulate", 2],
    "bf16": ["--precision", "bf16"],
    "compile": ["--compile", "aot_eager", "--epochs", 1],
    "checkpointing": ["--checkpointing", "--epochs", 1],
}


def test_losses_are_those_of_gloo_and_a_saved_state_goes_on(tmp_path: Path) -> None:
    assert library.plain(library.EXAMPLES / SCRIPT)[1] <= library.MOST_CHANGED
    runs = [[*arguments, "--out", name] for name, arguments in RUNS.items()]
    for where in ("gloo", "axon"):
        library.run(SCRIPT, runs, tmp_path / where, gloo=where == "gloo")
    library.run(SCRIPT, [["--resume", 5, "--out", "f32"]], tmp_path / "axon")
    resumed = library.losses(tmp_path / "axon" / "f32")
    rows = [(n, library.losses(tmp_path / "axon" / n), library.losses(tmp_path / "gloo" / n)) for n in RUNS]
    theirs = rows[0][2]
    rows[0] = ("resumed", [*theirs[:5], *resumed], theirs)
    found = library.report("accelerate", rows)
    assert found.pop("bf16") < 2e-2
    assert max(found.values()) < 1e-6, found
    loaded = pytest.importorskip("transformers").AutoModelForCausalLM.from_pretrained(
        tmp_path / "axon" / "f32" / "model"
    )
    assert sum(p.numel() for p in loaded.parameters()) > 1e5

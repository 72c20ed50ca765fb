"""PyTorch's DDP and FSDP2 over "axon", in one script: the losses that they have over gloo."""

from __future__ import annotations

from pathlib import Path

import pytest

import library_runs as library

SCRIPT = "torch_gpt2.py"
RUNS = {
    "f32": ["--save-every", 11],
    "accumulate": ["--accumulate", 2, "--steps", 8],
    "bf16": ["--bf16"],
    "compile": ["--compile", "aot_eager", "--steps", 8],
    "checkpointing": ["--checkpointing", "--steps", 8],
}


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_losses_are_those_of_gloo_and_a_checkpoint_goes_on(parallel: str, tmp_path: Path) -> None:
    assert library.plain(library.EXAMPLES / SCRIPT)[1] == 1
    ours, theirs = tmp_path / "axon", tmp_path / "gloo"
    runs = [[*arguments, "--parallel", parallel, "--out", name] for name, arguments in RUNS.items()]
    for where in (ours, theirs):
        library.run(SCRIPT, runs, where, gloo=where == theirs)
    rows = [(n, library.losses(ours / n), library.losses(theirs / n)) for n in RUNS]
    library.run(SCRIPT, [["--resume", "--parallel", parallel, "--out", "f32"]], ours)
    assert sorted(library.by_step(ours / "f32")) == [12, 13, 14, 15, 16]
    rows.append(("resumed", library.losses(ours / "f32"), rows[0][2][11:]))
    found = library.report(f"torch {parallel}", rows)
    assert found.pop("bf16") < 2e-2
    assert max(found.values()) < 1e-6, found

"""Lightning's strategies over axon_ps: the losses that DDP and FSDP2 have over gloo.

Tests of `lightning/strategy.py` and `lightning/over_backend.py`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

import library_runs as library

SCRIPT = "lightning_gpt2.py"
RUNS = {
    "f32": ["--save-every", 6],
    "accumulate": ["--accumulate", 2, "--steps", 4],
    "bf16": ["--bf16", "--steps", 8],
    "compile": ["--compile", "aot_eager", "--steps", 8],
    "checkpointing": ["--checkpointing", "--steps", 8],
}
THEIRS = {"axon": "ddp", "axon_ddp": "ddp", "axon_fsdp2": "fsdp2"}
"""Lightning's own, of each of our strategies."""


@pytest.mark.parametrize("strategy", THEIRS)
def test_losses_are_those_of_gloo_and_a_checkpoint_goes_on(strategy: str, tmp_path: Path) -> None:
    assert library.plain(library.EXAMPLES / SCRIPT)[1] <= library.MOST_CHANGED
    ours, theirs = tmp_path / "axon", tmp_path / "gloo"
    for where, name in ((ours, strategy), (theirs, THEIRS[strategy])):
        runs = [[*arguments, "--strategy", name, "--out", run] for run, arguments in RUNS.items()]
        library.run(SCRIPT, runs, where, gloo=where == theirs)
    rows = [(n, library.losses(ours / n), library.losses(theirs / n)) for n in RUNS]
    for where in (ours, theirs):
        name = strategy if where == ours else THEIRS[strategy]
        library.run(SCRIPT, [["--strategy", name, "--resume", "--out", "f32"]], where, gloo=where == theirs)
    rows.append(("resumed", library.losses(ours / "f32"), library.losses(theirs / "f32")))
    assert sorted(library.by_step(ours / "f32")) == [13, 14, 15, 16]
    found = library.report(f"Lightning {strategy}", rows)
    assert found.pop("bf16") < 2e-2
    assert max(found.values()) < 1e-6, found
    validated = [json.loads((where / "f32" / "validated.json").read_text()) for where in (ours, theirs)]
    assert library.largest_difference(*validated) < 1e-6
    assert names(ours / "f32" / "end.ckpt") == names(theirs / "f32" / "end.ckpt")


def names(checkpoint: Path) -> list[str]:
    """Of what is in a checkpoint; FSDP2's is a directory."""
    if checkpoint.is_dir():
        return sorted(FileSystemReader(checkpoint).read_metadata().state_dict_metadata)
    return list(torch.load(checkpoint, weights_only=False)["state_dict"])

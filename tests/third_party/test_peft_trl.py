"""PEFT's adapters and TRL's fine-tuning over our shard servers: the losses that they have over gloo."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import library_runs as library

RUNS = {
    "f32": ["--save-every", 5, "--steps", 12],
    "accumulate": ["--accumulate", 2, "--steps", 6],
    "bf16": ["--bf16", "--steps", 6],
    "compile": ["--compile", "aot_eager", "--steps", 6],
    "checkpointing": ["--checkpointing", "--steps", 6],
}


@pytest.mark.parametrize(
    ("script", "saved"),
    [("peft_gpt2.py", "adapter/adapter_model.safetensors"), ("trl_sft.py", "model/model.safetensors")],
)
def test_losses_are_those_of_gloo_and_a_checkpoint_goes_on(script: str, saved: str, tmp_path: Path) -> None:
    assert library.plain(library.EXAMPLES / script)[1] <= library.MOST_CHANGED
    ours, theirs = tmp_path / "axon", tmp_path / "gloo"
    for where in (ours, theirs):
        library.run(script, [[*a, "--out", name] for name, a in RUNS.items()], where, gloo=where == theirs)
    rows = [(n, library.losses(ours / n), library.losses(theirs / n)) for n in RUNS]
    library.run(script, [["--resume", "--out", "f32", "--steps", 16]], ours)
    library.run(script, [["--resume", "--out", "f32", "--steps", 16]], theirs, gloo=True)
    rows.append(("resumed", library.losses(ours / "f32"), library.losses(theirs / "f32")))
    assert len(rows[-1][1]) == 16
    found = library.report(script.partition("_")[0], rows)
    assert found.pop("bf16") < 2e-2
    assert max(found.values()) < 1e-6, found
    expected, got = load_file(theirs / "f32" / saved), load_file(ours / "f32" / saved)
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-3, atol=1e-4, msg=name)

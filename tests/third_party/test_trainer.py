"""transformers' Trainer over our shard servers: the losses that it has over gloo. Tests of `huggingface/trainer.py`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import library_runs as library

SCRIPT = "trainer_gpt2.py"
RUNS = {
    "f32": ["--save-every", 6],
    "accumulate": ["--accumulate", 2, "--steps", 8],
    "bf16": ["--bf16"],
    "compile": ["--compile", "aot_eager", "--steps", 8],
    "checkpointing": ["--checkpointing", "--steps", 8],
}


def test_losses_are_those_of_gloo_and_a_checkpoint_goes_on(tmp_path: Path) -> None:
    assert library.plain(library.EXAMPLES / SCRIPT)[1] <= library.MOST_CHANGED
    runs = [[*arguments, "--out", name] for name, arguments in RUNS.items()]
    for where in ("gloo", "axon"):
        library.run(SCRIPT, runs, tmp_path / where, gloo=where == "gloo")
    library.run(SCRIPT, [["--resume", "--out", "f32"]], tmp_path / "axon")
    rows = [(n, library.losses(tmp_path / "axon" / n), library.losses(tmp_path / "gloo" / n)) for n in RUNS]
    found = library.report("Trainer", rows)
    assert found.pop("bf16") < 2e-2
    assert max(found.values()) < 1e-6, found
    evaluated = [
        [e["eval_loss"] for e in json.loads((tmp_path / where / "f32" / "losses.json").read_text()) if "eval_loss" in e]
        for where in ("axon", "gloo")
    ]
    assert library.largest_difference(*evaluated) < 1e-6
    auto = pytest.importorskip("transformers").AutoModelForCausalLM
    ours, theirs = (auto.from_pretrained(tmp_path / where / "f32" / "model") for where in ("axon", "gloo"))
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-3, atol=1e-4, msg=name)

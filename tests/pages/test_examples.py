"""The examples do what they say: the Hugging Face one equals plain transformers, LoRA moves only adapters."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from axon_ps.testing import LocalCluster

EXAMPLES = Path(__file__).parents[2] / "examples"
SIZE = ["--steps", "4", "--layers", "2", "--channels", "32", "--heads", "2", "--context", "32"]


def model(directory: Path) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    return load_file(directory / "model" / "model.safetensors")


def losses(directory: Path) -> list[float]:
    return [float(loss) for loss in json.loads((directory / "losses.json").read_text())]


def test_examples_equal_plain_training(tmp_path: Path) -> None:
    for package in ("transformers", "sklearn"):
        if importlib.util.find_spec(package) is None:
            pytest.skip("the extra `examples` is not installed")
    hybrid, full, plain_4, plain_2, lora = (tmp_path / n for n in ("hybrid", "full", "plain-4", "plain-2", "lora"))
    with contextlib.ExitStack() as stack:
        four = stack.enter_context(LocalCluster(shards=1, world_size=4))
        two, other_two = (stack.enter_context(LocalCluster(shards=1, world_size=2)) for _ in range(2))
        runs = [
            (four, "train_hf_gpt2", [*SIZE, "--out", hybrid, "--strategy", "hybrid_shard", "--nodes", 2]),
            (two, "train_ddp_digits", ["--epochs", 2, "--hook", "int8"]),  # before the job has a model
            (two, "train_hf_gpt2", [*SIZE, "--out", full, "--checkpointing"]),
            (other_two, "finetune_lora", ["--steps", 4, "--base", full / "model", "--out", lora]),
            (None, "train_hf_gpt2", [*SIZE, "--out", plain_4, "--plain", "--replicas", 4]),
            (None, "train_hf_gpt2", [*SIZE, "--out", plain_2, "--plain", "--replicas", 2]),
        ]
        plan = [(name, [*map(str, arguments)], environments(cluster)) for cluster, name, arguments in runs]
        (tmp_path / "runs.json").write_text(json.dumps({"path": str(EXAMPLES), "runs": plan}))
        script = EXAMPLES.parent / "tests" / "integration" / "forked_workers.py"
        (result,) = four.run_workers(script, n=1, args=(tmp_path / "runs.json",), timeout_s=110.0)
    for sharded, plain in ((hybrid, plain_4), (full, plain_2)):
        assert losses(sharded) == pytest.approx(losses(plain), rel=1e-5)
        trained, expected = model(sharded), model(plain)
        assert list(trained) == list(expected)
        for name, value in expected.items():
            keys = name.endswith("c_attn.bias")  # true gradients of zero: AdamW makes steps of their rounding
            limit = (0.2 if keys else 1e-4) * float(np.linalg.norm(value))
            assert float(np.linalg.norm(trained[name] - value)) < limit, name
    assert losses(lora)[-1] < losses(lora)[0]
    assert float(re.findall(r"held out: (0\.\d+)", result.output)[0]) > 0.9


def environments(cluster: LocalCluster | None) -> list[dict[str, str]]:
    """Of each worker; of one process alone when there is no cluster."""
    return [cluster.env(rank) for rank in range(cluster.world_size)] if cluster else [{}]


def test_the_number_of_steps_is_seen_to_move_on_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setenv("COLUMNS", "60")  # as `axon-ps run` sets it for workers behind which there is a terminal
    report = importlib.import_module("progress").Report(on=True)
    costs = dict.fromkeys(("wire_bytes_in", "wire_bytes_out", "param_memory_bytes"), 1e9)
    report.start(0, None)
    for version in (1, 2, 3):
        report.step(version, None if version < 3 else 24, 2.5, 1024, costs)
    report.stop()
    assert "step 3/24  loss 2.500" in capsys.readouterr().out


def test_a_sampler_plays_with_the_newest_weights() -> None:
    with LocalCluster(shards=2, world_size=1) as cluster:
        (result,) = cluster.run_workers(EXAMPLES / "rl_sampler.py", args=("--steps", "30"), timeout_s=60.0)
    assert "samples were at most" in result.output

"""Lightning's strategies over axon_ps: the losses that "ddp" has over gloo, also when processes are killed."""

from __future__ import annotations

import json
from pathlib import Path

import torch

import library_runs as library

SCRIPT = "lightning_gpt2.py"
RUNS = {
    "f32": ["--save-every", 6],
    "accumulate": ["--accumulate", 2, "--epochs", 1],
    "bf16": ["--precision", "bf16-mixed", "--epochs", 1],
    "compile": ["--compile", "aot_eager", "--epochs", 1],
    "checkpointing": ["--checkpointing", "--epochs", 1],
    "axon_ddp": ["--strategy", "axon_ddp", "--epochs", 1],
}


def gloo(arguments: list[object]) -> list[object]:
    """The arguments of the same training by Lightning itself."""
    return ["ddp" if argument == "axon_ddp" else argument for argument in arguments]


def test_losses_are_those_of_gloo_and_a_checkpoint_goes_on(tmp_path: Path) -> None:
    assert library.plain(library.EXAMPLES / SCRIPT)[1] <= library.MOST_CHANGED
    ours, theirs = tmp_path / "axon", tmp_path / "gloo"
    library.run(SCRIPT, [[*arguments, "--out", name] for name, arguments in RUNS.items()], ours)
    library.run(SCRIPT, [[*gloo(arguments), "--out", name] for name, arguments in RUNS.items()], theirs, gloo=True)
    rows = [(n, library.losses(ours / n), library.losses(theirs / n)) for n in RUNS]
    for where in (ours, theirs):
        library.run(SCRIPT, [["--resume", "--out", "f32"]], where, gloo=where == theirs)
    rows.append(("resumed", library.losses(ours / "f32"), library.losses(theirs / "f32")))
    assert sorted(library.by_step(ours / "f32")) == [13, 14, 15, 16]
    found = library.report("Lightning", rows)
    assert found.pop("bf16") < 2e-2
    assert max(found.values()) < 1e-6, found
    validated = [json.loads((where / "f32" / "validated.json").read_text()) for where in (ours, theirs)]
    assert library.largest_difference(*validated) < 1e-6
    states = [torch.load(where / "f32" / "end.ckpt", weights_only=False)["state_dict"] for where in (ours, theirs)]
    assert list(states[0]) == list(states[1])


def test_the_script_goes_on_when_a_shard_server_and_then_a_worker_is_killed(tmp_path: Path) -> None:
    with library.running(SCRIPT, ["--epochs", 6, "--out", "killed"], tmp_path / "axon") as run:
        run.read_until("worker 0. batch", 10)
        run.kill("axon_ps.cli.main", "shard")
        run.read_until("worker 0. batch", 10)
        run.kill(str(library.EXAMPLES / SCRIPT), RANK="1")
        printed = run.end()
    assert "training goes on there" in printed
    library.run(SCRIPT, [["--epochs", 6, "--out", "killed"]], tmp_path / "undisturbed")
    ours, theirs = (library.by_step(tmp_path / where / "killed") for where in ("axon", "undisturbed"))
    assert max(ours) == max(theirs) == 48
    differences = [abs(loss - theirs[step]) / theirs[step] for step, loss in ours.items()]
    print(f"Lightning killed: {len(ours)} steps since the worker died, largest difference {max(differences):.1e}")
    assert max(differences) < 1e-6

"""The scripts of every library go on when a shard server, and then a worker, is killed: with the losses of before."""

from __future__ import annotations

from pathlib import Path

import pytest

import library_runs as library

SAVED, KILLED, STEPS = 32, 36, 58  # an epoch has 8 steps, and of Lightning's own only whole ones resume as they were
RESUME = ["--save-every", SAVED, "--resume"]

ON_SERVERS = {
    "accelerate": ("accelerate_gpt2.py", RESUME),
    "trainer": ("trainer_gpt2.py", []),
    "peft": ("peft_gpt2.py", []),
    "trl": ("trl_sft.py", []),
    "lightning": ("lightning_gpt2.py", RESUME),
}
"""No committed step is lost, and a checkpoint that is older than the servers is not loaded."""

ON_WORKERS = {
    "accelerate fsdp2": ("accelerate_over_axon.py", ["--parallel", "fsdp2", *RESUME]),
    "lightning ddp": ("lightning_gpt2.py", ["--strategy", "axon_ddp", *RESUME]),
    "lightning fsdp2": ("lightning_gpt2.py", ["--strategy", "axon_fsdp2", *RESUME]),
    "torch ddp": ("torch_gpt2.py", RESUME),
    "torch fsdp2": ("torch_gpt2.py", ["--parallel", "fsdp2", *RESUME]),
}
"""The script goes on from its own last checkpoint, of which there is one."""

A_STEP = r"worker 0. (step|batch|.'loss')"


@pytest.mark.parametrize("name", [*ON_SERVERS, *ON_WORKERS])
def test_the_script_goes_on_when_a_shard_server_and_then_a_worker_is_killed(name: str, tmp_path: Path) -> None:
    script, arguments = (ON_SERVERS | ON_WORKERS)[name]
    arguments = [*arguments, "--steps", STEPS, "--out", "killed"]
    with library.running(script, arguments, tmp_path / "axon") as run:
        run.read_until(A_STEP, 10)
        run.kill("axon_ps.cli.main", "shard")
        run.read_until(A_STEP, KILLED - 10)
        run.kill(str(library.EXAMPLES / script), RANK="1")
        run.end()
    library.run(script, [arguments], tmp_path / "undisturbed")
    ours, theirs = (library.by_step(tmp_path / where / "killed") for where in ("axon", "undisturbed"))
    since = min(ours)
    assert since >= KILLED if name in ON_SERVERS else since == SAVED + 1, since  # some print before they step
    assert sorted(ours) == list(range(since, STEPS + 1)) == sorted(theirs)[since - 1 :]
    differences = [abs(loss - theirs[step]) / theirs[step] for step, loss in ours.items()]
    print(f"{name} killed: steps from {since} since a worker died, differences to {max(differences):.1e}")
    assert max(differences) < 1e-6

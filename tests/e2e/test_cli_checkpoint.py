"""`axon-ps checkpoint` on a job that trained, and `axon-ps run --resume`: saved, listed, checked, exported, loaded.

Tests of `cli/checkpoint.py`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

import axon_ps
from axon_ps.testing import LocalCluster
from command_line import axon_ps as run_cli
from command_line import run_script
from deadlines import HANG_S

TRAIN = """
import sys, torch
from torch import nn
import axon_ps
from axon_ps.parallel import FSDP, SGD

torch.manual_seed(0)
with axon_ps.World.init(join_timeout_s=120) as world:
    model = FSDP(nn.Linear(4, 2), world.default_group)
    optimizer = SGD(model.parameters(), lr=0.1)
    began = world.version
    for _ in range(2):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    world.save_checkpoint(sys.argv[1])
    print("from", began, "to", world.version)
"""


def train_and_use_the_command_line(directory: str) -> None:
    """A worker: make two steps, then do with the running job what an operator does."""
    from axon_ps.parallel import FSDP, SGD

    torch.manual_seed(0)
    with axon_ps.World.init(join_timeout_s=HANG_S) as world:
        linear = nn.Linear(4, 2)
        expected = {name: p.detach().clone() for name, p in linear.named_parameters()}
        model = FSDP(linear, world.default_group)
        optimizer = SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        expected = {name: value - 0.2 for name, value in expected.items()}

        environment = {k: v for k, v in os.environ.items() if k.startswith("AXON_PS_")}
        saved = run_cli("checkpoint", "save", f"{directory}/first", "--extra", '{"epoch": 3}', **environment)
        assert saved.returncode == 0, saved.stderr
        assert saved.stdout.startswith(f"saved {directory}/first: version 2, ")

        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        assert world.version == 3
        restored = run_cli("checkpoint", "restore", directory, **environment)
        assert restored.returncode == 0, restored.stderr
        assert restored.stdout.startswith(f"restored {directory}/first: version 2, ")

    file = f"{directory}/model.safetensors"
    exported = run_cli("checkpoint", "export", directory, file)
    assert exported.returncode == 0, exported.stderr
    for name, value in load_file(file).items():
        torch.testing.assert_close(value, expected[name])


def test_an_operator_saves_restores_and_exports_a_running_job(tmp_path: Path) -> None:
    with LocalCluster(shards=2, world_size=1) as cluster:
        cluster.run_workers(train_and_use_the_command_line, args=(str(tmp_path),))
    listed = json.loads(run_cli("checkpoint", "ls", str(tmp_path), "--json").stdout)
    assert [(c["uri"], c["version"]) for c in listed] == [(f"{tmp_path}/first", 2)]
    assert "version 2" in run_cli("checkpoint", "ls", str(tmp_path)).stdout
    assert "is complete and unaltered" in run_cli("checkpoint", "verify", str(tmp_path)).stdout

    victim = next((tmp_path / "first").glob("*.safetensors"))
    os.truncate(victim, victim.stat().st_size - 1)
    damaged = run_cli("checkpoint", "verify", str(tmp_path))
    assert damaged.returncode == 1
    assert victim.name in damaged.stderr
    assert damaged.stderr.count("\n") == 1


def test_a_run_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    script, checkpoints = tmp_path / "train.py", tmp_path / "checkpoints"
    script.write_text(TRAIN)
    with LocalCluster(shards=2, world_size=1) as cluster:
        (first,) = cluster.run_workers(run_script, args=(str(script), f"{checkpoints}/a"))
    assert first.output == "from 0 to 2\n"
    arguments = ["run", "--checkpoint-dir", str(checkpoints), "--resume"]
    second = run_cli(*arguments, "auto", str(script), f"{checkpoints}/b")
    assert (second.returncode, second.stdout) == (0, "[worker 0] from 2 to 4\n"), second.stderr
    named = run_cli(*arguments, f"{checkpoints}/a", str(script), f"{checkpoints}/c")
    assert (named.returncode, named.stdout) == (0, "[worker 0] from 2 to 4\n"), named.stderr


def test_resuming_from_nothing_is_an_error(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    done = run_cli("run", "--resume", str(tmp_path / "nowhere"), str(script), str(tmp_path / "out"))
    assert done.returncode != 0
    assert "there is no complete checkpoint" in done.stderr

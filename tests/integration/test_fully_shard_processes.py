"""A program of FSDP2 with another import, in real processes: it joins the job by itself, and has FSDP2's losses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deadlines import WHOLE_S

PROGRAM = Path(__file__).with_name("llama_program.py")
THEIRS, OURS = "from torch.distributed.fsdp import fully_shard", "from axon_ps.parallel import fully_shard"
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
LAUNCH = ("-m", "axon_ps.cli.main", "run", "--nproc-per-node", "2", "--shards", "1")


def test_its_losses_are_those_of_fsdp2(tmp_path: Path) -> None:
    changed = tmp_path / "ours.py"
    text = PROGRAM.read_text()
    assert text.count(THEIRS) == 1
    changed.write_text(text.replace(THEIRS, OURS))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AXON_PS_")}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    commands = {
        "theirs": ([str(PROGRAM)], {**environment, **ALONE}),
        "ours": ([*LAUNCH, str(changed)], environment),
    }
    running = {
        name: subprocess.Popen(
            [sys.executable, *command, str(tmp_path / f"{name}.json"), str(tmp_path / name)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name, (command, env) in commands.items()
    }
    for process in running.values():
        said, _ = process.communicate(timeout=WHOLE_S)
        assert process.returncode == 0, said
    (losses, resumed), (ours, ours_resumed) = (json.loads((tmp_path / f"{n}.json").read_text()) for n in running)
    assert (len(losses), len(resumed)) == (10, 5)
    assert ours == pytest.approx(losses, abs=1e-5)
    assert ours_resumed == pytest.approx(resumed, abs=1e-5)

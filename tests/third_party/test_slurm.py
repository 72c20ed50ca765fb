"""deploy/slurm/train.sbatch, as bash runs it, with a stand-in for Slurm (slurm_stand_in.py): no scheduler, one host."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import slurm_stand_in
from command_line import environment

SCRIPT = Path(__file__).parents[2] / "deploy" / "slurm" / "train.sbatch"
END_S = 50.0

TRAIN = """
import os
import sys
from pathlib import Path
import numpy as np
import axon_ps

def write(line):
    os.write(1, f"{line}{os.linesep}".encode())  # in one piece: both workers write to the same pipe

here, fails = Path(sys.argv[1]), sys.argv[2] == "fails"
with axon_ps.World.init(join_timeout_s=40) as world:
    failed = here / "failed"
    if fails and world.rank == 1 and not failed.exists():
        failed.touch()
        os._exit(3)
    if fails:
        total = axon_ps.all_reduce_sum(np.full(1, world.rank + 1.0, np.float32))
        write(f"sum {world.rank} {world.membership.workers[0].node} {total[0]}")
    else:
        write(f"waits {world.rank}")
        world.view.wait_members(lambda m: False, 40.0, "the signal")
"""

Started = subprocess.Popen[str]


@pytest.fixture
def submitted(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Started]:
    """The batch script with two workers; the parameter is what they are to do."""
    (tmp_path / "train.py").write_text(TRAIN)
    variables = {**slurm_stand_in.install(tmp_path), "SLURM_NTASKS": "2", "RUN_DIR": str(tmp_path / "run")}
    command = ["bash", str(SCRIPT), str(tmp_path / "train.py"), str(tmp_path), request.param]
    with subprocess.Popen(
        command, env=environment(variables), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as script:
        try:
            yield script
        finally:
            left = [p for p in psutil.process_iter(["environ"]) if mine(p, tmp_path)]
            for process in left:
                process.kill()
            assert not left


def mine(process: psutil.Process, directory: Path) -> bool:
    """Whether the script has started a process."""
    return bool((process.info["environ"] or {}).get("SLURM_STAND_IN") == str(directory))


def requests(directory: Path) -> list[str]:
    """What scontrol and scancel were called with."""
    return (directory / slurm_stand_in.REQUESTS).read_text().splitlines()


@pytest.mark.parametrize("submitted", ["fails"], indirect=True)
def test_a_worker_that_fails_is_started_again_and_nothing_is_left(submitted: Started, tmp_path: Path) -> None:
    out, _ = submitted.communicate(timeout=END_S)
    assert submitted.returncode == 0, out
    assert "exit code 3, again in 1 s: python" in out
    assert sorted(line for line in out.splitlines() if line.startswith("sum")) == [
        "sum 0 localhost 3.0",
        "sum 1 localhost 3.0",
    ]
    assert {p.name for p in (tmp_path / "run").iterdir()} == {"audit.jsonl"}, "the secret is gone"


@pytest.mark.parametrize("submitted", ["waits"], indirect=True)
def test_at_slurms_signal_all_end_and_the_job_is_queued_again(submitted: Started, tmp_path: Path) -> None:
    assert submitted.stdout is not None
    said: list[str] = []
    while sum(line.startswith("waits") for line in said) < 2:
        said.append(submitted.stdout.readline())
        assert said[-1], said
    assert stat.S_IMODE((tmp_path / "run" / "token").stat().st_mode) == 0o600
    os.kill(submitted.pid, signal.SIGUSR1)
    out, _ = submitted.communicate(timeout=END_S)
    assert submitted.returncode == 0, out
    assert requests(tmp_path)[-1].startswith("scontrol requeue ")
    assert "again in" not in out, "nothing is started again that was told to end"


def test_shellcheck_finds_nothing() -> None:
    done = subprocess.run([Path(sys.executable).with_name("shellcheck"), SCRIPT], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")

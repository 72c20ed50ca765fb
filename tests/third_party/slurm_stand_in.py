"""A stand-in for srun, scontrol and scancel: one host, whose name is every node's, and nothing is scheduled.

    python slurm_stand_in.py PROGRAM [ARGUMENTS]    # with SLURM_STAND_IN, a directory that remembers tasks and requests

Like Slurm's own it starts each task as a process group, gives it srun's variables, and signals the whole group. It
knows the options that deploy/slurm/train.sbatch uses, and refuses others.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path

TASKS = "tasks"
REQUESTS = "requests"


def install(directory: Path) -> dict[str, str]:
    """Programs of the three names in `directory`/bin; the variables of a batch script that finds them."""
    (directory / "bin").mkdir()
    for name in ("srun", "scontrol", "scancel"):
        program = directory / "bin" / name
        program.write_text(f'#!/bin/sh\nexec {sys.executable} {__file__} {name} "$@"\n')
        program.chmod(0o755)
    return {
        "PATH": f"{directory / 'bin'}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "SLURM_STAND_IN": str(directory),
        "SLURM_SUBMIT_DIR": str(directory),
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "localhost",
    }


def srun(directory: Path, arguments: list[str]) -> int:
    """Start the tasks of a step and wait for them."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--ntasks", type=int, default=int(os.environ["SLURM_NTASKS"]))
    parser.add_argument("--overlap", action="store_true")
    for name in ("export", "nodes", "ntasks-per-node", "nodelist", "job-name", "kill-on-bad-exit"):
        parser.add_argument(f"--{name}")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    step = parser.parse_args(arguments)
    variables = {
        **os.environ,
        "SLURM_STEP_ID": str(os.getpid()),
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_TASKS_PER_NODE": str(step.ntasks),
        "SLURM_NTASKS": str(step.ntasks),
        "SLURMD_NODENAME": "localhost",
    }
    tasks = []
    for rank in range(step.ntasks):
        its = {**variables, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}
        tasks.append(subprocess.Popen(step.command, env=its, start_new_session=True))
        with (directory / TASKS).open("a") as file:
            file.write(f"{tasks[-1].pid}\n")
    return max(code if (code := task.wait()) >= 0 else 128 - code for task in tasks)


def scancel(directory: Path) -> int:
    """Signal SIGTERM to the tasks of every step."""
    for pid in map(int, (directory / TASKS).read_text().split()):
        try:
            os.killpg(pid, signal.SIGTERM)
        except ProcessLookupError:
            continue
    return 0


def main(name: str, arguments: list[str]) -> int:
    """Be one of the three; the exit code."""
    directory = Path(os.environ["SLURM_STAND_IN"])
    if name == "srun":
        return srun(directory, arguments)
    with (directory / REQUESTS).open("a") as file:
        file.write(" ".join([name, *arguments]) + "\n")
    if name == "scancel":
        return scancel(directory)
    if arguments[:2] == ["show", "hostnames"]:
        print(arguments[2])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))

"""deploy/slurm/train.sbatch: bash reads it, and the command line understands what it starts."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

from parsed_commands import understood

SCRIPT = Path(__file__).parents[2] / "deploy" / "slurm" / "train.sbatch"


def test_bash_reads_it() -> None:
    done = subprocess.run(["bash", "-n", SCRIPT], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_without_a_script_it_says_how_it_is_called() -> None:
    done = subprocess.run(["bash", SCRIPT], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, f"sbatch {SCRIPT} SCRIPT [ARGUMENTS]\n")


def test_the_command_line_understands_its_services() -> None:
    text = SCRIPT.read_text().replace("\\\n", " ")
    commands = [
        *re.findall(r"^ *serve \S+ ((?:coordinator|shard) .*)$", text, re.M),
        *re.findall(r"^ *axon-ps (.*?) \|\|$", text, re.M),
    ]
    assert len(commands) == 3
    for command in commands:
        understood([re.sub(r"\$\{?\w+.*|^10m$", "7", word) for word in shlex.split(command)])

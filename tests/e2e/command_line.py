"""Running `axon-ps` as a user does, for the tests beside this file."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from axon_ps.cli.main import main
from axon_ps.testing.workers import WorkerProcess
from deadlines import WHOLE_S

AXON_PS = (sys.executable, "-m", "axon_ps.cli.main")


def environment(values: Mapping[str, str]) -> dict[str, str]:
    """Our environment without anything of ours, and `values`."""
    return {k: v for k, v in os.environ.items() if not k.startswith("AXON_PS_")} | dict(values)


def axon_ps(*arguments: str, **values: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, with some environment variables, in a fork that has imported the command line.

    `AXON_PS` is the same with all of its start, which tests of commands that go on running use.
    """
    with tempfile.TemporaryDirectory() as directory:
        out, err = (Path(directory) / name for name in ("out", "err"))
        given = (str(out), str(err), arguments)
        command = WorkerProcess(0, _run, given, {}, environment=environment(values), log=Path(directory) / "log")
        result = command.result(WHOLE_S)
        assert not result.error, result.error
        return subprocess.CompletedProcess(arguments, result.value, out.read_text(), err.read_text())


def run_script(path: str, *arguments: str) -> None:
    """A worker that is a script, and has imported torch."""
    sys.argv = [path, *arguments]
    runpy.run_path(path, run_name="__main__")


def _run(out: str, err: str, arguments: Sequence[str]) -> int:
    for path, standard in ((out, 1), (err, 2)):
        with open(path, "wb") as file:
            os.dup2(file.fileno(), standard)
    code = main(arguments)
    sys.stdout.flush()
    return code

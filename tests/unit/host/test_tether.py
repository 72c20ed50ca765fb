"""A tied command ends with the thread that started it, and is not begun without it. Tests of `host/tether.py`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from axon_ps.host import tether
from deadlines import HANG_S


def tied(parent: int, *program: str) -> list[str]:
    """A command that gets SIGTERM when `parent` is gone, or the thread that started it."""
    return [sys.executable, "-I", "-S", tether.__file__, str(parent), str(int(signal.SIGTERM)), *program]


def test_a_command_gets_the_signal_when_the_thread_of_its_start_is_gone() -> None:
    started: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        process = subprocess.Popen(
            tied(os.getpid(), sys.executable, "-c", "import sys; print('begun', flush=True); sys.stdin.read()"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None
        started.append(process)
        assert process.stdout.readline() == b"begun\n"

    thread = threading.Thread(target=start)
    thread.start()
    thread.join(HANG_S)
    (process,) = started
    with process:
        try:
            assert process.wait(HANG_S) == -signal.SIGTERM
        finally:
            process.kill()


def test_a_command_keeps_its_arguments_and_exit_code() -> None:
    program = "import sys; print(sys.argv[1:]); sys.exit(3)"
    command = tied(os.getpid(), sys.executable, "-c", program, "a b", "--c")
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert (done.returncode, done.stdout) == (3, "['a b', '--c']\n")


def test_a_command_whose_starter_is_gone_is_not_begun(tmp_path: Path) -> None:
    file, stranger = tmp_path / "begun", os.getpid() + 1
    done = subprocess.run(
        tied(stranger, "touch", str(file)), capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert (done.returncode, done.stderr) == (1, f"axon-ps: process {stranger}, which started touch, is gone\n")
    assert not file.exists()

"""Ctrl-C while the command line is still being imported."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from deadlines import HANG_S

PROGRAM = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # also where a shell has it ignored

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
import axon_ps_cli
sys.exit(axon_ps_cli.main(["status", "--coordinator", "127.0.0.1:1"]))
"""


@pytest.mark.parametrize(
    "module", ["axon_ps", "typer", "axon_ps.cli.settings", "axon_ps.cli.status", "pydantic_settings", "grpc"]
)
def test_it_ends_without_a_traceback(module: str) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, module], capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode in (-signal.SIGINT, 130), done.stderr
    assert (done.stdout, done.stderr) == ("", "")

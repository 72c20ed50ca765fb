"""Processes of `axon-ps run`."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import signal
import sys

import pytest

from axon_ps.cli.launch import processes
from axon_ps.cli.launch.console import Console
from axon_ps.cli.launch.processes import Process

LEAVES_A_DAEMON = """
import subprocess
daemon = subprocess.Popen(["sleep", "60"], start_new_session=True)
print("daemon", daemon.pid, flush=True)
print("the last word", end="", flush=True)
daemon.returncode = 0  # or it would be complained about
"""


def test_a_daemon_that_holds_its_output_does_not_hold_up_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_DRAIN_OUTPUT_S", 0.1)
    shown = io.StringIO()

    async def main() -> None:
        source = Console(shown, shown, colour=False).source("worker 0")
        process = Process(source, [sys.executable, "-c", LEAVES_A_DAEMON], os.environ, is_worker=True)
        async with asyncio.timeout(30.0):
            await process.wait()
        assert (process.exit_code, process.is_running) == (0, False)

    try:
        asyncio.run(main())
        assert "the last word" in shown.getvalue()
    finally:
        daemon = int(shown.getvalue().split("daemon ")[1].split()[0])
        with contextlib.suppress(ProcessLookupError):
            os.kill(daemon, signal.SIGKILL)

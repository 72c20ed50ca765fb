"""A child process for tests: it dies with its parent, writes its output to a file, and is reaped by its process id.

All processes are started with the programs of the command line and tied to this one (`host.children`), so that a test
run that is killed leaves none behind. They are tied to the *thread* that starts them: start clusters from a thread that
outlives them.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from axon_ps.host.children import tethered
from axon_ps.testing.fork_server import ForkedProcess

_MAX_OUTPUT_BYTES = 16 << 10


class ChildProcess:
    """One process.

    Args:
        name: its name in messages: "shard 1".
        process: the process, leader of a process group of its own.
        log: file that its standard output and error are appended to.
    """

    def __init__(self, name: str, process: subprocess.Popen[bytes] | ForkedProcess, log: Path) -> None:
        self.name = name
        self.log_path = log
        self.was_signalled = False
        self._process = process

    @classmethod
    def start(
        cls,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        log: Path,
        pass_fds: Sequence[int] = (),
        stdin: int = subprocess.DEVNULL,
    ) -> ChildProcess:
        """Start a program.

        Args:
            name: its name in messages.
            command: the command, found on the path.
            environment: its complete environment.
            log: file that its standard output and error are appended to.
            pass_fds: descriptors that it inherits.
            stdin: None, or PIPE for `send_line`.
        """
        with open(log, "ab") as output:
            process = subprocess.Popen(
                tethered(command, signal.SIGKILL),
                env=dict(environment),
                stdin=stdin,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=tuple(pass_fds),
                process_group=0,
            )
        return cls(name, process, log)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    @property
    def output(self) -> str:
        """The end of its output."""
        content = self.log_path.read_bytes()
        return content[-_MAX_OUTPUT_BYTES:].decode("utf-8", "replace")

    def send_line(self, line: str) -> None:
        """Write a line to its standard input and close that; if it has died, its output shows why."""
        assert self._process.stdin is not None, "started without a pipe to its standard input"
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def send_signal(self, number: int) -> None:
        """Send it a signal; harmless when it has ended."""
        self.was_signalled = True
        self._process.send_signal(number)

    def wait(self, timeout_s: float) -> int | None:
        """Its exit code, or None when it still runs after `timeout_s` seconds."""
        wait_for_any([self], time.monotonic() + timeout_s)
        return self.exit_code

    def end(self, *steps: tuple[int, float]) -> int:
        """Send each signal and wait up to that many seconds, then kill it; reap it and the processes it left behind.

        Returns:
            Its exit code; -9 when it had to be killed.
        """
        for number, grace_s in steps:
            if self.exit_code is None:
                self.send_signal(number)
                self.send_signal(signal.SIGCONT)
                self.wait(grace_s)
        if self.exit_code is None:
            self.send_signal(signal.SIGKILL)
        exit_code = self._process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        return exit_code


def wait_for_any(processes: Sequence[ChildProcess], deadline: float) -> list[ChildProcess]:
    """Wait until a process has ended; returns those that have, none after `deadline` (of `time.monotonic`)."""
    while not (ended := [process for process in processes if process.exit_code is not None]):
        with contextlib.ExitStack() as stack:
            fds = [os.pidfd_open(process.pid) for process in processes]
            for fd in fds:
                stack.callback(os.close, fd)
            if not select.select(fds, [], [], max(0.0, deadline - time.monotonic()))[0]:
                return []
    return ended

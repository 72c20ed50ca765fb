"""`Child`, a child process that ends with its parent: starting it, sending it signals, reaping it.

Owns: the command that ties a child's life to this process (`tether.py` runs first), its process group, the pipe on
which it reports its address in one line, its signals, and its end.

Invariants:
- Children are started by `exec`, never by a bare fork, which a process with open gRPC channels must not do.
- A child's life is tied to the *thread* that starts it: start it from a thread that outlives it.
- A child leads a process group of its own, so that Ctrl-C reaches it only through its parent.
- The methods of a child are called by one thread.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO

from axon_ps.host import memory
from axon_ps.host.peer_process import stat_of

_TETHER = Path(__file__).with_name("tether.py")
_MAX_OUTPUT_BYTES = 64 << 10
_PF_EXITING = 0x4  # of a process's flags (proc(5), "stat")


class Child:
    """A child process, the leader of a process group of its own.

    Args:
        name: its name in messages: "shard 1".
        pid: its process id.
        reap: waits for its end, reaps it, and returns its exit code, negative for a signal.
        log: the file that its output is appended to; None = it has none.
        stdin: the pipe to its standard input; None when it has none.
        ready_fd: the pipe to which it writes its listening address; -1 when it does not.

    Attributes:
        was_signalled: whether it was sent a signal while it ran.
        pidfd: readable when it has ended; closed once it is reaped.
    """

    def __init__(
        self,
        name: str,
        pid: int,
        reap: Callable[[], int],
        *,
        log: Path | None = None,
        stdin: IO[bytes] | None = None,
        ready_fd: int = -1,
    ) -> None:
        self.name = name
        self.pid = pid
        self.was_signalled = False
        self.pidfd = os.pidfd_open(pid)
        self.ready_fd = ready_fd
        self._log = log
        self._reap = reap
        self._stdin = stdin
        self._exit_code: int | None = None
        self._oom_kills = memory.oom_kills()
        self._lacked_memory = False

    @classmethod
    def start(
        cls,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        last_signal: int,
        output: Path | tuple[int, int] | None = None,
        stdin: bool = False,
        pass_fds: Sequence[int] = (),
        ready: bool = False,
    ) -> Child:
        """Start a program.

        Args:
            name: its name in messages.
            command: the command, found on the path.
            environment: its complete environment.
            last_signal: the signal that it gets when the thread of its start is gone, even by kill -9.
            output: the file that its output is appended to, or the descriptors of its standard output and error;
                None = those of this process.
            stdin: whether it has a pipe for `send_line`; else its standard input is empty.
            pass_fds: descriptors that it inherits.
            ready: whether it gets the option `--ready-fd`, for `ready_line`.
        """
        with contextlib.ExitStack() as stack:
            log, fds = (output, None) if isinstance(output, Path) else (None, output)
            if log is not None:
                fds = (stack.enter_context(open(log, "ab")).fileno(),) * 2
            stdout, stderr = fds or (None, None)
            ready_fd = -1
            if ready:
                ready_fd, theirs = os.pipe()
                stack.callback(os.close, theirs)  # so that the child's death ends the pipe
                command, pass_fds = [*command, "--ready-fd", str(theirs)], (*pass_fds, theirs)
            try:
                process = subprocess.Popen(
                    _tethered(command, last_signal),
                    env=dict(environment),
                    stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=stderr,
                    pass_fds=tuple(pass_fds),
                    process_group=0,
                )
            except BaseException:
                if ready:
                    os.close(ready_fd)
                raise
        return cls(name, process.pid, process.wait, log=log, stdin=process.stdin, ready_fd=ready_fd)

    @property
    def exit_code(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        if self._exit_code is None and _readable([self.pidfd], 0.0):
            self._reaped()
        return self._exit_code

    @property
    def is_ending(self) -> bool:
        """True if it has ended, or if the kernel is ending it: its files may be closed, but it counts as running."""
        if self.exit_code is not None:
            return True
        with contextlib.suppress(OSError, IndexError):
            return bool(int(stat_of(self.pid)[6]) & _PF_EXITING)
        return True

    @property
    def ending(self) -> str:
        """The way in which it ended, as text."""
        code = self.exit_code or 0
        if code >= 0:
            return f"exited with code {code}"
        why = " when the kernel killed for lack of memory (`dmesg` names the process)" if self._lacked_memory else ""
        return f"was ended by {signal.Signals(-code).name}{why}"

    @property
    def output(self) -> str:
        """The end of its log."""
        assert self._log is not None, "started without a log"
        return self._log.read_bytes()[-_MAX_OUTPUT_BYTES:].decode("utf-8", "replace")

    def ready_line(self, deadline: float) -> str:
        """Return the line with its address; empty when it died or `deadline` (of `time.monotonic`) passed."""
        content = b""
        if self.ready_fd < 0:  # it has ended
            return ""
        while not content.endswith(b"\n") and _readable([self.ready_fd], deadline - time.monotonic()):
            if not (data := os.read(self.ready_fd, 4096)):
                break
            content += data
        return content.decode().strip() if content.endswith(b"\n") else ""

    def send_line(self, line: str) -> None:
        """Write a line to its standard input and close that. If it has died, its output shows the reason."""
        assert self._stdin is not None, "started without a pipe to its standard input"
        with contextlib.suppress(BrokenPipeError):
            if not self._stdin.closed:  # it has not ended
                self._stdin.write(f"{line}\n".encode())
        self._close_stdin()

    def send_signal(self, number: int) -> None:
        """Send it a signal; harmless when it has ended."""
        self._send(os.kill, number)

    def signal_group(self, number: int) -> None:
        """Send a signal to its process group; harmless when it has ended."""
        self._send(os.killpg, number)

    def wait(self, timeout_s: float) -> int | None:
        """Return its exit code, or None when it still runs after `timeout_s` seconds."""
        wait_for_any([self], time.monotonic() + timeout_s)
        return self.exit_code

    def end(self, *steps: tuple[int, float]) -> int:
        """End its group: send each signal, wait up to that many seconds, then kill it and the rest of its group.

        Returns:
            Its exit code; -9 when it had to be killed.
        """
        for number, grace_s in steps:
            self.signal_group(number)
            self.signal_group(signal.SIGCONT)  # it may be frozen
            self.wait(grace_s)
        self.signal_group(signal.SIGKILL)
        exit_code = self._reaped()
        with contextlib.suppress(ProcessLookupError):  # other processes of its group
            os.killpg(self.pid, signal.SIGKILL)
        self._close_stdin()
        if self.ready_fd >= 0:
            os.close(self.ready_fd)
            self.ready_fd = -1
        return exit_code

    def _send(self, send: Callable[[int, int], None], number: int) -> None:
        if self.exit_code is None:
            self.was_signalled = True
            with contextlib.suppress(ProcessLookupError):  # a program that reaps every child has reaped it
                send(self.pid, number)

    def _reaped(self) -> int:
        if self._exit_code is None:
            self._exit_code = self._reap()
            if self._exit_code == -signal.SIGKILL and not self.was_signalled:
                self._lacked_memory = memory.oom_kills() > self._oom_kills
            os.close(self.pidfd)
        return self._exit_code

    def _close_stdin(self) -> None:
        if self._stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._stdin.close()


def wait_for_any(children: Sequence[Child], deadline: float) -> list[Child]:
    """Wait until a child has ended, and return those that have; none after `deadline` (of `time.monotonic`)."""
    while not (ended := [child for child in children if child.exit_code is not None]):
        if not _readable([child.pidfd for child in children], deadline - time.monotonic()):
            break
    return ended


def _tethered(command: Sequence[str], last_signal: int) -> list[str]:
    """Wrap `command` so that it gets `last_signal` when the thread of its start is gone."""
    return [sys.executable, "-I", "-S", str(_TETHER), str(os.getpid()), str(int(last_signal)), *command]


def _readable(fds: Iterable[int], timeout_s: float) -> bool:
    """Return True if a descriptor is readable, or has been closed at its other end, within that time."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return bool(poll.poll(max(0.0, timeout_s) * 1000))

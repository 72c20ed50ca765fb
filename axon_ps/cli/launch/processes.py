"""The child processes of `axon-ps run`: their output goes to the console, and their end can be awaited.

Owns: reading a child's output. Starting it, signals and reaping are those of `host.children`.

Invariant: a process is reaped, and the processes that it left behind are killed, before the launcher returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence

from axon_ps.cli.launch.console import ProcessOutput
from axon_ps.errors import AxonError
from axon_ps.host.children import Child

PYTHON = (sys.executable, "-P")
_READ_BYTES = 1 << 16
_DRAIN_OUTPUT_S = 2.0
"""Seconds to read the output of a process that has ended, if a daemon that it left behind holds it open."""


class Process:
    """One child process, started at once; if this process dies, a worker is killed and a service asked to drain.

    Args:
        source: writes its lines to the console.
        command: the command, found on the path.
        environment: its complete environment.
        is_worker: whether it runs the user's program.
        stdin: whether it is sent a line.
        ready: whether it reports the address it listens on.

    Attributes:
        child: the process itself.
    """

    def __init__(
        self,
        source: ProcessOutput,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        is_worker: bool,
        stdin: bool = False,
        ready: bool = False,
    ) -> None:
        self.source = source
        last_signal = signal.SIGKILL if is_worker else signal.SIGTERM
        outputs, ends = zip(os.pipe(), os.pipe(), strict=True)
        try:
            self.child = Child.start(
                source.name, command, environment, last_signal=last_signal, output=ends, stdin=stdin, ready=ready
            )
        except BaseException:
            for fd in outputs:
                os.close(fd)
            raise
        finally:
            for fd in ends:
                os.close(fd)
        self._ended = asyncio.ensure_future(self._run(os.dup(self.child.pidfd), outputs))

    @property
    def is_running(self) -> bool:
        """True if it has not ended, or its output has not been read to the end."""
        return not self._ended.done()

    @property
    def failed(self) -> bool:
        """True if it ended by itself with an exit code other than 0."""
        return not self.is_running and not self.child.was_signalled and self.exit_code != 0

    @property
    def was_killed(self) -> bool:
        """True if a signal that is not the launcher's has ended it, and it wrote no error."""
        return self.failed and (self.child.exit_code or 0) < 0 and not self.source.error()

    @property
    def exit_code(self) -> int:
        """Its exit code as a shell gives it: 128 plus the signal that ended it."""
        code = self.child.exit_code or 0
        return code if code >= 0 else 128 - code

    async def wait(self) -> None:
        """Return when it has ended and all its output was read."""
        await asyncio.shield(self._ended)

    async def address(self) -> str:
        """Wait until a service listens; returns its address, and after a space the URL of its HTTP endpoint, if any.

        Raises:
            AxonError: it ended without having listened.
        """
        if self.child.ready_fd >= 0:
            listening = asyncio.ensure_future(_readable(self.child.ready_fd))
            await asyncio.wait((listening, self._ended), return_when=asyncio.FIRST_COMPLETED)
            listening.cancel()
        if not (line := self.child.ready_line(time.monotonic())):
            await self.wait()
            raise AxonError(f"the {self.source.name} {self.child.ending} before it listened")
        return line

    async def end(self, *steps: tuple[int, float]) -> None:
        """Send its group each signal and wait up to that many seconds for the process to end; then kill it."""
        for number, grace_s in steps:
            if self.is_running:
                self.child.signal_group(number)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.wait(), grace_s)
        self.child.signal_group(signal.SIGKILL)
        await self.wait()

    async def _run(self, pidfd: int, outputs: Sequence[int]) -> None:
        reading = asyncio.gather(*(self._copy(fd, error) for fd, error in zip(outputs, (False, True), strict=True)))
        await _readable(pidfd)
        self.source.ended()
        self.child.end()  # processes that it left behind hold the pipes open
        with contextlib.suppress(TimeoutError):  # a daemon that it has started is in another process group
            await asyncio.wait_for(reading, _DRAIN_OUTPUT_S)
        for fd in (pidfd, *outputs):
            os.close(fd)

    async def _copy(self, fd: int, error: bool) -> None:
        try:
            while True:
                await _readable(fd)
                if not (data := os.read(fd, _READ_BYTES)):
                    return
                self.source.feed(data, error=error)
        finally:
            self.source.feed(b"", error=error)


async def _readable(fd: int) -> None:
    """Return when a descriptor can be read."""
    readable, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_reader(fd, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(fd)

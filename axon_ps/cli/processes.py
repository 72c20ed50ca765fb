"""Starting and ending child processes, for `axon-ps run`.

Invariants: a process is started by `exec` (never a bare fork), dies with its parent even by kill -9 (`host.children`),
is in a process group of its own, so that Ctrl-C reaches it only through the parent, in the right order, and is reaped
before the launcher returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence

from axon_ps.cli.console import Source
from axon_ps.errors import AxonError
from axon_ps.host.children import LinePipe, tethered

PYTHON = (sys.executable, "-P")
_READ_BYTES = 1 << 16
_DRAIN_OUTPUT_S = 2.0
"""How long to read the output of a process that has ended, if a daemon that it left behind holds it open."""


class Process:
    """One child process.

    Attributes:
        source: writes its lines to the console.
        is_worker: whether it runs the user's program.
    """

    def __init__(
        self, process: asyncio.subprocess.Process, outputs: Sequence[_Output], source: Source, *, is_worker: bool
    ) -> None:
        self._process = process
        self._outputs = outputs
        self.source = source
        self.is_worker = is_worker
        self._signalled = False
        self._ended = asyncio.ensure_future(self._run())

    @classmethod
    async def start(
        cls,
        source: Source,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        is_worker: bool,
        stdin: int = asyncio.subprocess.DEVNULL,
        pass_fds: Sequence[int] = (),
    ) -> Process:
        """Start `command` tied to this process: if this dies, a worker is killed and a service asked to drain."""
        last_signal = signal.SIGKILL if is_worker else signal.SIGTERM
        # Not asyncio's pipes: with them `wait` would also wait for processes that have inherited them.
        outputs = [await _Output.open(), await _Output.open()]
        try:
            process = await asyncio.create_subprocess_exec(
                *tethered(command, last_signal),
                env=dict(environment),
                stdin=stdin,
                stdout=outputs[0].fd,
                stderr=outputs[1].fd,
                pass_fds=tuple(pass_fds),
                process_group=0,
            )
        except BaseException:
            for output in outputs:
                output.close()
            raise
        finally:
            for output in outputs:
                os.close(output.fd)
        return cls(process, outputs, source, is_worker=is_worker)

    @property
    def name(self) -> str:
        """Its name on the console."""
        return self.source.name

    @property
    def pid(self) -> int:
        """Its process id, which is also that of its group."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it has not ended, or its output has not been read to the end."""
        return not self._ended.done()

    @property
    def failed(self) -> bool:
        """Whether it ended by itself with an exit code other than 0."""
        return not self.is_running and not self._signalled and self._process.returncode != 0

    @property
    def exit_code(self) -> int:
        """Its exit code as a shell gives it: 128 plus the signal that ended it."""
        code = self._process.returncode or 0
        return code if code >= 0 else 128 - code

    @property
    def ending(self) -> str:
        """How it ended, as text."""
        code = self._process.returncode or 0
        return f"exited with code {code}" if code >= 0 else f"was ended by {signal.Signals(-code).name}"

    async def wait(self) -> None:
        """Return when it has ended and all its output was read."""
        await asyncio.shield(self._ended)

    async def send_line(self, line: str) -> None:
        """Write a line to its standard input and close that."""
        stdin = self._process.stdin
        assert stdin is not None, "started without a pipe to its standard input"
        with contextlib.suppress(ConnectionError):  # it has died; its output shows why
            stdin.write(f"{line}\n".encode())
            await stdin.drain()
        stdin.close()

    def send(self, number: int) -> None:
        """Send a signal to it and all that it has started."""
        if self.is_running:
            self._signalled = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    async def end(self, *steps: tuple[int, float]) -> None:
        """Send each signal and wait up to that many seconds for the process to end; then kill it."""
        for number, grace_s in steps:
            if self.is_running:
                self.send(number)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.wait(), grace_s)
        self.send(signal.SIGKILL)
        await self.wait()

    async def _run(self) -> None:
        output, errors = self._outputs
        reading = asyncio.gather(self._copy(output.reader, False), self._copy(errors.reader, True))
        await self._process.wait()
        with contextlib.suppress(ProcessLookupError):  # processes that it left behind hold the pipes open
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(TimeoutError):  # a daemon that it has started is in another process group
            await asyncio.wait_for(reading, _DRAIN_OUTPUT_S)
        for end in self._outputs:
            end.close()

    async def _copy(self, stream: asyncio.StreamReader, error: bool) -> None:
        try:
            while data := await stream.read(_READ_BYTES):
                self.source.feed(data, error=error)
        finally:
            self.source.feed(b"", error=error)


class _Output:
    """A pipe that a process writes to.

    Attributes:
        fd: the end for the process; closed here once it has been started.
        reader: the end that is read here.
    """

    def __init__(self, fd: int, reader: asyncio.StreamReader, transport: asyncio.ReadTransport) -> None:
        self.fd = fd
        self.reader = reader
        self._transport = transport

    @classmethod
    async def open(cls) -> _Output:
        """A new pipe."""
        read_end, fd = os.pipe()
        return cls(fd, *await _reader(read_end))

    def close(self) -> None:
        """Read no more."""
        self._transport.close()


async def _reader(fd: int) -> tuple[asyncio.StreamReader, asyncio.ReadTransport]:
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb")
    )
    return reader, transport


class ReadyPipe:
    """The pipe on which a service writes the address it listens on. Use as a context manager around starting it."""

    def __enter__(self) -> ReadyPipe:
        self._pipe = LinePipe()
        self.fd = self._pipe.fd
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.started()

    async def address(self, process: Process) -> str:
        """The address of the service, as soon as it listens.

        Raises:
            AxonError: it ended without having listened.
        """
        reader, transport = await _reader(self._pipe.detach())
        try:
            line = await reader.readline()
        finally:
            transport.close()
        if not line:
            await process.wait()
            raise AxonError(f"the {process.name} {process.ending} before it listened")
        return line.decode().strip()

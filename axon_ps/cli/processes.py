"""Starting other processes of ours and ending them: what `axon-ps run` stands on.

Invariants: a process is started by `exec` (never a bare fork), dies with us even by kill -9 (`host.children`), is
in a process group of its own, so that Ctrl-C reaches it through us and in our order, and is reaped before we return.
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
_REST_S = 2.0
"""How long a process that has ended is read from, while a daemon that it left behind holds its output open."""


class Process:
    """One process that we started.

    Attributes:
        source: its lines on the console.
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
        """Start `command` tied to this process: a worker is killed with us, a service asked to drain."""
        last_signal = signal.SIGKILL if is_worker else signal.SIGTERM
        # Not asyncio's pipes: with them `wait` would wait for whoever has inherited them, too.
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
        """What the user knows it by."""
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
        """How it ended, in words."""
        code = self._process.returncode or 0
        return f"exited with code {code}" if code >= 0 else f"was ended by {signal.Signals(-code).name}"

    async def wait(self) -> None:
        """Return when it has ended and all its output was read."""
        await asyncio.shield(self._ended)

    async def tell(self, line: str) -> None:
        """Write a line to its standard input and close that."""
        stdin = self._process.stdin
        assert stdin is not None, "started without a pipe to its standard input"
        with contextlib.suppress(ConnectionError):  # it has died; its output says why
            stdin.write(f"{line}\n".encode())
            await stdin.drain()
        stdin.close()

    def send(self, number: int) -> None:
        """Send a signal to it and whatever it started."""
        if self.is_running:
            self._signalled = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    async def end(self, *steps: tuple[int, float]) -> None:
        """Send each signal and give it that many seconds to take effect; then kill it."""
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
        with contextlib.suppress(ProcessLookupError):  # what it started and left behind holds our pipes open
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(TimeoutError):  # a daemon that it has made is in a group of its own
            await asyncio.wait_for(reading, _REST_S)
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
        fd: the end for the process; whoever starts it closes ours.
        reader: our end.
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
    """The pipe by which a service says where it listens. Use as a context manager around starting it."""

    def __enter__(self) -> ReadyPipe:
        self._pipe = LinePipe()
        self.fd = self._pipe.fd
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.started()

    async def address(self, process: Process) -> str:
        """Where the service listens, as soon as it does.

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

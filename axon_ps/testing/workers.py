"""Worker processes of a `LocalCluster`: start a function or a script, wait, get the result."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from axon_ps.host.children import Child, wait_for_any
from axon_ps.testing.fork_server import ForkServer
from axon_ps.testing.worker_main import ByName, ByValue, dumped

_AFTER_A_FAILURE_S = 5.0
_CALL = "import sys; from axon_ps.testing.worker_main import main; sys.exit(main(int(sys.argv[1])))"

_fork_server: ForkServer | None = None


def fork_server() -> ForkServer | None:
    """Return the process that workers and services are forks of, inside `preloaded`; else None."""
    return _fork_server


@contextlib.contextmanager
def preloaded(modules: Sequence[str]) -> Iterator[None]:
    """Fork services, and workers that run a function, from a process with `modules` imported, in a `with` block.

    That saves each of them the seconds of CPU that importing torch, numba and gRPC takes. The variables that modules
    read when they are imported (OMP_NUM_THREADS is 1) are then the same for all of them. Enter the block on a thread
    that outlives it.

    Args:
        modules: their names; none may start a thread when imported.
    """
    global _fork_server
    before = _fork_server
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    _fork_server = ForkServer(modules, environment)
    try:
        yield
    finally:
        _fork_server.close()
        _fork_server = before


@dataclass(frozen=True, kw_only=True)
class WorkerResult:
    """The result of one worker.

    Attributes:
        rank: its rank.
        value: the function's return value; None for a script.
        error: the traceback, or the signal or exit code that ended it, as text; empty when it ended well.
        exit_code: its exit code; negative for a signal.
        output: the end of its output.
    """

    rank: int
    value: Any
    error: str
    exit_code: int
    output: str


class WorkerFailed(Exception):
    """A worker raised, died or did not end in time.

    Attributes:
        results: those of all workers, by rank.
    """

    def __init__(self, results: Sequence[WorkerResult]) -> None:
        self.results = tuple(results)
        reports = [f"worker {r.rank}: {r.error}\n--- its output:\n{r.output}" for r in results if r.error]
        super().__init__("\n".join(reports))


class WorkerProcess:
    """One worker, made by `LocalCluster.start_workers`.

    Attributes:
        rank: its requested rank.
        process: the process itself.
    """

    def __init__(
        self,
        rank: int,
        target: Callable[..., object] | str | Path,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        environment: Mapping[str, str],
        log: Path,
    ) -> None:
        self.rank = rank
        self._reply: tuple[str, Any] = ("", None)
        self._listener: threading.Thread | None = None
        name = f"worker {rank}"
        if not callable(target):
            command = [sys.executable, str(target), *map(str, args)]
            self.process = Child.start(name, command, environment, last_signal=signal.SIGKILL, output=log)
            return
        located: ByName | ByValue | None = ByName.of(target)
        by_value = located is None
        located = located or ByValue(tuple(sys.path), target)
        payloads = [dumped(payload, by_value=by_value) for payload in (located, (tuple(args), dict(kwargs)))]
        connection, theirs = multiprocessing.Pipe()
        with theirs:
            fd = theirs.fileno()
            if _fork_server is not None:
                self.process = _fork_server.fork(name, environment, log, fd)
            else:
                command = [sys.executable, "-c", _CALL, str(fd)]
                self.process = Child.start(
                    name, command, environment, last_signal=signal.SIGKILL, output=log, pass_fds=(fd,)
                )
        with contextlib.suppress(BrokenPipeError):  # it has died already; the result shows how
            for payload in payloads:
                connection.send_bytes(payload)
        self._listener = threading.Thread(target=self._listen, args=(connection,), name=name, daemon=True)
        self._listener.start()

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to the process."""
        self.process.send_signal(number)

    def result(self, timeout_s: float = 50.0) -> WorkerResult:
        """Wait for the result; a worker that does not end in time is killed, which is an error, too."""
        self.process.wait(timeout_s)
        return self.end()

    def end(self) -> WorkerResult:
        """Kill the process if it still runs (its stacks are in its output then); returns the result."""
        running = self.process.exit_code is None
        exit_code = self.process.end((signal.SIGABRT, 5.0))
        if self._listener is not None:
            self._listener.join()
        kind, content = self._reply
        if kind == "error":
            error = str(content)
        elif running:
            error = "it did not end in time and was killed; where it was is in its output"
        elif exit_code:
            error = f"it was ended by signal {-exit_code}" if exit_code < 0 else f"it exited with code {exit_code}"
        else:
            error = ""
        value = content if kind == "value" else None
        return WorkerResult(rank=self.rank, value=value, error=error, exit_code=exit_code, output=self.process.output)

    def _listen(self, connection: Connection) -> None:
        with connection, contextlib.suppress(EOFError, ConnectionError):
            self._reply = connection.recv()


def results_of(workers: Sequence[WorkerProcess], *, timeout_s: float, check: bool) -> list[WorkerResult]:
    """Wait for all workers; returns their results by rank.

    Args:
        workers: the workers.
        timeout_s: seconds for all of them together.
        check: end the others soon after one has failed, and raise.

    Raises:
        WorkerFailed: `check` is set, and one failed or did not end in time.
    """
    deadline = time.monotonic() + timeout_s
    running = [worker.process for worker in workers]
    while running and (ended := wait_for_any(running, deadline)):
        running = [process for process in running if process not in ended]
        if check and any(process.exit_code for process in ended):
            deadline = min(deadline, time.monotonic() + _AFTER_A_FAILURE_S)
    results = [worker.end() for worker in workers]
    if check and any(result.error for result in results):
        raise WorkerFailed(results)
    return results

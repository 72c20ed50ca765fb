"""Workers and services with modules already imported: they are forks of a small process that only imports these.

Importing torch takes seconds of CPU, which would be most of the time of a test suite with a hundred small clusters. A
fork is safe as long as the process has no threads and no channels, which imports do not make. A process with gRPC
channels, such as the test itself, must not fork.

Owns: the server process and the requests to it. A fork, which is a `Child` here, does what `python -c` or `-m` would
do: it serves one call of `worker_main`, or runs the command line.

Invariants:
- The server is tied to the thread that started it, and forks are tied to the server: a killed test leaves none behind.
- Only the server reaps a fork, and only when asked for its exit code, so a process id stays the fork's until then.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from axon_ps.errors import InternalError
from axon_ps.host.children import Child
from axon_ps.host.tether import tie

_SERVE = "import sys; from axon_ps.testing.fork_server import main; sys.exit(main(sys.argv[1:]))"
_COMMAND_LINE = "axon_ps.cli.main"
_MAX_REQUEST_BYTES = 1 << 20
_MAX_FDS = 3


class ForkServer:
    """A process that forks. Its methods are thread-safe.

    Args:
        modules: imported first; none of them may start a thread.
        environment: its complete environment; modules that read variables when imported read these.
    """

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-c", _SERVE, str(theirs.fileno()), *modules]
            self._server = Child.start(
                "fork server", command, environment, last_signal=signal.SIGKILL, pass_fds=[theirs.fileno()]
            )

    def fork(self, name: str, environment: Mapping[str, str], log: Path, fd: int) -> Child:
        """Start a process that serves one call of `worker_main` on the pipe `fd`.

        Args:
            name: its name in messages.
            environment: its complete environment.
            log: file that its standard output and error are appended to.
            fd: a descriptor; the fork gets a copy.

        Raises:
            InternalError: the server has died; its output shows why.
        """
        pid = self._fork({"environment": dict(environment)}, log, [fd])
        return Child(name, pid, partial(self._reap, pid), log=log)

    def run(self, name: str, argv: Sequence[str], environment: Mapping[str, str], log: Path) -> Child:
        """Start a process that runs `axon-ps ARGV --ready-fd FD`, with a pipe as its standard input.

        Args:
            argv: the command and its options.
            name, environment, log: as for `fork`.

        Raises:
            InternalError: the server has died; its output shows why.
        """
        (stdin, our_stdin), (our_ready, ready) = os.pipe(), os.pipe()
        try:
            pid = self._fork({"environment": dict(environment), "argv": list(argv)}, log, [stdin, ready])
        except BaseException:
            os.close(our_stdin)
            os.close(our_ready)
            raise
        finally:
            os.close(stdin)
            os.close(ready)
        return Child(name, pid, partial(self._reap, pid), log=log, stdin=open(our_stdin, "wb"), ready_fd=our_ready)

    def close(self) -> None:
        """End the server, and every fork that still runs."""
        self._socket.close()
        self._server.end()

    def _reap(self, pid: int) -> int:
        return self._ask({"reap": pid})

    def _fork(self, request: dict[str, Any], log: Path, fds: Sequence[int]) -> int:
        with open(log, "ab") as output:
            return self._ask(request, (output.fileno(), *fds))

    def _ask(self, request: dict[str, Any], fds: Sequence[int] = ()) -> int:
        with self._lock:
            try:
                socket.send_fds(self._socket, [json.dumps(request).encode()], list(fds))
                reply = self._socket.recv(64)
            except ConnectionError:  # a request that the server has not read is lost with it
                reply = b""
            except OSError as error:
                raise InternalError(f"the fork server does not answer: {error}") from error
        if not reply:
            raise InternalError(f"the fork server has ended with exit code {self._server.wait(1.0)}")
        return int(reply)


def main(argv: Sequence[str]) -> int:
    """Serve requests on the socket `argv[0]` with the modules `argv[1:]` imported; a fork serves one call."""
    for module in argv[1:]:
        importlib.import_module(module)
    gc.freeze()  # the garbage collector of a fork does not visit imported objects, which would copy their pages
    with socket.socket(fileno=int(argv[0])) as requests:
        call = _serve(requests)
    if call is not None:
        _leave(call())
    return 0


def run_command(argv: Sequence[str]) -> int:
    """Run the command line in this process, as `python -m` does; returns its exit code."""
    exit_code: int = importlib.import_module(_COMMAND_LINE).main(argv)
    return exit_code


def _leave(exit_code: int) -> NoReturn:
    """End a fork as `multiprocessing` does: finish threads and exit functions, without finalizing the interpreter.

    Finalizing would take a second of CPU time with torch's compiler in memory, since every page would be copied first.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def _serve(requests: socket.socket) -> Callable[[], int] | None:
    """Fork and reap until the socket is closed; in a fork, return the fork's task."""
    while True:
        message, fds, _, _ = socket.recv_fds(requests, _MAX_REQUEST_BYTES, _MAX_FDS)
        if not message:
            return None
        request = json.loads(message)
        if "reap" in request:
            _, status = os.waitpid(request["reap"], 0)
            requests.send(str(os.waitstatus_to_exitcode(status)).encode())
            continue
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            _become_child(server, request["environment"], log=fds[0])
            return _task(request, *fds[1:])
        for fd in fds:
            os.close(fd)
        _lead_group(pid)
        requests.send(str(pid).encode())


def _task(request: dict[str, Any], fd: int, ready: int | None = None) -> Callable[[], int]:
    if ready is None:
        from axon_ps.testing import worker_main

        return lambda: worker_main.main(fd)
    os.dup2(fd, 0)
    os.close(fd)
    return lambda: run_command([*request["argv"], "--ready-fd", str(ready)])


def _lead_group(pid: int) -> None:
    """Make a fork the leader of a process group; server and fork both do it, so that neither has to wait."""
    with contextlib.suppress(PermissionError, ProcessLookupError):  # the other one has done it, or the fork has ended
        os.setpgid(pid, pid)


def _become_child(server: int, environment: Mapping[str, str], log: int) -> None:
    _lead_group(0)
    if not tie(server, signal.SIGKILL):
        raise SystemExit(f"axon-ps: process {server}, which made this fork, is gone")
    for standard in (1, 2):
        os.dup2(log, standard)
    os.close(log)
    os.environ.clear()
    os.environ.update(environment)
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # the server's; torch's take 70 ms of CPU
    sys.path += [p for p in environment.get("PYTHONPATH", "").split(os.pathsep) if p and p not in sys.path]

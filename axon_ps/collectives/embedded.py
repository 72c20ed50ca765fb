"""`EmbeddedCluster`: a coordinator and one shard server as children of a worker, for jobs that nobody started them for.

`torchrun` and plain environment variables start workers only; the worker of rank 0 then makes the services the others
need. They are programs of their own, started by `exec`, and are told to drain when the thread that started them is
gone, even by kill -9 (see `transport.children`).

Owns: the two processes. Refuses: to tell the other workers where they are; whoever starts it does.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from axon_ps.errors import Broken
from axon_ps.transport.children import LinePipe, tethered
from axon_ps.transport.security import Security

_DRAIN_S = 5.0
_DROPPED = ("AXON_PS_COORDINATOR", "AXON_PS_TOKEN", "AXON_PS_TOKEN_FILE", "AXON_PS_CONFIG")


class EmbeddedCluster:
    """The services of one job, on this host.

    Args:
        world_size: workers of the job.
        job: its name.
        host: address to listen on; beyond loopback, `security` must allow it.
        advertise: the name by which other hosts reach this one; empty = `host`.
        security: certificates of the services, and the token; without a token one is made up.
        environment: of this process: theirs, but for what is set here.
        start_timeout_s: seconds that starting may take.

    Attributes:
        address: "host:port" of the coordinator.
        security: what a client presents.

    Raises:
        ConfigurationError: it would be open to the network without TLS, and `security.insecure` is not set.
        Broken: a service ended, or did not listen in time; what it wrote is on standard error.
    """

    def __init__(
        self,
        world_size: int,
        *,
        job: str,
        host: str = "127.0.0.1",
        advertise: str = "",
        security: Security | None = None,
        environment: Mapping[str, str],
        start_timeout_s: float = 60.0,
    ) -> None:
        given = security or Security()
        self.security = Security(
            token=given.token or secrets.token_urlsafe(24),
            ca_file=given.ca_file,
            cert_file=given.cert_file,
            key_file=given.key_file,
            insecure=given.insecure,
        )
        self.security.check_bind(host)
        self._environment = {k: v for k, v in environment.items() if k not in _DROPPED}
        self._job = job
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pipes: list[LinePipe] = []
        deadline = time.monotonic() + start_timeout_s
        try:
            options = ["--world-size", str(world_size), "--shards", "1", "--state", "memory"]
            coordinator = self._start("coordinator", host, options)
            shard = self._start(
                "shard", host, ["--coordinator", "-", *(["--advertise", advertise] if advertise else [])]
            )
            port = self._line(coordinator, deadline, "coordinator").rpartition(":")[2]
            self.address = f"{advertise or host}:{port}"
            stdin = self._processes[1].stdin
            assert stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has died; its pipe says so below
                stdin.write(f"{self.address}\n".encode())
                stdin.flush()
            self._line(shard, deadline, "shard server")
        except BaseException:
            self.close(grace_s=0.0)
            raise

    def close(self, grace_s: float = _DRAIN_S) -> None:
        """End both, the shard server first. Harmless when repeated."""
        while self._pipes:
            self._pipes.pop().close()
        while self._processes:
            process = self._processes.pop()
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(grace_s)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()

    def _start(self, service: str, host: str, options: Sequence[str]) -> LinePipe:
        """Start a service; the pipe on which it says its address."""
        pipe = LinePipe()
        self._pipes.append(pipe)
        command = [sys.executable, "-P", "-m", "axon_ps.cli.main", service, "--host", host, "--port", "0", *options]
        command += ["--ready-fd", str(pipe.fd), *(["--insecure"] if self.security.insecure else [])]
        try:
            process = subprocess.Popen(
                tethered(command, signal.SIGTERM),
                env=self._variables(),
                stdin=subprocess.PIPE,
                pass_fds=(pipe.fd,),
                process_group=0,
            )
        finally:
            pipe.started()
        self._processes.append(process)
        return pipe

    def _variables(self) -> dict[str, str]:
        secured = {
            "AXON_PS_TLS_CA": self.security.ca_file,
            "AXON_PS_TLS_CERT": self.security.cert_file,
            "AXON_PS_TLS_KEY": self.security.key_file,
        }
        ours = {"AXON_PS_LOG_LEVEL": "WARNING"} | self._environment | {k: v for k, v in secured.items() if v}
        return ours | {"AXON_PS_JOB": self._job, "AXON_PS_TOKEN": self.security.token}

    def _line(self, pipe: LinePipe, deadline: float, what: str) -> str:
        """Where a child listens."""
        line = pipe.read(deadline)
        if not line:
            raise Broken(f"the embedded {what} ended, or did not listen in time; what it wrote is on standard error")
        return line

"""`EmbeddedServices`: a coordinator and shard servers as children of a worker, for jobs without services.

They are separate programs, started by `exec`, and drain when the thread that started them has ended, even
by kill -9 (see `host.children`).

Owns: the processes. Refuses: to announce them to the other workers (the caller does).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence

from axon_ps.errors import Broken
from axon_ps.host.children import Child
from axon_ps.rpc.auth.loopback import is_private
from axon_ps.rpc.auth.tokens import new_secret
from axon_ps.rpc.channels import join_address
from axon_ps.rpc.security import Security
from axon_ps.storage.roots import VARIABLE, roots_of_children
from axon_ps.worker.environment import security_variables

_DRAIN_S = 5.0
_DROPPED = ("AXON_PS_COORDINATOR", "AXON_PS_TOKEN", "AXON_PS_TOKEN_FILE", "AXON_PS_CONFIG")


class EmbeddedServices:
    """The services of one job that run on this host.

    Args:
        world_size: workers of the job.
        job: its name.
        shards: the ranks of the shard servers to start here.
        num_shards: shard servers of the job, here and elsewhere.
        coordinator: "host:port" of the job's coordinator, if it runs elsewhere; empty = start it, too.
        host: address to listen on. Beyond loopback, `security` must allow it.
        advertise: the name by which other hosts reach this one; empty = `host`.
        security: of the services; None = by a random secret.
        environment: of this process. The services get it, with changes.
        start_timeout_s: most seconds for starting.

    Attributes:
        address: "host:port" of the coordinator.
        security: the credentials that a client presents.

    Raises:
        ConfigurationError: they would be open to the network without TLS, and `security.insecure` is not set.
        Broken: a service ended, or did not listen in time. Its output is on standard error.
    """

    def __init__(
        self,
        world_size: int,
        *,
        job: str,
        shards: Sequence[int] = (0,),
        num_shards: int = 1,
        coordinator: str = "",
        host: str = "127.0.0.1",
        advertise: str = "",
        security: Security | None = None,
        environment: Mapping[str, str],
        start_timeout_s: float = 60.0,
    ) -> None:
        self.security = security or Security(token=new_secret())
        self.security.check_bind(host)
        self.address = coordinator
        self._environment = {k: v for k, v in environment.items() if k not in _DROPPED}
        self._job = job
        self._host = host
        self._children: list[Child] = []
        deadline = time.monotonic() + start_timeout_s
        try:
            if not coordinator:
                options = ["--world-size", str(world_size), "--shards", str(num_shards), "--state", "memory"]
                listening = self._start("coordinator", "coordinator", options)
            servers = [
                self._start(f"shard server {rank}", "shard", self._shard_options(rank, len(shards), advertise))
                for rank in shards
            ]
            if not coordinator:
                port = int(_ready_line(listening, deadline).rpartition(":")[2])
                self.address = join_address(advertise or host, port)
            for server in servers:
                server.send_line(self.address)
            for server in servers:
                _ready_line(server, deadline)
        except BaseException:
            self.close(grace_s=0.0)
            raise

    def close(self, grace_s: float = _DRAIN_S) -> None:
        """End all of them, the shard servers first. Repeated calls do nothing."""
        while self._children:
            self._children.pop().end((signal.SIGTERM, grace_s))

    def _shard_options(self, rank: int, shards_here: int, advertise: str) -> list[str]:
        threads = 0 if shards_here == 1 else max(1, len(os.sched_getaffinity(0)) // shards_here)
        options = ["--coordinator", "-", "--rank", str(rank), "--threads", str(threads)]
        return options + (["--advertise", advertise] if advertise else [])

    def _start(self, name: str, service: str, options: Sequence[str]) -> Child:
        command = [sys.executable, "-P", "-m", "axon_ps.cli.main", service, "--host", self._host, "--port", "0"]
        command += [*options, *(["--insecure"] if self.security.insecure else [])]
        child = Child.start(name, command, self._variables(service), last_signal=signal.SIGTERM, stdin=True, ready=True)
        self._children.append(child)
        return child

    def _variables(self, service: str) -> dict[str, str]:
        ours = {"AXON_PS_LOG_LEVEL": "WARNING"} | self._environment
        if service != "coordinator" and "AXON_PS_HTTP_PORT" in ours:
            ours["AXON_PS_HTTP_PORT"] = "0"  # the port in the environment is the coordinator's
        return (
            ours
            | roots_of_shards(self._host, self.security, ours)
            | {"AXON_PS_JOB": self._job}
            | security_variables(self.security)
        )


def roots_of_shards(host: str, security: Security, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that lets shard servers at a host open checkpoints where their coordinator does."""
    if environment.get(VARIABLE):
        return {}
    private = is_private(host, token=bool(security.tokens()))
    return roots_of_children(private=private, configured=(environment.get("AXON_PS_CHECKPOINT_DIR", ""),))


def _ready_line(child: Child, deadline: float) -> str:
    """Wait for a child to listen, and return its address."""
    if not (line := child.ready_line(deadline)):
        raise Broken(f"the embedded {child.name} ended, or did not listen in time; what it wrote is on standard error")
    return line.partition(" ")[0]  # the URL of an HTTP endpoint may follow

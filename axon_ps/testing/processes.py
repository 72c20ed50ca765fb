"""`ClusterProcesses`: the processes of a `LocalCluster`, their logs, and their end.

Owns: the temporary directory with the logs, and the order in which processes end. Refuses: to start a process.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path

from axon_ps.errors import InvalidRequest, Misuse
from axon_ps.host.children import Child
from axon_ps.testing.workers import WorkerProcess
from axon_ps.types import Role

COORDINATOR = "coordinator"
PROXY = "proxy"

DRAIN_S = 10.0
"""Seconds that a service may take to end after a signal."""


class ClusterProcesses:
    """The processes of one cluster, in the order in which they were started.

    Attributes:
        coordinators, shards, host_proxies: the services.
        workers: the workers.
        drained: the services that were taken out of the running job, and may end by themselves.
        directory: a directory for logs and a test's own files, while the cluster is open.
        is_open: True between `open` and `end`.
    """

    def __init__(self) -> None:
        self._clear()
        self._num_logs = 0

    def _clear(self) -> None:
        self.coordinators: list[Child] = []
        self.shards: list[Child] = []
        self.host_proxies: list[Child] = []
        self.workers: list[WorkerProcess] = []
        self.drained: set[Child] = set()
        self._temporary: tempfile.TemporaryDirectory[str] | None = None

    @property
    def is_open(self) -> bool:
        """See the class."""
        return self._temporary is not None

    def open(self) -> Path:
        """Make the directory, and return it.

        Raises:
            Misuse: there is one already.
        """
        if self._temporary is not None:
            raise Misuse("this LocalCluster is running already; make another")
        self._temporary = tempfile.TemporaryDirectory(prefix=f"axon-ps-{os.getpid()}-", ignore_cleanup_errors=True)
        self.directory = Path(self._temporary.name)
        return self.directory

    def new_log(self, name: str) -> Path:
        """Return the path of a log that no other process has."""
        self._num_logs += 1
        return self.directory / f"{self._num_logs:02d}-{name}.log"

    def get(self, role: Role | str, index: int) -> Child:
        """Return a process by its role and its number.

        Raises:
            InvalidRequest: there is none.
        """
        name = role.value if isinstance(role, Role) else role
        groups: dict[str, list[Child]] = {
            COORDINATOR: self.coordinators,
            Role.SHARD.value: self.shards,
            PROXY: self.host_proxies,
            Role.WORKER.value: [worker.process for worker in self.workers],
        }
        if name not in groups or not 0 <= index < len(groups[name]):
            raise InvalidRequest(f"there is no {name} {index} in this cluster")
        return groups[name][index]

    def end(self) -> tuple[list[str], str]:
        """End workers, shard servers, proxies, coordinators, in this order; return their errors, and their logs."""
        for worker in self.workers:
            worker.process.end()
        ending = (self.shards, self.host_proxies, self.coordinators)
        troubles = [trouble for group in ending for trouble in _end_services(group, self.drained)]
        services = (*self.coordinators, *self.shards, *self.host_proxies)
        logs = "\n".join(f"--- log of {service.name}:\n{service.output}" for service in services)
        if self._temporary is not None:
            self._temporary.cleanup()
        self._clear()
        return troubles, logs


def _end_services(services: Sequence[Child], drained: Collection[Child]) -> list[str]:
    """Ask all to drain, wait, reap; returns the problems, as text. Some may have been drained before."""
    troubles = []
    disturbed = {process for process in services if process.was_signalled or process in drained}
    for process in services:
        if process.exit_code is None:
            process.send_signal(signal.SIGTERM)
        elif process not in disturbed:
            troubles.append(f"{process.name} ended by itself with exit code {process.exit_code}")
            disturbed.add(process)
    for process in services:
        process.send_signal(signal.SIGCONT)  # it may be frozen
        process.wait(DRAIN_S)
        exit_code = process.end()
        if exit_code != 0 and process not in disturbed:
            troubles.append(f"{process.name} did not drain when asked to; exit code {exit_code}")
    return troubles

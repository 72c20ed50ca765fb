"""Processes of a cluster for benchmarks: on this machine or on the hosts of a `Network`, started by the command line.

A *place* is a set of hosts: `Loopback` (all of them are this machine) or `netns.Network`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from axon_ps.host.ports import free_ports
from netns import Network, stop

CLI = (sys.executable, "-m", "axon_ps.cli.main")
TICKS = os.sysconf("SC_CLK_TCK")


class Loopback:
    """This machine as it is, with the interface of `Network`."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self.hosts = list(hosts)
        self._processes: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> Loopback:
        return self

    def __exit__(self, *_: object) -> None:
        stop(self._processes)

    def address(self, _host: str) -> str:
        """Return the address of every host."""
        return "127.0.0.1"

    def node(self, _host: str) -> str:
        """Return the name that a process uses for its host: all share one, and read each other's memory."""
        return "here"

    def popen(self, _host: str, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start `command`; it is ended on leaving the context if it still runs."""
        self._processes.append(subprocess.Popen(command, **options))
        return self._processes[-1]

    def counters(self, _host: str) -> tuple[int, int]:
        """Return the bytes that the loopback device has received and sent, for all processes."""
        line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if "lo:" in line)
        fields = line.split(":")[1].split()
        return int(fields[0]), int(fields[8])


class Sockets(Loopback):
    """This machine as hosts that share no memory, such as containers, without a limit of their links."""

    def node(self, host: str) -> str:
        """Return the host's own name."""
        return host


Place = Loopback | Network


@contextmanager
def axon_cluster(
    place: Place, servers: Sequence[str], *, workers: int, replication: int = 1, shard: Sequence[str] = ()
) -> Iterator[tuple[list[subprocess.Popen[Any]], str]]:
    """Start a coordinator on the first of `servers`, shard servers (options: `shard`) on all.

    Yields:
        The processes, and the coordinator's address.
    """
    port = free_ports()
    coordinator = f"{place.address(servers[0])}:{port}"
    listen = ["--insecure", "--log-level", "warning", "--host"]
    size = ["--world-size", str(workers), "--shards", str(len(servers)), "--replication", str(replication)]
    size += ["--state", "memory", "--port", str(port)]
    command = [*CLI, "coordinator", *size, *listen, place.address(servers[0])]
    processes = [place.popen(servers[0], command)]
    for host in servers:
        who = ["--node", place.node(host), "--coordinator", coordinator, "--port", "0"]
        processes.append(place.popen(host, [*CLI, "shard", *shard, *who, *listen, place.address(host)]))
    try:
        yield processes, coordinator
    finally:
        stop(processes[1:])
        stop(processes[:1])


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a live process, user and system, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def rss_mib(pid: int) -> float:
    """Return the resident memory of a live process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)

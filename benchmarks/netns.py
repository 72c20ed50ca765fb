"""Hosts with slow network cards, made of network namespaces: a star of veth pairs around a bridge, with tbf rates.

Every host is a namespace with one card `eth0`. Both ends of its cable have the same limit, so the bytes that a host
sends and receives are each bounded as on a real card. Hosts use `CONGESTION`, whatever this machine uses: with bbr,
which estimates the rate of a card, the same transfer takes from 1.14 to 1.34 s. The bridge is in a namespace of its
own, where the machine's firewall rules (a running dockerd sets FORWARD to DROP) do not apply. `Network` still sends a
packet between every host and the first one, and raises an error if none arrives.

Names contain this process's id and a random part. All namespaces are destroyed on leaving the context manager, at
interpreter exit and on SIGINT, SIGTERM and SIGHUP; processes started in a namespace are ended first, by id. After a
`kill -9`, run this file: it destroys the namespaces of runs whose process is gone.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Self

PREFIX = "axps"
BURST_BYTES = 256 * 1024  # tbf's bucket: 4 ms at 500 Mbit/s; with less, the kernel's timer cannot hold the rate
QUEUE_LATENCY_MS = 50
SUBNET = "10.77.0"  # the first three bytes of every host's address
CONGESTION = "cubic"  # TCP's congestion control, Linux's default


class NetworkUnavailable(RuntimeError):
    """Namespaces cannot be made here (no root, no iproute2, no kernel support), or packets do not pass."""


def run_ip(*arguments: str) -> str:
    """Run `ip`; returns its output.

    Raises:
        NetworkUnavailable: the command failed.
    """
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise NetworkUnavailable(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


class Network:
    """Namespaces called by `hosts`, each behind a card of `rate_mbit` each way (None: unlimited), as a context manager.

    `congestion` is TCP's congestion control between them.

    `popen` starts a process on a host, `address` returns its address, `counters` reads its card.
    """

    def __init__(self, hosts: Sequence[str], *, rate_mbit: float | None = None, congestion: str = CONGESTION) -> None:
        self.hosts = list(hosts)
        self.rate_mbit = rate_mbit
        self.congestion = congestion
        self._id = f"{PREFIX}-{os.getpid()}-{secrets.token_hex(2)}"
        self._made: list[str] = []
        self._processes: list[subprocess.Popen[Any]] = []
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> Self:
        if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
            raise NetworkUnavailable("network namespaces need root and iproute2 (ip, tc)")
        atexit.register(self.close)
        self._undo.append(lambda: atexit.unregister(self.close))
        self._undo.append(exit_on_signals())
        try:
            self._build()
            self._check()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def namespace(self, host: str) -> str:
        """Return the namespace of `host`."""
        return f"{self._id}-{host}"

    def node(self, host: str) -> str:
        """Return the name that a process uses for its host: the host's own name, though all are on one machine."""
        return host

    def address(self, host: str) -> str:
        """Return the address of `host`'s card."""
        return f"{SUBNET}.{self.hosts.index(host) + 1}"

    def popen(self, host: str, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start `command` on `host`; the process is ended with the network if it still runs."""
        prefix = ["ip", "netns", "exec", self.namespace(host)]  # `ip` replaces itself, so the id is the command's own
        process = subprocess.Popen([*prefix, *command], **options)
        self._processes.append(process)
        return process

    def counters(self, host: str) -> tuple[int, int]:
        """Return the bytes that `host`'s card has received and sent so far."""
        table = run_ip("netns", "exec", self.namespace(host), "cat", "/proc/net/dev")
        fields = next(line for line in table.splitlines() if "eth0:" in line).split(":")[1].split()
        return int(fields[0]), int(fields[8])

    def close(self) -> None:
        """End the processes that were started here, then destroy the namespaces (their links go with them)."""
        stop(self._processes)
        while self._made:
            with contextlib.suppress(NetworkUnavailable):
                run_ip("netns", "del", self._made.pop())
        while self._undo:
            self._undo.pop()()

    def _build(self) -> None:
        switch = f"{self._id}-switch"
        self._add(switch)
        run_ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        run_ip("-n", switch, "link", "set", "bridge", "up")
        for index, host in enumerate(self.hosts):
            name, port = self.namespace(host), f"port{index}"
            self._add(name)
            run_ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
            run_ip("-n", switch, "link", "set", port, "master", "bridge", "up")
            run_ip("-n", name, "address", "add", f"{self.address(host)}/24", "dev", "eth0")
            run_ip("-n", name, "link", "set", "eth0", "up")
            run_ip("-n", name, "route", "change", f"{SUBNET}.0/24", "dev", "eth0", "congctl", self.congestion)
            run_ip("-n", name, "link", "set", "lo", "up")
            if self.rate_mbit:
                limit(switch, port, self.rate_mbit)
                limit(name, "eth0", self.rate_mbit)

    def _add(self, namespace: str) -> None:
        run_ip("netns", "add", namespace)
        self._made.append(namespace)

    def _check(self) -> None:
        for host in self.hosts[1:]:
            if not self._reaches(host, self.hosts[0]):
                raise NetworkUnavailable(
                    f"packets from {host} do not reach {self.hosts[0]}: does a firewall drop bridged packets? "
                    "(sysctl net.bridge.bridge-nf-call-iptables=0, or iptables -P FORWARD ACCEPT)"
                )

    def _reaches(self, source: str, target: str) -> bool:
        """Return True if a connection from `source` to a closed port of `target` is answered, with a refusal."""
        script = (
            "import socket, sys\n"
            "try: socket.create_connection((sys.argv[1], 9), 3)\n"
            "except ConnectionRefusedError: print('refused')\n"
            "except OSError: pass\n"
        )
        process = self.popen(source, [sys.executable, "-ISc", script, self.address(target)], stdout=subprocess.PIPE)
        return b"refused" in process.communicate(timeout=10)[0]


def limit(namespace: str, device: str, rate_mbit: float) -> None:
    """Let `device` send at most `rate_mbit`."""
    shape = ["tbf", "rate", f"{rate_mbit:g}mbit", "burst", str(BURST_BYTES), "latency", f"{QUEUE_LATENCY_MS}ms"]
    command = ["tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *shape]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise NetworkUnavailable(f"{' '.join(command)}: {done.stderr.strip()}")


def stop(processes: list[subprocess.Popen[Any]], *, grace_s: float = 5.0) -> None:
    """End these processes: SIGTERM to all, SIGKILL to the rest after `grace_s`. Empties the list."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    while processes:
        process = processes.pop()
        try:
            process.wait(grace_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def exit_on_signals() -> Callable[[], None]:
    """Turn SIGTERM and SIGHUP into SystemExit, as SIGINT is KeyboardInterrupt; returns a function that undoes it."""

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}

    def undo() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    return undo


def orphans() -> Iterator[str]:
    """Yield the namespaces of runs whose process is gone."""
    for line in run_ip("netns", "list").splitlines():
        name = line.split()[0] if line.strip() else ""
        if name.startswith(f"{PREFIX}-") and not Path(f"/proc/{name.split('-')[1]}").exists():
            yield name


if __name__ == "__main__":
    for orphan in orphans():
        print(f"destroying {orphan}")
        run_ip("netns", "del", orphan)

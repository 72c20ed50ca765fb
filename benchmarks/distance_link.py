"""A long link between two hosts: a process carries the packets, with a rate and a delay each way.

Each host is a network namespace with a TUN device. This process reads the packets of one host, and writes them to the
other when the link is free at its rate, and the delay has passed. So the kernels' own TCP runs over it, with its
windows, as over a long line. A packet that would wait longer than `QUEUE_S` for the rate is dropped, as by a router.
Packets are as large as TUN devices take, since Python carries some thousands a second.

    python benchmarks/distance_link.py NAMESPACE_A NAMESPACE_B RATE_MBIT ONE_WAY_MS     carries until its input ends
"""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
import sys
import threading
import time
from collections import deque

from netns import Network, NetworkUnavailable, run_ip

MTU = 65535
QUEUE_S = 0.2
SUBNET = "10.78.0"
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000


class Distance(Network):
    """Two hosts, `rate_mbit` and `rtt_ms` apart; otherwise as `netns.Network`."""

    def __init__(self, hosts: tuple[str, str], *, rate_mbit: float, rtt_ms: float) -> None:
        super().__init__(hosts)
        self._link = rate_mbit, rtt_ms

    def address(self, host: str) -> str:
        """Return the address of `host`."""
        return f"{SUBNET}.{self.hosts.index(host) + 1}"

    def _build(self) -> None:
        for host in self.hosts:
            self._add(self.namespace(host))
            run_ip("-n", self.namespace(host), "link", "set", "lo", "up")
        rate_mbit, rtt_ms = self._link
        command = [sys.executable, __file__, *map(self.namespace, self.hosts), str(rate_mbit), str(rtt_ms / 2)]
        carrier = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._processes.append(carrier)
        assert carrier.stdout is not None
        if carrier.stdout.readline() != "ready\n":
            raise NetworkUnavailable("no TUN device can be made here (/dev/net/tun)")


class Direction:
    """One direction: reads packets from a device, and writes them to another one at their times."""

    def __init__(self, source: int, target: int, rate_mbit: float, delay_s: float) -> None:
        self._source, self._target = source, target
        self._second_a_byte, self._delay_s = 8e-6 / rate_mbit, delay_s
        self._waiting: deque[tuple[float, bytes]] = deque()
        self._there = threading.Semaphore(0)
        for work in (self._read, self._write):
            threading.Thread(target=work, daemon=True).start()

    def _read(self) -> None:
        free_s = 0.0
        while True:
            packet = os.read(self._source, MTU)
            now = time.monotonic()
            free_s = max(free_s, now)
            if free_s - now > QUEUE_S:
                continue
            free_s += len(packet) * self._second_a_byte
            self._waiting.append((free_s + self._delay_s, packet))
            self._there.release()

    def _write(self) -> None:
        while True:
            self._there.acquire()
            due_s, packet = self._waiting.popleft()
            if (wait_s := due_s - time.monotonic()) > 0:
                time.sleep(wait_s)
            os.write(self._target, packet)


def device(namespace: str, index: int) -> int:
    """Make a TUN device in a namespace, up; packets sent there are read from it."""
    name = f"axps{os.getpid() % 100000}{index}"
    fd = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TUN | _IFF_NO_PI))
    run_ip("link", "set", name, "netns", namespace)
    run_ip("-n", namespace, "link", "set", name, "name", "eth0")
    run_ip("-n", namespace, "link", "set", "eth0", "mtu", str(MTU), "txqueuelen", "1000")
    run_ip("-n", namespace, "address", "add", f"{SUBNET}.{index + 1}/24", "dev", "eth0")
    run_ip("-n", namespace, "link", "set", "eth0", "up")
    run_ip("netns", "exec", namespace, "sysctl", "-qw", "net.ipv4.tcp_slow_start_after_idle=0")  # docs/network.md
    run_ip("-n", namespace, "route", "change", f"{SUBNET}.0/24", "dev", "eth0", "congctl", "cubic")
    return fd


def main() -> None:
    """Carry packets."""
    a, b, rate_mbit, delay_ms = sys.argv[1:]
    one, other = device(a, 0), device(b, 1)
    for source, target in ((one, other), (other, one)):
        Direction(source, target, float(rate_mbit), float(delay_ms) / 1e3)
    print("ready", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()

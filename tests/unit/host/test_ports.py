"""Ports for programs that must be told theirs."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from axon_ps.host import ports
from axon_ps.host.ports import free_ports


def test_nobody_has_them_and_the_kernel_gives_them_to_nobody() -> None:
    given_away = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    taken = set()
    for _ in range(20):
        first = free_ports(3)
        for port in range(first, first + 3):
            assert port < given_away
            with socket.create_server(("127.0.0.1", port)):
                taken.add(port)
    assert len(taken) == 60  # each call gave others


def test_those_that_somebody_has_on_any_address_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    first = free_ports(2)
    monkeypatch.setattr(ports, "_FIRST", first)
    monkeypatch.setattr(ports, "_LAST", first + 2)
    with socket.create_server(("127.0.0.1", first)):
        assert free_ports() == first + 1
        with pytest.raises(OSError, match=f"no 2 ports in a row are free between {first} and {first + 2}"):
            free_ports(2)

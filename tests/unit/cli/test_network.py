"""What the launcher does while nobody listens yet where it is to join."""

from __future__ import annotations

import asyncio
import socket

import pytest

from axon_ps.cli.launch import network
from axon_ps.errors import Unreachable
from axon_ps.host.ports import free_ports
from axon_ps.observe import reminders


def test_waiting_for_a_coordinator_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reminders, "FIRST_REMINDER_S", 0.02)
    lines: list[str] = []
    address = f"127.0.0.1:{free_ports()}"
    with pytest.raises(Unreachable, match="waited 0.3 s"):
        asyncio.run(network.wait_until_listening(address, 0.3, lines.append))
    assert lines
    assert all(line.startswith(f"axon-ps: waiting for the coordinator at {address}, for ") for line in lines)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        lines.clear()
        asyncio.run(network.wait_until_listening(f"127.0.0.1:{listener.getsockname()[1]}", 5.0, lines.append))
        assert not lines

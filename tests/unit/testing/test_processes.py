"""`ClusterProcesses`: processes by role, and the report of their end."""

from __future__ import annotations

import signal
from typing import cast

import pytest

from axon_ps.errors import InvalidRequest, Misuse
from axon_ps.host.children import Child
from axon_ps.testing.processes import ClusterProcesses
from axon_ps.types import Role


class FakeService:
    """A service that ends when it is asked to, with a given exit code."""

    def __init__(self, name: str, ending: int = 0, *, ended: int | None = None, was_signalled: bool = False) -> None:
        self.name, self.output = name, f"output of {name}"
        self.exit_code = ended
        self.was_signalled = was_signalled
        self.signals: list[int] = []
        self._ending = ending

    def send_signal(self, number: int) -> None:
        self.signals.append(number)

    def wait(self, timeout_s: float) -> int | None:
        return self.exit_code

    def end(self) -> int:
        self.exit_code = self._ending if self.exit_code is None else self.exit_code
        return self.exit_code


def fake(name: str, ending: int = 0, *, ended: int | None = None, was_signalled: bool = False) -> Child:
    return cast(Child, FakeService(name, ending, ended=ended, was_signalled=was_signalled))


def test_processes_are_found_by_role_and_number() -> None:
    processes = ClusterProcesses()
    coordinator, first, second, proxy = fake("c"), fake("s0"), fake("s1"), fake("p")
    processes.coordinators.append(coordinator)
    processes.shards += [first, second]
    processes.host_proxies.append(proxy)
    assert processes.get("coordinator", 0) is coordinator
    assert processes.get(Role.SHARD, 1) is second
    assert processes.get("proxy", 0) is proxy
    for role, index in (("shard", 2), ("shard", -1), ("worker", 0), ("broom", 0)):
        with pytest.raises(InvalidRequest, match=f"there is no {role} {index} in this cluster"):
            processes.get(role, index)


def test_the_directory_is_there_until_the_end() -> None:
    processes = ClusterProcesses()
    directory = processes.open()
    assert processes.is_open
    assert [processes.new_log(name).name for name in ("a", "b")] == ["01-a.log", "02-b.log"]
    with pytest.raises(Misuse, match="running already"):
        processes.open()
    assert processes.end() == ([], "")
    assert not processes.is_open
    assert not directory.exists()


def test_services_that_end_as_they_should_are_no_trouble() -> None:
    processes = ClusterProcesses()
    good, killed, taken_out = fake("good"), fake("killed", ended=-9, was_signalled=True), fake("drained", ended=0)
    processes.shards += [good, killed, taken_out]
    processes.drained.add(taken_out)
    troubles, logs = processes.end()
    assert troubles == []
    assert cast(FakeService, good).signals == [signal.SIGTERM, signal.SIGCONT]
    assert logs.splitlines()[:2] == ["--- log of good:", "output of good"]
    assert processes.shards == []


def test_services_that_do_not_are_named_in_the_order_of_their_end() -> None:
    processes = ClusterProcesses()
    processes.coordinators.append(fake("coordinator", ending=-9))
    processes.shards.append(fake("shard 0", ended=3))
    assert processes.end()[0] == [
        "shard 0 ended by itself with exit code 3",
        "coordinator did not drain when asked to; exit code -9",
    ]

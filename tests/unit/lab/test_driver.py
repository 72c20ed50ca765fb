"""`Driver`: how faults strike processes; what a cluster does with a disturbance is its own."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from axon_ps.errors import AxonError, InvalidRequest
from axon_ps_lab.faults.driver import Driver, send_signals
from axon_ps_lab.faults.fault import Fault, Means
from axon_ps_lab.faults.proxy import Disturbance


class Process:
    """A process that ends when it is killed, unless it is `immortal`."""

    def __init__(self, name: str, log: list[object], *, immortal: bool = False) -> None:
        self.name, self._log, self._immortal = name, log, immortal
        self._killed = False

    def send_signal(self, number: int) -> None:
        self._log.append((self.name, signal.Signals(number).name))
        self._killed |= number == signal.SIGKILL

    def wait(self, timeout_s: float) -> int | None:
        return -signal.SIGKILL if self._killed and not self._immortal else None


class Cluster:
    """Notes the disturbances that it is asked for."""

    def __init__(self, state: Path, log: list[object]) -> None:
        self.state, self._log = state, log

    def disturb(self, what: Disturbance, process: Process) -> None:
        self._log.append((process.name, what.kind))

    def partition(self, what: Disturbance, side: list[Process]) -> None:
        self._log.append(("partition", what.kind, [process.name for process in side]))

    def cut(self, what: Disturbance, one: Process, other: Process) -> None:
        self._log.append(("cut", what.kind, one.name, other.name))


@pytest.fixture
def log() -> list[object]:
    return []


@pytest.fixture
def driver(tmp_path: Path, log: list[object]) -> Driver:
    cluster: Any = Cluster(tmp_path / "coordinator.sqlite", log)
    return Driver(cluster)


def processes(log: list[object], *names: str) -> list[Any]:
    return [Process(name, log) for name in names]


def test_processes_are_killed_at_once_and_then_the_moment_is_released(driver: Driver, log: list[object]) -> None:
    driver.end(Fault.KILL, processes(log, "worker", "coordinator"), release=lambda: log.append("released"))
    assert log == [("worker", "SIGKILL"), ("coordinator", "SIGKILL"), "released"]


def test_a_process_that_runs_on_is_named(driver: Driver, log: list[object]) -> None:
    struck: Any = [Process("shard-0", log, immortal=True)]
    with pytest.raises(AxonError, match="shard-0 runs on after kill"):
        driver.end(Fault.KILL, struck)


def test_the_successor_finds_an_older_state(driver: Driver, log: list[object], tmp_path: Path) -> None:
    state = tmp_path / "coordinator.sqlite"
    state.write_text("newer")
    driver.end(Fault.OLDER_STATE, processes(log, "coordinator"), older={state: b"old"})
    assert state.read_text() == "old"


def test_the_end_of_the_journal_is_lost(driver: Driver, log: list[object], tmp_path: Path) -> None:
    journal = tmp_path / "coordinator.sqlite-wal"
    journal.write_bytes(bytes(1000))
    note = driver.end(Fault.TRUNCATED_JOURNAL, processes(log, "coordinator"), seed=7)
    assert journal.stat().st_size < 1000
    assert note == f"the journal has {journal.stat().st_size} of 1000 bytes"


def test_the_frozen_go_on_even_if_the_moment_cannot_be_released(driver: Driver, log: list[object]) -> None:
    def release() -> None:
        raise OSError

    with pytest.raises(OSError):
        driver.last(Fault.FREEZE, processes(log, "a", "b"), 0.0, release=release)
    assert log == [("a", "SIGSTOP"), ("b", "SIGSTOP"), ("a", "SIGCONT"), ("b", "SIGCONT")]


@pytest.mark.parametrize("fault", [fault for fault in Fault if fault.traits.means is Means.SIGNALS])
def test_processes_go_on_after_every_kind_by_signals(fault: Fault, driver: Driver, log: list[object]) -> None:
    driver.last(fault, processes(log, "a"), 0.0)
    assert log[-1] == ("a", "SIGCONT")


@pytest.mark.parametrize("fault", [fault for fault in Fault if fault.traits.means is not Means.SIGNALS])
def test_what_is_not_by_signals_sends_none(fault: Fault, log: list[object]) -> None:
    with pytest.raises(InvalidRequest, match=f"^{fault.value} is not a fault by signals"):
        send_signals(fault, [log.append], 0.0)
    assert log == []


@pytest.mark.parametrize("fault", Fault)
def test_what_a_driver_cannot_do_is_refused(fault: Fault, driver: Driver, log: list[object]) -> None:
    if not fault.traits.ends:
        with pytest.raises(InvalidRequest, match=f"^{fault.value} does not end processes"):
            driver.end(fault, processes(log, "a"))
    if fault.traits.means not in (Means.SIGNALS, Means.WIRE):
        with pytest.raises(InvalidRequest, match=f"^{fault.value} is neither by signals nor of connections"):
            driver.last(fault, processes(log, "a"), 0.0)
    assert log == []


WIRE = [fault for fault in Fault if fault.traits.means is Means.WIRE]


@pytest.mark.parametrize("fault", [fault for fault in WIRE if fault not in (Fault.PARTITION, Fault.CUT)])
def test_connections_of_all_struck_are_disturbed_before_the_release(
    fault: Fault, driver: Driver, log: list[object]
) -> None:
    driver.last(fault, processes(log, "a", "b"), 0.0, release=lambda: log.append("released"))
    assert log == [("a", fault), ("b", fault), "released"]


def test_a_partition_and_a_cut_swallow_what_is_sent(driver: Driver, log: list[object]) -> None:
    a, b, other = processes(log, "a", "b", "other")
    driver.last(Fault.PARTITION, [a, b], 0.0)
    driver.last(Fault.CUT, [a], 0.0, other=other)
    assert log == [("partition", Fault.BLACK_HOLE, ["a", "b"]), ("cut", Fault.BLACK_HOLE, "a", "other")]

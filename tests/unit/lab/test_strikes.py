"""`Strikes`: the faults of a campaign, on processes that only note what is done to them."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from axon_ps_lab.chaos.plan import PlannedFault
from axon_ps_lab.chaos.strikes import Strikes
from axon_ps_lab.faults.fault import Fault


class Job:
    """A cluster, its observer, and its processes."""

    def __init__(self, state: Path) -> None:
        self.done: list[object] = []
        self.state = state
        member = SimpleNamespace(rank=1, incarnation="the killed one")
        self._status = SimpleNamespace(membership=SimpleNamespace(shards=[member]))
        self.clocks = SimpleNamespace(jump=lambda slot, seconds: self.done.append((slot, seconds)))

    def process(self, role: str, index: int) -> Any:
        name = f"{role} {index}"

        def send_signal(number: int) -> None:
            self.done.append((name, signal.Signals(number).name))

        return SimpleNamespace(name=name, pid=7, send_signal=send_signal, wait=lambda timeout_s: -signal.SIGKILL)

    def slot_of(self, process: Any) -> str:
        return f"slot of {process.name}"

    def restart(self, role: str, index: int) -> None:
        self.done.append(("restart", role, index))

    def disturb(self, what: Any, process: Any) -> None:
        self.done.append((process.name, what.kind, what.bytes_per_s))

    def partition(self, what: Any, side: list[Any]) -> None:
        self.done.append(("partition", [process.name for process in side]))

    def cut(self, what: Any, one: Any, other: Any) -> None:
        self.done.append(("cut", one.name, other.name))

    def status(self) -> Any:
        return self._status


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path / "state")


@pytest.fixture
def strikes(job: Job, tmp_path: Path) -> Strikes:
    cluster: Any = job
    return Strikes(cluster, cluster, job.process, folders={}, checkpoints=tmp_path, flips=tmp_path)


def fault(kind: Fault, role: str = "shard", **fields: Any) -> PlannedFault:
    return PlannedFault(number=1, kind=kind, role=role, index=1, **fields)


def test_a_killed_server_is_restarted_and_its_incarnation_is_known(strikes: Strikes, job: Job) -> None:
    name, _, note = strikes.deal(fault(Fault.KILL))
    assert (name, note) == ("shard 1 (7)", "")
    assert job.done == [("shard 1", "SIGKILL"), ("restart", "shard", 1)]
    assert strikes.killed == {"the killed one"}


def test_a_killed_worker_is_replaced_by_its_job(strikes: Strikes, job: Job) -> None:
    strikes.deal(fault(Fault.KILL, "worker"))
    assert job.done == [("worker 1", "SIGKILL")]
    assert not strikes.killed


def test_a_coordinator_and_a_server_die_at_once_and_the_coordinator_comes_back_first(
    strikes: Strikes, job: Job
) -> None:
    strikes.deal(fault(Fault.KILL_TOGETHER))
    assert job.done == [
        ("shard 1", "SIGKILL"),
        ("coordinator 0", "SIGKILL"),
        ("restart", "coordinator", 0),
        ("restart", "shard", 1),
    ]


def test_a_slow_link_has_its_rate(strikes: Strikes, job: Job) -> None:
    strikes.deal(fault(Fault.SLOW_LINK, amount=5e5))
    assert job.done == [("shard 1", Fault.SLOW_LINK, 5e5)]


def test_the_members_of_a_side_are_parted_and_two_are_cut_off(strikes: Strikes, job: Job) -> None:
    strikes.deal(fault(Fault.PARTITION, "worker", side=(("worker", 1), ("shard", 0))))
    strikes.deal(fault(Fault.CUT, "worker", side=(("shard", 2),)))
    assert job.done == [("partition", ["worker 1", "shard 0"]), ("cut", "worker 1", "shard 2")]


def test_a_clock_jumps_and_jumps_back(strikes: Strikes, job: Job) -> None:
    strikes.deal(fault(Fault.CLOCK_JUMP, amount=-3600.0))
    assert job.done == [("slot of shard 1", -3600.0), ("slot of shard 1", 0.0)]

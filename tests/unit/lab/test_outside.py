"""`RunningJob`: faults of processes that the campaign has not started."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from axon_ps.errors import InvalidRequest
from axon_ps.rpc.security import Security
from axon_ps_lab.chaos.campaign import KINDS, Job
from axon_ps_lab.chaos.outside import RunningJob
from axon_ps_lab.chaos.plan import PlannedFault
from axon_ps_lab.faults.fault import Fault

Process = subprocess.Popen[bytes]


@pytest.fixture
def process() -> Iterator[Process]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


@pytest.fixture
def job(process: Process, tmp_path: Path) -> Iterator[RunningJob]:
    (tmp_path / "pid").write_text(str(process.pid))
    settings = Job(pid_files={"worker": (str(tmp_path / "pid"),)}, checkpoint_dir=str(tmp_path))
    job = RunningJob(settings, "127.0.0.1:1", Security(), "")
    with job.observer:
        yield job


def deal(job: RunningJob, kind: Fault) -> tuple[str, str]:
    target, _, note = job.deal(PlannedFault(number=1, kind=kind, role="worker", index=0))
    return target, note


def test_a_killed_process_ends(job: RunningJob, process: Process) -> None:
    assert deal(job, Fault.KILL) == (f"worker ({process.pid})", "")
    assert process.wait(5.0) == -signal.SIGKILL


@pytest.mark.parametrize("kind", [kind for kind in KINDS.values() if kind.traits.from_outside and not kind.traits.ends])
def test_a_process_goes_on_after_every_other_kind_that_is_possible(
    kind: Fault, job: RunningJob, process: Process
) -> None:
    deal(job, kind)
    assert process.poll() is None


@pytest.mark.parametrize("kind", [kind for kind in Fault if not kind.traits.from_outside])
def test_a_kind_that_is_not_possible_is_refused_by_its_name(kind: Fault, job: RunningJob, process: Process) -> None:
    with pytest.raises(InvalidRequest, match=f"^{kind.value} is not a fault by signals"):
        deal(job, kind)
    assert process.poll() is None

"""A worker that has finished: the others go on, what it sent arrives, and who failed has not finished."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import finishing_worker
from axon_ps.testing import LocalCluster
from deadlines import HANG_S
from job_services import TOKEN, JobServices
from job_worker import joined

SCRIPT = Path(__file__).with_name("ending_worker.py")
ENDS = {
    "the end of the script": True,
    "close": True,
    "exit with 0": True,
    "with and exit": True,
    "exit with 3": False,
    "error": False,
    "error in with": False,
    "close while it fails": False,
}
"""How a script ends, and whether that is finishing."""


def seen_by_the_other(address: str) -> tuple[bool, bool]:
    """Whether rank 1 is said to have finished, and whether the job is complete without it."""
    with joined(address, 0, 2) as world:
        world.barrier("there")
        deadline = time.monotonic() + 20.0
        while world.world_size > 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        m = world.membership
        return [f.rank for f in m.finished] == [1], m.complete


def test_what_counts_as_finishing() -> None:
    jobs = len(ENDS)
    with JobServices([(2, 1)] * jobs) as services, ThreadPoolExecutor(jobs) as threads:
        others = [threads.submit(seen_by_the_other, address) for address in services.addresses]
        for how, address in zip(ENDS, services.addresses, strict=True):
            variables = {"COORDINATOR": address, "TOKEN": TOKEN, "NODE": "node-1"}
            environment = {f"AXON_PS_{name}": value for name, value in variables.items()}
            environment |= {"RANK": "1", "WORLD_SIZE": "2", "AXON_PS_BACKEND": "grpc"}
            subprocess.run(
                [sys.executable, str(SCRIPT), how], env=os.environ | environment, capture_output=True, timeout=HANG_S
            )
        seen = {how: other.result(30.0) for how, other in zip(ENDS, others, strict=True)}
    assert seen == {how: (finishes, finishes) for how, finishes in ENDS.items()}


@pytest.mark.parametrize("policy", ["sync", "bounded"])
def test_the_others_train_on_when_one_is_done(policy: str) -> None:
    """With the default of --min-workers, which is all of them."""
    with LocalCluster(shards=1, world_size=3) as cluster:
        results = cluster.run_workers(finishing_worker.train, args=(policy, 5))
        log = cluster.log("coordinator")
    assert [r.value[0] for r in results] == [5, 10, 15]
    assert results[2].value[2], "the last one has trained alone"
    assert max(r.value[1] for r in results) < 5.0
    assert "WARNING" not in log
    assert not any("WARNING" in r.output or "Traceback" in r.output for r in results)


@pytest.mark.parametrize(("backend", "numel"), [("shm", 10), ("grpc", 10), ("grpc", 300_000)])
def test_what_it_sent_arrives(backend: str, numel: int) -> None:
    with LocalCluster(shards=1, world_size=3) as cluster:
        results = cluster.run_workers(finishing_worker.messages, args=(backend, numel))
    assert results[0].value == [1.0, 2.0]


def test_a_worker_that_takes_no_part_is_told_and_the_others_train_on() -> None:
    with LocalCluster(shards=1, world_size=3, min_workers=2, step_timeout_s=1.5) as cluster:
        results = cluster.run_workers(finishing_worker.idle, args=(4.0,))
    assert results[0].value == results[2].value == "0,2"
    assert "worker 1" in results[1].value
    assert "was set aside: the step to version 1 waited 1.5 s for it" in results[1].value

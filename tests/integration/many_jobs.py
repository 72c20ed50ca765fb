"""Runs many small jobs over the same worker processes, with services in a thread of the test's process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from axon_ps.testing.workers import WorkerProcess, results_of
from deadlines import WHOLE_S
from job_services import JobServices
from job_worker import Job, run_all


def run_jobs(jobs: Sequence[Job], logs: Path, timeout_s: float = WHOLE_S) -> list[list[Any]]:
    """Per job, what each of its workers returned.

    Args:
        jobs: run one after the other.
        logs: a directory for the workers' output.
        timeout_s: for all jobs together.

    Raises:
        WorkerFailed: one did, or did not end in time.
    """
    with JobServices([(job.workers, job.servers) for job in jobs]) as services:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("AXON_PS_")} | {"OMP_NUM_THREADS": "1"}
        processes = [
            WorkerProcess(
                rank,
                run_all,
                (list(jobs), services.addresses),
                {},
                environment=environment | {"RANK": str(rank)},
                log=logs / f"worker-{rank}.log",
            )
            for rank in range(max(job.workers for job in jobs))
        ]
        workers = [result.value for result in results_of(processes, timeout_s=timeout_s, check=True)]
    return [[values[i] for values in workers[: job.workers]] for i, job in enumerate(jobs)]

"""What only some features need may be missing: a job trains, and says what it does without."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from deadlines import HANG_S

ROOT = Path(__file__).parents[2]
OF_FEATURES = ("aiohttp", "cryptography", "grpc_health", "grpc_reflection", "jwt", "prometheus_client")
OF_THE_COMMAND_LINE = ("pydantic_settings", "rich", "typer")
JOB = """
import sys
sys.modules.update(dict.fromkeys(sys.argv[1:]))  # importing one raises ImportError
from concurrent.futures import ThreadPoolExecutor
import numpy as np
from job_services import JobServices
from job_worker import joined

def work(rank):
    with joined(services.addresses[0], rank, 2) as world:
        return world.default_group.all_reduce(np.full(4, rank + 1.0, np.float32)).tolist()

with JobServices([(2, 1)]) as services, ThreadPoolExecutor(2) as workers:
    print(list(workers.map(work, range(2))))
"""


def test_a_job_runs_without_the_packages_that_features_need() -> None:
    paths = [str(ROOT / folder) for folder in ("tests/integration", "tests", ".")]
    command = f"import sys; sys.path[:0] = {paths!r}{JOB}"
    missing = (*OF_FEATURES, *OF_THE_COMMAND_LINE)
    done = subprocess.run([sys.executable, "-c", command, *missing], capture_output=True, text=True, timeout=HANG_S)
    assert (done.returncode, done.stdout.strip()) == (0, str([[3.0] * 4] * 2)), done.stderr
    assert "grpcio-health-checking is not installed" in done.stderr

"""Workers that only a launcher has started, as real processes with its variables: they form a job, and leave nothing.

(torchrun itself runs in `make pages`, with docs/environment.md; `make lab NAME=launchers` runs all of them.)
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil

from command_line import environment
from deadlines import WHOLE_S

END_S = WHOLE_S

SCRIPT = """
import sys
import numpy as np
import axon_ps

with axon_ps.World.init(join_timeout_s=120) as world:
    total = axon_ps.all_reduce_sum(np.full(1, world.rank + 1.0, np.float32))
    print(world.rank, world.local_rank, world.num_shards, total[0], world.membership.workers[0].node, flush=True)
    if world.rank == 1:  # of rank 0, which has the services, nothing is left but these
        world.view.wait_members(lambda m: len(m.workers) == 1, 30.0, "rank 0 leaves")
        world.kv_put("still", b"here")
        print(world.kv_get("still"), len(world.server_statistics(0)) > 0, flush=True)
"""


def test_workers_of_mpirun_form_a_job_which_lives_until_the_last_of_them_is_done(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    workers = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env=environment(
                {
                    "OMPI_COMM_WORLD_RANK": str(rank),
                    "OMPI_COMM_WORLD_SIZE": "2",
                    "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
                    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
                    "PMIX_NAMESPACE": f"test-{os.getpid()}",
                    "AXON_PS_NODE": "here",
                }
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        assert workers[1].stdout is not None
        first = workers[1].stdout.readline()
        while first and not first.startswith("1 "):  # it may say that it waits
            first = workers[1].stdout.readline()
        services = psutil.Process(workers[0].pid).children()
        outputs = [worker.communicate(timeout=END_S)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert [worker.returncode for worker in workers] == [0, 0], outputs
    assert "0 0 1 3.0 here" in outputs[0].splitlines()
    assert first == "1 1 1 3.0 here\n"
    assert outputs[1].splitlines()[-1] == "b'here' True"
    assert len(services) == 2
    assert not any(service.is_running() for service in services)

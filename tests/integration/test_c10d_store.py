"""torch's store under `init_process_group("axon")` listens for everybody: a stranger finds nothing to use in it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from axon_ps.host.ports import free_ports
from command_line import environment
from deadlines import HANG_S

WORKER = """
import json, os, sys
import torch, torch.distributed as dist
from axon_ps.worker.world import World

dist.init_process_group("axon")
dist.barrier()
world = World.current()
security, coordinator = world._config.security, world._config.coordinator
if dist.get_rank() == 1:
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    stranger = dist.TCPStore(host, port, is_master=False)
    content = {key: stranger.get(key).decode(errors="replace") for key in stranger.list_keys()}
    print(json.dumps([security.tokens()[0], coordinator, content]), flush=True)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("given", [{}, {"AXON_PS_TOKEN": "the-secret-of-this-environment"}])
def test_a_stranger_reads_neither_the_secret_nor_where_to_use_it(given: dict[str, str]) -> None:
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports()), "WORLD_SIZE": "2", **given}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER],
            env=environment({**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [worker.communicate(timeout=HANG_S) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], said
    token, coordinator, content = json.loads(said[1][0])
    assert token == given.get("AXON_PS_TOKEN", token)
    assert any("incarnations" in value for value in content.values())  # the stranger does read what is there
    assert token not in json.dumps(content)
    assert coordinator not in json.dumps(content)
    assert "this worker has started one at 127.0.0.1:" in said[0][1]

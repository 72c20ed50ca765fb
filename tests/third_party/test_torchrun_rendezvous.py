"""`torchrun --rdzv-backend=axon`, real agents: the host of rank 0 dies and the others go on; what a user gets wrong.

The backend is found by the entry points of the installed package.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

WORKER = """
import os, pathlib, time
import torch
import torch.distributed as dist

dist.init_process_group("axon")
folder, rank, size = pathlib.Path(os.environ["FOLDER"]), dist.get_rank(), dist.get_world_size()
while True:
    value = torch.ones(4)
    dist.all_reduce(value)
    assert value.tolist() == [size] * 4
    note = folder / f"{size}-{rank}-{os.getppid()}"
    note.exists() or note.write_text(f"{time.time()}")
    if size == 2 and (folder / "end").exists():
        break
    time.sleep(0.02)
dist.barrier()
dist.destroy_process_group()
"""


@dataclass
class Cluster:
    """A coordinator and a shard server, and the agents of torchrun."""

    folder: Path
    address: str = ""
    children: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, *command: str, **options: object) -> subprocess.Popen[str]:
        """A process of its own session, whose output goes into a file."""
        ours = {k: v for k, v in os.environ.items() if not k.startswith("AXON_PS_")}
        values = {"FOLDER": str(self.folder), "OMP_NUM_THREADS": "1", "AXON_PS_LOG_LEVEL": "warning"}
        output = (self.folder / f"output-{len(self.children)}").open("w")
        with output:
            child = subprocess.Popen(
                [sys.executable, *command], env=ours | values, stdout=output, stderr=subprocess.STDOUT, text=True,
                start_new_session=True,
            )  # fmt: skip
        self.children.append(child)
        return child

    def agent(self, endpoint: str = "", nodes: str = "2:3", run: str = "run", conf: str = "") -> subprocess.Popen[str]:
        """An agent of torchrun with one worker."""
        token = f"token_file={self.folder / 'token'},last_call_timeout=2"
        return self.start(
            "-m", "torch.distributed.run", f"--nnodes={nodes}", "--nproc-per-node=1", "--max-restarts=3",
            "--rdzv-backend=axon", f"--rdzv-endpoint={endpoint or self.address}", f"--rdzv-id={run}",
            f"--rdzv-conf={conf or token}", str(self.folder / "worker.py"),
        )  # fmt: skip

    def output(self, child: subprocess.Popen[str]) -> str:
        """What a child has written."""
        return (self.folder / f"output-{self.children.index(child)}").read_text()

    def notes(self, size: int, rank: int | str = "*") -> list[Path]:
        """What workers of a world of that size have left."""
        return sorted(self.folder.glob(f"{size}-{rank}-*"))

    def wait_for(self, size: int, limit_s: float = 90.0) -> None:
        """Return when every worker of such a world has made a step."""
        end_s = time.monotonic() + limit_s
        while len({note.name.split("-")[1] for note in self.notes(size)}) < size:
            assert time.monotonic() < end_s, [self.output(child) for child in self.children]
            time.sleep(0.05)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Services that ask for a token."""
    cluster = Cluster(tmp_path)
    (tmp_path / "token").write_text("secret")
    (tmp_path / "worker.py").write_text(WORKER)
    secret = ("--token-file", str(tmp_path / "token"))
    ready, write = os.pipe()
    os.set_inheritable(write, True)
    command = ("-m", "axon_ps.cli.main", "coordinator", "--port", "0", "--min-workers", "1", "--state", "memory")
    service = subprocess.Popen(
        [sys.executable, *command, *secret, "--ready-fd", str(write), "--log-level", "warning"],
        pass_fds=(write,), start_new_session=True, text=True,
    )  # fmt: skip
    os.close(write)
    with os.fdopen(ready) as line:
        cluster.address = line.readline().strip()
    try:
        cluster.start("-m", "axon_ps.cli.main", "shard", "--port", "0", "--coordinator", cluster.address, *secret)
        yield cluster
    finally:
        for child in [*cluster.children, service]:
            if child.poll() is None:
                for worker in psutil.Process(child.pid).children(recursive=True):
                    worker.kill()
                child.kill()
            child.wait(20)


def test_the_host_of_rank_0_dies_and_the_others_go_on_by_themselves(cluster: Cluster) -> None:
    agents = [cluster.agent() for _ in range(3)]
    cluster.wait_for(3)
    (first,) = cluster.notes(3, 0)
    victim = next(agent for agent in agents if agent.pid == int(first.name.split("-")[2]))
    workers = psutil.Process(victim.pid).children(recursive=True)
    killed_s = time.time()
    victim.kill()
    for worker in workers:
        worker.kill()
    cluster.wait_for(2)
    gap_s = max(float(note.read_text()) for note in cluster.notes(2)) - killed_s
    print(f"next collective {gap_s:.1f} s after the death of rank 0's host")
    (cluster.folder / "end").touch()
    assert [agent.wait(60) for agent in agents if agent is not victim] == [0, 0]

    again = cluster.agent(nodes="1")  # of the same id
    assert again.wait(60) == 1
    assert "is closed: a run of that id has ended" in cluster.output(again)
    assert "--rdzv-id of its own" in cluster.output(again)


def test_another_agent_joins_and_ctrl_c_ends_one_agent_alone(cluster: Cluster) -> None:
    agents = [cluster.agent() for _ in range(2)]
    cluster.wait_for(2)
    agents.append(cluster.agent())
    cluster.wait_for(3)
    for note in cluster.notes(2):
        note.unlink()
    agents[2].send_signal(signal.SIGINT)
    assert agents[2].wait(60) != 0
    cluster.wait_for(2)
    (cluster.folder / "end").touch()
    assert [agent.wait(60) for agent in agents[:2]] == [0, 0]


def test_what_a_user_gets_wrong_is_an_error_that_names_it(cluster: Cluster) -> None:
    (cluster.folder / "other").write_text("wrong")
    token = f"token_file={cluster.folder / 'token'}"
    wrong = {
        "the token": cluster.agent(conf=f"token_file={cluster.folder / 'other'}"),
        "127.0.0.1:1": cluster.agent(endpoint="127.0.0.1:1", conf=f"{token},connect_timeout=1"),
        "nowhere": cluster.agent(endpoint="nowhere", conf=token),
        "--rdzv-conf has tokenfile": cluster.agent(conf="tokenfile=x"),
    }
    for what, agent in wrong.items():
        assert agent.wait(90) == 1
        assert what in cluster.output(agent)

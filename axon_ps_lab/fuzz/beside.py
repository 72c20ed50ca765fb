"""The job that is attacked, as real processes: coordinator, two shard servers, one worker that trains all the time.

The worker writes a line for every step: its time, its duration, whether it committed, and the loss. The loss depends on
every step before. So a step that was lost, or summed twice, shows.
"""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TextIO

import grpc
import psutil
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from torch import nn

from axon_ps import parallel
from axon_ps.sharding.plan import PlanOptions
from axon_ps.testing import LocalCluster
from axon_ps.worker.world import World

SHARDS = 2
HEALTH_S = 1.0
"""Seconds in which a service has to answer a health check."""


def model() -> nn.Module:
    """Return the model, the same on every worker."""
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))


def batch(step: int) -> torch.Tensor:
    """Return the data of a step."""
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(step))


def train(path: str, stop: str, pause_s: float) -> int:
    """Train until there is a file `stop`; writes the steps to `path`, and returns the number of committed ones."""

    def goes_on(_: int) -> bool:
        time.sleep(pause_s)
        return not Path(stop).exists()

    torch.set_num_threads(1)
    with World.init(timeout_s=60.0) as world, Path(path).open("w", encoding="utf-8", buffering=1) as out:
        return _train(world, goes_on, out)


def losses(steps: int) -> list[float]:
    """Return the losses of the same job in this process, without an attack."""
    torch.set_num_threads(1)
    out = io.StringIO()
    with World.mock(shards=SHARDS) as world:
        _train(world, lambda step: step < steps, out)
    return [step.loss for step in _parsed(out.getvalue())]


def _train(world: World, goes_on: Callable[[int], bool], out: TextIO) -> int:
    wrapped = parallel.FSDP(
        model(), world.default_group, plan_options=PlanOptions(chunk_numel=4096, min_slice_numel=4096)
    )
    optimizer = parallel.AdamW(wrapped, lr=1e-3)
    step = 0
    while goes_on(step):
        began = time.monotonic()
        loss = (wrapped(batch(step)) - 1).square().mean()
        loss.backward()
        committed = optimizer.step().committed
        optimizer.zero_grad()
        out.write(f"{time.monotonic()} {time.monotonic() - began} {int(committed)} {loss.item()!r}\n")
        step += committed
    return step


class JobStep(NamedTuple):
    """A line that the worker has written."""

    at_s: float
    took_s: float
    committed: bool
    loss: float


def steps_of(path: Path) -> list[JobStep]:
    """Return the steps that the worker has written, without an incomplete last line."""
    return _parsed(path.read_text(encoding="utf-8"))


def _parsed(text: str) -> list[JobStep]:
    lines = text.split("\n")[:-1]
    found = [line.split() for line in lines]
    return [JobStep(float(at), float(took), committed == "1", float(loss)) for at, took, committed, loss in found]


class AttackedServices:
    """The services of a cluster, with their health, memory and open files.

    Args:
        cluster: the cluster, which runs.
    """

    def __init__(self, cluster: LocalCluster) -> None:
        self.pids = {"coordinator": cluster.process("coordinator").pid}
        self.ports = {"coordinator": int(cluster.address.rpartition(":")[2])}
        for index in range(SHARDS):
            self.pids[f"shard {index}"] = cluster.process("shard", index).pid
            self.ports[f"shard {index}"] = int(cluster.address_of("shard", index).rpartition(":")[2])

    def memory_mib(self) -> dict[str, float]:
        """Return the resident memory of each."""
        return {name: psutil.Process(pid).memory_info().rss / 2**20 for name, pid in self.pids.items()}

    def dead(self) -> list[str]:
        """Return those that do not run any more."""
        return [name for name, pid in self.pids.items() if not _runs(pid)]

    def files(self) -> dict[str, int]:
        """Return the number of open file descriptors of each."""
        return {name: psutil.Process(pid).num_fds() for name, pid in self.pids.items()}

    async def healthy_s(self) -> dict[str, float]:
        """Return the time of a health check of each service, over a new connection.

        Raises:
            grpc.aio.AioRpcError: one did not answer within ten times `HEALTH_S`.
        """
        found = {}
        for name, port in self.ports.items():
            began_s = time.monotonic()
            async with grpc.aio.insecure_channel(
                f"127.0.0.1:{port}", options=[("grpc.use_local_subchannel_pool", 1)]
            ) as c:
                stub = health_pb2_grpc.HealthStub(c)
                await stub.Check(health_pb2.HealthCheckRequest(), timeout=10 * HEALTH_S, wait_for_ready=True)
            found[name] = time.monotonic() - began_s
        return found


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def healthy(services: AttackedServices) -> dict[str, float]:
    """Return the result of `AttackedServices.healthy_s`, from outside of an event loop."""
    return asyncio.run(services.healthy_s())

"""What the workers of many small jobs do: they join one after the other in the same processes.

Starting a process costs more than training in it, so tests that need many jobs share their workers.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

import axon_ps
from axon_ps.rpc.security import Security
from axon_ps.worker.environment import WorkerConfig
from deadlines import HANG_S
from job_services import TOKEN


@dataclass(frozen=True, kw_only=True)
class Job:
    """One job of a test.

    Attributes:
        function: "module:name"; each worker calls it with its world and `args`.
        args: further arguments.
        workers: world size.
        servers: shard servers.
        per_node: workers of an (emulated) node.
    """

    function: str
    args: tuple[Any, ...] = ()
    workers: int
    servers: int = 1
    per_node: int = 1


@contextmanager
def joined(address: str, rank: int, workers: int, per_node: int = 1) -> Iterator[axon_ps.World]:
    """A world of `workers`, `per_node` of which are on one node."""
    config = WorkerConfig(
        coordinator=address,
        rank=rank,
        world_size=workers,
        local_rank=rank % per_node,
        local_world_size=per_node,
        node=f"node-{rank // per_node}",
        security=Security(token=TOKEN),
    )
    with axon_ps.World.init(config, timeout_s=HANG_S, join_timeout_s=HANG_S) as world:
        yield world


def run_all(jobs: Sequence[Job], addresses: Sequence[str]) -> list[Any]:
    """What this worker returned in every job; None where it takes no part."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    results: list[Any] = []
    for job, address in zip(jobs, addresses, strict=True):
        if rank >= job.workers:
            results.append(None)
            continue
        module, _, name = job.function.partition(":")
        with joined(address, rank, job.workers, job.per_node) as world:
            results.append(getattr(importlib.import_module(module), name)(world, *job.args))
            world.barrier("done")
    return results

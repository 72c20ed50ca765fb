"""Pause of commits when a Ray node with a shard server and a worker dies; Ray Train's own restart beside it.

    python benchmarks/ray_cluster.py          about four minutes; needs the extra `integrations`

There are four Ray nodes on this machine; the head has no CPU to give. Three workers train a small model. A node with
one of them (and a shard server) is killed. The rows are:

- `RayCluster` and `AxonTrainer`: parameters on three shard servers; committed steps are counted.
- `TorchTrainer`, gloo: Ray's own, which restarts all workers and resumes from the last checkpoint, here after every
  20th step; optimizer steps are counted.
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ray
import torch
from ray.cluster_utils import Cluster
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import axon_ps
from axon_ps.ray import AxonConfig, AxonTrainer, ClusterConfig, RayCluster
from axon_ps_lab import report

NODE = {"num_cpus": 3, "object_store_memory": 80 << 20}
STEPS, KILL_AT, PAUSE_S, EVERY = 400, 100, 0.02, 20
HIDDEN = 256


class Times:
    """The times at which each step was first made; the actor is on the head node, which stays."""

    def __init__(self) -> None:
        self._first: dict[int, float] = {}
        self._made: Counter[tuple[int, int]] = Counter()

    def made(self, rank: int, step: int, at_s: float) -> None:
        """Count a step of a worker."""
        self._made[rank, step] += 1
        self._first[step] = min(at_s, self._first.get(step, at_s))

    def all(self) -> tuple[dict[int, float], int]:
        """Return the times by step, and the number of steps that were made again."""
        again = {step for (_, step), times in self._made.items() if times > 1}
        return self._first, len(again)


def network() -> torch.nn.Module:
    """Make a model of about 80,000 parameters."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, HIDDEN))


def on_servers(options: dict[str, Any]) -> None:
    """Train with axon_ps, counting committed steps; each worker has its own samples."""
    from axon_ps.parallel import FSDP, SGD

    world = axon_ps.World.init()
    model = FSDP(network(), world.default_group)
    optimizer = SGD(model.parameters(), lr=0.01)
    while world.version < STEPS:
        model(torch.randn(32, 64)).square().mean().backward()
        result = optimizer.step()
        optimizer.zero_grad()
        if result.committed:
            options["times"].made.remote(world.rank, result.version, time.time())
        time.sleep(PAUSE_S)


def over_gloo(options: dict[str, Any]) -> None:
    """Train the same model by DDP, with a checkpoint of Ray Train's every `EVERY` steps."""
    import ray.train.torch

    model = ray.train.torch.prepare_model(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rank, first = ray.train.get_context().get_world_rank(), 0
    if (found := ray.train.get_checkpoint()) is not None:
        with found.as_directory() as directory:
            stored = torch.load(Path(directory) / "state.pt")
        model.module.load_state_dict(stored["model"])
        first = stored["step"]
    for step in range(first + 1, STEPS + 1):
        model(torch.randn(32, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        options["times"].made.remote(rank, step, time.time())
        time.sleep(PAUSE_S)
        if step % EVERY == 0:
            with tempfile.TemporaryDirectory() as directory:
                torch.save({"model": model.module.state_dict(), "step": step}, Path(directory) / "state.pt")
                ray.train.report({"step": step}, checkpoint=Checkpoint.from_directory(directory))


def by_cluster(options: dict[str, Any], storage: str) -> None:
    """Run on a `RayCluster`: plain Ray."""
    with RayCluster(3, ClusterConfig(shards=3)) as cluster:
        cluster.run(on_servers, options)


def by_trainer(options: dict[str, Any], storage: str) -> None:
    """Run by `AxonTrainer`: elastic Ray Train."""
    config = AxonConfig(elastic=True, cluster=ClusterConfig(shards=3))
    AxonTrainer(on_servers, axon_config=config, **_common(options, storage)).fit()


def by_gloo(options: dict[str, Any], storage: str) -> None:
    """Run by `TorchTrainer`: Ray Train without axon_ps."""
    TorchTrainer(over_gloo, torch_config=TorchConfig(backend="gloo"), **_common(options, storage)).fit()


def _common(options: dict[str, Any], storage: str) -> dict[str, Any]:
    return {
        "train_loop_config": options,
        "scaling_config": ScalingConfig(num_workers=3, placement_strategy="SPREAD"),
        "run_config": RunConfig(storage_path=storage, failure_config=FailureConfig(max_failures=3)),
    }


RUNS: dict[str, Callable[[dict[str, Any], str], None]] = {
    "RayCluster": by_cluster,
    "AxonTrainer": by_trainer,
    "TorchTrainer, gloo": by_gloo,
}


def measure(nodes: Cluster, run: Callable[[dict[str, Any], str], None]) -> dict[str, Any]:
    """Run once, with the death of a node; returns a row."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    times = ray.remote(Times).options(num_cpus=0, scheduling_strategy=here).remote()
    with tempfile.TemporaryDirectory() as storage, ThreadPoolExecutor(1) as pool:
        running = pool.submit(run, {"times": times}, storage)
        while not running.done() and max(ray.get(times.all.remote())[0], default=0) < KILL_AT:
            time.sleep(0.05)
        killed_s = time.time()
        nodes.remove_node(next(iter(nodes.worker_nodes)), allow_graceful=False)
        nodes.add_node(**NODE, wait=False)
        running.result(timeout=300)
    first, again = ray.get(times.all.remote())
    ray.kill(times)
    before = max(step for step, at_s in first.items() if at_s <= killed_s)
    after = sorted((at_s, step) for step, at_s in first.items() if step > before)
    at = [at_s for at_s, _ in after]
    pause_s, began_s = max((b - a, a) for a, b in zip([killed_s, *at[:-1]], at, strict=True))
    return {
        "next_step_s": at[0] - killed_s if at else None,
        "longest_pause_s": pause_s,
        "which_began_s": began_s - killed_s,
        "steps_lost": STEPS - len(first),
        "steps_made_again": again,
        "done_after_s": at[-1] - killed_s,
    }


def main() -> None:
    """Measure all three, print the table, write the file."""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    logging.getLogger("ray").setLevel(logging.ERROR)
    head = {"num_cpus": 0, "object_store_memory": 80 << 20, "include_dashboard": False}
    nodes = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(3):
            nodes.add_node(**NODE, wait=False)
        nodes.wait_for_nodes()
        ray.init(address=nodes.address, log_to_driver=False)
        rows = [{"run": name, **measure(nodes, run)} for name, run in RUNS.items()]
    finally:
        ray.shutdown()
        nodes.shutdown()
    columns = list(rows[0])
    report.table("a Ray node with a shard server and a worker dies", columns, [list(row.values()) for row in rows])
    report.write("ray", rows, ray=ray.__version__, steps=STEPS, workers=3, shards=3, pause_s=PAUSE_S)


if __name__ == "__main__":
    main()

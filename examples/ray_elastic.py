"""Ray Train with parameters on shard servers: a worker or a whole Ray node may die, and the others train on.

    python examples/ray_elastic.py                      on this machine, or on the Ray cluster that RAY_ADDRESS names
    python examples/ray_elastic.py --workers 8 --shards 4

Needs the extras `ray` and `examples`. The data are the handwritten digits that ship with scikit-learn. Kill a worker
while it runs (`pkill -9 -o -f ray::RayTrainWorker`) or a shard server (`pkill -9 -o -f ray::ShardActor`): no step that
was committed is lost, and no sample is used twice.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import ray.train
import torch
import torch.nn.functional as F
from ray.train import FailureConfig, RunConfig, ScalingConfig
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import axon_ps
from axon_ps.parallel import FSDP, AdamW, ElasticLoader
from axon_ps.ray import AxonConfig, AxonTrainer, ClusterConfig


def train(options: dict[str, Any]) -> list[float]:
    """One worker, from its first line also when it replaces a lost one; the losses of the steps that it made."""
    world = axon_ps.World.init()
    digits = load_digits()
    images, labels = torch.from_numpy(digits.data).float() / 16.0, torch.from_numpy(digits.target).long()
    torch.manual_seed(options["seed"])
    network = nn.Sequential(nn.Linear(64, options["hidden"]), nn.ReLU(), nn.Linear(options["hidden"], 10))
    model = FSDP(network, world.default_group)
    optimizer = AdamW(model.parameters(), lr=options["lr"])
    loader = ElasticLoader(TensorDataset(images, labels), model, batch_size=options["batch"])
    losses = []
    for epoch in loader.epochs(options["epochs"]):  # begins where the job is
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            if optimizer.step().committed:
                losses.append(loss.item())
            optimizer.zero_grad()
            world.report(steps=world.version, loss=losses[-1] if losses else 0.0)
        if world.rank == 0:
            print(f"epoch {epoch + 1}/{options['epochs']}  step {world.version}  loss {losses[-1]:.4f}", flush=True)
    if options["checkpoint"] and world.rank == 0:
        world.save_checkpoint(options["checkpoint"])
    return losses


def main(arguments: Sequence[str] | None = None) -> ray.train.Result:
    """Run it to the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch", type=int, default=64, help="images of a step, over all workers")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", default="", help="directory that all nodes see")
    options = vars(parser.parse_args(arguments))
    workers, shards = options.pop("workers"), options.pop("shards")
    trainer = AxonTrainer(
        train,
        train_loop_config=options,
        axon_config=AxonConfig(elastic=True, cluster=ClusterConfig(shards=shards)),
        scaling_config=ScalingConfig(num_workers=workers, placement_strategy="SPREAD"),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=10)),
    )
    return trainer.fit()


if __name__ == "__main__":
    main()
